//! Attention as the model calls it, and the choice of the instruction set.
//!
//! Invariants: a thread's scratch is as large as a unit's tile, whatever the step.

use super::kernel::{CHUNK, Sums};
use super::lanes::LANES;
use super::lines::Lines;
use super::plan::{Plan, Sizes};
use super::rows::Rows;
use super::scalar::Scalar;
use super::{MAX_GROUP, MAX_HEAD_DIM};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::kv::KvPool;

/// Rows of queries (tokens by heads of a group) that a unit computes at once.
pub(super) const ROWS: usize = 64;

/// Attention of one model: its heads and the kernels of an instruction set.
#[derive(Clone, Debug)]
pub struct Attention {
    isa: Isa,
    pub(super) kv_heads: usize,
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// What queries are multiplied by: scores are logarithms to base 2.
    pub(super) scale: f32,
}

/// One layer of a step.
///
/// Token t's query begins at `queries.add(t * query_stride)`: `kv_heads * group` heads of `head_dim` numbers, the heads of a
/// group together. Its result goes to `out.add(t * out_stride)`, in the same order.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The rows that the plan was built for.
    pub rows: Rows<'a>,
    /// Where keys and values are.
    pub kv: &'a KvPool,
    /// The layer.
    pub layer: usize,
    /// Queries, rotated, not scaled.
    pub queries: *const f32,
    /// Numbers from one token's queries to the next.
    pub query_stride: usize,
    /// Results.
    pub out: *mut f32,
    /// Numbers from one token's result to the next.
    pub out_stride: usize,
}

// SAFETY: only addresses; they are followed by unsafe functions, whose callers answer for them.
unsafe impl Send for Call<'_> {}
// SAFETY: as above.
unsafe impl Sync for Call<'_> {}

/// A thread's room for one unit.
#[derive(Debug)]
pub struct Scratch {
    pub(super) queries: Lines,
    pub(super) scores: Lines,
    pub(super) keys: Lines,
    pub(super) values: Lines,
    /// Weighted values of a chunk.
    pub(super) chunk: Lines,
    /// The same of all chunks so far, and a vector for their sums.
    pub(super) whole: Lines,
    pub(super) sums: [Sums; ROWS],
}

impl Attention {
    /// Attention with `heads` query heads over `kv_heads` key/value heads of `head_dim`; scores are multiplied by `scale`
    /// (1 / sqrt(head_dim) in all models here).
    pub fn new(isa: Isa, heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> Result<Self> {
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) || heads / kv_heads > MAX_GROUP {
            return Err(Error::unsupported(format!(
                "{heads} heads over {kv_heads} key/value heads: not 1 to {MAX_GROUP} for each"
            )));
        }
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "head_dim {head_dim} is not from 1 to {MAX_HEAD_DIM}"
            )));
        }
        Ok(Self {
            isa,
            kv_heads,
            group: heads / kv_heads,
            head_dim,
            scale: scale * std::f32::consts::LOG2_E,
        })
    }

    /// A plan for steps over `kv` on some threads. `windows`: for each layer, how many positions a token sees, itself
    /// included.
    pub fn plan(&self, kv: &KvPool, threads: usize, windows: &[Option<usize>]) -> Plan {
        Plan::new(Sizes {
            page_size: kv.shape().page_size,
            pages: kv.shape().pages,
            kv_heads: self.kv_heads,
            group: self.group,
            tile: ROWS / self.group,
            threads,
            record: self.record(),
            windows: windows.to_vec(),
        })
    }

    /// Room for one thread.
    pub fn scratch(&self) -> Scratch {
        let (dim, width) = (self.head_dim, self.width());
        Scratch {
            queries: Lines::new(ROWS * dim),
            scores: Lines::new(ROWS * CHUNK),
            keys: Lines::new(dim * CHUNK),
            values: Lines::new(CHUNK * width),
            chunk: Lines::new(ROWS * width),
            whole: Lines::new(ROWS * (width + LANES)),
            sums: [Sums { most: 0.0, sum: 0.0 }; ROWS],
        }
    }

    /// `head_dim` up to whole vectors.
    pub(super) fn width(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Numbers of a head's part of a record: a vector for the sums, then the values.
    pub(super) fn part(&self) -> usize {
        LANES + self.width()
    }

    pub(super) fn record(&self) -> usize {
        self.kv_heads * self.group * self.part()
    }

    /// Run unit `unit` of a layer, 0..[`Plan::units`].
    ///
    /// # Safety
    /// The plan was built for `call.rows`, and for this model; the call's pointers are valid for all tokens of the step;
    /// the keys and values of this layer, this step's included, are stored and nobody writes them; nobody else uses
    /// `scratch`, runs this unit, or touches the output meanwhile but other units of this plan and layer.
    pub unsafe fn run_unit(&self, plan: &Plan, unit: usize, call: &Call<'_>, scratch: &mut Scratch) {
        // SAFETY: the caller's word; the instruction set was found on this processor.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512::unit(self, plan, unit, call, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::unit(self, plan, unit, call, scratch),
                _ => self.unit::<Scalar>(plan, unit, call, scratch),
            }
        }
    }

    /// Merge unit `unit` of a layer, 0..[`Plan::merges`], after all its units have run.
    ///
    /// # Safety
    /// As [`Self::run_unit`], and all units of this layer are done.
    pub unsafe fn merge(&self, plan: &Plan, unit: usize, call: &Call<'_>) {
        // SAFETY: as above.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512::join(self, plan, unit, call),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::join(self, plan, unit, call),
                _ => self.join::<Scalar>(plan, unit, call),
            }
        }
    }
}
