//! Tensor bytes for tests, also for those of `minisgl-cpu`, which includes this file.

use minisgl_kernels::Kind;

/// Gives the scales of a block of random bits a sensible size.
pub(crate) fn sensible(kind: Kind, block: &mut [u8]) {
    let last = block.len() - 1;
    let scales: &[usize] = match kind {
        Kind::F32 => {
            block[3] = block[3] & 0x80 | 0x3c;
            return;
        }
        Kind::BF16 => {
            block[1] = block[1] & 0x80 | 0x3c;
            return;
        }
        Kind::MXFP4 => {
            block[0] = block[0] & 7 | 0x78;
            return;
        }
        Kind::NVFP4 => &[],
        Kind::Q4_1 | Kind::Q5_1 | Kind::Q4_K | Kind::Q5_K => &[1, 3],
        Kind::Q2_K => &[81, 83],
        Kind::Q3_K | Kind::TQ1_0 | Kind::TQ2_0 | Kind::Q6_K => &[last],
        _ => &[1],
    };
    scales.iter().for_each(|&at| block[at] = block[at] & 0x83 | 0x24);
}

/// Returns `rows` rows of `k` elements of a kind: random bits with scales of a sensible size.
pub(crate) fn stored(kind: Kind, rows: usize, k: usize, mut seed: u32) -> Vec<u8> {
    let bytes = kind.bytes_of(rows * k).unwrap();
    let mut data: Vec<u8> = (0..bytes)
        .map(|_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        })
        .collect();
    data.chunks_exact_mut(kind.block_bytes())
        .for_each(|block| sensible(kind, block));
    data
}
