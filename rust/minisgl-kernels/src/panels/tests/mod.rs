//! Tests that rows read back from panels equal the rows that were packed.

use super::*;
use crate::{Kind, TensorView};

pub(crate) mod stored;

use stored::stored;

#[test]
fn every_kind_comes_back_bit_for_bit() {
    for kind in Kind::ALL {
        let (n, k) = (37, if kind.block_len() == 1 { 75 } else { 512 });
        let (data, shape) = (stored(kind, n, k, 5), [n, k]);
        let tensor = TensorView::new("t", kind, &shape, &data).unwrap();
        for held in [kind.held(), Kind::F32] {
            let matrix = Matrix::pack(&[Part::new(tensor)], false, Some(held)).unwrap();
            assert_eq!((matrix.n(), matrix.k(), matrix.panels()), (n, k, 3));
            let (mut want, mut got) = (vec![0.0; k], vec![1.0; k + 21]);
            for r in 0..n {
                tensor.decode_row(r, &mut want);
                matrix.row(r, &mut got);
                for (got, want) in got.iter().zip(&want) {
                    assert_eq!(got.to_bits(), want.to_bits(), "{kind:?} {held:?}: {got} for {want}");
                }
                assert!(got[k..].iter().all(|&x| x == 0.0));
            }
            matrix.row(47, &mut got);
            assert!(got.iter().all(|&x| x == 0.0), "rows beyond n");
        }
    }
}

#[test]
fn parts_are_stacked_or_taken_in_turns_and_in_any_order() {
    let shape = [20, 32];
    let data = [1, 2].map(|seed| stored(Kind::F32, 20, 32, seed));
    let tensors = [0, 1].map(|i| TensorView::new("t", Kind::F32, &shape, &data[i]).unwrap());
    let last_first = |i: usize| 19 - i;
    let parts = [Part::new(tensors[0]), Part::ordered(tensors[1], &last_first)];
    let (mut got, mut want) = ([0.0; 32], [0.0; 32]);

    let stacked = Matrix::pack(&parts, false, None).unwrap();
    assert_eq!((stacked.n(), stacked.panels()), (40, 3));
    stacked.row(25, &mut got);
    tensors[1].decode_row(14, &mut want);
    assert_eq!(got, want);

    let turns = Matrix::pack(&parts, true, None).unwrap();
    assert_eq!((turns.n(), turns.panels()), (64, 4));
    turns.row(32 + 3, &mut got);
    tensors[0].decode_row(16 + 3, &mut want);
    assert_eq!(got, want);
    turns.row(48 + 3, &mut got);
    tensors[1].decode_row(0, &mut want);
    assert_eq!(got, want);
}

#[test]
fn a_panel_has_rows_of_parts_of_several_kinds() {
    let shape = [20, 512];
    for kinds in [
        [Kind::TQ1_0, Kind::TQ2_0],
        [Kind::Q6_K, Kind::F16],
        [Kind::Q5_K, Kind::Q5_K],
    ] {
        let data = kinds.map(|kind| stored(kind, 20, 512, 7));
        let tensors = [0, 1].map(|i| TensorView::new("t", kinds[i], &shape, &data[i]).unwrap());
        let stacked = Matrix::pack(&tensors.map(Part::new), false, None).unwrap();
        let (mut got, mut want) = ([0.0; 512], [0.0; 512]);
        for r in 0..40 {
            stacked.row(r, &mut got);
            tensors[r / 20].decode_row(r % 20, &mut want);
            assert_eq!(got.map(f32::to_bits), want.map(f32::to_bits), "{kinds:?}, row {r}");
        }
    }
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let (a, b) = (stored(Kind::F32, 2, 32, 1), stored(Kind::F32, 2, 64, 1));
    let tensors = [
        TensorView::new("a", Kind::F32, &[2, 32], &a).unwrap(),
        TensorView::new("b", Kind::F32, &[2, 64], &b).unwrap(),
    ];
    let text = |parts: &[Part<'_>], turns: bool| Matrix::pack(parts, turns, None).err().unwrap().to_string();
    assert!(text(&tensors.map(Part::new), false).contains("tensor b has rows of 64, a of 32"));
    let beyond = |i: usize| i + 1;
    assert!(text(&[Part::ordered(tensors[0], &beyond)], false).contains("tensor a has 2 rows"));
    let tall = TensorView::new("tall", Kind::F32, &[4, 16], &a).unwrap();
    let short = TensorView::new("short", Kind::F32, &[2, 16], &a[..128]).unwrap();
    assert!(text(&[Part::new(tall), Part::new(short)], true).contains("tensor short has 2 rows"));
}

#[test]
fn a_matrix_takes_what_the_file_takes() {
    for kind in Kind::ALL {
        let layout = kind.held().layout();
        let held = layout.unit_bytes() as f64 / (layout.unit * BLOCK * PANEL) as f64;
        let stored = kind.block_bytes() as f64 / kind.block_len() as f64;
        let most = if kind == Kind::TQ1_0 { 1.23 } else { 1.03 };
        assert!(
            held <= most * stored,
            "{kind:?}: {held} bytes a number, {stored} in the file"
        );
    }
}
