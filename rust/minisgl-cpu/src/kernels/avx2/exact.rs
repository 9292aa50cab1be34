//! Products with f32 activations: weights as f32, and a few rows at a time.
//!
//! Few rows: weights are turned into f32 in registers and used for all rows at once. At one row two blocks of one
//! stream go at once: the sums of a block wait for no other block, which is what fills the pipeline.
//!
//! Invariants: as `scalar`: a block's sum in the order of its steps, blocks in order.

use super::*;

/// Rows from which on weights are unpacked into the cache.
const FEW: usize = 4;
/// Steps of a group: what one or two vectors hold. A block has 4 groups.
pub(super) const GROUP: usize = 8;

/// The vectors that the weights of a group come out of.
type Stored = [[__m256i; 2]; 2];

/// What steps `8 g .. 8 g + 8` come out of, if it is not read step by step.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn group<const FORM: u8>(block: *const u8, g: usize) -> Stored {
    // SAFETY: the caller's: a whole block, 4 groups.
    unsafe {
        match FORM {
            Q4 => {
                let (v, low) = (vectors(block.add(64 + 64 * g)), _mm256_set1_epi8(15));
                let top = [_mm256_srli_epi16::<4>(v[0]), _mm256_srli_epi16::<4>(v[1])];
                [
                    [_mm256_and_si256(v[0], low), _mm256_and_si256(v[1], low)],
                    [_mm256_and_si256(top[0], low), _mm256_and_si256(top[1], low)],
                ]
            }
            Q8 => {
                let at = block.add(32 + 128 * g);
                [vectors(at), vectors(at.add(64))]
            }
            _ => [[_mm256_setzero_si256(); 2]; 2],
        }
    }
}

/// The weights of step `T` of group `g`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn weights<const FORM: u8, const T: usize>(block: *const u8, g: usize, v: &Stored) -> Pair {
    // SAFETY: the caller's: a whole block.
    unsafe {
        match FORM {
            Q4 => [unsigned_byte::<T>(v[T % 2][0]), unsigned_byte::<T>(v[T % 2][1])],
            Q8 => [signed_byte::<T>(v[T / 4][0]), signed_byte::<T>(v[T / 4][1])],
            F16 => halves(block.add(256 * g + 32 * T)),
            BF16 => {
                let v = vectors(block.add(256 * g + T / 2 * 64));
                [upper_half::<T>(v[0]), upper_half::<T>(v[1])]
            }
            _ => load(block.add(512 * g + 64 * T).cast()),
        }
    }
}

/// A shuffle that moves byte `from` of each lane to byte `to` and clears the others.
const fn mover(from: i8, to: usize) -> [i8; 32] {
    let mut moves = [-1; 32];
    let mut lane = 0;
    while lane < 8 {
        moves[lane * 4 + to] = (lane % 4) as i8 * 4 + from;
        lane += 1;
    }
    moves
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn shuffle(v: __m256i, moves: &'static [i8; 32]) -> __m256i {
    // SAFETY: 32 bytes.
    let moves = unsafe { _mm256_loadu_si256(moves.as_ptr().cast()) };
    _mm256_shuffle_epi8(v, moves)
}

/// Byte `T / 2` of each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unsigned_byte<const T: usize>(v: __m256i) -> __m256 {
    _mm256_cvtepi32_ps(match T / 2 {
        0 => _mm256_and_si256(v, _mm256_set1_epi32(255)),
        1 => shuffle(v, const { &mover(1, 0) }),
        2 => shuffle(v, const { &mover(2, 0) }),
        _ => _mm256_srli_epi32::<24>(v),
    })
}

/// Byte `T % 4` of each lane, with its sign.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn signed_byte<const T: usize>(v: __m256i) -> __m256 {
    let top = match T % 4 {
        0 => shuffle(v, const { &mover(0, 3) }),
        1 => shuffle(v, const { &mover(1, 3) }),
        2 => shuffle(v, const { &mover(2, 3) }),
        _ => v,
    };
    _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
}

/// Number `T % 2` of each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn upper_half<const T: usize>(v: __m256i) -> __m256 {
    _mm256_castsi256_ps(if T.is_multiple_of(2) {
        _mm256_slli_epi32::<16>(v)
    } else {
        _mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32))
    })
}

/// Which input step `t` of group `g` takes.
#[inline]
pub(super) const fn input<const FORM: u8>(g: usize, t: usize) -> usize {
    if FORM == Q4 {
        4 * g + t / 2 + t % 2 * 16
    } else {
        GROUP * g + t
    }
}

/// Runs a body with each step of a group as a constant.
macro_rules! steps {
    (|$t:ident| $body:block) => {
        steps!(@ $t $body 0 1 2 3 4 5 6 7)
    };
    (@ $t:ident $body:block $($step:literal)*) => {
        $({
            const $t: usize = $step;
            $body
        })*
    };
}
pub(super) use steps;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<const FORM: u8>(p: &Product<'_>) {
    // SAFETY: the caller's.
    unsafe {
        if p.rows.len() > FEW {
            return many::matmul::<FORM>(p);
        }
        let row = p.rows.start;
        for panel in p.panels.clone() {
            match p.rows.len() {
                0 => {}
                1 => few::<FORM, 1, 2>(p, panel, row),
                2 => few::<FORM, 2, 1>(p, panel, row),
                3 => few::<FORM, 3, 1>(p, panel, row),
                _ => few::<FORM, 4, 1>(p, panel, row),
            }
        }
    }
}

/// `R` rows from `row` on, `B` blocks at a time.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few<const FORM: u8, const R: usize, const B: usize>(p: &Product<'_>, panel: usize, row: usize) {
    let (weights, blocks) = (p.w.panel(panel).as_ptr(), p.acts.blocks());
    let mut acc = [zero(); R];
    let mut b = 0;
    // SAFETY: the caller's: every block of the panel and of the rows is there.
    unsafe {
        while b + B <= blocks {
            few_blocks::<FORM, R, B>(p, weights.add(b * block_bytes(FORM)), b, row, &mut acc);
            b += B;
        }
        while b < blocks {
            few_blocks::<FORM, R, 1>(p, weights.add(b * block_bytes(FORM)), b, row, &mut acc);
            b += 1;
        }
        for (r, acc) in acc.into_iter().enumerate() {
            put(p, panel, row + r, acc);
        }
    }
}

/// Adds what `B` blocks from `b` on give.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few_blocks<const FORM: u8, const R: usize, const B: usize>(
    p: &Product<'_>,
    at: *const u8,
    b: usize,
    row: usize,
    acc: &mut [Pair; R],
) {
    // SAFETY: the caller's: `B` blocks of weights and activations.
    unsafe {
        let mut s = [[zero(); R]; B];
        for line in 0..(B * block_bytes(FORM)).div_ceil(64) {
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line * 64).cast());
        }
        for g in 0..4 {
            let mut v = [[[_mm256_setzero_si256(); 2]; 2]; B];
            for i in 0..B {
                v[i] = group::<FORM>(at.add(i * block_bytes(FORM)), g);
            }
            steps!(|T| {
                for i in 0..B {
                    let x = p.acts.x.add(cell(&p.acts, b + i, row) * BLOCK).cast_const();
                    let w = weights::<FORM, T>(at.add(i * block_bytes(FORM)), g, &v[i]);
                    for r in 0..R {
                        let x = _mm256_set1_ps(*x.add(r * BLOCK + input::<FORM>(g, T)));
                        s[i][r] = fma(w, x, s[i][r]);
                    }
                }
            });
        }
        for i in 0..B {
            let block = at.add(i * block_bytes(FORM));
            let sums = p.acts.sum.add(cell(&p.acts, b + i, row)).cast_const();
            for r in 0..R {
                acc[r] = match FORM {
                    Q4 => {
                        let acc = fma2(s[i][r], halves(block), acc[r]);
                        fma(halves(block.add(32)), _mm256_set1_ps(*sums.add(r)), acc)
                    }
                    Q8 => fma2(s[i][r], halves(block), acc[r]),
                    _ => [
                        _mm256_add_ps(acc[r][0], s[i][r][0]),
                        _mm256_add_ps(acc[r][1], s[i][r][1]),
                    ],
                };
            }
        }
    }
}
