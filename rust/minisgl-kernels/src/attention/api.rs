//! Attention API for the model: runs a unit or a merge of a plan on the vectors of the processor's instruction set.

use super::plan::Plan;
use super::unit::{Attention, Call, Scratch};
use crate::lanes::{Lanes, OnLanes, on_lanes};

/// Unit of work: an attention unit, or a merge if there is no scratch. Fields: attention, plan, index, call, scratch.
struct Piece<'a, 'c>(&'a Attention, &'a Plan, usize, &'a Call<'c>, Option<&'a mut Scratch>);

impl OnLanes for Piece<'_, '_> {
    #[inline(always)]
    unsafe fn on<V: Lanes>(self) {
        let Self(attention, plan, unit, call, scratch) = self;
        // SAFETY: upheld by the caller.
        unsafe {
            match scratch {
                Some(scratch) => attention.attend::<V>(plan, unit, call, scratch),
                None => attention.merge_records::<V>(plan, unit, call),
            }
        }
    }
}

impl Attention {
    /// Runs unit `unit` of a layer (0..[`Plan::units`]). Units of a layer may run at once on different threads.
    ///
    /// # Safety
    /// The plan was built for `call.rows` and for this model. The call's pointers are valid for all tokens of the step.
    /// The keys and values of this layer, this step's included, are stored, and nothing writes them meanwhile. No other
    /// thread uses `scratch`, runs this unit, or accesses the output, except for other units of this plan and layer.
    pub unsafe fn run_unit(&self, plan: &Plan, unit: usize, call: &Call<'_>, scratch: &mut Scratch) {
        // SAFETY: upheld by the caller; the instruction set was found on this processor.
        unsafe { on_lanes(self.isa, Piece(self, plan, unit, call, Some(scratch))) }
    }

    /// Merges the partial results of unit `unit` of a layer (0..[`Plan::merges`]) and writes the output.
    ///
    /// # Safety
    /// The conditions of [`Self::run_unit`] hold, and all units of this layer are done.
    pub unsafe fn merge(&self, plan: &Plan, unit: usize, call: &Call<'_>) {
        // SAFETY: as above.
        unsafe { on_lanes(self.isa, Piece(self, plan, unit, call, None)) }
    }
}
