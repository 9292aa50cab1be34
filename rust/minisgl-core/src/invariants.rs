//! Checks of every invariant that must hold between two calls, from scratch.
//!
//! A check changes nothing; a broken invariant is an error that names it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::admission::{RATIO_MAX, RATIO_MIN};
use crate::api::{Result, need};
use crate::numbers::{ToU32, ToUsize};
use crate::page_pool::Page;
use crate::radix::{NO_CHECKPOINT, NO_NODE, NodeId, ROOT, check_tree};
use crate::request::{Index, NO_SLOT, Requests, State};
use crate::state::SchedulerState;

/// Returns an error at the first invariant that does not hold. O(everything).
pub(crate) fn check_all(state: &SchedulerState) -> Result<()> {
    check_tree(&state.tree)?;
    check_page_owners(state)?;
    check_locks(state)?;
    check_pins(state)?;
    check_lists(state)?;
    check_slots(state)?;
    check_checkpoints(state)?;
    check_pending(state)?;
    for index in state.started.indices().iter().copied() {
        check_started(state, index)?;
    }
    let ratio = state.ratio.value;
    need((RATIO_MIN..=RATIO_MAX).contains(&ratio), || {
        format!("the reserve ratio is {ratio}")
    })
}

/// Checks that each page has one owner: the pool, the tree, or one request.
fn check_page_owners(state: &SchedulerState) -> Result<()> {
    let mut owners = vec![0_u32; state.tree.pool.num_pages()];
    let mut own = |page: Page| -> Result<()> {
        match owners.get_mut(page.to_usize()) {
            Some(count) => {
                *count += 1;
                need(*count == 1, || format!("pages [{page}] have more than one owner"))
            }
            None => need(false, || format!("pages [{page}] have no owner, or don't exist")),
        }
    };
    for &page in state.tree.pool.free_pages() {
        own(page)?;
    }
    for id in state.tree.ids() {
        for &page in &state.tree.node(id).pages {
            own(page)?;
        }
    }
    for index in state.started.indices().iter().copied() {
        let cold = state.requests.cold(index);
        for &page in &state.requests.pages(index)[cold.num_tree_pages..] {
            own(page)?;
        }
    }
    match owners.iter().position(|&count| count == 0) {
        None => Ok(()),
        Some(page) => need(false, || format!("pages [{page}] have no owner, or don't exist")),
    }
}

/// Checks that each node's lock count is the number of handles on it and below it: of started requests and of pins.
fn check_locks(state: &SchedulerState) -> Result<()> {
    let mut locks: HashMap<NodeId, u32> = HashMap::new();
    let started = state.started.indices().iter();
    let handles = started.map(|&index| (state.requests.get(index).req_id, state.requests.handle(index)));
    let pins = state.pins.iter();
    let pinned = pins.filter_map(|(req_id, pin)| pin.handle.map(|handle| (req_id, handle)));
    for (req_id, handle) in handles.chain(pinned) {
        let mut at = handle;
        while at != ROOT {
            need(at != NO_NODE, || {
                format!("request {req_id} locks a node that is not in the tree")
            })?;
            *locks.entry(at).or_default() += 1;
            at = state.tree.node(at).parent;
        }
    }
    for id in state.tree.ids() {
        let (counted, handles) = (state.tree.node(id).lock, locks.get(&id).copied().unwrap_or(0));
        need(counted == handles, || {
            format!("a node has {counted} locks and {handles} handles")
        })?;
    }
    Ok(())
}

/// Checks that a pin covers the full pages of its prompt, and that a pin without pages belongs to a live request.
fn check_pins(state: &SchedulerState) -> Result<()> {
    let (limit, counted) = (state.pins.max_pages, state.pins.num_pages);
    let total: usize = state.pins.iter().map(|(_, pin)| pin.num_pages).sum();
    need(total == counted && total <= limit, || {
        format!("{total} pages are pinned, counted {counted} of {limit}")
    })?;
    for (req_id, pin) in state.pins.iter() {
        let Some(handle) = pin.handle else {
            need(state.live.contains_key(&req_id), || {
                format!("the pin of request {req_id} waits for nobody")
            })?;
            continue;
        };
        let (_, pages) = state.tree.path(handle);
        need(pages.len() == pin.num_pages, || {
            format!("request {req_id} pins {} pages, not {}", pages.len(), pin.num_pages)
        })?;
    }
    Ok(())
}

/// Checks that a request's page table is the path to its locked node and then its own pages, and covers its KV exactly.
fn check_started(state: &SchedulerState, index: Index) -> Result<()> {
    let (request, cold) = (state.requests.get(index), state.requests.cold(index));
    let who = || format!("request {}", request.req_id);
    let size = state.tree.page_size();
    let drafted = cold.drafter.as_ref().map_or(0, |drafter| drafter.in_flight.len());
    let covered = request.kv_len.to_usize() + drafted;
    let num_pages = state.requests.pages(index).len();
    need(num_pages == covered.div_ceil(size), || {
        format!("{}: {num_pages} pages, {covered} KV", who())
    })?;
    let end = request.len.to_usize() + request.num_pending.to_usize() + drafted;
    need(end <= request.max_len.to_usize(), || {
        format!("{}: {end} tokens with {drafted} drafted of {}", who(), request.max_len)
    })?;
    let row = state.started.find(index).map(|at| state.started.row(at));
    need(row.is_some_and(|row| row.equals_record(index, &state.requests)), || {
        format!("{}: its row differs from its record", who())
    })?;
    need(state.requests.tokens(index).len() == request.len.to_usize(), || {
        format!("{}: wrong length", who())
    })?;
    let (tokens, pages) = state.tree.path(state.requests.handle(index));
    need(pages.len() == cold.num_tree_pages, || {
        format!("{}: it locks {} pages, not {}", who(), pages.len(), cold.num_tree_pages)
    })?;
    need(state.requests.pages(index).starts_with(&pages), || {
        format!("{}: its page table differs from the path that it locks", who())
    })?;
    need(state.requests.tokens(index).starts_with(&tokens), || {
        format!("{}: it locks other tokens than its own", who())
    })?;
    let length = request.len + request.num_pending;
    need(length <= request.max_len, || {
        format!("{}: {length} tokens scheduled, the limit is {}", who(), request.max_len)
    })?;
    need(request.is_prefilling() || request.kv_len == length - 1, || {
        format!("{}: KV of {} tokens of {length}", who(), request.kv_len)
    })
}

fn check_lists(state: &SchedulerState) -> Result<()> {
    check_order(state.waiting.iter(), &state.requests, State::Waiting)?;
    check_order(state.started.indices().iter().copied(), &state.requests, State::Started)?;
    let mut listed = BTreeSet::new();
    for index in state.waiting.iter().chain(state.started.indices().iter().copied()) {
        let req_id = state.requests.get(index).req_id;
        need(listed.insert(req_id), || "a request is in two lists".into())?;
        need(state.live.get(&req_id) == Some(&index), || {
            "the lists and the live requests differ".into()
        })?;
    }
    need(listed.len() == state.live.len(), || {
        "the lists and the live requests differ".into()
    })?;
    for index in state.waiting.iter() {
        let (request, cold) = (state.requests.get(index), state.requests.cold(index));
        let holds = cold.handle.is_some() || !state.requests.pages(index).is_empty() || request.slot != NO_SLOT;
        need(!holds, || {
            format!("request {} waits and holds something", request.req_id)
        })?;
    }
    Ok(())
}

fn check_order(list: impl Iterator<Item = Index>, requests: &Requests, expected: State) -> Result<()> {
    let mut last = None;
    for index in list {
        let order = requests.cold(index).order;
        need(last.is_none_or(|last| last < order), || {
            format!("{expected:?} is not sorted")
        })?;
        need(requests.get(index).state == expected, || {
            format!("a request that is {expected:?} has another state")
        })?;
        last = Some(order);
    }
    Ok(())
}

fn check_slots(state: &SchedulerState) -> Result<()> {
    let (free, in_use, draining) = state.slots.owners();
    let mut all: Vec<u32> = free.iter().chain(&in_use).chain(&draining).copied().collect();
    all.sort_unstable();
    need(all.iter().copied().eq(0..state.slots.num_slots().to_u32()), || {
        "a slot is lost or doubled".into()
    })?;
    let mut used: Vec<u32> = state
        .started
        .iter()
        .map(|row| state.requests.get(row.index).slot)
        .collect();
    used.sort_unstable();
    need(used == in_use, || "slots in use and started requests differ".into())
}

/// Checks that each checkpoint slot has one owner, and that pins hold the checkpoints that they record.
fn check_checkpoints(state: &SchedulerState) -> Result<()> {
    let Some(checkpoints) = &state.tree.checkpoints else {
        return Ok(());
    };
    let started = state.started.indices().iter();
    let tails = started.filter_map(|&index| state.requests.cold(index).tail.map(|tail| tail.slot));
    let of_nodes = checkpoints.of_nodes().map(|(slot, _)| slot);
    let mut owned: Vec<u32> = checkpoints
        .free_slots()
        .iter()
        .copied()
        .chain(tails)
        .chain(of_nodes)
        .collect();
    owned.sort_unstable();
    need(owned.into_iter().eq(0..checkpoints.num_slots().to_u32()), || {
        "a slot of a checkpoint is lost or doubled".into()
    })?;
    let has_checkpoint = |id: &NodeId| state.tree.node(*id).checkpoint != NO_CHECKPOINT;
    let with_slots: BTreeSet<NodeId> = checkpoints.of_nodes().map(|(_, node)| node).collect();
    need(
        state.tree.ids().filter(has_checkpoint).collect::<BTreeSet<_>>() == with_slots,
        || "the nodes with checkpoints are others than those that are known".into(),
    )?;
    for (slot, node) in checkpoints.of_nodes() {
        let pins = state.pins.iter().filter(|(_, pin)| pin.saved == Some(node)).count();
        let (listed, held) = checkpoints.listing(slot);
        need(state.tree.node(node).checkpoint == slot, || {
            "a node has another checkpoint".into()
        })?;
        need(held.to_usize() == pins && !(listed && pins > 0), || {
            "pins hold other checkpoints than they say".into()
        })?;
    }
    Ok(())
}

/// Checks that a live request's pending tokens equal its sampling rows in flight, up to its last step.
fn check_pending(state: &SchedulerState) -> Result<()> {
    let mut pending: HashMap<Index, u32> = HashMap::new();
    for flight in &state.in_flight {
        for &index in &flight.rows {
            let request = state.requests.get(index);
            need(request.last_step >= flight.step, || {
                format!("request {} has a row that it does not know of", request.req_id)
            })?;
        }
        for &row in flight.sample_rows.iter().filter(|&&row| flight.draft(row).is_none()) {
            *pending.entry(flight.rows[row.to_usize()]).or_default() += 1;
        }
    }
    for (req_id, &index) in &state.live {
        let expected = pending.get(&index).copied().unwrap_or(0);
        need(state.requests.get(index).num_pending == expected, || {
            format!("request {req_id}: wrong count of pending tokens")
        })?;
    }
    need(state.in_flight.len() <= 2, || {
        format!("{} steps are in flight", state.in_flight.len())
    })
}

/// Page tables of the last check: from a request's admission to its end they only grow, but for pages of drafts.
#[derive(Default)]
pub(crate) struct TableWatch {
    seen: BTreeMap<(i64, u32), Vec<Page>>,
}

impl TableWatch {
    pub fn check(&mut self, state: &SchedulerState) -> Result<()> {
        let mut tables = BTreeMap::new();
        for index in state.started.indices().iter().copied() {
            let cold = state.requests.cold(index);
            let key = (state.requests.get(index).req_id, cold.num_admissions);
            if let Some(before) = self.seen.get(&key) {
                need(state.requests.pages(index).starts_with(before), || {
                    format!("the page table of request {} changed", key.0)
                })?;
            }
            let num_pages = state
                .requests
                .get(index)
                .kv_len
                .to_usize()
                .div_ceil(state.tree.page_size());
            tables.insert(key, state.requests.pages(index)[..num_pages].to_vec());
        }
        self.seen = tables;
        Ok(())
    }
}
