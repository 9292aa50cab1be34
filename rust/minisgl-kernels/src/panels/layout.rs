//! Storage of a matrix in panels: the table of layouts, one row for each kind of a file.
//!
//! A panel of 16 rows is a sequence of units. A unit is a *head*, the scales of one or some blocks of 32 inputs, and
//! the *codes* of these blocks, plane by plane in vectors of 64 bytes: 4 bytes of each row. Vector j of a block (0..8)
//! has inputs 4j..4j+4 of each row; depending on its width, a plane stores it in
//! * 8 bits: vector j;
//! * 4 bits: nibble `j / 4` of the bytes of vector `j % 4`;
//! * 2 bits: quarter `j / 2` of the bytes of vector `j % 2`;
//! * 1 bit: bit j of the bytes of the only vector.
//!
//! A second plane has the upper bits of a code. A weight is `scale (value - bias) + min`, its value being the code or a
//! table entry. Float kinds have blocks without a head: F16 as 32 vectors of 32 bytes, one input of each row; F32
//! likewise with 64 bytes; BF16 as 16 vectors of 64 bytes, inputs 2j and 2j + 1 of each row.
//!
//! Invariants: no value from a file is rounded a second time, and no kind takes more than 3 % more than in the file,
//! most nothing more (except TQ1_0, stored in 2 bits: 22 %).

use crate::Kind;
use crate::blocks::{FLOATS, UNEVEN, f16_to_f32, half_of_e4m3, half_of_e8m0};

/// Rows (outputs) in a panel.
pub const PANEL: usize = 16;
/// Inputs in a block.
pub const BLOCK: usize = 32;

/// Values of the codes of `Q1_0`.
const SIGNS: [i8; 16] = [-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1];

/// Layout of a kind's weights in panels.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Blocks that share a head.
    pub unit: usize,
    /// Bytes of a head.
    pub head: usize,
    /// Bits of a code in the first plane, and in the second.
    pub bits: [usize; 2],
    /// Bias that is subtracted from a value; 8-bit codes are stored signed.
    pub bias: u8,
    /// Values by code; `None`: the codes are the values.
    pub table: Option<[u8; 16]>,
    /// Scales in a block, each for an equal sub-block of its inputs.
    pub subs: usize,
    /// True if the kind has minima.
    pub min: bool,
}

impl Layout {
    /// Returns the bytes of a block's codes.
    #[must_use]
    pub const fn codes(&self) -> usize {
        (self.bits[0] + self.bits[1]) * PANEL * BLOCK / 8
    }

    /// Returns the bytes of a unit.
    #[must_use]
    pub const fn unit_bytes(&self) -> usize {
        self.head + self.unit * self.codes()
    }

    /// Returns true if f32 sums go over both nibbles of each byte in turn, which is cheapest for 4-bit codes.
    #[must_use]
    pub const fn by_halves(&self) -> bool {
        self.bits[0] == 4 && self.bits[1] == 0 && self.subs == 1
    }
}

impl Kind {
    /// Returns the kind in which weights of this kind are stored in panels: itself, except that TQ1_0 becomes TQ2_0.
    #[must_use]
    pub const fn held(self) -> Self {
        match self {
            Self::TQ1_0 => Self::TQ2_0,
            other => other,
        }
    }

    /// Returns the layout of the kind.
    #[must_use]
    pub const fn layout(self) -> Layout {
        const fn row(unit: usize, head: usize, bits: [usize; 2], bias: u8, subs: usize, min: bool) -> Layout {
            Layout {
                unit,
                head,
                bits,
                bias,
                table: None,
                subs,
                min,
            }
        }
        const fn looked_up(values: &[i8; 16], bias: i8, row: Layout) -> Layout {
            let mut table = [0; 16];
            let mut code = 0;
            while code < 16 {
                table[code] = values[code].wrapping_add(bias) as u8;
                code += 1;
            }
            Layout {
                bias: bias as u8,
                table: Some(table),
                ..row
            }
        }
        match self {
            Self::Q4_1 => row(1, 64, [4, 0], 0, 1, true),
            Self::Q8_0 => row(1, 32, [8, 0], 128, 1, false),
            Self::F16 | Self::BF16 => row(1, 0, [16, 0], 0, 0, false),
            Self::F32 => row(1, 0, [32, 0], 0, 0, false),
            Self::Q4_0 => row(1, 32, [4, 0], 8, 1, false),
            Self::Q5_0 => row(1, 32, [4, 1], 16, 1, false),
            Self::Q5_1 => row(1, 64, [4, 1], 0, 1, true),
            Self::Q4_K => row(8, 64 + 8 * 32, [4, 0], 0, 1, true),
            Self::Q5_K => row(8, 64 + 8 * 32, [4, 1], 0, 1, true),
            Self::Q6_K => row(8, 32 + 8 * 32, [4, 2], 32, 2, false),
            Self::Q2_K => row(8, 64 + 8 * 32, [2, 0], 0, 2, true),
            Self::Q3_K => row(8, 32 + 8 * 16 + 64, [2, 1], 4, 2, false),
            Self::IQ4_NL => looked_up(&UNEVEN, -128, row(1, 32, [4, 0], 0, 1, false)),
            Self::IQ4_XS => looked_up(&UNEVEN, -128, row(8, 32 + 8 * 16, [4, 0], 0, 1, false)),
            Self::MXFP4 => looked_up(&FLOATS, 12, row(1, 16, [4, 0], 0, 1, false)),
            Self::NVFP4 => looked_up(&FLOATS, 12, row(2, 64, [4, 0], 0, 2, false)),
            Self::TQ1_0 | Self::TQ2_0 => row(8, 32, [2, 0], 1, 1, false),
            Self::Q1_0 => looked_up(&SIGNS, 1, row(4, 32, [1, 0], 0, 1, false)),
            Self::Q2_0 => row(2, 32, [2, 0], 1, 1, false),
        }
    }

    /// Returns true for kinds that are multiplied with int8 activations on request; float kinds always use f32.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Self::F16 | Self::BF16 | Self::F32)
    }
}

fn half(head: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([head[at], head[at + 1]]))
}

/// Block of a panel: its unit's head, the block's index in the unit, and its codes or floats.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    kind: Kind,
    head: &'a [u8],
    at: usize,
    codes: &'a [u8],
}

impl<'a> Block<'a> {
    /// Returns block `b` of a panel.
    pub(super) fn new(kind: Kind, panel: &'a [u8], b: usize) -> Self {
        let layout = kind.layout();
        let unit = &panel[b / layout.unit * layout.unit_bytes()..][..layout.unit_bytes()];
        let (head, codes) = unit.split_at(layout.head);
        let at = b % layout.unit;
        let codes = &codes[at * layout.codes()..][..layout.codes()];
        Self { kind, head, at, codes }
    }

    /// Returns the block's codes, or its floats for a float kind.
    #[must_use]
    pub fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// Returns the scale of row `lane` for sub-block `sub` of its inputs.
    #[must_use]
    pub fn scale(&self, lane: usize, sub: usize) -> f32 {
        let (head, at) = (self.head, self.at);
        let d = || half(head, 2 * lane);
        match self.kind {
            Kind::Q4_K | Kind::Q5_K => d() * f32::from(head[64 + 32 * at + lane]),
            Kind::Q6_K => d() * f32::from(head[32 + 32 * at + 16 * sub + lane] as i8),
            Kind::Q2_K => d() * f32::from(head[64 + 32 * at + 16 * sub + lane] & 15),
            Kind::Q3_K => {
                let low = head[32 + 16 * at + lane] >> (4 * sub) & 15;
                let high = head[160 + at / 2 * 16 + lane] >> (at % 2 * 4 + 2 * sub) & 3;
                d() * (f32::from(low | high << 4) - 32.0)
            }
            Kind::IQ4_XS => d() * f32::from(head[32 + 16 * at + lane] as i8),
            Kind::MXFP4 => half_of_e8m0(head[lane]),
            Kind::NVFP4 => half_of_e4m3(head[32 * at + 16 * sub + lane]),
            _ => d(),
        }
    }

    /// Returns the minimum of row `lane` for sub-block `sub` of its inputs; 0 for a kind without minima.
    #[must_use]
    pub fn min(&self, lane: usize, sub: usize) -> f32 {
        let (head, at) = (self.head, self.at);
        match self.kind {
            Kind::Q4_K | Kind::Q5_K => half(head, 32 + 2 * lane) * f32::from(head[64 + 32 * at + 16 + lane]),
            Kind::Q2_K => half(head, 32 + 2 * lane) * f32::from(head[64 + 32 * at + 16 * sub + lane] >> 4),
            Kind::Q4_1 | Kind::Q5_1 => half(head, 32 + 2 * lane),
            _ => 0.0,
        }
    }

    /// Returns the value of input `i` of row `lane`, minus the bias.
    #[must_use]
    pub fn value(&self, lane: usize, i: usize) -> i32 {
        let layout = self.kind.layout();
        let value = self.biased(&layout, i / 4, 4 * lane + i % 4);
        i32::from(value) - i32::from(layout.bias)
    }

    /// Returns the values, minus the bias, of inputs 4j..4j+4 of each row.
    #[must_use]
    pub fn values(&self, j: usize) -> [i16; 4 * PANEL] {
        let layout = self.kind.layout();
        std::array::from_fn(|byte| i16::from(self.biased(&layout, j, byte)) - i16::from(layout.bias))
    }

    /// Returns the unsigned value, bias included, of the code at byte `byte` of vector `j`.
    #[inline]
    fn biased(&self, layout: &Layout, j: usize, byte: usize) -> u8 {
        let plane = |bits: usize, at: usize| -> u8 {
            // `bits` vectors of the plane hold as much as eight vectors of bytes.
            self.codes[at + 64 * (j % bits) + byte] >> (bits * (j / bits)) & ((1u16 << bits) - 1) as u8
        };
        let [low, high] = layout.bits;
        if low == 8 {
            return plane(8, 0) ^ 0x80;
        }
        let mut code = plane(low, 0);
        if high > 0 {
            code |= plane(high, 64 * low) << low;
        }
        layout.table.map_or(code, |table| table[usize::from(code)])
    }
}
