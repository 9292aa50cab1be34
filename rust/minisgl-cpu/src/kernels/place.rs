//! Where kernels find a block of a panel, for forms that are known when they are compiled.

use super::ActsPtr;
use super::scalar::cell16;
use crate::weights::{Form, Layout};

/// A form's row of the table.
pub(super) const fn layout(form: u8) -> Layout {
    Form::ALL[form as usize].layout()
}

/// Bytes of a block, with its share of the head.
pub(super) const fn block_bytes(form: u8) -> usize {
    let layout = layout(form);
    layout.unit_bytes() / layout.unit
}

/// A block of a panel: its unit's head, which block of the unit it is, its codes or numbers.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) head: *const u8,
    pub(super) at: usize,
    pub(super) codes: *const u8,
}

impl Place {
    /// Block `b` of the panel at `panel` (or of the panels from there on, if their inputs fill units).
    #[inline]
    pub(super) const fn of<const FORM: u8>(panel: *const u8, b: usize) -> Self {
        let layout = const { layout(FORM) };
        let (unit, at) = (b / layout.unit, b % layout.unit);
        let head = panel.wrapping_add(unit * layout.unit_bytes());
        let codes = head.wrapping_add(layout.head + at * layout.codes());
        Self { head, at, codes }
    }
}

/// What a tile has to know of a form: how many shares have a scale, whether there are minima, the order of steps.
const fn tile_kind(form: u8) -> (usize, bool, bool) {
    let layout = layout(form);
    (layout.subs, layout.min, layout.by_halves())
}

/// A form for each kind of tile, so that forms alike share their code.
pub(super) const fn like(form: u8) -> u8 {
    let want = tile_kind(form);
    let mut other = 0;
    loop {
        let kind = tile_kind(other);
        if kind.0 == want.0 && kind.1 == want.1 && kind.2 == want.2 {
            return other;
        }
        other += 1;
    }
}

/// Where row `row` of block `b` is among the activations' cells.
#[inline]
pub(super) const fn cell(acts: &ActsPtr, b: usize, row: usize) -> usize {
    b * acts.rows + row
}

/// Sums of the inputs that share a scale, row after row from `row` on.
#[inline]
pub(super) unsafe fn sums(acts: &ActsPtr, subs: usize, b: usize, sub: usize, row: usize) -> *const f32 {
    // SAFETY: the caller's: the rows are there.
    unsafe {
        match subs {
            1 => acts.sum.add(cell(acts, b, row)),
            _ => acts.sum16.add(cell16(acts, b, sub, row)),
        }
    }
}
