//! Matmul with f32 activations for few rows (AVX2).
//!
//! Weights are converted to f32 in registers and used for all rows of a tile at once. At two rows, two blocks of one
//! stream are computed at once: the sums of a block depend on no other block, which fills the pipeline. At one row it is
//! four blocks, and most formats' codes are converted where they are in their lanes (`is_in_place`).
//!
//! Invariants: sums follow `scalar`: within a block in the order of its steps, then blocks in order.

use super::*;

/// Rows in a tile.
const TALL: usize = 4;

/// Returns the maximum rows for unpacking weights in registers, once for each tile of rows, instead of in the cache.
const fn few_rows(kind: u8) -> usize {
    if layout(kind).subs == 0 { TALL } else { 2 * TALL }
}

/// Steps in a group: the content of one or two vectors. A block has 4 groups.
pub(super) const GROUP: usize = 8;

/// Vectors that contain the packed weights of a group.
type Stored = [[__m256i; 2]; 2];

/// Returns inputs 4j..4j+4 of each row as unsigned bytes that include the bias.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn biased<const KIND: u8>(codes: *const u8, j: usize) -> [__m256i; 2] {
    let layout = const { layout(KIND) };
    let [low, high] = layout.bits;
    // SAFETY: the caller guarantees a block's codes.
    unsafe {
        if low == 8 {
            let top = _mm256_set1_epi8(-128);
            return both!(vectors(codes.add(64 * j)), |v| _mm256_xor_si256(v, top));
        }
        let mut code = plane(codes, low, j);
        if high > 0 {
            let (upper, by) = (plane(codes.add(64 * low), high, j), _mm_cvtsi32_si128(low as i32));
            code = both!([0, 1], |i| _mm256_or_si256(code[i], _mm256_sll_epi16(upper[i], by)));
        }
        if layout.table.is_none() {
            return code;
        }
        let table = _mm_loadu_si128(const { &table(KIND) }.as_ptr().cast());
        let table = _mm256_broadcastsi128_si256(table);
        both!(code, |code| _mm256_shuffle_epi8(table, code))
    }
}

/// Returns the bits of vector `j` from a plane of `bits` bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plane(at: *const u8, bits: usize, j: usize) -> [__m256i; 2] {
    let by = _mm_cvtsi32_si128((bits * (j / bits)) as i32);
    let mask = _mm256_set1_epi8((1 << bits) - 1);
    // SAFETY: the caller guarantees a whole plane.
    let v = unsafe { vectors(at.add(64 * (j % bits))) };
    both!(v, |v| _mm256_and_si256(_mm256_srl_epi16(v, by), mask))
}

/// Loads the vectors that contain steps `8 g .. 8 g + 8`, unless the format is read step by step. With `SIGNED`, the
/// bias of bytes is already subtracted.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn group<const KIND: u8, const SIGNED: bool>(block: Place, g: usize) -> Stored {
    let layout = const { layout(KIND) };
    // SAFETY: the caller guarantees a whole block, 4 groups.
    unsafe {
        if layout.subs == 0 {
            return [[_mm256_setzero_si256(); 2]; 2];
        }
        if SIGNED && KIND == Q8 {
            let at = block.codes.add(128 * g);
            return [vectors(at), vectors(at.add(64))];
        }
        let (first, second) = if layout.by_halves() {
            (g, 4 + g)
        } else {
            (2 * g, 2 * g + 1)
        };
        let values = [biased::<KIND>(block.codes, first), biased::<KIND>(block.codes, second)];
        let bias = _mm256_set1_epi8(layout.bias as i8);
        if layout.bias == 0 || !SIGNED {
            return values;
        }
        both!(values, |pair| both!(pair, |v| _mm256_sub_epi8(v, bias)))
    }
}

/// Returns the weights of step `T` of group `g` as f32, from the result of `group` with the same `SIGNED`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn weights<const KIND: u8, const T: usize, const SIGNED: bool>(
    block: Place,
    g: usize,
    v: &Stored,
) -> Pair {
    let layout = const { layout(KIND) };
    let numbers = block.codes;
    // SAFETY: the caller guarantees a whole block.
    unsafe {
        match KIND {
            F16 => halves(numbers.add(256 * g + 32 * T)),
            BF16 => both!(vectors(numbers.add(256 * g + T / 2 * 64)), |v| upper_half::<T>(v)),
            F32 => load(numbers.add(512 * g + 64 * T).cast()),
            _ => {
                let (v, at) = if layout.by_halves() {
                    (v[T % 2], T / 2)
                } else {
                    (v[T / 4], T % 4)
                };
                both!(v, |v| {
                    match (layout.bias, SIGNED) {
                        (0, _) => unsigned_byte(v, at),
                        (_, true) => signed_byte(v, at),
                        (bias, false) => byte_less(v, at, bias),
                    }
                })
            }
        }
    }
}

/// Builds a shuffle mask that takes the bytes `from` of each lane; -1 clears the byte.
const fn mover(from: [i8; 4]) -> [i8; 32] {
    let mut moves = [-1; 32];
    let mut i = 0;
    while i < 32 {
        if from[i % 4] >= 0 {
            moves[i] = (i % 16 / 4 * 4) as i8 + from[i % 4];
        }
        i += 1;
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

/// Returns byte `at` of each lane as f32, unsigned.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unsigned_byte(v: __m256i, at: usize) -> __m256 {
    _mm256_cvtepi32_ps(match at {
        0 => _mm256_and_si256(v, _mm256_set1_epi32(255)),
        1 => shuffle(v, const { &mover([1, -1, -1, -1]) }),
        2 => shuffle(v, const { &mover([2, -1, -1, -1]) }),
        _ => _mm256_srli_epi32::<24>(v),
    })
}

/// Returns byte `at` of each lane as f32, signed.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn signed_byte(v: __m256i, at: usize) -> __m256 {
    let top = match at {
        0 => shuffle(v, const { &mover([-1, -1, -1, 0]) }),
        1 => shuffle(v, const { &mover([-1, -1, -1, 1]) }),
        2 => shuffle(v, const { &mover([-1, -1, -1, 2]) }),
        _ => v,
    };
    _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
}

/// Returns byte `at` of each lane minus the bias as f32. The byte becomes the low bits of a float between 2^23 and
/// 2^24, whose high bits are inserted for two bytes at once. Cheaper than a signed byte, but needs more registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn byte_less(v: __m256i, at: usize, bias: u8) -> __m256 {
    const TOP: i32 = (127 + 23) << 23;
    let low = _mm256_blend_epi16::<0xAA>(v, _mm256_set1_epi32(TOP));
    let high = _mm256_blend_epi16::<0x55>(v, _mm256_set1_epi32(TOP >> 24));
    let number = match at {
        0 => shuffle(low, const { &mover([0, -1, -1, 3]) }),
        1 => shuffle(low, const { &mover([1, -1, -1, 3]) }),
        2 => shuffle(high, const { &mover([2, -1, -1, 0]) }),
        _ => shuffle(high, const { &mover([3, -1, -1, 0]) }),
    };
    let less = (1 << 23) + i32::from(bias);
    _mm256_sub_ps(_mm256_castsi256_ps(number), _mm256_set1_ps(less as f32))
}

/// Returns 16-bit element `T % 2` of each lane as the upper half of an f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn upper_half<const T: usize>(v: __m256i) -> __m256 {
    _mm256_castsi256_ps(if T.is_multiple_of(2) {
        _mm256_slli_epi32::<16>(v)
    } else {
        _mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32))
    })
}

/// Returns the index of the input that step `t` of group `g` multiplies.
#[inline]
pub(super) const fn input<const KIND: u8>(g: usize, t: usize) -> usize {
    crate::kernels::scalar::input(const { layout(KIND).by_halves() }, GROUP * g + t)
}

/// Runs a body for each step of a group, with the step as a constant.
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

/// Runs a body for each group of a block, unrolled where a group has shifts of its own, which are then constants.
macro_rules! groups {
    ($layout:expr, |$g:ident| $body:block) => {
        if $layout.subs == 0 || $layout.by_halves() {
            for $g in 0..4 $body
        } else {
            groups!(@ $g $body 0 1 2 3);
        }
    };
    (@ $g:ident $body:block $($group:literal)*) => {
        $({
            let $g: usize = $group;
            $body
        })*
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8>(p: &Product<'_>) {
    let rows = p.rows.len();
    let tiles = rows.div_ceil(TALL);
    // SAFETY: upheld by the caller.
    unsafe {
        if rows > const { few_rows(KIND) } {
            return many::matmul::<KIND, LIKE>(p);
        }
        if rows == 1 && p.w.k() <= MOST && const { is_in_place(KIND) } {
            let mut x = std::mem::MaybeUninit::<[f32; MOST]>::uninit();
            let x = x.as_mut_ptr().cast();
            if shift::<KIND>(&p.acts, p.rows.start, x) {
                return p.panels.clone().for_each(|panel| one_in_place::<KIND>(p, panel, x));
            }
        }
        for panel in p.panels.clone() {
            for tile in 0..tiles {
                let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
                let row = p.rows.start + from;
                match to - from {
                    1 => few::<KIND, 1, 2, false>(p, panel, row),
                    2 => few::<KIND, 2, 2, false>(p, panel, row),
                    3 => few::<KIND, 3, 1, true>(p, panel, row),
                    _ => few::<KIND, TALL, 1, true>(p, panel, row),
                }
            }
        }
    }
}

/// Maximum inputs of a row that is multiplied by codes in place.
const MOST: usize = 16384;

/// Returns true if one row is multiplied by codes in place: each is converted to f32 where it is in its lane, which is
/// the code times a power of two. Activations are divided by that power beforehand.
const fn is_in_place(kind: u8) -> bool {
    let layout = layout(kind);
    layout.subs > 0 && (!layout.by_halves() || layout.bias == 0 && layout.table.is_none())
}

/// Returns the codes in a lane: eight of 4 bits in the order of steps, or four bytes.
const fn fields(kind: u8) -> usize {
    if layout(kind).by_halves() { 8 } else { 4 }
}

/// Returns the power of two that code `at` of a lane is multiplied by (`in_place`).
const fn factor(kind: u8, at: usize) -> f32 {
    let bits = 32 / fields(kind) * at;
    match layout(kind).bias {
        0 if at < fields(kind) - 1 => (1u32 << bits) as f32,
        0 => 1.0,
        _ => (1 << 24) as f32,
    }
}

/// Writes the activations of a row in the order of steps, divided by the codes' factors. Returns false if one is so
/// small that its quotient might be rounded.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn shift<const KIND: u8>(acts: &ActsPtr, row: usize, to: *mut f32) -> bool {
    let by = const {
        let (mut by, mut t) = ([1.0f32; GROUP], 0);
        while t < GROUP {
            by[t] = 1.0 / factor(KIND, t % fields(KIND));
            t += 1;
        }
        by
    };
    let least = _mm256_set1_ps(f32::from_bits((127 - 100) << 23));
    let mut small = zero()[0];
    // SAFETY: the caller guarantees the row, and room for its inputs.
    unsafe {
        let by = _mm256_loadu_ps(by.as_ptr());
        for b in 0..acts.blocks() {
            let from = acts.x.add(cell(acts, b, row) * BLOCK);
            for g in 0..4 {
                let x = if const { layout(KIND).by_halves() } {
                    let (low, high) = (_mm_loadu_ps(from.add(4 * g)), _mm_loadu_ps(from.add(16 + 4 * g)));
                    _mm256_set_m128(_mm_unpackhi_ps(low, high), _mm_unpacklo_ps(low, high))
                } else {
                    _mm256_loadu_ps(from.add(GROUP * g))
                };
                let size = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
                let below = _mm256_cmp_ps::<_CMP_LT_OQ>(size, least);
                small = _mm256_or_ps(small, _mm256_and_ps(below, size));
                _mm256_storeu_ps(to.add(b * BLOCK + GROUP * g), _mm256_mul_ps(x, by));
            }
        }
        _mm256_testz_si256(_mm256_castps_si256(small), _mm256_castps_si256(small)) == 1
    }
}

/// Returns code `at` of each lane times its factor as f32; bytes of kinds with a bias are signed.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn in_place<const KIND: u8>(v: __m256i, at: usize) -> __m256 {
    let bits = const { 32 / fields(KIND) };
    _mm256_cvtepi32_ps(match (const { layout(KIND).bias }, at) {
        (0, _) if at == const { fields(KIND) } - 1 => _mm256_srl_epi32(v, _mm_cvtsi32_si128(32 - bits as i32)),
        (0, _) => _mm256_and_si256(v, _mm256_set1_epi32(((1 << bits) - 1) << (bits * at))),
        (_, 0) => _mm256_slli_epi32::<24>(v),
        (_, 1) => shuffle(v, const { &mover([-1, -1, -1, 1]) }),
        (_, 2) => shuffle(v, const { &mover([-1, -1, -1, 2]) }),
        _ => _mm256_and_si256(v, _mm256_set1_epi32(255 << 24)),
    })
}

/// Multiplies a panel by one row of `shift`, four blocks at a time: fewer sums would wait for each other.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one_in_place<const KIND: u8>(p: &Product<'_>, panel: usize, x: *const f32) {
    let (weights, blocks) = (p.w.panel(panel).as_ptr(), p.acts.blocks());
    let mut acc = [zero()];
    // SAFETY: the caller guarantees every block of the panel and of the row is there.
    unsafe {
        let whole = blocks / 4 * 4;
        for b in (0..whole).step_by(4) {
            blocks_in_place::<KIND, 4>(p, weights, b, x, &mut acc);
        }
        for b in whole..blocks {
            blocks_in_place::<KIND, 1>(p, weights, b, x, &mut acc);
        }
        put(p, panel, p.rows.start, acc[0]);
    }
}

/// Adds the products of the `B` blocks from `b` on to `acc`; `panel` is the panel's first byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn blocks_in_place<const KIND: u8, const B: usize>(
    p: &Product<'_>,
    panel: *const u8,
    b: usize,
    x: *const f32,
    acc: &mut [Pair; 1],
) {
    let (layout, fields) = const { (layout(KIND), fields(KIND)) };
    let mut bytes = [std::mem::MaybeUninit::<[__m256i; 16]>::uninit(); B];
    // SAFETY: the caller guarantees `B` blocks of weights and activations.
    unsafe {
        let mut blocks = [Place::of::<KIND>(panel, b); B];
        let mut codes = [blocks[0].codes; B];
        for i in 0..B {
            blocks[i] = Place::of::<KIND>(panel, b + i);
            codes[i] = blocks[i].codes;
            if KIND != Q8 && fields == 4 {
                let to: *mut __m256i = bytes[i].as_mut_ptr().cast();
                for j in 0..8 {
                    let v = biased::<KIND>(codes[i], j);
                    for h in 0..2 {
                        _mm256_store_si256(
                            to.add(2 * j + h),
                            _mm256_sub_epi8(v[h], _mm256_set1_epi8(layout.bias as i8)),
                        );
                    }
                }
                codes[i] = to.cast();
            }
        }
        let count = BLOCK / fields / layout.subs;
        let lines = const { (B * block_bytes(KIND)).div_ceil(8 * 64) } * (8 / (layout.subs * count));
        let mut s = [[[zero()]; B]; 2];
        for sub in 0..layout.subs {
            let mut sums = [[zero()]; B];
            for g in sub * count..(sub + 1) * count {
                for line in g * lines..(g + 1) * lines {
                    _mm_prefetch::<_MM_HINT_T0>(blocks[0].codes.wrapping_add(AHEAD + line * 64).cast());
                }
                steps!(|T| {
                    if T < fields {
                        for i in 0..B {
                            let w = both!(vectors(codes[i].add(64 * g)), |v| in_place::<KIND>(v, T));
                            let x = _mm256_set1_ps(*x.add((b + i) * BLOCK + fields * g + T));
                            sums[i][0] = fma(w, x, sums[i][0]);
                        }
                    }
                });
            }
            s[sub] = sums;
        }
        add_sums::<KIND, 1, B>(p, &blocks, b, p.rows.start, &s, acc);
    }
}

/// Multiplies a panel by the `R` rows from `row` on, `B` blocks at a time.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few<const KIND: u8, const R: usize, const B: usize, const SIGNED: bool>(
    p: &Product<'_>,
    panel: usize,
    row: usize,
) {
    let (weights, blocks) = (p.w.panel(panel).as_ptr(), p.acts.blocks());
    let mut acc = [zero(); R];
    let mut b = 0;
    // SAFETY: the caller guarantees every block of the panel and of the rows is there.
    unsafe {
        while b + B <= blocks {
            few_blocks::<KIND, R, B, SIGNED>(p, weights, b, row, &mut acc);
            b += B;
        }
        while b < blocks {
            few_blocks::<KIND, R, 1, SIGNED>(p, weights, b, row, &mut acc);
            b += 1;
        }
        for (r, acc) in acc.into_iter().enumerate() {
            put(p, panel, row + r, acc);
        }
    }
}

/// Adds the products of the `B` blocks from `b` on to `acc`; `panel` is the panel's first byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few_blocks<const KIND: u8, const R: usize, const B: usize, const SIGNED: bool>(
    p: &Product<'_>,
    panel: *const u8,
    b: usize,
    row: usize,
    acc: &mut [Pair; R],
) {
    let layout = const { layout(KIND) };
    let shares = layout.subs.max(1);
    // SAFETY: the caller guarantees `B` blocks of weights and activations.
    unsafe {
        let mut blocks = [Place::of::<KIND>(panel, b); B];
        for i in 1..B {
            blocks[i] = Place::of::<KIND>(panel, b + i);
        }
        let lines = const { (B * block_bytes(KIND)).div_ceil(4 * 64) };
        let mut s = [[[zero(); R]; B]; 2];
        groups!(layout, |g| {
            // Prefetches a few lines at a time: more than the processor can track would stall the computation.
            for line in g * lines..(g + 1) * lines {
                _mm_prefetch::<_MM_HINT_T0>(blocks[0].codes.wrapping_add(AHEAD + line * 64).cast());
            }
            let sub = g / 2 * (shares - 1);
            let mut v = [[[_mm256_setzero_si256(); 2]; 2]; B];
            for i in 0..B {
                v[i] = group::<KIND, SIGNED>(blocks[i], g);
            }
            steps!(|T| {
                for i in 0..B {
                    let x = p.acts.x.add(cell(&p.acts, b + i, row) * BLOCK).cast_const();
                    let w = weights::<KIND, T, SIGNED>(blocks[i], g, &v[i]);
                    for r in 0..R {
                        let x = _mm256_set1_ps(*x.add(r * BLOCK + input::<KIND>(g, T)));
                        s[sub][i][r] = fma(w, x, s[sub][i][r]);
                    }
                }
            });
        });
        add_sums::<KIND, R, B>(p, &blocks, b, row, &s, acc);
    }
}

/// Adds the scaled sums of `B` blocks and their minima to `acc`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_sums<const KIND: u8, const R: usize, const B: usize>(
    p: &Product<'_>,
    blocks: &[Place; B],
    b: usize,
    row: usize,
    s: &[[[Pair; R]; B]; 2],
    acc: &mut [Pair; R],
) {
    let layout = const { layout(KIND) };
    // SAFETY: the caller guarantees `B` blocks of weights and activations.
    unsafe {
        for i in 0..B {
            if layout.subs == 0 {
                for r in 0..R {
                    acc[r] = sum(acc[r], s[0][i][r]);
                }
            }
            for sub in 0..layout.subs {
                let d = scale::<KIND>(blocks[i], sub);
                for r in 0..R {
                    acc[r] = fma2(s[sub][i][r], d, acc[r]);
                }
                if layout.min {
                    let (m, sums) = (
                        min::<KIND>(blocks[i], sub),
                        input_sums(&p.acts, layout.subs, b + i, sub, row),
                    );
                    for r in 0..R {
                        acc[r] = fma(m, _mm256_set1_ps(*sums.add(r)), acc[r]);
                    }
                }
            }
        }
    }
}
