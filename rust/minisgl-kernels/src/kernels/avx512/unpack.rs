//! Unpacking of a block's weights to f32 vectors, each with one input of all 16 outputs.
//!
//! Invariants: values are unpacked as stored; applying scales and minima is the caller's task.

use super::*;

/// Steps in a group, which comes out of registers at once. A block has 4 groups.
pub(crate) const GROUP: usize = 8;

/// Runs a body for each step of a group, with the step as a constant.
macro_rules! steps {
    (|$t:ident| $body:block) => {
        steps!(@ $t $body 0 1 2 3 4 5 6 7)
    };
    (@ $t:ident $body:block $($step:literal)*) => {
        $({
            const $t: usize = $step;
            $body
        })*
    };
}

/// Returns inputs 4j..4j+4 of each row as unsigned bytes that include the bias.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn biased<const KIND: u8>(codes: *const u8, j: usize) -> __m512i {
    let layout = const { layout(KIND) };
    let [low, high] = layout.bits;
    // SAFETY: the caller guarantees a block's codes.
    unsafe {
        if low == 8 {
            let v = _mm512_loadu_si512(codes.add(64 * j).cast());
            return _mm512_xor_si512(v, _mm512_set1_epi8(-128));
        }
        let mut code = plane(codes, low, j);
        if high > 0 {
            // One rotation of each lane moves the upper bits within their bytes.
            let upper = _mm512_loadu_si512(codes.add(64 * low + 64 * (j % high)).cast());
            let turn = (high * (j / high)) as i32 - low as i32;
            let v = _mm512_rorv_epi32(upper, _mm512_set1_epi32(turn));
            let mask = _mm512_set1_epi8((((1 << high) - 1) << low) as i8);
            code = _mm512_ternarylogic_epi32::<0xF8>(code, v, mask);
        }
        if layout.table.is_none() {
            return code;
        }
        let table = _mm_loadu_si128(const { &table(KIND) }.as_ptr().cast());
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code)
    }
}

/// Returns the bits of vector `j` from a plane of `bits` bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn plane(at: *const u8, bits: usize, j: usize) -> __m512i {
    // SAFETY: the caller guarantees a whole plane.
    let v = unsafe { _mm512_loadu_si512(at.add(64 * (j % bits)).cast()) };
    let v = _mm512_srl_epi16(v, _mm_cvtsi32_si128((bits * (j / bits)) as i32));
    _mm512_and_si512(v, _mm512_set1_epi8((1 << bits) - 1))
}

/// Loads the vectors that contain the weights of group `g`, unless the format is read step by step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn group<const KIND: u8>(block: Place, g: usize) -> [__m512i; 2] {
    let layout = const { layout(KIND) };
    // SAFETY: the caller guarantees a whole block, 4 groups.
    unsafe {
        if layout.subs == 0 {
            return [_mm512_setzero_si512(); 2];
        }
        if layout.by_halves() {
            return [
                _mm512_loadu_si512(block.codes.add(64 * g).cast()),
                _mm512_setzero_si512(),
            ];
        }
        both!([0, 1], |i| biased::<KIND>(block.codes, 2 * g + i))
    }
}

/// Returns the weights of step `T` of group `g` as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn weights<const KIND: u8, const T: usize>(block: Place, g: usize, v: [__m512i; 2]) -> __m512 {
    let numbers = block.codes;
    // SAFETY: the caller guarantees a whole block.
    unsafe {
        match KIND {
            F16 => halves(numbers.add(256 * g + 32 * T)),
            BF16 => {
                let v = _mm512_loadu_si512(numbers.add(256 * g + T / 2 * 64).cast());
                let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                _mm512_castsi512_ps(if T.is_multiple_of(2) {
                    _mm512_slli_epi32::<16>(v)
                } else {
                    _mm512_and_si512(v, high)
                })
            }
            F32 => _mm512_loadu_ps(numbers.add(512 * g + 64 * T).cast()),
            _ if const { layout(KIND).by_halves() } => nibble::<KIND, T>(v[0]),
            _ => byte::<KIND, T>(v[T / 4]),
        }
    }
}

/// Returns the values of nibble `T` of each lane, by a table lookup that uses only the lowest 4 bits of an index.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn nibble<const KIND: u8, const T: usize>(v: __m512i) -> __m512 {
    // SAFETY: 16 elements.
    let table = unsafe { _mm512_loadu_ps(const { &values(KIND) }.as_ptr()) };
    let index = match T {
        0 => v,
        1 => _mm512_srli_epi32::<4>(v),
        2 => _mm512_srli_epi32::<8>(v),
        3 => _mm512_srli_epi32::<12>(v),
        4 => _mm512_srli_epi32::<16>(v),
        5 => _mm512_srli_epi32::<20>(v),
        6 => _mm512_srli_epi32::<24>(v),
        _ => _mm512_srli_epi32::<28>(v),
    };
    _mm512_permutexvar_ps(index, table)
}

/// Returns the table of a kind's values by code.
const fn values(kind: u8) -> [f32; 16] {
    let layout = layout(kind);
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        let value = match layout.table {
            Some(table) => table[code],
            None => code as u8,
        };
        values[code] = value as f32 - layout.bias as f32;
        code += 1;
    }
    values
}

/// Returns byte `T % 4` of each lane minus the bias as f32: it becomes the low bits of a float between 2^23 and 2^24.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn byte<const KIND: u8, const T: usize>(v: __m512i) -> __m512 {
    let top = _mm512_set1_epi32((127 + 23) << 23);
    let at = T as i32 % 4;
    let from = _mm512_set4_epi32(at + 12, at + 8, at + 4, at);
    let number = _mm512_mask_shuffle_epi8(top, 0x1111_1111_1111_1111, v, from);
    let less = (1 << 23) + const { layout(KIND) }.bias as i32;
    _mm512_sub_ps(_mm512_castsi512_ps(number), _mm512_set1_ps(less as f32))
}

/// Returns the index of the input that step `t` of group `g` multiplies.
#[inline]
pub(crate) const fn input<const KIND: u8>(g: usize, t: usize) -> usize {
    crate::kernels::scalar::input(const { layout(KIND).by_halves() }, GROUP * g + t)
}

pub(crate) use steps;
