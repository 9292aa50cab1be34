//! Tests of conversions between f32 and 16-bit floats.

use super::*;

#[test]
fn every_f16_converts_to_f32_and_back() {
    for bits in 0..=u16::MAX {
        let value = f16_to_f32(bits);
        if value.is_nan() {
            assert!(bits & 0x7fff > 0x7c00, "{bits:#x}");
            assert!(f16_to_f32(f32_to_f16(value)).is_nan());
        } else {
            assert_eq!(f32_to_f16(value), bits);
        }
        let value = bf16_to_f32(bits);
        assert!(value.is_nan() || f32_to_bf16(value) == bits);
    }
}

#[test]
fn f16_rounds_to_nearest_ties_to_even() {
    for bits in 0..0x7bffu16 {
        let (below, above) = (f16_to_f32(bits), f16_to_f32(bits + 1));
        let middle = f32::midpoint(below, above); // exact in f32
        let even = if bits % 2 == 0 { bits } else { bits + 1 };
        assert_eq!(f32_to_f16(middle), even);
        assert_eq!(f32_to_f16(middle.next_down()), bits);
        assert_eq!(f32_to_f16(-middle.next_up()), (bits + 1) | 0x8000);
    }
    assert_eq!(f32_to_f16(65519.0), 0x7bff);
    assert_eq!(f32_to_f16(65520.0), 0x7c00);
    assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
    assert_eq!(f32_to_f16(f32::MIN_POSITIVE), 0);
}
