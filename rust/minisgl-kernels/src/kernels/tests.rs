//! Tests of every instruction set on this machine against the scalar definition, bit for bit, and of that against f64.

#![allow(clippy::undocumented_unsafe_blocks)] // every pointer is into a vector of the length that the call needs

use proptest::prelude::*;

use super::*;
use crate::panels::Part;
use crate::panels::tests::stored::sensible;
use crate::{Kind, TensorView};

/// Pseudo-random generator, the same for the same seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as u32
    }

    fn activation(&mut self, extremes: bool) -> f32 {
        let plain = self.next() as f32 / (1u64 << 30) as f32 - 1.0;
        match self.next() % 16 {
            0 if extremes => plain * 1e30,
            1 if extremes => 0.0,
            2 if extremes => -0.0,
            3 if extremes => f32::from_bits(self.next() & 0x807f_ffff), // denormal
            4 if extremes => 1.0,
            _ => plain,
        }
    }
}

/// Returns a matrix of random bits, with `extremes` also blocks of the smallest and largest values.
fn matrix(kind: Kind, n: usize, k: usize, numbers: &mut Numbers, extremes: bool) -> Matrix {
    let mut data = Vec::new();
    let full = numbers.next() as u8;
    for _ in 0..n * k / kind.block_len() {
        let fill = extremes && numbers.next().is_multiple_of(2);
        let fills = [0x80, 0x7f, 0xff, 0x00, full];
        let byte = fills[numbers.next() as usize % fills.len()];
        let mut block: Vec<u8> = (0..kind.block_bytes())
            .map(|_| if fill { byte } else { numbers.next() as u8 })
            .collect();
        sensible(kind, &mut block);
        if extremes && full.is_multiple_of(2) && kind == Kind::MXFP4 {
            block[0] &= 3; // the smallest scales, two of them subnormal
        }
        data.extend(block);
    }
    let shape = [n, k];
    let part = Part::new(TensorView::new("w", kind, &shape, &data).unwrap());
    Matrix::pack(&[part], false, None).unwrap()
}

pub(super) struct Case {
    pub(super) w: Matrix,
    pub(super) x: Vec<f32>,
    rows: usize,
    mode: Mode,
}

impl Case {
    pub(super) fn new(kind: Kind, mode: Mode, (n, k, rows): (usize, usize, usize), seed: u64, extremes: bool) -> Self {
        let mut numbers = Numbers(seed);
        let k = k.next_multiple_of(kind.block_len());
        let w = matrix(kind, n, k, &mut numbers, extremes);
        let x = (0..rows * k).map(|_| numbers.activation(extremes)).collect();
        Self { w, x, rows, mode }
    }

    /// Returns the product of rows `rows`, prepared among `among`, with `panels`; `add` adds it to ones.
    pub(super) fn run(
        &self,
        isa: Isa,
        among: Range<usize>,
        rows: Range<usize>,
        panels: Range<usize>,
        add: bool,
    ) -> Vec<f32> {
        let (kernels, k) = (Kernels::new(isa), self.w.k());
        let acts = Acts::new(among.len(), k, self.mode);
        let writer = acts.writer(among.len(), k);
        let stride = panels.len() * PANEL + 3;
        let mut out = vec![1.0; rows.len() * stride + 5];
        unsafe {
            for (i, row) in among.enumerate() {
                kernels.prepare(self.x[row * k..].as_ptr(), writer, i);
            }
            kernels.matmul(&self.w, panels.clone(), writer, rows, out.as_mut_ptr(), stride, add);
        }
        for row in out.chunks(stride) {
            assert!(
                row.iter().skip(panels.len() * PANEL).all(|&x| x == 1.0),
                "beyond its row"
            );
        }
        out.chunks_exact(stride)
            .flat_map(|row| row[..panels.len() * PANEL].to_vec())
            .collect()
    }

    pub(super) fn all(&self, isa: Isa) -> Vec<f32> {
        self.run(isa, 0..self.rows, 0..self.rows, 0..self.w.panels(), false)
    }
}

/// Sizes (outputs, inputs, rows) that fill no whole panel; smaller under Miri.
const SMALL: (usize, usize, usize) = if cfg!(miri) { (17, 40, 2) } else { (37, 96, 3) };

/// Returns the bits of each element, with one pattern for all NaN.
pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
        .collect()
}

fn modes(kind: Kind) -> Vec<Mode> {
    let all = [Mode::Exact, Mode::Plain, Mode::Bf16, Mode::Int8, Mode::Both];
    all.into_iter().filter(|mode| mode.serves(kind)).collect()
}

fn all_kinds() -> Vec<(Kind, Mode)> {
    let all = Kind::ALL
        .into_iter()
        .flat_map(|kind| modes(kind).into_iter().map(move |mode| (kind, mode)));
    all.collect()
}

fn kinds() -> impl Strategy<Value = (Kind, Mode)> {
    proptest::sample::select(all_kinds())
}

#[test]
fn matmuls_match_f64() {
    for isa in Isa::here() {
        for (kind, mode) in all_kinds() {
            let case = Case::new(kind, mode, SMALL, 7, false);
            let (got, k) = (case.all(isa), case.w.k());
            let mut row = vec![0.0; k];
            for (at, got) in got.iter().enumerate() {
                let (r, n) = (at / (case.w.panels() * PANEL), at % (case.w.panels() * PANEL));
                case.w.row(n, &mut row);
                let products = row
                    .iter()
                    .zip(&case.x[r * k..])
                    .map(|(w, x)| f64::from(*w) * f64::from(*x));
                let size: f64 = products.clone().map(f64::abs).sum();
                let bound = match mode {
                    _ if mode.int8_with(kind) => 1e-2,
                    Mode::Bf16 => 4e-3, // half a unit in the last of 8 bits
                    _ => 1e-6,
                };
                let off = (f64::from(*got) - products.sum::<f64>()).abs();
                assert!(off <= bound * size, "{isa:?} {kind:?} {mode:?}: off by {off} of {size}");
            }
        }
    }
}

#[test]
fn activations_that_are_not_finite_give_output_that_is_not_finite() {
    for isa in Isa::here() {
        for kind in Kind::ALL {
            for mode in modes(kind) {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut case = Case::new(kind, mode, (32, 64, 9), 3, false);
                    let k = case.w.k();
                    case.x[3 * k + 40] = bad;
                    let out = case.all(isa);
                    let row = |r: usize| &out[r * 32..(r + 1) * 32];
                    assert!(row(3).iter().all(|x| !x.is_finite()), "{isa:?} {kind:?} {mode:?}");
                    assert!((0..9).filter(|&r| r != 3).all(|r| row(r).iter().all(|x| x.is_finite())));
                }
            }
        }
    }
}

/// More rows, panels and blocks than a kernel takes at a time, and none a whole number of times.
#[test]
#[cfg_attr(miri, ignore = "millions of products")]
fn large_int8_matmuls_have_the_same_bits_on_every_isa() {
    for kind in [Kind::Q4_K, Kind::Q6_K, Kind::Q8_0, Kind::Q2_K, Kind::IQ4_NL] {
        let case = Case::new(kind, Mode::Int8, (16 * 35, 512, 131), 11, false);
        let want = bits(&case.all(Isa::Scalar));
        for isa in Isa::here() {
            assert_eq!(bits(&case.all(isa)), want, "{isa:?} {kind:?}");
        }
    }
}

/// The largest codes and activations: sums in 16 bits must not pass their range.
#[test]
fn int8_sums_of_extreme_values_do_not_overflow() {
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_quantized()) {
        for (fill, sign) in [0x00, 0xff, 0x80, 0x77, 0x88]
            .into_iter()
            .flat_map(|fill| [(fill, 1.0), (fill, -1.0)])
        {
            let k = 64usize.next_multiple_of(kind.block_len());
            let mut data = vec![fill; 16 * k / kind.block_len() * kind.block_bytes()];
            data.chunks_exact_mut(kind.block_bytes())
                .for_each(|block| sensible(kind, block));
            let shape = [16, k];
            let part = Part::new(TensorView::new("w", kind, &shape, &data).unwrap());
            let w = Matrix::pack(&[part], false, None).unwrap();
            let mut case = Case {
                w,
                x: Vec::new(),
                rows: 0,
                mode: Mode::Int8,
            };
            for rows in [1, 4, 9] {
                (case.rows, case.x) = (rows, vec![sign; rows * k]);
                let want = bits(&case.all(Isa::Scalar));
                for isa in Isa::here() {
                    assert_eq!(bits(&case.all(isa)), want, "{isa:?} {kind:?} {fill:x} {sign} {rows}");
                }
            }
        }
    }
}

/// Activations of any size, also too small to be divided by a power of two.
#[test]
fn one_row_of_any_size_has_the_same_bits_on_every_isa() {
    for (kind, mode) in all_kinds() {
        for size in [1.0, 2f32.powi(90), 2f32.powi(-80), 2f32.powi(-110), f32::INFINITY] {
            let mut case = Case::new(kind, mode, (32, 512 + 32, 1), 13, false);
            for (i, x) in case.x.iter_mut().enumerate() {
                *x *= size * 2f32.powi(i as i32 * 37 % 20 - 10);
            }
            let want = bits(&case.all(Isa::Scalar));
            for isa in Isa::here().into_iter().filter(|isa| isa.sums_as_scalar(kind, mode)) {
                assert_eq!(bits(&case.all(isa)), want, "{isa:?} {kind:?} {mode:?} {size}");
            }
        }
    }
}

#[test]
fn rows_prepared_together_have_the_bits_of_rows_alone() {
    for isa in Isa::here() {
        for (kind, mode) in all_kinds() {
            let case = Case::new(kind, mode, (16, 1100, 5), 5, false);
            let (kernels, k) = (Kernels::new(isa), case.w.k());
            let acts = Acts::new(5, k, mode);
            let (writer, mut out) = (acts.writer(5, k), vec![0.0; 5 * PANEL]);
            unsafe {
                kernels.prepare_rows(case.x.as_ptr(), k, writer, 0..2);
                kernels.prepare_rows(case.x[2 * k..].as_ptr(), k, writer, 2..5);
                kernels.matmul(&case.w, 0..1, writer, 0..5, out.as_mut_ptr(), PANEL, false);
            }
            assert_eq!(bits(&out), bits(&case.all(isa)), "{isa:?} {kind:?} {mode:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 300 }))]

    #[test]
    fn matmuls_have_the_same_bits_on_every_isa(
        (kind, mode) in kinds(), n in 1usize..150, k in 1usize..400, rows in 1usize..=70, seed: u64, extremes: bool,
    ) {
        let case = Case::new(kind, mode, (n, k, rows), seed, extremes);
        let want = case.all(Isa::Scalar);
        for isa in Isa::here() {
            if isa.sums_as_scalar(kind, mode) {
                prop_assert_eq!(bits(&case.all(isa)), bits(&want), "{:?} {:?} {:?}", isa, kind, mode);
            }
        }
    }

    #[test]
    fn a_row_alone_and_a_panel_alone_have_the_same_bits(
        (kind, mode) in kinds(), n in 17usize..150, k in 1usize..400, rows in 1usize..=70, seed: u64, add: bool,
    ) {
        let case = Case::new(kind, mode, (n, k, rows), seed, true);
        let panels = case.w.panels();
        for isa in Isa::here() {
            let all = case.run(isa, 0..rows, 0..rows, 0..panels, add);
            let (row, panel) = (seed as usize % rows, seed as usize % panels);
            let alone = case.run(isa, row..row + 1, 0..1, 0..panels, add);
            let of_all = &all[row * panels * PANEL..][..panels * PANEL];
            prop_assert_eq!(bits(&alone), bits(of_all), "{:?} {:?} {:?}", isa, kind, mode);
            let cut = case.run(isa, 0..rows, row..rows, panel..panels, add);
            let width = (panels - panel) * PANEL;
            for (i, got) in cut.chunks_exact(width).enumerate() {
                let of_all = &all[((row + i) * panels + panel) * PANEL..][..width];
                prop_assert_eq!(bits(got), bits(of_all), "{:?} {:?} {:?}", isa, kind, mode);
            }
        }
    }

    #[test]
    fn small_kernels_have_the_same_bits_on_every_isa(n in 0usize..300, seed: u64, extremes: bool) {
        let mut numbers = Numbers(seed);
        let mut list = |n: usize| -> Vec<f32> { (0..n).map(|_| numbers.activation(extremes)).collect() };
        let (x, y, z) = (list(n), list(n), list(2 * n));
        let run = |isa: Isa| {
            let kernels = Kernels::new(isa);
            let (mut norm, mut silu, mut gelu) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
            let panels = n / PANEL * PANEL;
            let (mut silus, mut gelus) = (vec![0.0; panels], vec![0.0; panels]);
            let (mut sum, mut turned) = (x.clone(), z.clone());
            let top = unsafe {
                kernels.rms_norm(x.as_ptr(), y.as_ptr(), n, 1e-5, norm.as_mut_ptr());
                kernels.silu_mul(x.as_ptr(), y.as_ptr(), n, silu.as_mut_ptr());
                kernels.gelu_mul(x.as_ptr(), y.as_ptr(), n, gelu.as_mut_ptr());
                kernels.silu_mul_of_panels(z.as_ptr(), panels, silus.as_mut_ptr());
                kernels.gelu_mul_of_panels(z.as_ptr(), panels, gelus.as_mut_ptr());
                kernels.add(sum.as_mut_ptr(), y.as_ptr(), n);
                kernels.rotate(turned.as_mut_ptr(), x.as_ptr(), y.as_ptr(), n);
                (kernels.argmax(x.as_ptr(), n), kernels.finite(x.as_ptr(), n))
            };
            ([norm, silu, gelu, silus, gelus, sum, turned].map(|list| bits(&list)), top)
        };
        let want = run(Isa::Scalar);
        for isa in Isa::here() {
            prop_assert_eq!(run(isa), want.clone(), "{:?}", isa);
        }
    }
}

#[test]
fn exp_is_close() {
    for i in -8700..8800 {
        let x = i as f32 / 100.0;
        let want = f64::from(x).exp();
        let off = (f64::from(scalar::exp(x)) / want - 1.0).abs();
        assert!(off < 3e-7, "exp({x}) is off by {off}");
    }
    assert!(scalar::exp(f32::NAN).is_nan());
}

#[test]
fn gelu_is_close() {
    let kernels = Kernels::new(Isa::Scalar);
    for i in -2000..2000 {
        let (x, mut out) = (i as f32 / 100.0, 0.0);
        unsafe { kernels.gelu_mul(&x, &1.0, 1, &mut out) };
        let wide = f64::from(x);
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
        let want = 0.5 * wide * (1.0 + inner.tanh());
        let off = (f64::from(out) - want).abs();
        assert!(off < 1e-6 * wide.abs().max(0.1), "gelu({x}) is {out}, not {want}");
    }
}

#[test]
fn the_largest_is_the_first_of_equals_and_never_nan() {
    for isa in Isa::here() {
        let kernels = Kernels::new(isa);
        for n in 1..if cfg!(miri) { 20 } else { 100 } {
            for at in 0..n {
                let mut x = vec![-1.0; n];
                x[0] = f32::NAN;
                x[at] = 2.0;
                x[n - 1] = 2.0;
                assert_eq!(unsafe { kernels.argmax(x.as_ptr(), n) }, at, "{isa:?}");
                x[at] = f32::INFINITY;
                assert!(!unsafe { kernels.finite(x.as_ptr(), n) });
            }
        }
        let none = [f32::NEG_INFINITY; 40];
        assert_eq!(unsafe { kernels.argmax(none.as_ptr(), 40) }, 0);
        assert!(unsafe { kernels.finite([0.0; 40].as_ptr(), 40) });
    }
}
