//! Attention as the model calls it: the choice of the instruction set.

use super::plan::Plan;
use super::scalar::Scalar;
use super::unit::{Attention, Call, Scratch};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::kernels::Isa;

impl Attention {
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
