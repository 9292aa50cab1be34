//! A loaded model, and the buffers that it computes in.
//!
//! Invariants: both remain usable after a failed forward pass.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Mutex};

use minisgl_kernels::attention::{Rows, Scratch};
use minisgl_kernels::kv::KvPool;
use minisgl_kernels::panels::PANEL;
use minisgl_kernels::{Acts, Kernels, Mode, plain};

use crate::error::Result;
use crate::model::buffers::{Buffers, ThreadBuffers, activation_mode};
use crate::model::config::ModelConfig;
use crate::model::grid::Grid;
use crate::model::products::Groups;
use crate::model::weights::Weights;
use crate::model::worker::{Attentions, Forward, Times, Tokens};
use crate::threads::{Counter, Deadline, Pool};

/// Model with its weights, ready for forward passes.
pub struct Decoder {
    /// Configuration of the model.
    pub config: ModelConfig,
    /// Packed weights.
    pub weights: Weights,
    /// Matmul kernels for the chosen instruction set.
    pub kernels: Kernels,
    mode: Mode,
}

/// Buffers for forward passes and logits, shared and per thread.
pub struct Memory {
    buffers: Buffers,
    attention: Attentions,
    threads: Vec<Mutex<(ThreadBuffers, Scratch)>>,
    last: Grid,
    last_acts: Acts,
    last_rows: usize,
    counters: [Counter; 2],
    times: Option<Mutex<Times>>,
    /// True if the hidden states are those of the MTP layer.
    of_mtp: bool,
}

impl Decoder {
    /// Creates a decoder. `mode` is the precision of activations in matmuls with integer weights.
    pub fn new(config: ModelConfig, weights: Weights, kernels: Kernels, mode: Mode) -> Self {
        Self {
            config,
            weights,
            kernels,
            mode,
        }
    }

    /// Allocates buffers for `threads` threads, which grow with the steps. `timed`: measure parts of the forward pass.
    pub fn memory(&self, threads: usize, kv: &KvPool, timed: bool) -> Result<Memory> {
        let config = &self.config;
        let buffers = Buffers::new(config, &self.weights, self.mode);
        let attention = Attentions::new(config, self.kernels.isa(), threads, kv)?;
        let own = || Ok(Mutex::new((buffers.own(), attention.scratch()?)));
        Ok(Memory {
            threads: (0..threads).map(|_| own()).collect::<Result<_>>()?,
            last: Grid::new(self.config.hidden_size),
            last_acts: Acts::new(1, self.config.hidden_size, activation_mode(self.mode)),
            last_rows: 0,
            counters: Default::default(),
            times: timed.then(|| Mutex::new(Times::default())),
            of_mtp: false,
            attention,
            buffers,
        })
    }

    /// Runs the forward pass of `tokens`, grouped in `rows`. Writes hidden states to `memory` and keys and values to
    /// `kv`. Returns the indices of tokens whose hidden states are not finite, ascending.
    pub fn forward(
        &self,
        pool: &mut Pool,
        memory: &mut Memory,
        kv: &KvPool,
        rows: &Rows<'_>,
        tokens: Tokens<'_>,
    ) -> Result<Vec<usize>> {
        self.begin(memory, rows, tokens.ids.len())?;
        self.forward_part(pool, (memory, kv), rows, tokens, 0..self.weights.forward_len())
    }

    /// Runs the MTP layer over the hidden states that `forward` left for the same `rows`, and replaces them. `tokens`
    /// has the id of the next token in place of each. Returns what `forward` returns.
    pub fn forward_mtp(
        &self,
        pool: &mut Pool,
        memory: &mut Memory,
        kv: &KvPool,
        rows: &Rows<'_>,
        tokens: Tokens<'_>,
    ) -> Result<Vec<usize>> {
        self.begin(memory, rows, tokens.ids.len())?;
        memory.of_mtp = true;
        let operations = self.weights.forward_len()..self.weights.operations().count();
        self.forward_part(pool, (memory, kv), rows, tokens, operations)
    }

    /// Begins a forward pass of `count` tokens, grouped in `rows`.
    pub(super) fn begin(&self, memory: &mut Memory, rows: &Rows<'_>, count: usize) -> Result<()> {
        memory.buffers.begin(count);
        memory.of_mtp = false;
        memory.attention.build(rows)
    }

    /// Runs the next `operations` of a forward pass, by number. The caller begins at 0, leaves none out, repeats those
    /// that a deadline has ended, and changes nothing meanwhile. Returns what `forward` returns, of these operations.
    pub(super) fn forward_part(
        &self,
        pool: &mut Pool,
        (memory, kv): (&mut Memory, &KvPool),
        rows: &Rows<'_>,
        tokens: Tokens<'_>,
        operations: Range<usize>,
    ) -> Result<Vec<usize>> {
        if !tokens.runs.is_empty() {
            let (rank, widest) = (memory.buffers.between.reserve(tokens.runs), memory.buffers.widest);
            for own in &memory.threads {
                let mut own = own.lock().unwrap_or_else(|e| e.into_inner());
                own.0.between.reserve(rank, widest);
            }
        }
        let forward = Forward {
            weights: &self.weights,
            hidden: self.config.hidden_size,
            kernels: self.kernels,
            mode: self.mode,
            kv,
            rows: *rows,
            attention: &memory.attention,
            buffers: &memory.buffers,
            tokens,
            not_finite: Mutex::default(),
            threads: pool.threads(),
        };
        let (threads, times) = (&memory.threads, &memory.times);
        pool.run(&|thread, barrier| {
            let mut mine = threads[thread].lock().unwrap_or_else(|e| e.into_inner());
            let (own, scratch) = &mut *mine;
            let mut times = match times {
                Some(times) if thread == 0 => Some(times.lock().unwrap_or_else(|e| e.into_inner())),
                _ => None,
            };
            forward.run(&operations, thread, barrier, own, scratch, times.as_deref_mut());
        })?;
        let mut not_finite = forward.not_finite.into_inner().unwrap_or_else(|e| e.into_inner());
        not_finite.sort_unstable();
        Ok(not_finite)
    }

    /// Returns the hidden state of one token of the last forward pass, after the final norm.
    pub fn hidden<'a>(&self, memory: &'a mut Memory, token: usize) -> &'a [f32] {
        memory.last.reserve(1);
        let (x, normed) = (memory.buffers.x.at(token, 0), memory.last.at(0, 0));
        let size = self.config.hidden_size;
        // SAFETY: the forward that wrote `x` has ended, and `&mut memory` is exclusive.
        unsafe {
            let kernels = self.kernels.decoding();
            let Some(norm) = &self.weights.norm else {
                return std::slice::from_raw_parts(x, size);
            };
            norm.apply(&kernels, x, (0, size), normed);
            std::slice::from_raw_parts(normed, size)
        }
    }

    /// Computes the logits of `tokens` (indices in the last pass, of the model or its MTP layer) into the rows of `out`.
    /// Each thread first calls `beside` (such as filling grammar masks); the small work items of the matmul balance its load.
    pub fn logits(
        &self,
        pool: &mut Pool,
        memory: &mut Memory,
        tokens: &[usize],
        out: &mut Grid,
        beside: &(dyn Fn() + Sync),
    ) -> Result<()> {
        out.reserve(tokens.len());
        memory.last.reserve(tokens.len());
        if tokens.len() > memory.last_rows {
            memory.last_rows = tokens.len();
            memory.last_acts = Acts::new(tokens.len(), self.config.hidden_size, activation_mode(self.mode));
        }
        memory.counters.iter().for_each(Counter::reset);
        // same kernel for all, so that logits do not depend on whether a token was decode or prefill
        let kernels = self.kernels.decoding();
        let (head, config) = (&self.weights.head, &self.config);
        let acts = memory
            .last_acts
            .writer_as(tokens.len(), config.hidden_size, self.mode.with(head));
        let groups = Groups::new(head, pool.threads());
        let (memory, out) = (&*memory, &*out);
        let mtp = self.weights.mtp.as_ref().filter(|_| memory.of_mtp);
        let norm = mtp.map(|mtp| &mtp.norm).or(self.weights.norm.as_ref());
        pool.run(&|_, barrier| {
            while let Some(row) = memory.counters[0].claim(tokens.len()) {
                let (mut x, normed) = (memory.buffers.x.at(tokens[row], 0), memory.last.at(row, 0));
                // SAFETY: each row is claimed once; the forward pass that wrote `x` has ended.
                unsafe {
                    if let Some(norm) = norm {
                        norm.apply(&kernels, x, (0, config.hidden_size), normed);
                        x = normed;
                    }
                    kernels.prepare(x, acts, row);
                }
            }
            barrier.wait();
            beside();
            while let Some(group) = memory.counters[1].claim(groups.count) {
                let panels = groups.panels(group);
                let to = out.at(0, panels.start * PANEL);
                let width = panels.len() * PANEL;
                // SAFETY: each column is claimed once; `acts` was written before the barrier.
                unsafe {
                    let first = panels.start * PANEL;
                    kernels.matmul(head, panels, acts, 0..tokens.len(), to, out.stride(), false);
                    for row in 0..tokens.len() {
                        self.finish(to.add(row * out.stride()), first, width);
                    }
                }
            }
        })
    }

    /// Applies bias, scale and soft cap to `width` logits of one token, starting at column `first`.
    ///
    /// # Safety
    /// No other thread may use these logits meanwhile.
    unsafe fn finish(&self, logits: *mut f32, first: usize, width: usize) {
        let (scale, cap) = (self.config.logits_scale, self.config.logits_cap);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if let Some(bias) = &self.weights.head_bias {
                self.kernels.decoding().add(logits, bias[first..].as_ptr(), width);
            }
            let logits = std::slice::from_raw_parts_mut(logits, width);
            if scale != 1.0 || cap != 0.0 {
                logits.iter_mut().for_each(|logit| *logit *= scale);
            }
            if cap != 0.0 {
                plain::soft_cap(logits, cap);
            }
        }
    }
}

impl Memory {
    /// Makes the operations of a forward pass leave work items after `deadline`.
    pub(super) fn end_at(&mut self, deadline: &Arc<Deadline>) {
        self.buffers
            .counters
            .iter_mut()
            .for_each(|counter| counter.end_at(deadline));
    }

    /// Returns the copies of the hidden states that the forward pass left, and then the last ones.
    pub(super) fn tapped(&self) -> impl Iterator<Item = &Grid> {
        self.buffers.taps.iter().chain([&self.buffers.x])
    }

    /// Returns the seconds spent in each part so far, `None` without timing.
    pub fn times(&self) -> Option<Times> {
        self.times
            .as_ref()
            .map(|times| *times.lock().unwrap_or_else(|e| e.into_inner()))
    }
}
