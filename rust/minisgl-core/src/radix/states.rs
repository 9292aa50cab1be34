//! State checkpoints of the radix tree (`checkpoints`): match, save, pin, and removal of nodes that no match can reach.

use super::checkpoints::Checkpoints;
use super::nodes::{NO_CHECKPOINT, NO_NODE, NodeId, ROOT, Slot};
use super::tree::{Match, RadixTree};
use crate::api::{Result, broken};
use crate::numbers::{ToU64, ToUsize};

impl RadixTree {
    /// Truncates `found`, a match below `node`, to the deepest node with a checkpoint saved before `step`, from whose
    /// state a row of `step` can begin; empty if there is none. `num_unlocked` still counts the whole match.
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

    /// Assigns a slot for the state that `step` saves at the end of `found`; the edge is split there. `None` if the
    /// node has a checkpoint or no slot is available.
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

    /// Sets `slot`, which holds the state after `step`, as checkpoint of `node`. `Error::Broken` if it has one or is
    /// gone.
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

    /// Allocates a slot: a free one, else that of the evictable checkpoint of least worth. `None` if there is neither.
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

    /// Removes the checkpoint of `node` and returns its slot, which is not freed. `None` if it had none.
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

    /// Removes the checkpoint of `node` and frees its slot.
    pub(super) fn free_checkpoint(&mut self, node: NodeId) {
        if let Some(slot) = self.take_off(node) {
            self.free_slot(slot);
        }
    }

    /// Returns the slot of the checkpoint at the end of `node`, or -1 if it has none.
    pub fn checkpoint(&self, node: NodeId) -> i64 {
        match self.node(node).checkpoint {
            NO_CHECKPOINT => -1,
            slot => i64::from(slot),
        }
    }

    /// Returns true if the model has recurrent state, so that matches must end at a checkpoint.
    pub fn has_states(&self) -> bool {
        self.checkpoints.is_some()
    }

    /// Returns the stack of free checkpoint slots.
    pub fn free_slots(&self) -> &[Slot] {
        self.checkpoints.as_ref().map_or(&[], Checkpoints::free_slots)
    }

    /// Returns the checkpoint slots that pins hold.
    pub fn held_slots(&self) -> Vec<Slot> {
        let counts = self
            .checkpoints
            .iter()
            .flat_map(|checkpoints| (0..).zip(&checkpoints.held));
        counts.filter_map(|(slot, &pins)| (pins > 0).then_some(slot)).collect()
    }

    /// Returns the number of checkpoint slots in use by nodes or requests.
    pub fn num_checkpoints(&self) -> usize {
        self.checkpoints.as_ref().map_or(0, Checkpoints::num_used)
    }

    /// Frees a checkpoint slot that no node has.
    pub fn free_slot(&mut self, slot: Slot) {
        if let Some(checkpoints) = &mut self.checkpoints
            && slot != NO_CHECKPOINT
        {
            checkpoints.push(slot);
        }
    }

    /// Renews the worth of a node's checkpoint, because a request begins with it.
    pub fn use_checkpoint(&mut self, node: NodeId) {
        let slot = self.node(node).checkpoint;
        if let Some(checkpoints) = &mut self.checkpoints
            && checkpoints.worth[slot.to_usize()].is_some()
        {
            checkpoints.unlist(slot);
            self.enlist(slot);
        }
    }

    /// Makes the checkpoints saved in this step evictable. Call once a step, after it is decided.
    pub fn settle_checkpoints(&mut self) {
        let Some(checkpoints) = &mut self.checkpoints else {
            return;
        };
        let mut new = std::mem::take(&mut checkpoints.new);
        for slot in new.drain(..) {
            self.enlist(slot);
        }
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.new = new; // keeps its memory
        }
    }

    /// Pins the deepest checkpoint on the path to `handle` and returns its node, or `None` if the path has none.
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

    /// Releases a pin's hold on the checkpoint of `node`. It is evictable once no pin holds it.
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

    /// Adds `slot` to the eviction order, unless a pin holds it.
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

    /// Returns the tokens between the end of `node` and the nearest checkpoint above it, or the root.
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

    /// Frees `node` and its ancestors while they are unlocked leaves without a checkpoint. No-op without states.
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

    /// Returns each checkpoint's slot with the tokens of the path to it, in the format of `tree_pages`.
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
