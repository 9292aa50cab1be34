//! The LM head as a single matrix, for the torch engine, which holds the model's other tensors.
//!
//! Invariants: a row's outputs have the same bits for every number of rows and threads, as in the CPU engine.

#![allow(unsafe_code)]

use minisgl_kernels::panels::{Matrix, PANEL, Part};
use minisgl_kernels::{Acts, Isa, Kernels, Kind, Mode, TensorView};

use crate::error::{Error, Result};
use crate::model::Groups;
use crate::openmp::OpenMp;
use crate::threads::{Counter, Pool};

/// Row count below which one thread prepares all rows: waking the others would take longer.
const FEW: usize = 64;

/// Threads that compute a head's matmul.
pub enum Team {
    /// Thread pool of its own.
    Own(Pool),
    /// OpenMP threads that the process already has.
    OpenMp(OpenMp),
}

impl Team {
    fn threads(&self) -> usize {
        match self {
            Self::Own(pool) => pool.threads(),
            Self::OpenMp(threads) => threads.threads(),
        }
    }

    /// Calls `job` on all threads at once. Returns after all have finished.
    fn run(&mut self, job: &(dyn Fn() + Sync)) -> Result<()> {
        match self {
            Self::Own(pool) => pool.run(&|_, _| job()),
            Self::OpenMp(threads) => threads.run(job),
        }
    }
}

/// A packed weight matrix, [outputs, inputs], and the threads that multiply by it.
pub struct Head {
    matrix: Matrix,
    kernels: Kernels,
    team: Team,
    acts: Acts,
    rows: usize,
}

impl Head {
    /// Packs row-major `data`, [outputs, inputs]. `isa` limits the instruction set. Errors if `data` does not fit.
    pub fn new(kind: Kind, shape: [usize; 2], data: &[u8], isa: Option<&str>, team: Team) -> Result<Self> {
        if shape.contains(&0) {
            return Err(Error::setting("head: a dimension is 0"));
        }
        let table = TensorView::new("head", kind, &shape, data)?;
        let matrix = Matrix::pack(&[Part::new(table)], false, None)?;
        Ok(Self {
            acts: Acts::new(1, matrix.k(), Mode::Exact),
            rows: 1,
            kernels: Kernels::new(Isa::detect(isa)?).decoding(),
            team,
            matrix,
        })
    }

    /// Returns the elements of an output row: the matrix's outputs, rounded up to whole panels.
    #[must_use]
    pub fn width(&self) -> usize {
        self.matrix.panels() * PANEL
    }

    /// Multiplies `x`, [rows, inputs], into `out`, [rows, `width`]. `bf16`: `x` holds such values, which is faster.
    pub fn product(&mut self, x: &[f32], out: &mut [f32], bf16: bool) -> Result<()> {
        let (inputs, width) = (self.matrix.k(), self.width());
        let rows = x.len() / inputs;
        if x.len() != rows * inputs || out.len() != rows * width {
            let (x, out) = (x.len(), out.len());
            return Err(Error::setting(format!(
                "head: {x} inputs and {out} outputs: must be rows of {inputs} and {width}"
            )));
        }
        if rows > self.rows {
            self.rows = rows;
            self.acts = Acts::new(rows, inputs, Mode::Exact);
        }
        let (kernels, matrix) = (self.kernels, &self.matrix);
        let bf16 = bf16 && matrix.kind() == Kind::BF16 && kernels.has_bf16();
        let mode = if bf16 { Mode::Bf16 } else { Mode::Exact };
        let acts = self.acts.writer_as(rows.max(1), inputs, mode);
        let groups = Groups::new(matrix, self.team.threads());
        let counters: [Counter; 2] = Default::default();
        let to = Out(out.as_mut_ptr());
        let prepare = || {
            while let Some(row) = counters[0].claim(rows) {
                let from = x[row * inputs..].as_ptr();
                // SAFETY: each row is claimed once; `x` has `inputs` elements for it.
                unsafe {
                    if bf16 {
                        kernels.prepare_bf16(from, acts, row);
                    } else {
                        kernels.prepare(from, acts, row);
                    }
                }
            }
        };
        if rows < FEW {
            prepare();
        } else {
            self.team.run(&prepare)?;
        }
        self.team.run(&|| {
            let to = &to;
            while let Some(group) = counters[1].claim(groups.count) {
                let panels = groups.panels(group);
                // SAFETY: each column is claimed once; `out` holds all rows, as checked above.
                unsafe {
                    let at = to.0.add(panels.start * PANEL);
                    if bf16 {
                        kernels.matmul_bf16(matrix, panels, acts, 0..rows, at, width);
                    } else {
                        kernels.matmul(matrix, panels, acts, 0..rows, at, width, false);
                    }
                }
            }
        })
    }
}

/// Pointer to the output, shared by the threads.
struct Out(*mut f32);

// SAFETY: threads write to disjoint columns.
unsafe impl Sync for Out {}

#[cfg(test)]
mod tests {
    use super::*;
    use minisgl_kernels::blocks::{bf16_to_f32, f32_to_bf16};

    fn team(threads: usize) -> Team {
        Team::Own(Pool::new(threads).unwrap())
    }

    #[test]
    fn matmul_of_a_row_does_not_depend_on_other_rows() {
        let shape = [37, 45];
        let number = |i: usize| ((i * 2_654_435_761) % 2_001) as f32 / 1_000.0 - 1.0;
        let table: Vec<u16> = (0..shape[0] * shape[1]).map(|i| f32_to_bf16(number(i))).collect();
        let data: Vec<u8> = table.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let mut head = Head::new(Kind::BF16, shape, &data, None, team(2)).unwrap();
        assert_eq!(head.width(), 48);
        let x: Vec<f32> = (0..9 * shape[1]).map(|i| number(i + 77)).collect();
        let mut all = vec![0.0; 9 * 48];
        let bf16: Vec<f32> = x.iter().map(|&x| bf16_to_f32(f32_to_bf16(x))).collect();
        for (x, is_halves) in [(&x, false), (&bf16, true)] {
            head.product(x, &mut all, is_halves).unwrap();
            check(&mut head, &table, shape, x, &all, is_halves);
        }
    }

    fn check(head: &mut Head, table: &[u16], shape: [usize; 2], x: &[f32], all: &[f32], bf16: bool) {
        for row in 0..9 {
            let own = &x[row * shape[1]..][..shape[1]];
            let mut alone = vec![0.0; 48];
            head.product(own, &mut alone, bf16).unwrap();
            assert_eq!(alone, all[row * 48..][..48]);
            for (output, got) in alone.iter().take(shape[0]).enumerate() {
                let weights = &table[output * shape[1]..][..shape[1]];
                let want: f64 = weights
                    .iter()
                    .zip(own)
                    .map(|(&w, &x)| f64::from(f32::from_bits(u32::from(w) << 16)) * f64::from(x))
                    .sum();
                assert!((f64::from(*got) - want).abs() < 1e-5, "{got}, not {want}");
            }
        }
    }

    #[test]
    fn wrong_sizes_are_rejected() {
        let mut head = Head::new(Kind::F32, [3, 2], &[0; 24], None, team(1)).unwrap();
        assert!(head.product(&[0.0; 3], &mut [0.0; 16], false).is_err());
        assert!(head.product(&[0.0; 2], &mut [0.0; 3], false).is_err());
        assert!(head.product(&[], &mut [], true).is_ok());
        assert!(Head::new(Kind::BF16, [3, 2], &[0; 24], None, team(1)).is_err());
        assert!(Head::new(Kind::BF16, [0, 2], &[], None, team(1)).is_err());
    }
}
