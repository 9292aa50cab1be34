//! The choice of the instruction set, and attention as the model calls it.

use super::lanes::{Lanes, OnLanes};
use super::plan::Plan;
use super::scalar::Scalar;
use super::unit::{Attention, Call, Scratch};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::kernels::Isa;

/// Do a job with the vectors of `isa`, which was found on this processor.
///
/// # Safety
/// As the job asks.
pub(crate) unsafe fn on_lanes<J: OnLanes>(isa: Isa, job: J) {
    // SAFETY: the caller's word.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => avx512::Vector::run(job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => avx2::Vector::run(job),
            _ => Scalar::run(job),
        }
    }
}

/// A unit; without scratch, its merge.
struct Piece<'a, 'c>(&'a Attention, &'a Plan, usize, &'a Call<'c>, Option<&'a mut Scratch>);

impl OnLanes for Piece<'_, '_> {
    #[inline(always)]
    unsafe fn on<V: Lanes>(self) {
        let Self(attention, plan, unit, call, scratch) = self;
        // SAFETY: the caller's word.
        unsafe {
            match scratch {
                Some(scratch) => attention.unit::<V>(plan, unit, call, scratch),
                None => attention.join::<V>(plan, unit, call),
            }
        }
    }
}

impl Attention {
    /// Run unit `unit` of a layer, 0..[`Plan::units`].
    ///
    /// # Safety
    /// The plan was built for `call.rows`, and for this model; the call's pointers are valid for all tokens of the step;
    /// the keys and values of this layer, this step's included, are stored and nobody writes them; nobody else uses
    /// `scratch`, runs this unit, or touches the output meanwhile but other units of this plan and layer.
    pub unsafe fn run_unit(&self, plan: &Plan, unit: usize, call: &Call<'_>, scratch: &mut Scratch) {
        // SAFETY: the caller's word; the instruction set was found on this processor.
        unsafe { on_lanes(self.isa, Piece(self, plan, unit, call, Some(scratch))) }
    }

    /// Merge unit `unit` of a layer, 0..[`Plan::merges`], after all its units have run.
    ///
    /// # Safety
    /// As [`Self::run_unit`], and all units of this layer are done.
    pub unsafe fn merge(&self, plan: &Plan, unit: usize, call: &Call<'_>) {
        // SAFETY: as above.
        unsafe { on_lanes(self.isa, Piece(self, plan, unit, call, None)) }
    }
}
