//! Location of a block in a panel, for kinds that are known at compile time.

use super::ActsPtr;
use crate::Kind;
use crate::panels::Layout;

/// Returns the layout of a kind.
pub(super) const fn layout(kind: u8) -> Layout {
    Kind::ALL[kind as usize].layout()
}

/// Returns a kind's values by code; zeros if the codes are the values.
pub(super) const fn table(kind: u8) -> [u8; 16] {
    match layout(kind).table {
        Some(table) => table,
        None => [0; 16],
    }
}

/// Returns the bytes of a block, with its share of the unit's head.
pub(super) const fn block_bytes(kind: u8) -> usize {
    let layout = layout(kind);
    layout.unit_bytes() / layout.unit
}

/// Location of a block in a panel: its unit's head, the block's index in the unit, and its codes or floats.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) head: *const u8,
    pub(super) at: usize,
    pub(super) codes: *const u8,
}

impl Place {
    /// Locates block `b` of the panel at `panel`; `b` may run into the next panels if their inputs fill whole units.
    #[inline]
    pub(super) const fn of<const KIND: u8>(panel: *const u8, b: usize) -> Self {
        let layout = const { layout(KIND) };
        let (unit, at) = (b / layout.unit, b % layout.unit);
        let head = panel.wrapping_add(unit * layout.unit_bytes());
        let codes = head.wrapping_add(layout.head + at * layout.codes());
        Self { head, at, codes }
    }
}

/// Returns the properties of a kind that shape its tiles: scales in a block, whether it has minima, and the step order.
const fn tile_kind(kind: u8) -> (usize, bool, bool) {
    let layout = layout(kind);
    (layout.subs, layout.min, layout.by_halves())
}

/// Returns one representative kind for all kinds with alike tiles, so that they share their code.
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

/// Returns the index of row `row` of block `b` in the activations' [block][row] arrays.
#[inline]
pub(super) const fn cell(acts: &ActsPtr, b: usize, row: usize) -> usize {
    b * acts.rows + row
}

/// Runs `$blocks` with `$of` as the constant of a quantized kind, or `$numbers` with that of a float kind.
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
