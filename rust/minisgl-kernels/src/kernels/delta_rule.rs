//! Gated delta rule (Gated DeltaNet, arXiv 2412.06464): updates of a head's state S [keys, values], outputs of tokens.
//!
//! S decays, then its value for the key is moved towards the token's value, then the query reads:
//! S = g S; d = b (v - k S); S = S + k d; o = q S.
//!
//! Invariants: token by token, key by key, one fused multiply-add each; columns of S are independent. So neither prompt
//! chunking, nor the threads, nor the instruction set change a bit.

use super::Isa;
use super::plain::softplus;
use crate::lanes::{LANES, Lanes, OnLanes, on_lanes};

/// Vectors in a block.
const VECTORS: usize = 2;
/// Columns of a head's state matrix in a block: with all its keys a block stays in the L1 cache.
pub const BLOCK: usize = VECTORS * LANES;

/// Consecutive tokens through one block of a head's state matrix.
pub struct Recurrence {
    /// State of the block: [keys, `BLOCK`].
    pub state: *mut f32,
    /// Elements in a key.
    pub keys: usize,
    /// Valid columns of the block; the padding columns after them are 0.
    pub columns: usize,
    /// Number of tokens.
    pub count: usize,
    /// Query of the first token.
    pub query: *const f32,
    /// Key of the first token.
    pub key: *const f32,
    /// Value of the first token.
    pub value: *const f32,
    /// Decay g of the first token, by which the state is multiplied.
    pub decay: *const f32,
    /// Learning rate b of the first token.
    pub rate: *const f32,
    /// Elements from one token's inputs to the next.
    pub stride: usize,
    /// Output of the first token for these columns, and the elements from one token's output to the next.
    pub out: (*mut f32, usize),
}

type Block<V> = [V; VECTORS];

/// Pending work of a token, done in the next token's pass: its key, its query and its update d.
struct Pending<V> {
    key: *const f32,
    query: *const f32,
    learnt: Block<V>,
}

impl Recurrence {
    /// Runs the recurrence in the vectors of `isa`, which must be supported by this processor.
    ///
    /// # Safety
    /// The pointers have these sizes, and nothing else uses state and output.
    pub unsafe fn run(self, isa: Isa) {
        // SAFETY: upheld by the caller.
        unsafe { on_lanes(isa, self) };
    }
}

impl OnLanes for Recurrence {
    /// Makes one pass over the block for each token: applies the previous token's update and reads its output, then
    /// decays the state and multiplies it by the key.
    ///
    /// # Safety
    /// The pointers have these sizes, and nothing else uses state and output.
    #[inline(always)]
    unsafe fn on<V: Lanes>(self) {
        // SAFETY: upheld by the caller.
        unsafe {
            let mut left: Option<Pending<V>> = None;
            for token in 0..self.count {
                let at = token * self.stride;
                let (key, decay) = (self.key.add(at), V::splat(*self.decay.add(at)));
                let seen = match &left {
                    None => self.pass::<V, false, true>(None, (key, decay)).1,
                    Some(left) => {
                        let (read, seen) = self.pass::<V, true, true>(Some(left), (key, decay));
                        self.store_output(token - 1, read);
                        seen
                    }
                };
                let (mut learnt, rate): (Block<V>, V) = (self.values(token), V::splat(*self.rate.add(at)));
                for (value, seen) in learnt.iter_mut().zip(seen) {
                    *value = value.sub(seen).mul(rate);
                }
                let query = self.query.add(at);
                left = Some(Pending { key, query, learnt });
            }
            if let Some(left) = &left {
                let (read, _) = self.pass::<V, true, false>(Some(left), (left.key, V::splat(1.0)));
                self.store_output(self.count - 1, read);
            }
        }
    }
}

impl Recurrence {
    /// Returns the previous token's output, after its update, and the block's value for `key`, after decay.
    ///
    /// # Safety
    /// The conditions of `on` hold; with `LEARN` there is a previous token.
    #[inline(always)]
    unsafe fn pass<V: Lanes, const LEARN: bool, const ASK: bool>(
        &self,
        left: Option<&Pending<V>>,
        (key, decay): (*const f32, V),
    ) -> (Block<V>, Block<V>) {
        // SAFETY: upheld by the caller.
        unsafe {
            let zero = V::splat(0.0);
            let (mut read, mut seen) = ([zero; VECTORS], [zero; VECTORS]);
            let (before, query, learnt) = match left {
                Some(left) => (left.key, left.query, left.learnt),
                None => (key, key, [zero; VECTORS]),
            };
            for i in 0..self.keys {
                for part in 0..VECTORS {
                    let at = self.state.add(i * BLOCK + part * LANES);
                    let mut s = V::load(at);
                    if LEARN {
                        s = V::splat(*before.add(i)).fma(learnt[part], s);
                        read[part] = V::splat(*query.add(i)).fma(s, read[part]);
                    }
                    if ASK {
                        s = s.mul(decay);
                        seen[part] = V::splat(*key.add(i)).fma(s, seen[part]);
                    }
                    s.store(at);
                }
            }
            (read, seen)
        }
    }

    /// Loads a token's value in these columns, under the conditions of `on`.
    #[inline(always)]
    unsafe fn values<V: Lanes>(&self, token: usize) -> Block<V> {
        // SAFETY: upheld by the caller.
        unsafe {
            let mut some = [0.0; BLOCK];
            let from = self.value.add(token * self.stride);
            some.as_mut_ptr().copy_from_nonoverlapping(from, self.columns);
            let mut value = [V::splat(0.0); VECTORS];
            for (part, value) in value.iter_mut().enumerate() {
                *value = V::load(some.as_ptr().add(part * LANES));
            }
            value
        }
    }

    /// Stores a token's output, under the conditions of `on`.
    #[inline(always)]
    unsafe fn store_output<V: Lanes>(&self, token: usize, read: Block<V>) {
        let (first, stride) = self.out;
        // SAFETY: upheld by the caller.
        unsafe {
            let mut some = [0.0; BLOCK];
            for (part, read) in read.into_iter().enumerate() {
                read.store(some.as_mut_ptr().add(part * LANES));
            }
            first
                .add(token * stride)
                .copy_from_nonoverlapping(some.as_ptr(), self.columns);
        }
    }
}

/// Returns the decay of a head's state: exp(rate softplus(step)), `rate` being negative.
#[inline]
pub fn decay(rate: f32, step: f32) -> f32 {
    (rate * softplus(step)).exp()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::undocumented_unsafe_blocks)] // every pointer is into a vector of the length that the case needs

    use super::*;

    /// Random tokens of a head: query, key, value, decay and rate of each adjacent.
    struct Case {
        keys: usize,
        values: usize,
        rows: Vec<Vec<f32>>,
    }

    impl Case {
        fn new(keys: usize, values: usize, tokens: usize) -> Self {
            let mut seed = (keys * values * tokens) as u32;
            let mut next = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            let mut row = || {
                let mut row: Vec<f32> = (0..2 * keys + values).map(|_| next() / (keys as f32).sqrt()).collect();
                row.extend([0.95 + 0.05 * next(), 0.5 + 0.5 * next()]);
                row
            };
            let rows = (0..tokens).map(|_| row()).collect();
            Self { keys, values, rows }
        }

        fn blocks(&self) -> usize {
            self.values.div_ceil(BLOCK)
        }

        /// Returns state and output after running the tokens in runs that end at `ends`.
        fn run(&self, isa: Isa, ends: &[usize]) -> (Vec<f32>, Vec<f32>) {
            let (keys, stride) = (self.keys, self.rows[0].len());
            let flat: Vec<f32> = self.rows.concat();
            let mut state = vec![0.0; self.blocks() * keys * BLOCK];
            let mut out = vec![f32::NAN; self.rows.len() * self.values];
            let mut start = 0;
            for end in ends {
                for block in 0..self.blocks() {
                    let first = flat[start * stride..].as_ptr();
                    let job = Recurrence {
                        state: state[block * keys * BLOCK..].as_mut_ptr(),
                        keys,
                        columns: BLOCK.min(self.values - block * BLOCK),
                        count: end - start,
                        query: first,
                        key: first.wrapping_add(keys),
                        value: first.wrapping_add(2 * keys + block * BLOCK),
                        decay: first.wrapping_add(2 * keys + self.values),
                        rate: first.wrapping_add(2 * keys + self.values + 1),
                        stride,
                        out: (out[start * self.values + block * BLOCK..].as_mut_ptr(), self.values),
                    };
                    unsafe { job.run(isa) };
                }
                start = *end;
            }
            (state, out)
        }

        /// Returns the reference output, by the paper's formula in f64.
        fn wanted(&self) -> Vec<f64> {
            let (keys, values) = (self.keys, self.values);
            let (mut s, mut out) = (vec![vec![0.0_f64; values]; keys], Vec::new());
            for row in &self.rows {
                let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
                let (q, k, v) = (&row[..keys], &row[keys..2 * keys], &row[2 * keys..2 * keys + values]);
                let (decay, rate) = (row[2 * keys + values], row[2 * keys + values + 1]);
                s.iter_mut().flatten().for_each(|x| *x *= decay);
                let dot = |s: &[Vec<f64>], by: &[f64], j: usize| (0..keys).map(|i| s[i][j] * by[i]).sum::<f64>();
                let learnt: Vec<f64> = (0..values).map(|j| rate * (v[j] - dot(&s, k, j))).collect();
                for (row, k) in s.iter_mut().zip(k) {
                    row.iter_mut().zip(&learnt).for_each(|(x, learnt)| *x += k * learnt);
                }
                out.extend((0..values).map(|j| dot(&s, q, j)));
            }
            out
        }
    }

    #[test]
    fn the_delta_rule_has_the_same_bits_for_every_split_and_isa() {
        for (keys, values, tokens) in [(16, 32, 40), (24, 20, 7), (128, 128, 33), (5, 70, 9)] {
            let case = Case::new(keys, values, tokens);
            let (state, out) = case.run(Isa::Scalar, &[tokens]);
            for (found, wanted) in out.iter().zip(case.wanted()) {
                assert!(
                    (f64::from(*found) - wanted).abs() < 1e-5,
                    "{keys} {values}: {found} {wanted}"
                );
            }
            for isa in Isa::here() {
                for ends in [&[tokens][..], &[1, 2, tokens], &[tokens - 1, tokens]] {
                    assert!(case.run(isa, ends) == (state.clone(), out.clone()), "{isa:?} {ends:?}");
                }
            }
        }
    }

    #[test]
    fn decay_matches_torch() {
        // torch's values of exp(-exp(a) * softplus(x)), by a and x
        for (a, x, wanted) in [
            (0.0_f32, 0.0, 0.5),
            (0.0, 1.0, 0.268_941_42),
            (-1.0, -3.0, 0.982_284_5),
            (-4.0, 25.0, 0.632_616_46),
            (1.0, -90.0, 1.0),
        ] {
            let found = decay(-a.exp(), x);
            assert!((found - wanted).abs() < 1e-6, "{a} {x}: {found} {wanted}");
        }
        assert!(decay(-1.0, f32::NAN).is_nan());
    }
}
