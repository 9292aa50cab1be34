//! Data that the threads of a forward pass share, and one thread's view of it.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use minisgl_kernels::attention::{Attention, Plan, Rows, Scratch};
use minisgl_kernels::kv::KvPool;
use minisgl_kernels::{Isa, Kernels, Mode};

use crate::error::{Error, Result};
use crate::model::adapter::Run;
use crate::model::buffers::{Buffers, COUNTERS, TOKENS, ThreadBuffers};
use crate::model::config::ModelConfig;
use crate::model::held::Norm;
use crate::model::operation::Rotation;
use crate::model::weights::Weights;
use crate::states::StepStates;
use crate::threads::{Barrier, Counter};

/// Tokens per work item, where work goes token by token.
pub(super) const ITEM_TOKENS: usize = 4;
/// Tokens per work item, where each token writes one element of a shared cache line. It avoids false sharing.
pub(super) const LINE_TOKENS: usize = 16;

/// Names of the parts that time is measured by.
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
/// Seconds per part (`PARTS`), measured on thread 0.
pub type Times = [f64; PARTS.len()];

/// Tokens of a step, input of the forward pass.
pub struct Tokens<'a> {
    /// Token ids of the step.
    pub ids: &'a [u32],
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// KV slot of each token: page * page_size + offset.
    pub slots: &'a [u32],
    /// Number of decode tokens, which come first.
    pub decode: usize,
    /// Runs of tokens with a LoRA adapter, in order; none mixes decode and prefill tokens.
    pub runs: &'a [Run<'a>],
    /// Token type ids; missing ones are 0.
    pub types: &'a [u32],
    /// Recurrent states of the rows; `None` if no layer has any.
    pub states: Option<StepStates<'a>>,
    /// Features of images, in place of the embedding and then for each layer that adds some; empty without images.
    pub features: &'a [Option<&'a [f32]>],
    /// Positions by axis (time, row, column); empty if all three are those of `positions`.
    pub axes: &'a [[u32; 3]],
    /// Image whose patches are the tokens (vision towers).
    pub image: Option<Image<'a>>,
}

/// Image in the order of its tower's patches.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Pixels, [patches, channels, values of a channel].
    pub pixels: &'a [u8],
    /// Value of each pixel as the tower reads it, by channel.
    pub table: &'a [[f32; 256]; 3],
}

/// Attention kernels and plans, one for each distinct (KV heads, head size) of the layers.
pub(super) struct Attentions {
    kinds: Vec<(Attention, Plan)>,
    /// Index in `kinds` for each layer.
    kind_of: Vec<usize>,
}

impl Attentions {
    /// Creates the kernels and plans of a model, for steps over `kv`.
    pub fn new(config: &ModelConfig, isa: Isa, threads: usize, kv: &KvPool) -> Result<Self> {
        let sizes: Vec<(usize, usize)> = config.heads.iter().map(|one| (one.kv_heads, one.head_dim)).collect();
        let never_attends = !config.attends.contains(&true);
        let mut sizes_done: Vec<(usize, usize)> = Vec::new();
        let mut kinds = Vec::new();
        for (first, size) in sizes.iter().enumerate() {
            // a model without attention still needs one plan, which iterates over the rows
            if sizes_done.contains(size) || !(config.attends[first] || never_attends) {
                continue;
            }
            let ((kv_heads, head_dim), heads) = (*size, config.num_heads);
            let (scale, cap) = (config.attention_scale, config.attention_cap);
            let attention = Attention::new(isa, heads, kv_heads, head_dim, scale, cap)?;
            let attention = match &config.latent {
                Some(latent) => attention.with_values_of_keys(latent.rank),
                None => attention,
            };
            // layers of other sizes get the window of this one, so that they add no work to the plan
            let windows: Vec<_> = (0..sizes.len())
                .map(|layer| config.windows[if sizes[layer] == *size { layer } else { first }])
                .collect();
            let plan = attention.plan(kv, threads, &windows);
            let plan = if config.chunked { plan.in_chunks() } else { plan };
            let plan = if config.both_ways { plan.both_ways() } else { plan };
            kinds.push((attention, plan));
            sizes_done.push(*size);
        }
        let index_of = |size: &(usize, usize)| sizes_done.iter().position(|one| one == size).unwrap_or(0);
        Ok(Self {
            kind_of: sizes.iter().map(index_of).collect(),
            kinds,
        })
    }

    /// Returns the kernel and the plan of `layer`.
    pub fn for_layer(&self, layer: usize) -> (&Attention, &Plan) {
        let (attention, plan) = &self.kinds[self.kind_of[layer]];
        (attention, plan)
    }

    /// Plans the attention of a step with `rows`.
    pub fn build(&mut self, rows: &Rows<'_>) -> Result<()> {
        self.kinds.iter_mut().try_for_each(|(_, plan)| plan.build(rows))
    }

    /// Allocates one thread's scratch memory, large enough for every layer.
    pub fn scratch(&self) -> Result<Scratch> {
        let largest = self.kinds.iter().max_by_key(|(attention, _)| attention.head_dim());
        largest.map_or_else(
            || Err(Error::setting("the model has no layers")),
            |(one, _)| Ok(one.scratch()),
        )
    }
}

/// Data that all threads share in a forward pass.
pub(super) struct Forward<'a> {
    pub weights: &'a Weights,
    /// Elements of a hidden state.
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

/// View that a thread has of a forward pass: shared data, its own buffers and counters.
pub(super) struct Worker<'a, 'f> {
    pub shared: &'a Forward<'f>,
    pub barrier: &'a Barrier,
    pub thread: usize,
    /// Next unused work counter of the running operation.
    pub next: usize,
    /// End of the operation's work counters.
    pub end: usize,
    pub own: &'a mut ThreadBuffers,
    pub scratch: &'a mut Scratch,
    pub clock: Option<Instant>,
    pub times: &'a mut Times,
}

impl Forward<'_> {
    pub(super) fn count(&self) -> usize {
        self.tokens.ids.len()
    }

    /// Returns the tokens per work item of KV stores. Keys of prefill tokens are interleaved in cache lines.
    pub(super) fn store_item_tokens(&self) -> usize {
        if self.tokens.decode < self.count() {
            LINE_TOKENS
        } else {
            ITEM_TOKENS
        }
    }

    /// Returns the number of token blocks in a matmul. A block never mixes decode and prefill tokens.
    pub(super) fn blocks(&self) -> usize {
        let decode = self.tokens.decode;
        decode.div_ceil(TOKENS) + (self.count() - decode).div_ceil(TOKENS)
    }

    /// Returns the tokens of a block, and the kernels for them.
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

    /// Returns the kernels for a token: those for decode or for prefill.
    pub(super) fn kernels_of(&self, token: usize) -> Kernels {
        if token < self.tokens.decode {
            self.kernels.decoding()
        } else {
            self.kernels
        }
    }

    /// Returns a token's hidden state, normalized into `scratch` if there is a norm.
    ///
    /// # Safety
    /// `scratch` must fit a hidden state and belong to this thread; no thread may write to the token's hidden state.
    #[allow(unsafe_code)]
    pub(super) unsafe fn normed(&self, norm: Option<&Norm>, token: usize, scratch: *mut f32) -> *const f32 {
        let x = self.buffers.x.at(token, 0);
        match norm {
            None => x,
            Some(norm) => {
                // SAFETY: guaranteed by the caller.
                unsafe { norm.apply(&self.kernels, x, (0, self.hidden), scratch) };
                scratch
            }
        }
    }

    /// Returns the cosines and sines for a token's position.
    pub(super) fn angles(&self, by: Rotation, token: usize) -> (*mut f32, *mut f32) {
        let angles = &self.buffers.angles;
        (angles.at(token, by.at), angles.at(token, by.at + by.half))
    }
}

impl Forward<'_> {
    /// Shares out (row, part) pairs as `work(row, tokens, part)`, with all tokens of the row, as they share one state.
    pub(super) fn each_row(&self, counter: &Counter, parts: usize, mut work: impl FnMut(usize, Range<usize>, usize)) {
        while let Some(piece) = counter.claim(self.rows.slots.len() * parts) {
            let (row, part) = (piece / parts, piece % parts);
            let [from, to] = [row, row + 1].map(|at| self.rows.qo_indptr[at] as usize);
            work(row, from..to, part);
        }
    }
}

impl<'a> Worker<'a, '_> {
    /// Returns the operation's next work counter. All threads call this in the same order.
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

/// Calls `work` with the indices of `0..total` that this thread claims, `size` adjacent ones at a time.
pub(super) fn each(counter: &Counter, total: usize, size: usize, mut work: impl FnMut(usize)) {
    while let Some(piece) = counter.claim(total.div_ceil(size)) {
        (piece * size..((piece + 1) * size).min(total)).for_each(&mut work);
    }
}
