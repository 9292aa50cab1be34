//! What the threads of a forward share, and one thread's view of it.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use minisgl_kernels::attention::{Attention, Plan, Rows, Scratch};
use minisgl_kernels::kv::KvPool;
use minisgl_kernels::{Isa, Kernels, Mode};

use crate::error::{Error, Result};
use crate::model::adapter::Run;
use crate::model::buffers::{Buffers, COUNTERS, Own, TOKENS};
use crate::model::config::ModelConfig;
use crate::model::held::Norm;
use crate::model::operation::Rotation;
use crate::model::weights::Weights;
use crate::states::Passing;
use crate::threads::{Barrier, Counter};

/// Tokens of a piece of work that goes token by token.
pub(super) const FEW: usize = 4;
/// Tokens of a piece where each has a number in a cache line that others write to as well: two threads that take turns in
/// one line wait for each other at each number.
pub(super) const LINE: usize = 16;

/// Parts that time is told by.
pub const PARTS: [&str; 8] = [
    "prepare",
    "qkv",
    "rotate, store",
    "attention",
    "out",
    "gate, up",
    "down",
    "embed, check",
];
/// Seconds by part, of the calling thread.
pub type Times = [f64; PARTS.len()];

/// The tokens of a step.
pub struct Tokens<'a> {
    /// Ids, all of them known.
    pub ids: &'a [u32],
    /// Positions in their sequences.
    pub positions: &'a [u32],
    /// Where each one's keys and values go.
    pub slots: &'a [u32],
    /// How many of them, from the first on, are rows that decode.
    pub decode: usize,
    /// Those that have an adapter, in order; a run is of rows that decode or of others.
    pub runs: &'a [Run<'a>],
    /// Their kinds; those that are missing are of the first one.
    pub types: &'a [u32],
    /// States of their rows, if layers keep some.
    pub states: Option<Passing<'a>>,
}

/// Attention of each kind of layers: those that have the same heads.
pub(super) struct Attentions {
    kinds: Vec<(Attention, Plan)>,
    /// By layer.
    kind_of: Vec<usize>,
}

impl Attentions {
    /// Of a model, for steps over `kv`.
    pub fn new(config: &ModelConfig, isa: Isa, threads: usize, kv: &KvPool) -> Result<Self> {
        let sizes: Vec<(usize, usize)> = config.heads.iter().map(|one| (one.kv_heads, one.head_dim)).collect();
        let nowhere = !config.attends.contains(&true);
        let mut known: Vec<(usize, usize)> = Vec::new();
        let mut kinds = Vec::new();
        for (first, size) in sizes.iter().enumerate() {
            // where no layer attends, a plan still goes over the rows
            if known.contains(size) || !(config.attends[first] || nowhere) {
                continue;
            }
            let ((kv_heads, head_dim), heads) = (*size, config.num_heads);
            let (scale, cap) = (config.attention_scale, config.attention_cap);
            let attention = Attention::new(isa, heads, kv_heads, head_dim, scale, cap)?;
            let attention = match &config.latent {
                Some(latent) => attention.with_values_of_keys(latent.rank),
                None => attention,
            };
            // layers of other kinds ask for nothing that these do not
            let windows: Vec<_> = (0..sizes.len())
                .map(|layer| config.windows[if sizes[layer] == *size { layer } else { first }])
                .collect();
            let plan = attention.plan(kv, threads, &windows);
            let plan = if config.chunked { plan.in_chunks() } else { plan };
            let plan = if config.both_ways { plan.both_ways() } else { plan };
            kinds.push((attention, plan));
            known.push(*size);
        }
        let place = |size: &(usize, usize)| known.iter().position(|one| one == size).unwrap_or(0);
        Ok(Self {
            kind_of: sizes.iter().map(place).collect(),
            kinds,
        })
    }

    /// Of a layer.
    pub fn of(&self, layer: usize) -> (&Attention, &Plan) {
        let (attention, plan) = &self.kinds[self.kind_of[layer]];
        (attention, plan)
    }

    /// For a step.
    pub fn build(&mut self, rows: &Rows<'_>) -> Result<()> {
        self.kinds.iter_mut().try_for_each(|(_, plan)| plan.build(rows))
    }

    /// A thread's room for each of them, one after the other.
    pub fn scratch(&self) -> Result<Scratch> {
        let largest = self.kinds.iter().max_by_key(|(attention, _)| attention.head_dim());
        largest.map_or_else(
            || Err(Error::setting("a model without layers")),
            |(one, _)| Ok(one.scratch()),
        )
    }
}

/// What all threads share in a forward.
pub(super) struct Forward<'a> {
    pub weights: &'a Weights,
    /// Hidden numbers of a token.
    pub hidden: usize,
    pub kernels: Kernels,
    pub mode: Mode,
    pub kv: &'a KvPool,
    pub rows: Rows<'a>,
    pub attention: &'a Attentions,
    pub buffers: &'a Buffers,
    pub tokens: Tokens<'a>,
    pub not_finite: Mutex<Vec<usize>>, // tokens
    pub threads: usize,
}

/// One thread's view.
pub(super) struct Worker<'a, 'f> {
    pub shared: &'a Forward<'f>,
    pub barrier: &'a Barrier,
    pub thread: usize,
    /// The next counter of the operation that runs.
    pub next: usize,
    /// The first counter that is not its own.
    pub end: usize,
    pub own: &'a mut Own,
    pub scratch: &'a mut Scratch,
    pub clock: Option<Instant>,
    pub times: &'a mut Times,
}

impl Forward<'_> {
    pub(super) fn count(&self) -> usize {
        self.tokens.ids.len()
    }

    /// Tokens of a piece that stores keys, of which those of a prompt lie in turns.
    pub(super) fn stored_together(&self) -> usize {
        if self.tokens.decode < self.count() { LINE } else { FEW }
    }

    /// Pieces of the tokens that a product goes over, those that decode apart from those of prompts.
    pub(super) fn blocks(&self) -> usize {
        let decode = self.tokens.decode;
        decode.div_ceil(TOKENS) + (self.count() - decode).div_ceil(TOKENS)
    }

    /// The tokens of a piece, and what multiplies them.
    pub(super) fn block(&self, block: usize) -> (Range<usize>, Kernels) {
        let decode = self.tokens.decode;
        let decoding = decode.div_ceil(TOKENS);
        if block < decoding {
            let end = ((block + 1) * TOKENS).min(decode);
            return (block * TOKENS..end, self.kernels.decoding());
        }
        let start = decode + (block - decoding) * TOKENS;
        (start..(start + TOKENS).min(self.count()), self.kernels)
    }

    /// What multiplies a token.
    pub(super) fn kernels_of(&self, token: usize) -> Kernels {
        if token < self.tokens.decode {
            self.kernels.decoding()
        } else {
            self.kernels
        }
    }

    /// A token's hidden numbers as they are, or normalised into `room`.
    ///
    /// # Safety
    /// `room` is the caller's and has room; nobody writes to the token's numbers meanwhile.
    #[allow(unsafe_code)]
    pub(super) unsafe fn normed(&self, norm: Option<&Norm>, token: usize, room: *mut f32) -> *const f32 {
        let x = self.buffers.x.at(token, 0);
        match norm {
            None => x,
            Some(norm) => {
                // SAFETY: the caller's.
                unsafe { norm.apply(&self.kernels, x, (0, self.hidden), room) };
                room
            }
        }
    }

    /// Cosines and sines of a token's position.
    pub(super) fn angles(&self, by: Rotation, token: usize) -> (*mut f32, *mut f32) {
        let angles = &self.buffers.angles;
        (angles.at(token, by.at), angles.at(token, by.at + by.half))
    }
}

impl Forward<'_> {
    /// Deal out the rows of the step, each in as many parts: `work` gets the row, its tokens and the part. One piece has all
    /// tokens of a row for its part of a state.
    pub(super) fn each_row(&self, counter: &Counter, parts: usize, mut work: impl FnMut(usize, Range<usize>, usize)) {
        while let Some(piece) = counter.take(self.rows.slots.len() * parts) {
            let (row, part) = (piece / parts, piece % parts);
            let [from, to] = [row, row + 1].map(|at| self.rows.qo_indptr[at] as usize);
            work(row, from..to, part);
        }
    }
}

impl<'a> Worker<'a, '_> {
    /// A counter of its own for each time that an operation deals out work: all threads ask in the same order.
    pub(super) fn counter(&mut self) -> &'a Counter {
        self.next += 1;
        assert!(
            self.next <= self.end,
            "an operation deals out work more than {COUNTERS} times"
        );
        &self.shared.buffers.counters[self.next - 1]
    }

    pub(super) fn lap(&mut self, part: usize) {
        if let Some(clock) = &mut self.clock {
            let now = Instant::now();
            self.times[part] += (now - *clock).as_secs_f64();
            *clock = now;
        }
    }
}

/// Call `work` with each of `0..total` that falls to this thread, `size` of them at a time.
pub(super) fn each(counter: &Counter, total: usize, size: usize, mut work: impl FnMut(usize)) {
    while let Some(piece) = counter.take(total.div_ceil(size)) {
        (piece * size..((piece + 1) * size).min(total)).for_each(&mut work);
    }
}
