//! AMX tile registers: the permission to use them, their shapes, and the instructions (inline assembly in stable Rust).
//!
//! Invariants: no instruction runs without the system's permission; the code that configured tiles releases them.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::cell::RefCell;
use std::sync::OnceLock;

use crate::memory::Zeroed;

/// Rows in a tile; the next constant is the bytes in a row.
pub(super) const ROWS: usize = 16;
pub(super) const ROW_BYTES: usize = 64;

/// Panels whose accumulators are kept at once.
pub(super) const GROUP: usize = 8;
/// Bytes of expanded weights at once: they stay in the L2 cache.
pub(super) const EXPANDED: usize = 768 << 10;
/// Bytes of activations that many panels use one after the other: they stay in the L1 cache.
pub(super) const NEAR: usize = 24 << 10;

thread_local! {
    /// Buffer of this thread: sums of a group, results still to be added, and weights as tiles.
    pub(super) static SCRATCH: RefCell<Zeroed> = RefCell::new(Zeroed::new(0));
}

/// Returns the missing requirement for AMX tiles, or `None`. Requests the system's permission once per process.
pub(crate) fn missing() -> Option<&'static str> {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    if !is_present() {
        return Some("amx-tile with amx-int8 and amx-bf16");
    }
    (!*PERMITTED.get_or_init(request_permission)).then_some("permission of the system to use amx tiles")
}

/// Returns true if the CPU has tiles with byte and bf16 products.
fn is_present() -> bool {
    if __cpuid(0).eax < 7 {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    let (bf16, tile, int8) = (features >> 22 & 1, features >> 24 & 1, features >> 25 & 1);
    bf16 & tile & int8 == 1
}

/// Requests the system's permission for the large tile state, which is granted on demand only. Returns true if granted.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let answer: i64;
    // SAFETY: the call takes two integers and changes only this process's permission; the system overwrites rcx, r11.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// Shapes of all eight tiles, in the layout that the `ldtilecfg` instruction reads.
#[repr(C, align(64))]
pub(super) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Creates a configuration from (rows, bytes of a row) of each tile.
    pub(super) fn new(shapes: [(usize, usize); 8]) -> Self {
        let mut config = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        for (i, (rows, bytes)) in shapes.into_iter().enumerate() {
            debug_assert!((1..=ROWS).contains(&rows) && (4..=ROW_BYTES).contains(&bytes));
            config.rows[i] = rows as u8;
            config.row_bytes[i] = bytes as u16;
        }
        config
    }
}

/// Guard of this thread's configured tiles; dropping it releases them.
pub(super) struct Tiles(());

impl Tiles {
    /// Configures this thread's tiles with these shapes.
    ///
    /// # Safety
    /// `missing()` is `None`, and the thread has no other `Tiles`.
    pub(super) unsafe fn configure(config: &Config) -> Self {
        let tiles = Self(());
        // SAFETY: upheld by the caller.
        unsafe { tiles.reconfigure(config) };
        tiles
    }

    /// Reconfigures the tiles with other shapes; their contents are lost.
    ///
    /// # Safety
    /// The shapes are valid.
    pub(super) unsafe fn reconfigure(&self, config: &Config) {
        // SAFETY: the thread may use tiles, and the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly)) }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: tiles were configured, so the instruction exists.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// Loads a tile from memory, rows `stride` bytes apart.
macro_rules! load {
    ($tile:literal, $from:expr, $stride:expr) => {
        std::arch::asm!(concat!("tileloadd tmm", $tile, ", [{from} + {stride}]"),
            from = in(reg) $from, stride = in(reg) $stride, options(nostack, readonly))
    };
}

/// Stores a tile to memory, rows `stride` bytes apart.
macro_rules! store {
    ($tile:literal, $to:expr, $stride:expr) => {
        std::arch::asm!(concat!("tilestored [{to} + {stride}], tmm", $tile),
            to = in(reg) $to, stride = in(reg) $stride, options(nostack))
    };
}

/// Clears a tile.
macro_rules! zero {
    ($tile:literal) => {
        std::arch::asm!(concat!("tilezero tmm", $tile), options(nostack, nomem))
    };
}

/// Multiplies tiles, `c += a b`, of bytes (`$bytes`) or of bf16.
macro_rules! multiply {
    ($c:literal, $a:literal, $b:literal, $bytes:expr) => {
        if $bytes {
            std::arch::asm!(
                concat!("tdpbssd tmm", $c, ", tmm", $a, ", tmm", $b),
                options(nostack, nomem)
            )
        } else {
            std::arch::asm!(
                concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b),
                options(nostack, nomem)
            )
        }
    };
}

pub(super) use {load, multiply, store, zero};
