//! State of the scheduler between two calls: the parts that decide, and that the invariants are about.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::admission::ReserveRatio;
use crate::api::Config;
use crate::decode_set::DecodeSet;
use crate::drafts::DraftRow;
use crate::numbers::ToUsize;
use crate::page_pool::{PagePool, PageSize};
use crate::pins::Pins;
use crate::radix::{Checkpoints, RadixTree};
use crate::ranking::Ranking;
use crate::request::{Index, Queue, Requests};
use crate::slots::SlotTable;

/// A step that is scheduled and not yet committed.
#[derive(Default)]
pub(crate) struct InFlight {
    pub step: i64,
    pub rows: Vec<Index>,
    pub sample_rows: Vec<u32>,
    pub first_draft_row: usize, // index of the first row of `drafts`
    pub drafts: Vec<DraftRow>,
}

impl InFlight {
    /// Returns the draft row with index `row` in the step, or `None` if it is no draft row.
    pub fn draft(&self, row: u32) -> Option<&DraftRow> {
        let at = row.to_usize().checked_sub(self.first_draft_row)?;
        self.drafts.get(at)
    }
}

type Ids = HashMap<i64, Index, BuildHasherDefault<DefaultHasher>>;

pub(crate) struct SchedulerState {
    pub tree: RadixTree,
    pub slots: SlotTable,
    pub ratio: ReserveRatio,
    pub pins: Pins,
    pub requests: Requests,
    pub live: Ids,
    pub waiting: Queue,
    pub ranking: Ranking,
    pub started: DecodeSet,
    pub in_flight: VecDeque<InFlight>,
}

impl SchedulerState {
    /// Creates a state without requests: all pages and slots are free.
    pub fn new(config: &Config) -> Self {
        let limits = config.limits();
        let rows = limits.max_rows;
        Self {
            tree: RadixTree::new(
                PagePool::new(config.num_pages),
                config.page_size,
                config.cache,
                (config.checkpoint_interval > 0).then(|| Checkpoints::new(config.num_checkpoints)),
            ),
            slots: SlotTable::new(rows),
            ratio: ReserveRatio::new(),
            pins: Pins::new(config.max_pinned_pages),
            requests: Requests::default(),
            live: Ids::default(),
            waiting: Queue::default(),
            ranking: Ranking::new(config.schedule_policy),
            started: DecodeSet::new(rows, PageSize::new(limits.page_size)),
            in_flight: VecDeque::with_capacity(3),
        }
    }
}
