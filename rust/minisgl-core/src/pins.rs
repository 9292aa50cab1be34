//! Pins: prompt pages that stay in the radix tree after the end of their request.
//!
//! Invariants: the pages of all pins, shared ones counted for each, are within the limit from the arrival of their
//! requests on; a pin locks its pages from the step on in which the last of them was scheduled, even if the request is
//! retracted later.
//!
//! Because a pin locks that early, every request that ends by itself has its pin: a retraction before its last token
//! does not cost it.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::{Result, broken};
use crate::numbers::ToUsize;
use crate::radix::{NodeId, ROOT, RadixTree};
use crate::request::{Index, Requests};

/// A pin of the first `num_pages` pages of a prompt. `handle`: the locked node, `None` until the prompt is scheduled.
pub(crate) struct Pin {
    pub num_pages: usize,
    pub handle: Option<NodeId>,
    pub saved: Option<NodeId>, // deepest node on the path with a checkpoint, held by the pin
}

/// All pins by request id, of live and of ended requests.
pub(crate) struct Pins {
    pins: BTreeMap<i64, Pin>,
    pub max_pages: usize,
    pub num_pages: usize, // shared pages counted for each pin
}

impl Pins {
    pub fn new(max_pages: usize) -> Self {
        Self {
            pins: BTreeMap::new(),
            max_pages,
            num_pages: 0,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (i64, &Pin)> {
        self.pins.iter().map(|(&req_id, pin)| (req_id, pin))
    }

    /// Returns how many pages the request's pin locks or will lock, or `None` if it has no pin.
    pub fn pages_of(&self, req_id: i64) -> Option<usize> {
        self.pins.get(&req_id).map(|pin| pin.num_pages)
    }

    /// Registers the pin of a new request, for `num_pages` pages. Locks nothing yet.
    pub fn register(&mut self, req_id: i64, num_pages: usize) {
        let (handle, saved) = (None, None);
        self.pins.insert(
            req_id,
            Pin {
                num_pages,
                handle,
                saved,
            },
        );
        self.num_pages += num_pages;
    }

    /// Locks the pages of the request's pin once the last of them is scheduled. Returns true if this call locked them.
    pub fn take(&mut self, requests: &Requests, index: Index, tree: &mut RadixTree) -> Result<bool> {
        if self.pins.is_empty() {
            return Ok(false);
        }
        let request = requests.get(index);
        let Some(pin) = self.pins.get_mut(&request.req_id) else {
            return Ok(false);
        };
        if pin.handle.is_some() || request.kv_len.to_usize() < pin.num_pages * tree.page_size() {
            return Ok(false);
        }
        let namespace = requests.cold(index).namespace;
        let matched = tree.find(ROOT, namespace, requests.tokens(index), 0, pin.num_pages);
        let (got, wanted) = (matched.pages.len(), pin.num_pages);
        if got != wanted {
            return broken(format!("request {}: {got} of {wanted} pages to pin", request.req_id));
        }
        pin.handle = Some(tree.descend(ROOT, &matched)?);
        Ok(true)
    }

    /// Holds the deepest state checkpoint on the locked path. Call after the step's checkpoints are assigned.
    pub fn hold(&mut self, req_id: i64, tree: &mut RadixTree) {
        if let Some(pin) = self.pins.get_mut(&req_id) {
            pin.saved = pin.handle.and_then(|handle| tree.hold_deepest(handle));
        }
    }

    /// Returns true if the request's pin has locked its pages.
    pub fn holds(&self, req_id: i64) -> bool {
        self.pins.get(&req_id).is_some_and(|pin| pin.handle.is_some())
    }

    /// Removes the request's pin, so that its pages may be evicted. No-op if it has none.
    pub fn drop(&mut self, req_id: i64, tree: &mut RadixTree) -> Result<()> {
        let Some(pin) = self.pins.remove(&req_id) else {
            return Ok(());
        };
        self.num_pages -= pin.num_pages;
        if let Some(node) = pin.saved {
            tree.unhold(node);
        }
        match pin.handle {
            Some(handle) => tree.release(handle),
            None => Ok(()),
        }
    }

    /// Unlocks all pins after the tree was reset. Pins of live requests remain and will lock again; others are removed.
    pub fn forget(&mut self, is_live: impl Fn(i64) -> bool) {
        self.pins.retain(|&req_id, pin| {
            pin.handle = None;
            pin.saved = None;
            is_live(req_id)
        });
        self.num_pages = self.pins.values().map(|pin| pin.num_pages).sum();
    }

    /// Returns the number of tree pages that pins lock, each counted once.
    pub fn num_locked_pages(&self, tree: &RadixTree) -> usize {
        self.locked_nodes(tree)
            .iter()
            .map(|&id| tree.node(id).pages.len())
            .sum()
    }

    /// Returns the nodes of the tree that pins lock.
    pub fn locked_nodes(&self, tree: &RadixTree) -> BTreeSet<NodeId> {
        let mut nodes = BTreeSet::new();
        for handle in self.pins.values().filter_map(|pin| pin.handle) {
            let mut at = handle;
            while at != ROOT && nodes.insert(at) {
                at = tree.node(at).parent;
            }
        }
        nodes
    }
}
