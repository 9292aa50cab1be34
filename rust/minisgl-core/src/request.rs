//! Requests as the control plane sees them, and the sorted lists that they stand in.
//!
//! Keeps true: an index names one request until it has ended and no step in flight holds a row of it; its order key
//! never changes.
//! Doesn't know: the radix tree's inside, the pool.
//!
//! A started request is *prefilling* until the KV of all tokens known at its admission is scheduled, then it *decodes*.
//! What a decode step touches stands in `Request`, one cache line; the rest in `Detail`.

use crate::error::{Result, broken};
use crate::inputs::Arrival;
use crate::output::FinishReason;
use crate::page_pool::Page;
use crate::radix::{NO_NODE, NodeId};

/// Index of a request.
pub(crate) type Index = u32;
pub(crate) const NO_SLOT: u32 = u32::MAX;
pub(crate) const NO_STEP: i64 = i64::MIN;
const MAX_LEN: usize = u32::MAX as usize - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Started,
    Ended,
}

/// What every step looks at. Lengths in tokens.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Request {
    pub req_id: i64,
    pub last_step: i64,   // the last step that holds a row of it
    pub kv_len: u32,      // tokens whose KV is computed, or scheduled to be
    pub prefill_len: u32, // tokens known at this admission
    pub len: u32,         // committed tokens, prompt first
    pub max_len: u32,     // total length at which it ends
    pub min_len: u32,     // total length before which no stop id ends it
    pub slot: u32,
    pub last_page: Page, // of its page table
    pub last_token: i32, // the last committed one
    pub num_pending: u8, // tokens scheduled to be sampled beyond `len`
    pub state: State,
    pub no_overlap: bool,
    pub uses_cache: bool,
    pub obeys_eos: bool,
    pub has_stop_ids: bool,
}

const TAIL: usize = 7;

/// The ends of what grows while it decodes: one cache line, so that a decode step touches two a request. Whatever reads a
/// sequence or a page table whole settles it first.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Tail {
    tokens: [i32; TAIL],
    pages: [Page; TAIL],
    num_tokens: u8,
    num_pages: u8,
}

/// All but the ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Body {
    pub tokens: Vec<i32>, // the committed ones, prompt first
    pub pages: Vec<Page>, // its page table, by column
}

/// The rest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Detail {
    pub order: (i64, u64),     // priority, arrival counter
    pub num_tree_pages: usize, // of these, the first ones belong to the tree
    pub handle: Option<NodeId>,
    pub num_admissions: u32,
    pub stop_ids: Vec<i32>,
}

impl Request {
    pub fn is_prefilling(&self) -> bool {
        self.kv_len < self.prefill_len
    }

    /// Tokens it may still generate beyond those that are known or pending.
    pub fn num_unscheduled(&self) -> usize {
        (self.max_len - self.len) as usize - self.num_pending as usize
    }
}

/// All requests that live, or whose rows are in flight.
#[derive(Default)]
pub(crate) struct Requests {
    pub hot: Vec<Request>,
    tails: Vec<Tail>,
    pub bodies: Vec<Body>,
    pub detail: Vec<Detail>,
    unused: Vec<Index>,
}

impl Requests {
    pub fn get(&self, index: Index) -> &Request {
        &self.hot[index as usize]
    }

    pub fn get_mut(&mut self, index: Index) -> &mut Request {
        &mut self.hot[index as usize]
    }

    /// The committed tokens of a settled request.
    pub fn tokens(&self, index: Index) -> &[i32] {
        debug_assert_eq!(self.tails[index as usize].num_tokens, 0);
        &self.bodies[index as usize].tokens
    }

    /// The page table of a settled request.
    pub fn pages(&self, index: Index) -> &[Page] {
        debug_assert_eq!(self.tails[index as usize].num_pages, 0);
        &self.bodies[index as usize].pages
    }

    pub fn num_pages(&self, index: Index) -> usize {
        self.bodies[index as usize].pages.len() + usize::from(self.tails[index as usize].num_pages)
    }

    /// The page table of any request, copied.
    pub fn page_table(&self, index: Index) -> Vec<Page> {
        let tail = &self.tails[index as usize];
        let mut pages = self.bodies[index as usize].pages.clone();
        pages.extend_from_slice(&tail.pages[..usize::from(tail.num_pages)]);
        pages
    }

    pub fn push_page(&mut self, index: Index, page: Page) {
        if usize::from(self.tails[index as usize].num_pages) == TAIL {
            self.settle(index);
        }
        let tail = &mut self.tails[index as usize];
        tail.pages[usize::from(tail.num_pages)] = page;
        tail.num_pages += 1;
    }

    fn push_token(&mut self, index: Index, token: i32) {
        if usize::from(self.tails[index as usize].num_tokens) == TAIL {
            self.settle(index);
        }
        let tail = &mut self.tails[index as usize];
        tail.tokens[usize::from(tail.num_tokens)] = token;
        tail.num_tokens += 1;
    }

    /// Bring sequence and page table together.
    pub fn settle(&mut self, index: Index) {
        let (tail, body) = (
            &mut self.tails[index as usize],
            &mut self.bodies[index as usize],
        );
        body.tokens
            .extend_from_slice(&tail.tokens[..usize::from(tail.num_tokens)]);
        body.pages
            .extend_from_slice(&tail.pages[..usize::from(tail.num_pages)]);
        tail.num_tokens = 0;
        tail.num_pages = 0;
    }

    pub fn detail(&self, index: Index) -> &Detail {
        &self.detail[index as usize]
    }

    pub fn detail_mut(&mut self, index: Index) -> &mut Detail {
        &mut self.detail[index as usize]
    }

    /// The request of a valid `arrival`, the `count`-th one. `caches` is false without a prefix cache.
    pub fn add(&mut self, arrival: Arrival, count: u64, max_seq_len: usize, caches: bool) -> Index {
        let limit = length(arrival.num_prompt.saturating_add(arrival.max_tokens)).min(max_seq_len);
        let request = Request {
            req_id: arrival.req_id,
            last_step: NO_STEP,
            kv_len: 0,
            prefill_len: 0,
            len: arrival.tokens.len() as u32,
            max_len: limit.min(MAX_LEN) as u32,
            min_len: length(arrival.num_prompt.saturating_add(arrival.min_tokens)).min(MAX_LEN)
                as u32,
            slot: NO_SLOT,
            last_page: 0,
            last_token: arrival.tokens.last().copied().unwrap_or(0),
            num_pending: 0,
            state: State::Waiting,
            no_overlap: arrival.no_overlap,
            uses_cache: caches && !arrival.no_match,
            obeys_eos: !arrival.ignore_eos,
            has_stop_ids: !arrival.stop_ids.is_empty(),
        };
        let index = match self.unused.pop() {
            Some(index) => {
                self.hot[index as usize] = request;
                index
            }
            None => {
                self.hot.push(request);
                self.tails.push(Tail::default());
                self.bodies.push(Body::default());
                self.detail.push(Detail::default());
                self.hot.len() as Index - 1
            }
        };
        let detail = &mut self.detail[index as usize];
        let mut tokens = arrival.tokens;
        // room for what it generates, so that a decode step need not allocate
        tokens.reserve(limit.saturating_sub(tokens.len()).min(RESERVED_OUTPUT));
        detail.order = (arrival.priority, count);
        self.tails[index as usize] = Tail::default();
        self.bodies[index as usize].tokens = tokens;
        self.bodies[index as usize].pages.clear();
        detail.num_tree_pages = 0;
        detail.handle = None;
        detail.num_admissions = 0;
        detail.stop_ids = arrival.stop_ids;
        index
    }

    /// Forget an ended request of which no row is in flight.
    pub fn free(&mut self, index: Index) {
        self.bodies[index as usize].tokens = Vec::new();
        self.unused.push(index);
    }

    /// Take a sampled token; whether it ends the request, and how. Stop wins over length.
    pub fn accept(&mut self, index: Index, token: i32, eos_ids: &[i32]) -> FinishReason {
        self.push_token(index, token);
        let request = &mut self.hot[index as usize];
        request.len += 1;
        request.last_token = token;
        let stops = (request.obeys_eos && eos_ids.contains(&token))
            || (request.has_stop_ids && self.detail[index as usize].stop_ids.contains(&token));
        if stops && request.len >= request.min_len {
            FinishReason::Stop
        } else if request.len >= request.max_len {
            FinishReason::Length
        } else {
            FinishReason::None
        }
    }

    /// Room in the page table for what it may generate, so that rows in lockstep don't all grow theirs in one step.
    pub fn reserve_pages(&mut self, index: Index, page_size: usize) {
        let request = self.get(index);
        let length = (request.max_len as usize).min(request.len as usize + RESERVED_OUTPUT);
        self.bodies[index as usize]
            .pages
            .reserve(length.div_ceil(page_size));
    }

    /// The request holds nothing any more. Its slot is the scheduler's business, and must be taken before.
    pub fn forget_pages(&mut self, index: Index) {
        let detail = &mut self.detail[index as usize];
        detail.handle = None;
        detail.num_tree_pages = 0;
        self.bodies[index as usize].pages.clear();
        self.tails[index as usize].num_pages = 0;
        let request = &mut self.hot[index as usize];
        request.kv_len = 0;
        request.prefill_len = 0;
        request.slot = NO_SLOT;
    }

    pub fn handle(&self, index: Index) -> NodeId {
        self.detail(index).handle.unwrap_or(NO_NODE)
    }
}

const RESERVED_OUTPUT: usize = 1024;

/// A checked number of tokens is not negative.
fn length(tokens: i64) -> usize {
    usize::try_from(tokens).unwrap_or(0)
}

/// Requests sorted by (priority, arrival).
#[derive(Default)]
pub(crate) struct Queue {
    items: Vec<Index>, // those before `head` have left
    head: usize,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.items.len() - self.head
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, at: usize) -> Index {
        self.items[self.head + at]
    }

    pub fn first(&self) -> Option<Index> {
        self.items.get(self.head).copied()
    }

    pub fn last(&self) -> Option<Index> {
        self.iter().next_back()
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Index> + '_ {
        self.items[self.head..].iter().copied()
    }

    pub fn clear(&mut self) {
        self.items.clear();
        self.head = 0;
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

    /// Where the request stands, or would stand.
    fn place(&self, index: Index, requests: &Requests) -> usize {
        let order = requests.detail(index).order;
        let before = |&one: &Index| requests.detail(one).order < order;
        self.head + self.items[self.head..].partition_point(before)
    }
}
