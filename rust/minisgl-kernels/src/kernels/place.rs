//! Where kernels find a block of a panel, for kinds that are known when they are compiled.

use super::ActsPtr;
use crate::Kind;
use crate::panels::Layout;

/// A kind's row of the table.
pub(super) const fn layout(kind: u8) -> Layout {
    Kind::ALL[kind as usize].layout()
}

/// Its values by code; zeros if they are the codes.
pub(super) const fn table(kind: u8) -> [u8; 16] {
    match layout(kind).table {
        Some(table) => table,
        None => [0; 16],
    }
}

/// Bytes of a block, with its share of the head.
pub(super) const fn block_bytes(kind: u8) -> usize {
    let layout = layout(kind);
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
    pub(super) const fn of<const KIND: u8>(panel: *const u8, b: usize) -> Self {
        let layout = const { layout(KIND) };
        let (unit, at) = (b / layout.unit, b % layout.unit);
        let head = panel.wrapping_add(unit * layout.unit_bytes());
        let codes = head.wrapping_add(layout.head + at * layout.codes());
        Self { head, at, codes }
    }
}

/// What a tile has to know of a kind: how many shares have a scale, whether there are minima, the order of steps.
const fn tile_kind(kind: u8) -> (usize, bool, bool) {
    let layout = layout(kind);
    (layout.subs, layout.min, layout.by_halves())
}

/// A kind for each kind of tile, so that kinds alike share their code.
pub(super) const fn like(kind: u8) -> u8 {
    let want = tile_kind(kind);
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

/// Runs `$blocks` with `$of` as the constant of a kind of blocks, `$numbers` with that of a kind of numbers.
macro_rules! by_kind {
    ($kind:expr, $of:ident, $blocks:expr, $numbers:expr) => {
        by_kind!(@ $kind, $of, $blocks, $numbers,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS TQ2_0 MXFP4 NVFP4 Q1_0 Q2_0; F32 F16 BF16)
    };
    (@ $kind:expr, $of:ident, $blocks:expr, $numbers:expr, $($block:ident)*; $($number:ident)*) => {
        match $kind {
            $(Kind::$block => {
                const $of: u8 = Kind::$block as u8;
                $blocks
            })*
            $(Kind::$number => {
                const $of: u8 = Kind::$number as u8;
                $numbers
            })*
            Kind::TQ1_0 => unreachable!("held as TQ2_0"),
        }
    };
}
pub(super) use by_kind;
