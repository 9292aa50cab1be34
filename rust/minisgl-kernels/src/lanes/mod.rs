//! Vectors of 16 f32: the operations that an instruction set must offer to the kernels, and 2^x built on them.
//!
//! Invariants: every operation rounds like the scalar form, so generic kernels have the same bits on all sets.

mod api;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

pub(crate) use api::{LANES, Lanes, Lines, OnLanes, exp2, exp2_one};

use crate::kernels::Isa;

/// Runs a job with the vectors of `isa`.
///
/// # Safety
/// The processor has that instruction set, and the job's own conditions hold.
pub(crate) unsafe fn on_lanes<J: OnLanes>(isa: Isa, job: J) {
    // SAFETY: upheld by the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => avx512::Vector::run(job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => avx2::Vector::run(job),
            _ => scalar::Scalar::run(job),
        }
    }
}
