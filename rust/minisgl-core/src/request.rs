//! Requests as the scheduler sees them, in three parts (hot, sequence, cold), and the sorted queue of waiting ones.
//!
//! Invariants: an index names one request until it has ended and no step in flight holds a row of it; its order key
//! never changes.
//!
//! A started request is *prefilling* until the KV of all tokens known at its admission is scheduled, then it *decodes*.
//! While it decodes, its row in the decode set is authoritative, and the record here is only as recent as the last
//! `synchronize`.

use crate::api::{Result, broken};
use crate::drafter::Drafter;
use crate::numbers::{MAX_U32, ToU32, ToUsize};
use crate::page_pool::Page;
use crate::radix::{NO_NODE, Namespace, NodeId, Slot};
use crate::step::{Arrival, FinishReason, RESERVED_OUTPUT};

/// Index of a request in `Requests`. Reused after the request is freed.
pub(crate) type Index = u32;
pub(crate) const NO_SLOT: u32 = u32::MAX;
pub(crate) const AGE: i64 = 64; // arrivals by which one level of priority changes the age
pub(crate) const NO_STEP: i64 = i64::MIN;
const MAX_LEN: usize = MAX_U32 - 1;

/// Sort key of a request: (is in the background, age, id).
pub(crate) type OrderKey = (bool, i64, i64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Started,
    Ended,
}

/// Hot part of a request, read in every pass: state and limits. Lengths in tokens.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub req_id: i64,
    pub last_step: i64,   // last step with a row of the request
    pub kv_len: u32,      // tokens whose KV is computed or scheduled, without drafts
    pub prefill_len: u32, // tokens known at the last admission
    pub len: u32,         // committed tokens, prompt first
    pub max_len: u32,     // total length at which the request ends
    pub num_prompt: u32,  // prompt tokens
    pub min_len: u32,     // total length below which stop ids are ignored
    pub slot: u32,
    pub num_pending: u32, // tokens scheduled to be sampled beyond `len`
    pub state: State,
    pub no_overlap: bool,
    pub uses_cache: bool,
    pub obeys_eos: bool,
    pub has_stop_ids: bool,
    pub background: bool,
}

/// Growing part of a request: its tokens and its page table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    pub tokens: Vec<i32>, // committed tokens, prompt first
    pub pages: Vec<Page>, // page table
}

/// Cold part of a request, used when it starts and ends.
#[derive(Default)]
pub(crate) struct ColdPart {
    pub num_tree_pages: usize, // leading pages of the page table that belong to the tree
    pub handle: Option<NodeId>,
    pub namespace: Namespace, // cache namespace
    pub order: OrderKey,
    pub priority: i64,
    pub cached_len: usize, // tokens cached or loadable at the last lookup
    pub matched_in: i64,   // step of that lookup
    pub num_admissions: u32,
    pub num_found_pages: Option<usize>, // cached pages at the first admission since the tree was reset
    pub stop_ids: Vec<i32>,
    pub drafter: Option<Box<Drafter>>, // `None` for a request without drafts
    pub tail: Option<Tail>,
    pub stored: (usize, usize), // range of pages that can be loaded
}

/// State checkpoint that belongs to a request and enters the radix tree with the request's pages.
#[derive(Clone, Copy)]
pub(crate) struct Tail {
    pub slot: Slot,
    pub len: u32,  // tokens of the sequence before the state
    pub step: i64, // step that saves it
}

impl Request {
    pub fn is_prefilling(&self) -> bool {
        self.kv_len < self.prefill_len
    }

    /// Returns how many tokens the request may still generate, beyond those known or pending.
    pub fn num_unscheduled(&self) -> u32 {
        self.max_len - self.len - self.num_pending
    }
}

/// Table of all requests that are live or have a row in flight.
#[derive(Default)]
pub(crate) struct Requests {
    hot: Vec<Request>,
    sequences: Vec<Sequence>,
    cold: Vec<ColdPart>,
    unused: Vec<Index>,
}

impl Requests {
    pub fn get(&self, index: Index) -> &Request {
        &self.hot[index.to_usize()]
    }

    pub fn get_mut(&mut self, index: Index) -> &mut Request {
        &mut self.hot[index.to_usize()]
    }

    pub fn cold(&self, index: Index) -> &ColdPart {
        &self.cold[index.to_usize()]
    }

    pub fn cold_mut(&mut self, index: Index) -> &mut ColdPart {
        &mut self.cold[index.to_usize()]
    }

    pub fn sequence_mut(&mut self, index: Index) -> &mut Sequence {
        &mut self.sequences[index.to_usize()]
    }

    /// Returns the sequence and the cold part of a request, both mutable.
    pub fn parts_mut(&mut self, index: Index) -> (&mut Sequence, &mut ColdPart) {
        let at = index.to_usize();
        (&mut self.sequences[at], &mut self.cold[at])
    }

    /// Returns the committed tokens of a synchronized request.
    pub fn tokens(&self, index: Index) -> &[i32] {
        &self.sequences[index.to_usize()].tokens
    }

    /// Returns the page table of a synchronized request.
    pub fn pages(&self, index: Index) -> &[Page] {
        &self.sequences[index.to_usize()].pages
    }

    /// Adds the request of a valid `arrival`, the `count`-th of its kind, and returns its index.
    ///
    /// Background requests are counted separately and have no drafts. `caches` is false without a prefix cache. Age
    /// counts arrivals: a request of priority p is overtaken by at most (p - q) * AGE later ones of priority q.
    pub fn add(
        &mut self,
        arrival: Arrival,
        count: i64,
        max_seq_len: usize,
        caches: bool,
        max_draft_len: usize,
    ) -> Index {
        let drafts = max_draft_len > 0 && !arrival.no_drafts && !arrival.background;
        let limit = length(arrival.num_prompt.saturating_add(arrival.max_tokens)).min(max_seq_len);
        let request = Request {
            req_id: arrival.req_id,
            last_step: NO_STEP,
            kv_len: 0,
            prefill_len: 0,
            len: arrival.tokens.len().to_u32(),
            max_len: limit.min(MAX_LEN).to_u32(),
            min_len: length(arrival.num_prompt.saturating_add(arrival.min_tokens))
                .min(MAX_LEN)
                .to_u32(),
            num_prompt: length(arrival.num_prompt).to_u32(),
            slot: NO_SLOT,
            num_pending: 0,
            state: State::Waiting,
            no_overlap: arrival.no_overlap,
            uses_cache: caches && !arrival.no_match,
            obeys_eos: !arrival.ignore_eos,
            has_stop_ids: !arrival.stop_ids.is_empty(),
            background: arrival.background,
        };
        let index = match self.unused.pop() {
            Some(index) => {
                self.hot[index.to_usize()] = request;
                index
            }
            None => {
                self.hot.push(request);
                self.sequences.push(Sequence::default());
                self.cold.push(ColdPart::default());
                self.hot.len().to_u32() - 1
            }
        };
        let mut tokens = arrival.tokens;
        // memory for the output, so that a decode step need not allocate
        tokens.reserve(limit.saturating_sub(tokens.len()).min(RESERVED_OUTPUT));
        let sequence = self.sequence_mut(index);
        sequence.tokens = tokens;
        sequence.pages.clear(); // keeps its memory
        let cold = self.cold_mut(index);
        cold.num_tree_pages = 0;
        cold.handle = None;
        cold.namespace = u32::try_from(arrival.namespace).unwrap_or(0);
        cold.order = (arrival.background, arrival.priority * AGE + count, arrival.req_id);
        cold.priority = arrival.priority;
        cold.cached_len = 0;
        cold.matched_in = NO_STEP;
        cold.num_admissions = 0;
        cold.num_found_pages = None;
        cold.tail = None;
        cold.stored = (length(arrival.stored_from), length(arrival.stored_to));
        cold.stop_ids = arrival.stop_ids;
        cold.drafter = drafts.then(|| Box::new(Drafter::new(max_draft_len)));
        index
    }

    /// Frees the record of an ended request that has no row in flight.
    pub fn free(&mut self, index: Index) {
        self.sequence_mut(index).tokens = Vec::new();
        self.cold_mut(index).drafter = None;
        self.unused.push(index);
    }

    /// Returns the finish reason of a request whose `len`-th token is `token`, or `None`. Stop wins over length.
    pub fn end_at(&self, index: Index, token: i32, len: u32, eos_ids: &[i32]) -> Option<FinishReason> {
        let request = self.get(index);
        let stops = (request.obeys_eos && eos_ids.contains(&token))
            || (request.has_stop_ids && self.cold(index).stop_ids.contains(&token));
        if stops && len >= request.min_len {
            Some(FinishReason::Stop)
        } else if len >= request.max_len {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Appends the token in flight of a request that was retracted and waits. Returns the finish reason, if it ends.
    pub fn accept(&mut self, index: Index, token: i32, eos_ids: &[i32]) -> Option<FinishReason> {
        self.sequence_mut(index).tokens.push(token);
        let request = self.get_mut(index);
        request.len += 1;
        let len = request.len;
        self.end_at(index, token, len, eos_ids)
    }

    /// Reserves page-table memory for the expected output, so that equally long rows do not all reallocate in one step.
    pub fn reserve_pages(&mut self, index: Index, page_size: usize) {
        let request = self.get(index);
        let length = request.max_len.to_usize().min(request.len.to_usize() + RESERVED_OUTPUT);
        self.sequence_mut(index).pages.reserve(length.div_ceil(page_size));
    }

    /// Returns true if the request has no row while a token of it is in flight: by `no_overlap`, or because of a draft.
    pub fn awaits_token(&self, index: Index) -> bool {
        let drafter = self.cold(index).drafter.as_ref();
        let waits = drafter.is_some_and(|drafter| drafter.draft.len() > 1 || !drafter.in_flight.is_empty());
        self.get(index).no_overlap || waits
    }

    /// Returns true if a draft of the request is in flight.
    pub fn is_drafting(&self, index: Index) -> bool {
        let drafter = self.cold(index).drafter.as_ref();
        drafter.is_some_and(|drafter| !drafter.in_flight.is_empty())
    }

    /// Clears pages, drafts, cache handle and loadable pages of a request. Its slot and pages were freed before.
    pub fn forget_pages(&mut self, index: Index) {
        let cold = self.cold_mut(index);
        cold.handle = None;
        cold.num_tree_pages = 0;
        cold.tail = None;
        cold.stored = (0, 0);
        if let Some(drafter) = &mut cold.drafter {
            drafter.forget();
        }
        self.sequence_mut(index).pages.clear();
        let request = self.get_mut(index);
        request.kv_len = 0;
        request.prefill_len = 0;
        request.slot = NO_SLOT;
    }

    pub fn handle(&self, index: Index) -> NodeId {
        self.cold(index).handle.unwrap_or(NO_NODE)
    }
}

/// Converts a validated count of tokens or pages to `usize`. Negative values become 0.
pub(crate) fn length(tokens: i64) -> usize {
    usize::try_from(tokens).unwrap_or(0)
}

/// Queue of requests, sorted by (background, age, id).
#[derive(Default)]
pub(crate) struct Queue {
    items: Vec<Index>, // items before `head` were removed
    head: usize,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.items.len() - self.head
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of requests that are not in the background. They come first.
    pub fn num_ordinary(&self, requests: &Requests) -> usize {
        let items = &self.items[self.head..];
        items.partition_point(|&index| !requests.get(index).background)
    }

    pub fn first(&self) -> Option<Index> {
        self.items.get(self.head).copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = Index> + '_ {
        self.items[self.head..].iter().copied()
    }

    pub fn add(&mut self, index: Index, requests: &Requests) {
        let at = self.place(index, requests);
        self.items.insert(at, index);
    }

    pub fn remove(&mut self, index: Index, requests: &Requests) -> Result<()> {
        let at = self.place(index, requests);
        if self.items.get(at) != Some(&index) {
            return broken(format!(
                "request {} is not in the list that its state names",
                requests.get(index).req_id
            ));
        }
        if at > self.head {
            self.items.remove(at);
            return Ok(());
        }
        self.head += 1;
        if self.head > self.items.len() / 2 {
            self.items.drain(..self.head);
            self.head = 0;
        }
        Ok(())
    }

    /// Returns the position in `items` at which the request stands or would be inserted.
    fn place(&self, index: Index, requests: &Requests) -> usize {
        let order = requests.cold(index).order;
        let before = |&one: &Index| requests.cold(one).order < order;
        self.head + self.items[self.head..].partition_point(before)
    }
}
