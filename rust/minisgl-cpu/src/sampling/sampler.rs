//! Sampling of one token from a row of logits.
//!
//! Invariants: greedy is the exact argmax, the lowest id on ties; otherwise the token is a function of logits,
//! parameters, seed and position only; top-k and top-p keep the tokens that a stable sort of the row would.

use minisgl_kernels::{Isa, softmax};

use super::params::Params;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// Shift from the bits of a probability to its bucket; 1.0 has bucket 0x3F80.
const BUCKET_SHIFT: u32 = 16;
const BUCKETS: usize = 0x3F81;
/// Tokens between two stored partial sums.
const STRIDE: usize = 256;

/// Argmax so far. The results of ranges of the vocabulary merge to that of the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// Largest logit so far.
    pub value: f32,
    /// Lowest token id that has it.
    pub id: u32,
}

impl Best {
    /// Argmax of no logits, the neutral element of `merge`.
    pub const NONE: Self = Self {
        value: f32::NEG_INFINITY,
        id: u32::MAX,
    };

    /// Returns the better of both; the order does not matter.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let other_wins = other.value > self.value || (other.value == self.value && other.id < self.id);
        if other_wins { other } else { self }
    }
}

/// Returns the argmax of `logits` for the ids from `first` on, or `first` if all are NaN. Lower ids win ties.
pub fn argmax(logits: &[f32], first: u32) -> Best {
    let mut best = Best::NONE;
    if !logits.is_empty() {
        best.id = first;
    }
    for (index, chunk) in logits.chunks(1024).enumerate() {
        let value = softmax::max(chunk);
        if value > best.value {
            let at = chunk.iter().position(|&x| x == value).unwrap_or(0);
            best = Best {
                value,
                id: first + (index * 1024 + at) as u32,
            };
        }
    }
    best
}

/// Scratch memory of one thread for sampling.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) isa: Isa,
    probabilities: Vec<f32>,
    buckets: Vec<Bucket>,
    members: Vec<Member>,
    sums: Vec<f64>,
    pub(super) raw: Vec<f32>,
}

impl Scratch {
    /// Creates scratch memory for sampling with the vectors of `isa`, which must come from `Isa::detect`.
    pub fn new(isa: Isa) -> Self {
        Self { isa, ..Self::default() }
    }
}

/// Sum and count of the tokens whose probabilities have the same high bits.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    mass: f64,
    count: usize,
}

/// Token whose order is that of a stable descending sort by probability. Bits of a positive float grow with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    inverted: u32,
    id: u32,
}

impl Member {
    fn probability(self) -> f32 {
        f32::from_bits(!self.inverted)
    }
}

/// Samples the token at `position` from a row of `logits`, which stay unchanged.
pub fn sample(params: &Params, position: u64, logits: &[f32], scratch: &mut Scratch) -> u32 {
    if params.is_greedy() {
        return argmax(logits, 0).id;
    }
    scratch.probabilities.resize(logits.len(), 0.0);
    if !softmax::softmax(scratch.isa, logits, params.temperature, &mut scratch.probabilities) {
        return argmax(logits, 0).id; // the softmax is not finite, as at a temperature near 0
    }
    if params.min_p > 0.0 {
        let floor = softmax::max(&scratch.probabilities) * params.min_p;
        let keep = |p: &mut f32| *p = if *p < floor { 0.0 } else { *p };
        scratch.probabilities.iter_mut().for_each(keep);
    }
    if params.top_k > 0 || params.top_p < 1.0 {
        truncate(params.top_k, params.top_p, scratch);
    }
    inverse_cdf(uniform(params.seed, position), scratch)
}

/// Returns a number in [0, 1) from seed and position: the finalizer of splitmix64 (Steele, Lea, Flood 2014), twice.
pub fn uniform(seed: i64, position: u64) -> f64 {
    let bits = finalize(finalize(seed as u64) ^ position.wrapping_mul(GOLDEN));
    (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

fn finalize(x: u64) -> u64 {
    let x = x.wrapping_add(GOLDEN);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Zeroes all but the k most likely tokens, then all but the fewest of these whose probabilities reach p (nucleus
/// sampling, Holtzman et al. 2019). On ties the lower id stays.
///
/// Sorts only the two buckets that contain the thresholds; buckets above stay whole.
fn truncate(top_k: i64, top_p: f32, scratch: &mut Scratch) {
    let nonzero = fill_buckets(scratch);
    let mut total: f64 = scratch.buckets.iter().map(|bucket| bucket.mass).sum();
    let mut last = None;
    let k = usize::try_from(top_k).unwrap_or(0);
    if (1..nonzero).contains(&k) {
        let (index, above) = find_bucket(&scratch.buckets, |before, bucket| before.count + bucket.count >= k);
        sort_bucket(index, scratch);
        total = above.mass;
        for &member in scratch.members.iter().take(k - above.count) {
            total += f64::from(member.probability());
            last = Some(member);
        }
    }
    if top_p < 1.0 {
        let limit = f64::from(top_p) * total;
        let (index, above) = find_bucket(&scratch.buckets, |before, bucket| before.mass + bucket.mass >= limit);
        sort_bucket(index, scratch);
        let (beyond_k, mut mass) = (last, above.mass);
        for (rank, &member) in scratch.members.iter().enumerate() {
            let probability = f64::from(member.probability());
            mass += probability;
            let enough = mass - probability >= limit && above.count + rank > 0;
            if enough || beyond_k.is_some_and(|last| member > last) {
                break;
            }
            last = Some(member);
        }
    }
    if let Some(last) = last {
        keep_up_to(last, &mut scratch.probabilities);
    }
}

/// Sorts probabilities into buckets. Returns how many are above 0.
fn fill_buckets(scratch: &mut Scratch) -> usize {
    scratch.buckets.clear();
    scratch.buckets.resize(BUCKETS, Bucket::default());
    for &p in &scratch.probabilities {
        let bucket = &mut scratch.buckets[bucket_of(p)];
        bucket.mass += f64::from(p);
        bucket.count += usize::from(p > 0.0);
    }
    scratch.buckets.iter().map(|bucket| bucket.count).sum()
}

#[inline(always)]
fn bucket_of(p: f32) -> usize {
    ((p.to_bits() >> BUCKET_SHIFT) as usize).min(BUCKETS - 1)
}

/// Returns the first bucket, from the most likely down, that `is_match` accepts, with the sums of those before.
fn find_bucket(buckets: &[Bucket], is_match: impl Fn(&Bucket, &Bucket) -> bool) -> (usize, Bucket) {
    let (mut before, mut here) = (Bucket::default(), (0, Bucket::default()));
    for (index, bucket) in buckets.iter().enumerate().rev() {
        if bucket.count == 0 {
            continue;
        }
        here = (index, before);
        if is_match(&before, bucket) {
            break;
        }
        before.mass += bucket.mass;
        before.count += bucket.count;
    }
    here
}

/// Writes the tokens of a bucket to `members`, most likely first.
fn sort_bucket(index: usize, scratch: &mut Scratch) {
    scratch.members.clear();
    for (id, &p) in scratch.probabilities.iter().enumerate() {
        if bucket_of(p) == index && p > 0.0 {
            scratch.members.push(Member {
                inverted: !p.to_bits(),
                id: id as u32,
            });
        }
    }
    scratch.members.sort_unstable();
}

fn keep_up_to(last: Member, probabilities: &mut [f32]) {
    let lowest = last.probability();
    let (head, tail) = probabilities.split_at_mut(last.id as usize + 1);
    let keep = |p: &mut f32| *p = if *p < lowest { 0.0 } else { *p };
    head.iter_mut().for_each(keep);
    let keep = |p: &mut f32| *p = if *p <= lowest { 0.0 } else { *p };
    tail.iter_mut().for_each(keep);
}

/// Returns the first id whose cumulative probability exceeds `uniform` times the total, in float64.
fn inverse_cdf(uniform: f64, scratch: &mut Scratch) -> u32 {
    let Scratch {
        probabilities, sums, ..
    } = scratch;
    sums.clear();
    let mut total = 0.0;
    for chunk in probabilities.chunks(STRIDE) {
        sums.push(total);
        if chunk.iter().fold(0, |all, p| all | p.to_bits()) != 0 {
            total = chunk.iter().fold(total, |sum, &p| sum + f64::from(p));
        }
    }
    let target = uniform * total;
    // The chunk in which the sum passes the target is the last one that begins at most there. Rounding may carry the
    // target to the total: then it is the first token that reaches the total.
    let passed = sums.partition_point(|&sum| sum <= target && sum < total);
    let start = passed.saturating_sub(1) * STRIDE;
    let mut sum = sums[start / STRIDE];
    let mut last = 0;
    for (i, &p) in probabilities[start..].iter().enumerate() {
        sum += f64::from(p);
        if p > 0.0 {
            last = (start + i) as u32;
        }
        if sum > target || sum >= total {
            return last;
        }
    }
    last
}
