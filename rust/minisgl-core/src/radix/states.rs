//! What a radix tree does with checkpoints of states (`checkpoints`): finding, saving, and giving up what nobody finds.

use super::checkpoints::Checkpoints;
use super::nodes::{NO_CHECKPOINT, NO_NODE, NodeId, ROOT, Slot};
use super::tree::{Match, RadixTree};
use crate::api::{Result, broken};
use crate::numbers::{ToU64, ToUsize};

impl RadixTree {
    /// The part of `found`, looked for below `node`, with whose state a row of `step` can begin: to the deepest node
    /// with a checkpoint that an earlier step saves, or nothing of it. All unlocked pages count as in `found`.
    pub fn beginning(&self, node: NodeId, mut found: Match, step: i64) -> Match {
        let mut num_pages = found.pages.len() - found.num_partial_pages;
        while found.node != node {
            let end = self.node(found.node);
            if end.checkpoint != NO_CHECKPOINT && end.saved_in < step {
                break;
            }
            num_pages -= end.pages.len();
            found.node = end.parent;
        }
        found.pages.truncate(num_pages);
        found.partial = NO_NODE;
        found.num_partial_pages = 0;
        found
    }

    /// The slot to which `step` saves the state at the end of `found`, whose edge is split there; none if there is one
    /// already, or no slot.
    pub fn save(&mut self, found: &Match, step: i64) -> Result<Option<Slot>> {
        let node = match found.partial {
            NO_NODE => found.node,
            partial => self.split(partial, found.num_partial_pages)?,
        };
        if self.node(node).checkpoint != NO_CHECKPOINT {
            return Ok(None);
        }
        let slot = self.take_slot()?;
        if let Some(slot) = slot {
            self.put_checkpoint(node, slot, step)?;
        }
        Ok(slot)
    }

    /// `slot` holds, or will hold after `step`, the state at the end of `node`.
    pub fn put_checkpoint(&mut self, node: NodeId, slot: Slot, step: i64) -> Result<()> {
        let (Some(checkpoints), end) = (&mut self.checkpoints, self.nodes.get_mut(node)) else {
            return broken("a state was saved of a model that has none");
        };
        if end.checkpoint != NO_CHECKPOINT || end.parent == NO_NODE {
            return broken("a checkpoint was given to a node that has one, or is gone");
        }
        end.checkpoint = slot;
        end.saved_in = step;
        checkpoints.nodes[slot.to_usize()] = node;
        checkpoints.new.push(slot);
        Ok(())
    }

    /// A slot for a checkpoint: a free one, else that of the checkpoint that is worth least. None if none may go.
    pub fn take_slot(&mut self) -> Result<Option<Slot>> {
        let Some(checkpoints) = &mut self.checkpoints else {
            return Ok(None);
        };
        if let Some(slot) = checkpoints.free.pop() {
            return Ok(Some(slot));
        }
        let Some(&(worth, _, slot)) = checkpoints.order.first() else {
            return Ok(None);
        };
        checkpoints.floor = worth;
        let node = checkpoints.nodes[slot.to_usize()];
        self.take_off(node);
        self.prune(node)?;
        Ok(Some(slot))
    }

    /// The node has no checkpoint any more; the slot that it had, which is not free yet.
    fn take_off(&mut self, node: NodeId) -> Option<Slot> {
        let slot = std::mem::replace(&mut self.nodes.get_mut(node).checkpoint, NO_CHECKPOINT);
        let checkpoints = self.checkpoints.as_mut()?;
        if slot == NO_CHECKPOINT {
            return None;
        }
        checkpoints.unlist(slot);
        checkpoints.nodes[slot.to_usize()] = NO_NODE;
        checkpoints.new.retain(|&new| new != slot);
        Some(slot)
    }

    /// What a node had at its end is gone.
    pub(super) fn free_checkpoint(&mut self, node: NodeId) {
        if let Some(slot) = self.take_off(node) {
            self.free_slot(slot);
        }
    }

    /// The slot of the state at the end of a node; -1 if there is none.
    pub fn checkpoint(&self, node: NodeId) -> i64 {
        match self.node(node).checkpoint {
            NO_CHECKPOINT => -1,
            slot => i64::from(slot),
        }
    }

    /// Whether it is the tree of a model with states.
    pub fn has_states(&self) -> bool {
        self.checkpoints.is_some()
    }

    /// The stack of free slots.
    pub fn free_slots(&self) -> &[Slot] {
        self.checkpoints.as_ref().map_or(&[], Checkpoints::free_slots)
    }

    /// The slots that pins keep.
    pub fn held_slots(&self) -> Vec<Slot> {
        let held = self
            .checkpoints
            .iter()
            .flat_map(|checkpoints| (0..).zip(&checkpoints.held));
        held.filter_map(|(slot, &pins)| (pins > 0).then_some(slot)).collect()
    }

    /// Slots that nodes or requests have.
    pub fn num_checkpoints(&self) -> usize {
        self.checkpoints.as_ref().map_or(0, Checkpoints::num_used)
    }

    /// A slot that no node has.
    pub fn free_slot(&mut self, slot: Slot) {
        if let Some(checkpoints) = &mut self.checkpoints
            && slot != NO_CHECKPOINT
        {
            checkpoints.push(slot);
        }
    }

    /// Somebody begins with the checkpoint of a node: it is worth its tokens again.
    pub fn use_checkpoint(&mut self, node: NodeId) {
        let slot = self.node(node).checkpoint;
        if let Some(checkpoints) = &mut self.checkpoints
            && checkpoints.worth[slot.to_usize()].is_some()
        {
            checkpoints.unlist(slot);
            self.enlist(slot);
        }
    }

    /// The step is decided: what it saves may be given up from now on.
    pub fn settle_checkpoints(&mut self) {
        let Some(checkpoints) = &mut self.checkpoints else {
            return;
        };
        let mut new = std::mem::take(&mut checkpoints.new);
        for slot in new.drain(..) {
            self.enlist(slot);
        }
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.new = new; // keeps its room
        }
    }

    /// A pin keeps the deepest checkpoint on the path to `handle`; its node, if there is one.
    pub fn hold_deepest(&mut self, handle: NodeId) -> Option<NodeId> {
        let mut at = handle;
        while at != ROOT && self.node(at).checkpoint == NO_CHECKPOINT {
            at = self.node(at).parent;
        }
        let checkpoints = self.checkpoints.as_mut().filter(|_| at != ROOT)?;
        let slot = self.nodes.get(at).checkpoint;
        checkpoints.held[slot.to_usize()] += 1;
        checkpoints.unlist(slot);
        Some(at)
    }

    /// The pin is gone.
    pub fn unhold(&mut self, node: NodeId) {
        let slot = self.node(node).checkpoint;
        let Some(checkpoints) = &mut self.checkpoints else {
            return;
        };
        checkpoints.held[slot.to_usize()] -= 1;
        if !checkpoints.new.contains(&slot) {
            self.enlist(slot);
        }
    }

    /// It may be given up, unless a pin holds it.
    fn enlist(&mut self, slot: Slot) {
        let Some(checkpoints) = &self.checkpoints else {
            return;
        };
        if checkpoints.held[slot.to_usize()] > 0 {
            return;
        }
        let tokens = self
            .tokens_since_checkpoint(checkpoints.nodes[slot.to_usize()])
            .to_u64();
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.uses += 1;
            let (worth, uses) = (checkpoints.floor + tokens, checkpoints.uses);
            checkpoints.worth[slot.to_usize()] = Some((worth, uses));
            checkpoints.order.insert((worth, uses, slot));
        }
    }

    /// From the end of the next node above that has one, or from the root, to the end of `node`.
    fn tokens_since_checkpoint(&self, node: NodeId) -> usize {
        let mut at = node;
        let mut count = 0;
        while at != ROOT {
            count += self.node(at).tokens.len();
            at = self.node(at).parent;
            if self.node(at).checkpoint != NO_CHECKPOINT {
                break;
            }
        }
        count
    }

    /// For a model with states: free `node`, and what is above it, as far as nobody holds it or can find it.
    pub(super) fn prune(&mut self, node: NodeId) -> Result<()> {
        let mut at = node;
        while self.checkpoints.is_some() && at != ROOT {
            let node = self.node(at);
            let in_use = node.parent == NO_NODE || node.lock + node.num_children > 0;
            if in_use || node.checkpoint != NO_CHECKPOINT {
                break;
            }
            let parent = node.parent;
            self.free_end(at, 0)?;
            at = parent;
        }
        Ok(())
    }

    /// Each checkpoint with the path to it, as `tree_pages` has it.
    pub fn tree_states(&self) -> Vec<(Vec<i32>, Slot)> {
        let of_nodes = self.checkpoints.iter().flat_map(Checkpoints::of_nodes);
        let path = |node: NodeId| {
            let namespace = self.node(node).namespace;
            let before = (namespace > 0).then(|| -namespace.cast_signed());
            before.into_iter().chain(self.path(node).0).collect()
        };
        of_nodes.map(|(slot, node)| (path(node), slot)).collect()
    }
}
