//! Checks everything that must hold between two calls, from scratch.
//!
//! Keeps true: nothing is changed by a check; a broken invariant is an error that says which.
//! Doesn't know: what is in the KV pool (the echo engine's audit compares that with the tree).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::admission::{RATIO_MAX, RATIO_MIN};
use crate::config::CachePolicy;
use crate::error::{Result, need};
use crate::page_pool::Page;
use crate::radix::{NO_NODE, NodeId, ROOT, RadixTree};
use crate::request::{Index, NO_SLOT, Requests, State};
use crate::scheduler::Scheduler;

/// An error at the first invariant that doesn't hold. O(everything).
pub(crate) fn check_all(plane: &Scheduler) -> Result<()> {
    check_tree(&plane.tree)?;
    check_page_owners(plane)?;
    check_locks(plane)?;
    check_lists(plane)?;
    check_slots(plane)?;
    check_pending(plane)?;
    for index in plane.started.indices().iter().copied() {
        check_started(plane, index)?;
    }
    let ratio = plane.ratio.value;
    need((RATIO_MIN..=RATIO_MAX).contains(&ratio), || {
        format!("the reserve ratio is {ratio}")
    })
}

/// Shape: links, whole pages, keys, counters, and that every unlocked leaf can be found by eviction.
pub(crate) fn check_tree(tree: &RadixTree) -> Result<()> {
    let (mut evictable, mut protected, mut count) = (0, 0, 0);
    let mut leaves = BTreeSet::new();
    let mut unlocked = BTreeSet::new();
    let mut children: HashMap<NodeId, u32> = HashMap::new();
    let mut siblings: BTreeSet<(NodeId, &[i32])> = BTreeSet::new();
    for id in tree.ids() {
        let node = tree.node(id);
        count += 1;
        need(!node.pages.is_empty(), || {
            "a node of the tree has no pages".into()
        })?;
        need(
            node.tokens.len() == node.pages.len() * tree.page_size(),
            || "the tokens of a node don't fill its pages".into(),
        )?;
        if node.lock == 0 {
            evictable += node.pages.len();
            unlocked.insert(id);
            if node.num_children == 0 {
                leaves.insert(id);
            }
        } else {
            protected += node.pages.len();
        }
        *children.entry(node.parent).or_default() += 1;
        need(
            siblings.insert((node.parent, &node.tokens[..tree.page_size()])),
            || "two siblings begin alike".into(),
        )?;
        need(tree.has_page(node.parent, &node.tokens, 0), || {
            "a node does not hang under the key that its tokens begin with".into()
        })?;
        need(
            node.parent == ROOT || node.lock <= tree.node(node.parent).lock,
            || "a node has more locks than its parent".into(),
        )?;
    }
    for id in tree.ids().chain([ROOT]) {
        let known = children.get(&id).copied().unwrap_or(0);
        need(tree.node(id).num_children == known, || {
            "a node miscounts its children".into()
        })?;
    }
    need(evictable == tree.num_evictable(), || {
        format!(
            "{evictable} pages are evictable, counted {}",
            tree.num_evictable()
        )
    })?;
    need(protected == tree.num_protected(), || {
        format!(
            "{protected} pages are protected, counted {}",
            tree.num_protected()
        )
    })?;
    need(count == tree.num_nodes(), || {
        format!("the tree has {count} nodes, counted {}", tree.num_nodes())
    })?;
    let known: BTreeSet<NodeId> = tree.known_to_eviction().into_iter().collect();
    let expected = if tree.policy() == CachePolicy::Lfu {
        leaves
    } else {
        unlocked
    };
    need(known == expected, || {
        "eviction does not know the unlocked nodes".into()
    })
}

/// Each page is owned once: by the pool, the tree, or one request.
fn check_page_owners(plane: &Scheduler) -> Result<()> {
    let mut owners = vec![0_u32; plane.tree.pool.num_pages()];
    let mut own = |page: Page| -> Result<()> {
        match owners.get_mut(page as usize) {
            Some(count) => {
                *count += 1;
                need(*count == 1, || {
                    format!("pages [{page}] have more than one owner")
                })
            }
            None => need(false, || {
                format!("pages [{page}] have no owner, or don't exist")
            }),
        }
    };
    for &page in plane.tree.pool.free_pages() {
        own(page)?;
    }
    for id in plane.tree.ids() {
        for &page in &plane.tree.node(id).pages {
            own(page)?;
        }
    }
    for index in plane.started.indices().iter().copied() {
        let detail = plane.requests.detail(index);
        for &page in &plane.requests.pages(index)[detail.num_tree_pages..] {
            own(page)?;
        }
    }
    match owners.iter().position(|&count| count == 0) {
        None => Ok(()),
        Some(page) => need(false, || {
            format!("pages [{page}] have no owner, or don't exist")
        }),
    }
}

/// Lock counts are the numbers of handles on a node and below it.
fn check_locks(plane: &Scheduler) -> Result<()> {
    let mut locks: HashMap<NodeId, u32> = HashMap::new();
    for index in plane.started.indices().iter().copied() {
        let mut at = plane.requests.handle(index);
        while at != ROOT {
            need(at != NO_NODE, || {
                let req_id = plane.requests.get(index).req_id;
                format!("request {req_id} locks a node that is not in the tree")
            })?;
            *locks.entry(at).or_default() += 1;
            at = plane.tree.node(at).parent;
        }
    }
    for id in plane.tree.ids() {
        let (counted, handles) = (
            plane.tree.node(id).lock,
            locks.get(&id).copied().unwrap_or(0),
        );
        need(counted == handles, || {
            format!("a node has {counted} locks and {handles} handles")
        })?;
    }
    Ok(())
}

/// Its page table is the path to the node that it locks, then its own tail, and covers its KV exactly.
fn check_started(plane: &Scheduler, index: Index) -> Result<()> {
    let (request, detail) = (plane.requests.get(index), plane.requests.detail(index));
    let who = || format!("request {}", request.req_id);
    let size = plane.tree.page_size();
    need(
        plane.requests.pages(index).len() == (request.kv_len as usize).div_ceil(size),
        || {
            format!(
                "{}: {} pages, {} KV",
                who(),
                plane.requests.pages(index).len(),
                request.kv_len
            )
        },
    )?;
    let row = plane.started.find(index).map(|at| plane.started.row(at));
    need(
        row.is_some_and(|row| row.is_of(index, &plane.requests)),
        || format!("{}: its row differs from its record", who()),
    )?;
    need(
        plane.requests.tokens(index).len() == request.len as usize,
        || format!("{}: wrong length", who()),
    )?;
    let (tokens, pages) = plane.tree.path(plane.requests.handle(index));
    need(pages.len() == detail.num_tree_pages, || {
        format!(
            "{}: it locks {} pages, not {}",
            who(),
            pages.len(),
            detail.num_tree_pages
        )
    })?;
    need(plane.requests.pages(index).starts_with(&pages), || {
        format!(
            "{}: its page table differs from the path that it locks",
            who()
        )
    })?;
    need(plane.requests.tokens(index).starts_with(&tokens), || {
        format!("{}: it locks other tokens than its own", who())
    })?;
    let length = request.len + request.num_pending;
    need(length <= request.max_len, || {
        format!(
            "{}: {length} tokens scheduled, the limit is {}",
            who(),
            request.max_len
        )
    })?;
    need(
        request.is_prefilling() || request.kv_len == length - 1,
        || format!("{}: KV of {} tokens of {length}", who(), request.kv_len),
    )
}

fn check_lists(plane: &Scheduler) -> Result<()> {
    check_order(plane.waiting.iter(), &plane.requests, State::Waiting)?;
    check_order(
        plane.started.indices().iter().copied(),
        &plane.requests,
        State::Started,
    )?;
    let mut listed = BTreeSet::new();
    for index in plane
        .waiting
        .iter()
        .chain(plane.started.indices().iter().copied())
    {
        let req_id = plane.requests.get(index).req_id;
        need(listed.insert(req_id), || "a request is in two lists".into())?;
        need(plane.live.get(&req_id) == Some(&index), || {
            "the lists and the live requests differ".into()
        })?;
    }
    need(listed.len() == plane.live.len(), || {
        "the lists and the live requests differ".into()
    })?;
    for index in plane.waiting.iter() {
        let (request, detail) = (plane.requests.get(index), plane.requests.detail(index));
        let holds = detail.handle.is_some()
            || !plane.requests.pages(index).is_empty()
            || request.slot != NO_SLOT;
        need(!holds, || {
            format!("request {} waits and holds something", request.req_id)
        })?;
    }
    Ok(())
}

fn check_order(list: impl Iterator<Item = Index>, requests: &Requests, state: State) -> Result<()> {
    let mut last = None;
    for index in list {
        let order = requests.detail(index).order;
        need(last.is_none_or(|last| last < order), || {
            format!("{state:?} is not sorted")
        })?;
        need(requests.get(index).state == state, || {
            format!("a request that is {state:?} has another state")
        })?;
        last = Some(order);
    }
    Ok(())
}

fn check_slots(plane: &Scheduler) -> Result<()> {
    let (free, in_use, draining) = plane.slots.owners();
    let mut all: Vec<u32> = free
        .iter()
        .chain(&in_use)
        .chain(&draining)
        .copied()
        .collect();
    all.sort_unstable();
    need(
        all.iter().copied().eq(0..plane.slots.num_slots() as u32),
        || "a slot is lost or doubled".into(),
    )?;
    let mut held: Vec<u32> = plane
        .started
        .iter()
        .map(|row| plane.requests.get(row.index).slot)
        .collect();
    held.sort_unstable();
    need(held == in_use, || {
        "slots in use and started requests differ".into()
    })
}

/// A live request's pending tokens are those of its sampling rows in flight; nobody is in flight past its step.
fn check_pending(plane: &Scheduler) -> Result<()> {
    let mut pending: HashMap<Index, u32> = HashMap::new();
    for flight in &plane.in_flight {
        for &index in &flight.rows {
            let request = plane.requests.get(index);
            need(request.last_step >= flight.step, || {
                format!(
                    "request {} has a row that it does not know of",
                    request.req_id
                )
            })?;
        }
        for &row in &flight.sample_rows {
            *pending.entry(flight.rows[row as usize]).or_default() += 1;
        }
    }
    for (req_id, &index) in &plane.live {
        let expected = pending.get(&index).copied().unwrap_or(0);
        need(plane.requests.get(index).num_pending == expected, || {
            format!("request {req_id}: wrong count of pending tokens")
        })?;
    }
    need(plane.in_flight.len() <= 2, || {
        format!("{} steps are in flight", plane.in_flight.len())
    })
}

/// Remembers page tables from one check to the next: they only grow, from one admission to its end.
#[derive(Default)]
pub(crate) struct TableWatch {
    seen: BTreeMap<(i64, u32), Vec<Page>>,
}

impl TableWatch {
    pub fn check(&mut self, plane: &Scheduler) -> Result<()> {
        let mut tables = BTreeMap::new();
        for index in plane.started.indices().iter().copied() {
            let detail = plane.requests.detail(index);
            let key = (plane.requests.get(index).req_id, detail.num_admissions);
            if let Some(before) = self.seen.get(&key) {
                need(plane.requests.pages(index).starts_with(before), || {
                    format!("the page table of request {} changed", key.0)
                })?;
            }
            tables.insert(key, plane.requests.pages(index).to_vec());
        }
        self.seen = tables;
        Ok(())
    }
}
