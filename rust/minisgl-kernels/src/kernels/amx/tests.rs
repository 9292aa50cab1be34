//! Tests of properties that only tiles have: three bf16 parts per f32, their own order of sums, per-thread state.

use super::super::tests::{Case, bits};
use crate::Kind;
use crate::kernels::{Isa, Mode};
use crate::panels::PANEL;

fn here() -> bool {
    Isa::here().contains(&Isa::Amx)
}

/// Returns the largest error of a matmul, relative to the sum of its terms' absolute values.
fn error(case: &Case, isa: Isa) -> f64 {
    let (got, k) = (case.all(isa), case.w.k());
    let width = case.w.panels() * PANEL;
    let mut row = vec![0.0; k];
    let mut worst = 0.0f64;
    for (at, got) in got.iter().enumerate() {
        case.w.row(at % width, &mut row);
        let x = &case.x[at / width * k..];
        let terms = || row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
        let size: f64 = terms().map(f64::abs).sum();
        if size > 0.0 {
            worst = worst.max((f64::from(*got) - terms().sum::<f64>()).abs() / size);
        }
    }
    worst
}

#[test]
fn three_bf16_parts_are_as_exact_as_f32() {
    if !here() {
        return;
    }
    for kind in Kind::ALL {
        for seed in 0..5 {
            let case = Case::new(kind, Mode::Exact, (64, 1536, 18), seed, false);
            let (tiles, scalar) = (error(&case, Isa::Amx), error(&case, Isa::Scalar));
            assert!(
                tiles <= 2.0 * scalar && tiles < 5e-7,
                "{kind:?}: {tiles:e} on tiles, {scalar:e} scalar"
            );
        }
    }
}

/// Uses more rows, panels and inputs than one pass over expanded tiles can hold.
#[test]
fn large_matmuls_in_several_passes_keep_their_bits() {
    if !here() {
        return;
    }
    for kind in [Kind::Q8_0, Kind::Q2_K, Kind::Q4_K, Kind::Q6_K] {
        let case = Case::new(kind, Mode::Int8, (144, 5632, 530), 1, true);
        assert_eq!(bits(&case.all(Isa::Amx)), bits(&case.all(Isa::Avx512)), "{kind:?}");
        let case = Case::new(kind, Mode::Exact, (144, 5632, 530), 1, false);
        let (all, width) = (case.all(Isa::Amx), case.w.panels() * PANEL);
        for row in [0, 511, 512, 529] {
            let alone = case.run(Isa::Amx, row..row + 1, 0..1, 8..9, false);
            assert_eq!(
                bits(&alone),
                bits(&all[row * width..][8 * PANEL..9 * PANEL]),
                "{kind:?}, {row}"
            );
        }
    }
}

#[test]
fn threads_have_tiles_of_their_own() {
    if !here() {
        return;
    }
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                let rows = 1 + 7 * thread as usize;
                for kind in Kind::ALL {
                    for mode in [Mode::Exact, Mode::Bf16, Mode::Both] {
                        let case = Case::new(kind, mode, (80, 256, rows), thread, true);
                        let first = case.all(Isa::Amx);
                        let same = |out: &[f32]| {
                            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                            bits(out) == bits(&first)
                        };
                        assert!((0..20).all(|_| same(&case.all(Isa::Amx))));
                    }
                }
            });
        }
    });
}
