//! The engine behind one call a step: page table, slots, forward pass, sampling.
//!
//! Invariants: freed slots, bindings, page-table changes and rows of a step take effect in that order; a negative input
//! id stands for the token that the previous step sampled for that slot; after a failed step the engine still works,
//! with KV pool and states wiped; a row whose output is not finite gets no token, and no other row reads its KV
//! entries: attention reads beyond a row's end, so its pages are wiped before another row writes to them.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use minisgl_kernels::attention::Rows;
use minisgl_kernels::kv::KvPool;
use minisgl_store::{Keeper, Store};

use crate::adapters::Adapters;
use crate::error::{Error, Result};
use crate::images::{Ahead, FIRST_VIRTUAL_ID, ImageCounts, Images, PromptImage, StepImages, no_tower};
use crate::model::{Decoder, Grid, Memory, Times, Tokens, Tower};
use crate::mtp::{Drafts, last_rows};
use crate::pooling::{Heads, Pools};
use crate::sampling::{Binding, SampleResult, Scratch, Slots, TokenLogprobs, argmax, logprobs};
use crate::states::{FROM_STORE, States};
use crate::step::{Choices, Embedding, NOT_FINITE, PromptLogprobs, Sampled, Sizes, Step, StepLogprobs};
use crate::threads::{Counter, Pool};

/// Prompt positions per call of the LM head. A long prompt thus never needs all [tokens, vocabulary] logits at once.
const HEAD_CHUNK: usize = 128;
const NO_TEXT: &str = "the model is an encoder: it computes embeddings and cannot generate text";
const NOT_FINITE_TEXT: &str = "the model's output for it is not finite: values overflow (try --kv-dtype f32), \
     or those of its adapter do";

/// CPU inference engine: one model with its thread pool, KV pool, slots and adapters. `step` runs one scheduler step.
pub struct Engine {
    decoder: Decoder,
    pool: Pool,
    kv: KvPool,
    states: Option<States>,
    memory: Memory,
    sizes: Sizes,
    page_table: Vec<u32>,
    columns: usize,
    last_token: Vec<u32>,
    slots: Slots,
    adapters: Adapters,
    pools: Pools,
    logits: Grid,
    scratch: Vec<Mutex<Scratch>>,
    dirty_pages: BTreeSet<usize>, // ids of pages that may hold values that are not finite
    keeper: Option<Keeper>,
    images: Option<Images>,
    drafts: Option<Drafts>, // if the model's MTP layer is loaded
    /// Slots with rows or loads in a failed step. Until all are freed or bound anew, a step that was planned before the
    /// failure may compute on wiped pages, and nothing is stored.
    lost: Vec<i32>,
    lent: Vec<(usize, u32)>, // entries of the page table that stand for a step, and their own pages
}

impl Engine {
    /// Creates an engine that runs `decoder` on `pool`, with an empty KV pool. Tokens in `eos_ids` end a sequence.
    pub fn new(decoder: Decoder, pool: Pool, sizes: Sizes, choices: Choices, eos_ids: &[u32]) -> Result<Self> {
        let config = &decoder.config;
        let kv = KvPool::new(choices.kv)?;
        let memory = decoder.memory(pool.threads(), &kv, choices.timed)?;
        let columns = sizes.max_seq_len.div_ceil(sizes.page_size);
        let states = config
            .state
            .map(|_| States::new(&config.state_sizes(), sizes.max_rows + 1, sizes.num_checkpoints));
        Ok(Self {
            page_table: vec![sizes.num_pages as u32; columns * (sizes.max_rows + 1)],
            columns,
            last_token: vec![0; sizes.max_rows + 1],
            slots: Slots::new(sizes.max_rows + 1, config.vocab_size, eos_ids),
            adapters: Adapters::new(sizes.max_rows + 1),
            pools: Pools::new(sizes.max_rows + 1, config.both_ways),
            logits: Grid::new(config.vocab_size),
            scratch: (0..pool.threads())
                .map(|_| Mutex::new(Scratch::new(decoder.kernels.isa())))
                .collect(),
            dirty_pages: BTreeSet::new(),
            keeper: None,
            images: None,
            drafts: config.mtp.then(|| Drafts::new(sizes.max_rows + 1)),
            lost: Vec::new(),
            lent: Vec::new(),
            decoder,
            pool,
            kv,
            states: states.transpose()?,
            memory,
            sizes,
        })
    }

    /// Returns the LoRA adapters that requests may use.
    pub fn adapters(&mut self) -> &mut Adapters {
        &mut self.adapters
    }

    /// Writes full KV pages and state snapshots to `store` from now on. Stored pages may be loaded in later steps.
    pub fn keep(&mut self, store: Arc<Store>) {
        self.keeper = Some(Keeper::new(store, self.sizes.max_rows + 1));
    }

    /// Accepts images from now on. `limit`: bytes of their features, without those that are being computed.
    pub fn see(&mut self, tower: Tower, limit: usize) {
        self.images = Some(Images::new(tower, limit, self.sizes.max_rows + 1));
    }

    /// Runs the vision tower over an image ahead of its request, as `Images::see_ahead` says.
    pub fn see_ahead(&mut self, image: &PromptImage, begins: bool, slice: Duration) -> Ahead {
        let (images, pool) = (&mut self.images, &mut self.pool);
        let seen = images
            .as_mut()
            .map(|images| images.see_ahead(image, begins, slice, pool));
        seen.unwrap_or(Ahead::Failed)
    }

    /// Gives up what `see_ahead` has begun.
    pub fn give_up_image(&mut self) {
        if let Some(images) = &mut self.images {
            images.give_up();
        }
    }

    /// Returns the MTP layer's draft tokens after sequences, given as (request, length), `None` where there is none.
    pub fn draft_tokens(&mut self, sequences: &[(i64, usize)]) -> Vec<Option<u32>> {
        let none = || vec![None; sequences.len()];
        (self.drafts.as_mut()).map_or_else(none, |drafts| drafts.take(sequences))
    }

    /// Returns the counts of images, `None` for a model without a vision tower.
    pub fn image_counts(&self) -> Option<ImageCounts> {
        self.images.as_ref().map(Images::counts)
    }

    /// Returns the bytes of all weight matrices.
    pub fn weight_bytes(&self) -> usize {
        let tower = self.images.as_ref().map_or(0, |images| images.tower().bytes());
        self.decoder.weights.bytes() + tower
    }

    /// Sets the heads (dense layers) for pooled hidden states. Errors if they do not fit the hidden size.
    pub fn set_heads(&mut self, heads: Heads) -> Result<()> {
        heads.check(self.decoder.config.hidden_size)?;
        self.pools.set_heads(heads);
        Ok(())
    }

    /// Returns the model that the engine runs.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns the bytes of KV cache that one token takes in all layers.
    pub fn kv_token_bytes(&self) -> usize {
        let shape = self.kv.shape();
        KvPool::page_bytes(shape) / shape.page_size
    }

    /// Returns the number of threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Returns the seconds spent in each part of the forward pass so far, `None` without timing.
    pub fn times(&self) -> Option<Times> {
        self.memory.times()
    }

    /// Runs one step of the scheduler and returns its sampled tokens. `bindings` are the (slot, binding) pairs of slots
    /// that change owner. If the computation fails, the KV pool and the states are wiped; the engine stays usable.
    pub fn step(&mut self, step: &Step, bindings: Vec<(usize, Binding)>) -> Result<Sampled> {
        let done = self.try_step(step, bindings);
        if done.is_err() {
            let slots = step.req_slots.iter().chain(step.page_loads.iter().map(|load| &load[0]));
            let most = self.sizes.max_rows as i32;
            self.lost.extend(slots.filter(|slot| (0..most).contains(*slot)));
        }
        done
    }

    fn try_step(&mut self, step: &Step, bindings: Vec<(usize, Binding)>) -> Result<Sampled> {
        self.assign(step, bindings)?;
        self.change_pages(step)?;
        if step.req_slots.is_empty() && step.page_loads.is_empty() {
            return Ok(Sampled::default());
        }
        // the pool turns a panic in a job into an error; this catches panics between jobs
        let run = || {
            self.load_pages(step)?;
            self.load_states(step)?;
            let ids = self.checked_ids(step)?;
            if let Some(images) = &mut self.images {
                images.prepare(step, &mut self.pool);
            }
            let began = Instant::now();
            let sampled = self.compute(step, &ids)?;
            if let Some(keeper) = &self.keeper {
                keeper.took(ids.len(), began.elapsed());
            }
            self.store_pages(step, &ids, &sampled);
            if let Some(images) = &mut self.images {
                images.computed(step);
            }
            Ok(sampled)
        };
        let done = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(Error::step("the step panicked")));
        if done.is_err() {
            self.kv = KvPool::new(self.kv.shape().clone())?;
            self.states = self.states.as_ref().map(States::zeroed).transpose()?;
            self.dirty_pages.clear();
        }
        done
    }

    /// Returns the logits at each of `tokens`, [tokens, vocabulary], as one prompt with `images`; with `mtp` those of
    /// the MTP layer, for which the token after the last is that token again. Overwrites the first KV pages.
    pub fn prompt_logits(&mut self, tokens: &[i32], images: Vec<PromptImage>, mtp: bool) -> Result<Vec<f32>> {
        let count = tokens.len();
        if mtp && self.drafts.is_none() {
            return Err(Error::step("prompt_logits: no MTP layer is loaded"));
        }
        if count == 0 || count > self.sizes.max_seq_len.min(self.sizes.num_pages * self.sizes.page_size) {
            return Err(Error::step(format!("prompt_logits: {count} tokens")));
        }
        let slot = self.sizes.max_rows as i32;
        let indices: Vec<i32> = (0..count as i32).collect();
        let pages = count.div_ceil(self.sizes.page_size) as i32;
        let step = Step {
            input_ids: tokens.to_vec(),
            positions: indices.clone(),
            out_loc: indices,
            req_slots: vec![slot],
            seq_lens: vec![count as i32],
            extend_lens: vec![count as i32],
            page_table_updates: vec![[slot, 0, pages]],
            page_ids: (0..pages).collect(),
            state_begins: self.states.iter().map(|_| [slot, -1]).collect(),
            ..Step::default()
        };
        let binding = Binding {
            images,
            ..Binding::default()
        };
        let measured = |engine: &mut Self, runs| engine.drafts.iter_mut().for_each(|drafts| drafts.measured = runs);
        measured(self, Some(mtp));
        let done = self.step(&step, vec![(self.sizes.max_rows, binding)]);
        measured(self, None);
        done?;
        let vocabulary = self.decoder.config.vocab_size;
        let mut logits = Vec::with_capacity(count * vocabulary);
        for from in (0..count).step_by(HEAD_CHUNK) {
            let indices: Vec<usize> = (from..count.min(from + HEAD_CHUNK)).collect();
            self.decoder
                .logits(&mut self.pool, &mut self.memory, &indices, &mut self.logits, &|| ())?;
            for row in self.logits.rows(indices.len()) {
                logits.extend_from_slice(&row[..vocabulary]);
            }
        }
        Ok(logits)
    }

    /// Frees the slots whose requests have ended, and binds slots to new requests.
    fn assign(&mut self, step: &Step, bindings: Vec<(usize, Binding)>) -> Result<()> {
        for slot in &step.freed {
            self.slots.free(*slot as usize);
            if let Some(images) = &mut self.images {
                images.free(*slot as usize);
            }
            if let Some(keeper) = &mut self.keeper {
                keeper.free(*slot as usize);
            }
        }
        self.lost.retain(|slot| !step.freed.contains(slot));
        for (slot, mut binding) in bindings {
            self.lost.retain(|lost| *lost as usize != slot);
            if slot > self.sizes.max_rows {
                return Err(Error::step(format!(
                    "binding: slot {slot}: must be 0 to {}",
                    self.sizes.max_rows
                )));
            }
            let seen = std::mem::take(&mut binding.images);
            match &mut self.images {
                Some(images) => images.bind(slot, seen)?,
                None if seen.is_empty() => {}
                None => return Err(no_tower()),
            }
            self.pools.bind(slot, &binding);
            self.adapters.bind(slot, &binding);
            if let Some(drafts) = &mut self.drafts {
                drafts.bind(slot, &binding);
            }
            if let Some(keeper) = &mut self.keeper {
                keeper.bind(slot, &binding.tokens, &binding.space, binding.staged.take());
            }
            self.slots.bind(slot, binding);
        }
        Ok(())
    }

    fn change_pages(&mut self, step: &Step) -> Result<()> {
        for (at, page) in self.lent.drain(..).rev() {
            self.page_table[at] = page;
        }
        let mut from = 0_usize;
        for update in &step.page_table_updates {
            let [slot, column, count] = update.map(|number| number as usize);
            let pages = step.page_ids.get(from..from.saturating_add(count));
            let start = slot.saturating_mul(self.columns).saturating_add(column);
            let row = self.page_table.get_mut(start..start.saturating_add(count));
            let (Some(pages), Some(row)) = (pages, row.filter(|_| column + count <= self.columns)) else {
                return Err(Error::step(format!(
                    "page_table_updates: slot {slot}, page index {column}, {count} pages: out of bounds"
                )));
            };
            for (to, page) in row.iter_mut().zip(pages) {
                *to = *page as u32;
                if *to as usize > self.sizes.num_pages {
                    return Err(Error::step(format!(
                        "page_ids: page {page}: must be 0 to {}",
                        self.sizes.num_pages
                    )));
                }
            }
            from += count;
        }
        Ok(())
    }

    /// Copies the staged pages that `step.page_loads` lists into the KV pool. Errors if one is not staged.
    fn load_pages(&mut self, step: &Step) -> Result<()> {
        for load in &step.page_loads {
            let [slot, first, count] = load.map(|number| number as usize);
            for column in first..first.saturating_add(count) {
                let entry = slot.saturating_mul(self.columns).saturating_add(column);
                let staged = self.keeper.as_ref().and_then(|keeper| keeper.staged(slot, column));
                let (Some(page), Some(bytes)) = (self.page_table.get(entry), staged) else {
                    return Err(Error::step(format!(
                        "page_loads: slot {slot}, page {column}: not staged"
                    )));
                };
                let page = *page as usize;
                if bytes.len() != KvPool::page_bytes(self.kv.shape()) {
                    return Err(Error::step(format!(
                        "page_loads: {} bytes are not the size of a page",
                        bytes.len()
                    )));
                }
                self.kv.put(page, bytes);
                self.dirty_pages.remove(&page);
            }
        }
        Ok(())
    }

    /// Restores the recurrent states that begin from a staged snapshot. Errors if one is not staged.
    fn load_states(&mut self, step: &Step) -> Result<()> {
        for [slot, _] in step.state_begins.iter().filter(|[_, from]| *from == FROM_STORE) {
            let slot = *slot as usize;
            let staged = (self.keeper.as_ref()).and_then(|keeper| keeper.staged_state(slot));
            let loaded = staged
                .zip(self.states.as_mut())
                .map(|(state, states)| states.load(slot, state));
            if loaded != Some(true) {
                return Err(Error::step(format!("state_begins: slot {slot}: no state is staged")));
            }
        }
        Ok(())
    }

    /// Hands full KV pages and state snapshots to the page store. Only a slot's first row counts; others are drafts.
    fn store_pages(&mut self, step: &Step, ids: &[u32], sampled: &Sampled) {
        let Some(keeper) = self.keeper.as_mut().filter(|_| self.lost.is_empty()) else {
            return;
        };
        let (mut seen, mut end) = (BTreeSet::new(), 0);
        for (row, (slot, count)) in step.req_slots.iter().zip(&step.extend_lens).enumerate() {
            let start = end;
            end += *count as usize;
            if sampled.tokens[row] == NOT_FINITE || !seen.insert(*slot) {
                continue;
            }
            let (kv, table) = (
                &self.kv,
                &self.page_table[*slot as usize * self.columns..][..self.columns],
            );
            let first = step.positions[start] as usize;
            keeper.computed(*slot as usize, first, &ids[start..end], |column| {
                kv.page(table[column] as usize)
            });
        }
        for [row, tokens, checkpoint] in step.state_saves.iter().map(|save| save.map(|number| number as usize)) {
            let num_tokens = step.seq_lens[row] - step.extend_lens[row] + tokens as i32;
            if let (Some(states), true) = (&self.states, sampled.tokens[row] != NOT_FINITE) {
                let slot = step.req_slots[row] as usize;
                keeper.saved(slot, num_tokens as usize, || states.checkpoint(checkpoint));
            }
        }
    }

    /// Checks the indices of `step`, and returns its token ids. A negative id becomes the slot's last sampled token.
    fn checked_ids(&self, step: &Step) -> Result<Vec<u32>> {
        let wrong = |what: &str, value: i32| Error::step(format!("step: {what}: {value}: out of bounds"));
        let within = |what: &str, values: &[i32], end: usize| {
            let outside = values.iter().find(|value| **value < 0 || **value as usize >= end);
            outside.map_or(Ok(()), |value| Err(wrong(what, *value)))
        };
        let rows = step.req_slots.len();
        within(
            "out_loc",
            &step.out_loc,
            (self.sizes.num_pages + 1) * self.sizes.page_size,
        )?;
        within("req_slots", &step.req_slots, self.sizes.max_rows + 1)?;
        within("positions", &step.positions, self.sizes.max_seq_len)?;
        within("seq_lens", &step.seq_lens, self.sizes.max_seq_len + 1)?;
        within("sample_rows", &step.sample_rows, rows)?;
        let total: i64 = step.extend_lens.iter().map(|count| i64::from(*count)).sum();
        if total != step.input_ids.len() as i64
            || step
                .extend_lens
                .iter()
                .zip(&step.seq_lens)
                .any(|(new, all)| *new < 1 || new > all)
        {
            return Err(Error::step(
                "step: extend_lens: must be 1 to seq_lens in each row and add up to the tokens of the step",
            ));
        }
        match &self.states {
            Some(states) => states.check(step)?,
            None if step.state_begins.is_empty() && step.state_saves.is_empty() => {}
            None => {
                return Err(Error::step(
                    "step: state_begins, state_saves: the model has no recurrent layers",
                ));
            }
        }
        let vocabulary = self.decoder.config.vocab_size;
        step.input_ids
            .iter()
            .map(|id| {
                let token_id = if *id < 0 {
                    self.last_token.get((-1 - *id) as usize).copied()
                } else {
                    Some(*id as u32)
                };
                // virtual ids beyond images are those of drafts, which are rejected
                let is_virtual = |id: u32| self.images.is_some() && id >= FIRST_VIRTUAL_ID;
                token_id
                    .filter(|id| (*id as usize) < vocabulary || is_virtual(*id))
                    .ok_or_else(|| wrong("input_ids", *id))
            })
            .collect()
    }

    fn compute(&mut self, step: &Step, ids: &[u32]) -> Result<Sampled> {
        if self.decoder.config.both_ways {
            self.encode(step)
        } else if let Some((whole, ids)) = self.completed(step, ids) {
            self.run(&whole, &ids, &[])
        } else {
            self.run(step, ids, &[])
        }
    }

    /// Adds the rest of an image to the rows that end within it, because its tokens attend to each other. The added keys
    /// and values go to pages of the engine's own for this step; the row's next chunk computes them again. `None` if no
    /// row ends so.
    fn completed(&mut self, step: &Step, ids: &[u32]) -> Option<(Step, Vec<u32>)> {
        let images = self.images.as_ref()?;
        let rows = || step.req_slots.iter().zip(&step.seq_lens);
        let lens: Vec<i32> = rows()
            .map(|(slot, len)| images.whole(*slot as usize, *len as usize) as i32)
            .collect();
        if lens == step.seq_lens {
            return None;
        }
        let size = self.sizes.page_size;
        let (mut whole, mut whole_ids) = (step.clone(), Vec::new());
        let (mut next, mut own) = (0, self.sizes.num_pages as u32 + 1);
        whole.positions.clear();
        whole.out_loc.clear();
        for (row, (slot, len)) in rows().enumerate() {
            let tokens = next..next + step.extend_lens[row] as usize;
            next = tokens.end;
            whole_ids.extend_from_slice(&ids[tokens.clone()]);
            whole.positions.extend_from_slice(&step.positions[tokens.clone()]);
            whole.out_loc.extend_from_slice(&step.out_loc[tokens]);
            let (len, end, first) = (*len as usize, lens[row] as usize, *slot as usize * self.columns);
            for column in len.div_ceil(size)..end.div_ceil(size) {
                let entry = &mut self.page_table[first + column];
                self.lent.push((first + column, *entry));
                (*entry, own) = (own, own + 1);
            }
            for at in len..end {
                whole_ids.push(FIRST_VIRTUAL_ID);
                whole.positions.push(at as i32);
                let page = self.page_table[first + at / size] as usize;
                whole.out_loc.push((page * size + at % size) as i32);
            }
            whole.extend_lens[row] += (end - len) as i32;
            whole.added.push(end - len);
        }
        whole.seq_lens = lens;
        Some((whole, whole_ids))
    }

    /// Runs a step of an encoder. A prompt is computed whole in the step in which it ends. Samples no tokens.
    fn encode(&mut self, step: &Step) -> Result<Sampled> {
        let mut sampled = Sampled {
            tokens: vec![-1; step.req_slots.len()],
            ..Sampled::default()
        };
        let (mut whole, mut ids, mut rows) = (Step::default(), Vec::new(), Vec::new());
        let mut types = Vec::new();
        for (row, slot) in step.req_slots.iter().enumerate() {
            let len = step.seq_lens[row] as usize;
            let prompt = self.pools.prompt(*slot as usize);
            let Some((prompt, is_scored)) = prompt.filter(|(prompt, _)| len <= prompt.len()) else {
                sampled.tokens[row] = NOT_FINITE;
                sampled.failures.push((row as i32, NO_TEXT.to_owned()));
                continue;
            };
            if len < prompt.len() {
                continue;
            }
            let (size, first) = (self.sizes.page_size, *slot as usize * self.columns);
            let kv_slot = |at: usize| self.page_table[first + at / size] as usize * size + at % size;
            ids.extend_from_slice(prompt);
            let pair = is_scored && self.decoder.config.pair_types;
            types.extend(if pair { pair_token_types(prompt) } else { vec![0; len] });
            whole.positions.extend(0..len as i32);
            whole.out_loc.extend((0..len).map(|at| kv_slot(at) as i32));
            whole.req_slots.push(*slot);
            whole.seq_lens.push(len as i32);
            whole.extend_lens.push(len as i32);
            rows.push(row);
        }
        if rows.is_empty() {
            return Ok(sampled);
        }
        let computed = self.run(&whole, &ids, &types)?;
        for (row, token) in rows.iter().zip(computed.tokens) {
            // any token ends the request, which asks for a single one
            sampled.tokens[*row] = if token == NOT_FINITE { token } else { 0 };
        }
        let failures = computed.failures.into_iter();
        (sampled.failures).extend(failures.map(|(row, why)| (rows[row as usize] as i32, why)));
        sampled.embeddings = computed.embeddings;
        Ok(sampled)
    }

    /// Runs the forward pass and sampling of `step`. `types`: token type id of each token (BERT); empty if all are 0.
    fn run(&mut self, step: &Step, ids: &[u32], types: &[u32]) -> Result<Sampled> {
        let arrays = Arrays::new(step);
        let starts = &arrays.starts;
        let seen = (self.images.as_ref()).map_or_else(StepImages::default, |images| images.for_step(step));
        let rows = arrays.rows((&self.page_table, self.columns), &seen.ends);
        let saves = match &mut self.states {
            Some(states) => states.begin(step),
            None => Vec::new(),
        };
        let runs = self.adapters.runs(step, starts)?;
        let tokens = Tokens {
            runs: &runs,
            types,
            states: self.states.as_ref().map(|states| states.for_step(&saves)),
            ids,
            positions: &arrays.positions,
            slots: &arrays.locations,
            decode: arrays.decode(step),
            features: &seen.features,
            axes: &seen.axes,
            image: None,
        };
        if !self.dirty_pages.is_empty() {
            for location in &step.out_loc {
                let location = *location as usize; // pages are filled from their start
                let page = location / self.sizes.page_size;
                if location.is_multiple_of(self.sizes.page_size) && self.dirty_pages.remove(&page) {
                    self.kv.clear(page);
                }
            }
        }
        let not_finite = self
            .decoder
            .forward(&mut self.pool, &mut self.memory, &self.kv, &rows, tokens)?;
        let failed = self.mark_dirty(step, starts, &not_finite);
        let blind = self.images.as_ref().map_or(&[][..], Images::failed).to_vec();
        let prompts = self.prompt_logprobs(step, starts, &failed)?;
        let mut sampled = Sampled {
            tokens: vec![-1; step.req_slots.len()],
            prompts,
            embeddings: self.embeddings(step, starts, &failed),
            ..Sampled::default()
        };
        for row in &failed {
            sampled.tokens[*row] = NOT_FINITE;
            let why = blind.iter().find(|(blind, _)| blind == row).map(|(_, why)| why.clone());
            let why = why.unwrap_or_else(|| NOT_FINITE_TEXT.to_owned());
            sampled.failures.push((*row as i32, why));
        }
        let sample_rows: Vec<usize> = (step.sample_rows.iter().map(|row| *row as usize))
            .filter(|row| !failed.contains(row))
            .collect();
        if !sample_rows.is_empty() {
            let last: Vec<usize> = sample_rows.iter().map(|row| starts[row + 1] as usize - 1).collect();
            let slots = sample_rows.iter().map(|row| step.req_slots[*row] as usize);
            let masks = self.slots.masks(slots);
            self.decoder
                .logits(&mut self.pool, &mut self.memory, &last, &mut self.logits, &|| {
                    masks.fill()
                })?;
            self.sample(step, &sample_rows, &mut sampled)?;
        }
        let (runs, drafts) = (self.drafts.as_mut()).map_or((false, false), |drafts| drafts.begin(step));
        if runs {
            self.run_mtp(step, &arrays, ids, &sampled.tokens, drafts)?;
        }
        Ok(sampled)
    }

    /// Runs the MTP layer over the tokens of `step`, after its tokens are `sampled`. `drafts`: computes draft tokens.
    fn run_mtp(&mut self, step: &Step, arrays: &Arrays, ids: &[u32], sampled: &[i32], drafts: bool) -> Result<()> {
        let Some(store) = &mut self.drafts else { return Ok(()) };
        let next = store.next_ids(step, ids, &arrays.starts, sampled);
        let tokens = Tokens {
            runs: &[],
            types: &[],
            states: None,
            ids: &next,
            positions: &arrays.positions,
            slots: &arrays.locations,
            decode: arrays.decode(step),
            features: &[],
            axes: &[],
            image: None,
        };
        let rows = arrays.rows((&self.page_table, self.columns), &[]);
        let (pool, memory) = (&mut self.pool, &mut self.memory);
        let not_finite = self.decoder.forward_mtp(pool, memory, &self.kv, &rows, tokens)?;
        let mut rows = last_rows(step, ids, &arrays.starts, sampled);
        let failed = self.mark_dirty(step, &arrays.starts, &not_finite);
        rows.retain(|row| drafts && !failed.contains(row));
        if rows.is_empty() {
            return Ok(());
        }
        let last: Vec<usize> = rows.iter().map(|row| arrays.starts[row + 1] as usize - 1).collect();
        self.decoder
            .logits(&mut self.pool, &mut self.memory, &last, &mut self.logits, &|| ())?;
        let vocabulary = self.decoder.config.vocab_size;
        let best = self.logits.rows(rows.len()).map(|row| argmax(&row[..vocabulary], 0).id);
        if let Some(store) = &mut self.drafts {
            store.add(step, &rows, best);
        }
        Ok(())
    }

    /// Returns the rows of the tokens `not_finite`, and marks their pages to be wiped before reuse.
    fn mark_dirty(&mut self, step: &Step, starts: &[u32], not_finite: &[usize]) -> BTreeSet<usize> {
        let row_of = |token: &usize| starts.partition_point(|start| *start as usize <= *token) - 1;
        let failed: BTreeSet<usize> = not_finite.iter().map(row_of).collect();
        for row in &failed {
            let count = (step.seq_lens[*row] as usize).div_ceil(self.sizes.page_size);
            let first = step.req_slots[*row] as usize * self.columns;
            let pages = &self.page_table[first..first + count];
            self.dirty_pages.extend(pages.iter().map(|page| *page as usize));
        }
        failed
    }

    /// Samples one token for each of `rows` on all threads. Logits and grammar masks must be ready.
    fn sample(&mut self, step: &Step, rows: &[usize], sampled: &mut Sampled) -> Result<()> {
        let results: Vec<Mutex<Option<SampleResult>>> = rows.iter().map(|_| Mutex::new(None)).collect();
        let (slots, scratch, next) = (&self.slots, &self.scratch, Counter::default());
        let vocabulary = self.decoder.config.vocab_size;
        let logits: Vec<Mutex<&mut [f32]>> = self.logits.rows(rows.len()).map(Mutex::new).collect();
        self.pool.run(&|thread, _| {
            let mut scratch = scratch[thread].lock().unwrap_or_else(|e| e.into_inner());
            while let Some(index) = next.claim(rows.len()) {
                let row = rows[index];
                let mut logits = logits[index].lock().unwrap_or_else(|e| e.into_inner());
                let (slot, position) = (step.req_slots[row] as usize, step.seq_lens[row] as u64);
                let next_token = slots.sample_with_grammar(slot, position, &mut logits[..vocabulary], &mut scratch);
                *results[index].lock().unwrap_or_else(|e| e.into_inner()) = Some(next_token);
            }
        })?;
        let mut step_logprobs = StepLogprobs::default();
        for (row, result) in rows.iter().zip(results) {
            let Some((next_token, failure)) = result.into_inner().unwrap_or_else(|e| e.into_inner()) else {
                return Err(Error::step("a row was not sampled"));
            };
            let slot = step.req_slots[*row] as usize;
            self.slots.record(slot, next_token.token);
            self.last_token[slot] = next_token.token;
            sampled.tokens[*row] = next_token.token as i32;
            sampled.failures.extend(failure.map(|why| (*row as i32, why)));
            if let Some(logprobs) = next_token.logprobs {
                step_logprobs.rows.push(*row as i32);
                step_logprobs.tokens.push(logprobs);
            }
        }
        sampled.logprobs = (!step_logprobs.rows.is_empty()).then_some(step_logprobs);
        Ok(())
    }

    /// Returns the requested embeddings of prompts that end in this step. Skips rows in `failed`.
    fn embeddings(&mut self, step: &Step, starts: &[u32], failed: &BTreeSet<usize>) -> Vec<Embedding> {
        let mut embeddings = Vec::new();
        if self.pools.is_empty() {
            return embeddings;
        }
        for (row, slot) in step
            .req_slots
            .iter()
            .enumerate()
            .filter(|(row, _)| !failed.contains(row))
        {
            let slot = *slot as usize;
            let added = step.added.get(row).copied().unwrap_or_default();
            for token in starts[row] as usize..starts[row + 1] as usize - added {
                let position = step.positions[token] as usize;
                if self.pools.wants(slot, position) {
                    let hidden = self.decoder.hidden(&mut self.memory, token);
                    embeddings.extend(self.pools.add(slot, position, hidden));
                }
            }
        }
        embeddings
    }

    /// Returns the requested log probabilities of the prompt tokens after the positions of this step.
    fn prompt_logprobs(
        &mut self,
        step: &Step,
        starts: &[u32],
        failed: &BTreeSet<usize>,
    ) -> Result<Vec<PromptLogprobs>> {
        let mut prompts = Vec::new();
        for (row, slot) in step
            .req_slots
            .iter()
            .enumerate()
            .filter(|(row, _)| !failed.contains(row))
        {
            let (start, end) = (starts[row] as usize, starts[row + 1] as usize);
            let position = step.positions[start] as usize;
            let Some(part) = self.slots.prompt_part(*slot as usize, position, end - start) else {
                continue;
            };
            let (req_id, first, count) = (part.req_id, part.first, part.count);
            let ids: Vec<u32> = part.tokens.iter().map(|token| *token as u32).collect();
            let mut tokens = Vec::with_capacity(ids.len());
            for (chunk, chunk_ids) in ids.chunks(HEAD_CHUNK).enumerate() {
                let from = start + chunk * HEAD_CHUNK;
                let indices: Vec<usize> = (from..from + chunk_ids.len()).collect();
                self.decoder
                    .logits(&mut self.pool, &mut self.memory, &indices, &mut self.logits, &|| ())?;
                tokens.append(&mut self.logprobs_of(chunk_ids, count)?);
            }
            prompts.push(PromptLogprobs { req_id, first, tokens });
        }
        Ok(prompts)
    }

    /// Returns log probabilities for the tokens `ids`, one for each row of the logits, with the `count` most likely.
    fn logprobs_of(&mut self, ids: &[u32], count: usize) -> Result<Vec<TokenLogprobs>> {
        let vocabulary = self.decoder.config.vocab_size;
        let rows: Vec<&[f32]> = self.logits.rows(ids.len()).map(|row| &row[..vocabulary]).collect();
        let cells: Vec<Mutex<TokenLogprobs>> = ids.iter().map(|_| Mutex::default()).collect();
        let (next, isa) = (Counter::default(), self.decoder.kernels.isa());
        self.pool.run(&|_, _| {
            while let Some(index) = next.claim(ids.len()) {
                let token_logprobs = logprobs(isa, rows[index], ids[index], count);
                *cells[index].lock().unwrap_or_else(|e| e.into_inner()) = token_logprobs;
            }
        })?;
        Ok(cells
            .into_iter()
            .map(|cell| cell.into_inner().unwrap_or_else(|e| e.into_inner()))
            .collect())
    }
}

/// Arrays of a step as the forward pass reads them.
struct Arrays {
    positions: Vec<u32>,
    locations: Vec<u32>,
    seq_lens: Vec<u32>,
    slots: Vec<u32>,
    /// First token of each row, and the end.
    starts: Vec<u32>,
}

impl Arrays {
    fn new(step: &Step) -> Self {
        let unsigned = |values: &[i32]| values.iter().map(|value| *value as u32).collect::<Vec<u32>>();
        let mut starts = vec![0_u32];
        for count in &step.extend_lens {
            starts.push(starts[starts.len() - 1] + *count as u32);
        }
        Self {
            positions: unsigned(&step.positions),
            locations: unsigned(&step.out_loc),
            seq_lens: unsigned(&step.seq_lens),
            slots: unsigned(&step.req_slots),
            starts,
        }
    }

    /// Returns the number of decode tokens.
    fn decode(&self, step: &Step) -> usize {
        self.starts[step.num_decode_rows.min(self.slots.len())] as usize
    }

    fn rows<'a>(&'a self, (table, columns): (&'a [u32], usize), ends: &'a [u32]) -> Rows<'a> {
        Rows {
            seq_lens: &self.seq_lens,
            qo_indptr: &self.starts,
            table,
            columns,
            slots: &self.slots,
            ends,
        }
    }
}

/// Returns the token type ids of a text pair: 0 up to the first token that equals the prompt's last, then 1.
fn pair_token_types(prompt: &[u32]) -> Vec<u32> {
    let end = prompt.iter().position(|token| Some(token) == prompt.last());
    let first = end.unwrap_or_default() + 1;
    (0..prompt.len()).map(|at| u32::from(at >= first)).collect()
}
