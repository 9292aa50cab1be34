//! Attention as the model calls it, on the vectors of an instruction set.

use super::plan::Plan;
use super::unit::{Attention, Call, Scratch};
use crate::lanes::{Lanes, OnLanes, on_lanes};

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
