//! Sixteen numbers at once: what an instruction set must offer to the kernels, and 2^x made of it.
//!
//! Invariants: every operation rounds as the scalar form does, so kernels written once over this trait give the same
//! bits on all of them.

mod api;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

pub(crate) use api::{LANES, Lanes, Lines, OnLanes, exp2, exp2_one};

use crate::kernels::Isa;

/// Do a job with the vectors of `isa`, which was found on this processor.
///
/// # Safety
/// Runs a job on the vectors of an instruction set. The processor has that set.
pub(crate) unsafe fn on_lanes<J: OnLanes>(isa: Isa, job: J) {
    // SAFETY: the caller's word.
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
