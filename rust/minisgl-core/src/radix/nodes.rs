//! Nodes of the radix tree, and the hash table that finds a node's child by its first page.
//!
//! Invariants: a node is linked below its parent under its namespace and the tokens of its first page, in which
//! siblings differ.
//!
//! One table for the whole tree maps (parent, hash of namespace and first page's tokens) to chains through the nodes.
//! Hashes may collide, so tokens are always compared. At start the table has one entry for each page of the pool, up to
//! `MAX_HEADS`, already touched in memory; it doubles when there are more nodes.

use crate::numbers::{LowBits, ToU32, ToUsize};
use crate::page_pool::Page;

/// Index of a node in the tree's arena. Reused after the node is removed.
pub(crate) type NodeId = u32;
pub(crate) const NO_NODE: NodeId = NodeId::MAX;
pub(crate) const ROOT: NodeId = 0;
/// Index of a state checkpoint's slot.
pub(crate) type Slot = u32;
pub(crate) const NO_CHECKPOINT: Slot = Slot::MAX;
/// Cache namespace: prefixes are shared only within it. 0 is the default namespace.
pub(crate) type Namespace = u32;
const MAX_HEADS: usize = 1 << 20;

/// A node with the edge that leads to it: `pages` hold the KV of `tokens`.
#[derive(Default)]
pub(crate) struct Node {
    pub parent: NodeId,
    pub tokens: Vec<i32>,
    pub pages: Vec<Page>,
    pub num_children: u32,
    pub lock: u32,
    pub namespace: Namespace, // the same in a whole branch; meaningless for the root
    pub checkpoint: Slot,     // slot of the state at the node's end
    pub saved_in: i64,        // step that saves the checkpoint
    pub(super) stamp: u64,
    pub(super) frequency: u64,
    key: u64,      // hash of parent, namespace and first page
    chain: NodeId, // next node of the same hash chain
}

/// Arena of all nodes. Removed ones remain until their ids are reused.
pub(super) struct Nodes {
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    heads: Vec<NodeId>, // hash table; its length is a power of two
    page_size: usize,
    num_linked: usize,
}

impl Nodes {
    /// Creates the root, with memory reserved for `expected` nodes.
    pub fn new(page_size: usize, expected: usize) -> Self {
        let num_heads = expected.clamp(1, MAX_HEADS).next_power_of_two();
        Self {
            nodes: vec![root()],
            unused: Vec::with_capacity(expected.min(MAX_HEADS)),
            heads: vec![NO_NODE; num_heads],
            page_size,
            num_linked: 0,
        }
    }

    pub fn get(&self, id: NodeId) -> &Node {
        &self.nodes[id.to_usize()]
    }

    pub fn get_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.to_usize()]
    }

    pub fn two(&mut self, a: NodeId, b: NodeId) -> Option<[&mut Node; 2]> {
        self.nodes.get_disjoint_mut([a.to_usize(), b.to_usize()]).ok()
    }

    /// Returns the number of linked nodes, without the root.
    pub fn len(&self) -> usize {
        self.num_linked
    }

    /// Returns the ids of all nodes but the root, in no order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        (1..self.nodes.len().to_u32()).filter(|&id| self.get(id).parent != NO_NODE)
    }

    pub fn clear(&mut self) {
        self.nodes.clear();
        self.nodes.push(root());
        self.unused.clear();
        self.heads.fill(NO_NODE);
        self.num_linked = 0;
    }

    /// Creates a node without tokens, not yet linked below `parent`.
    pub fn create(&mut self, parent: NodeId, namespace: Namespace) -> NodeId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            self.nodes.len().to_u32() - 1
        });
        let node = self.get_mut(id);
        node.parent = parent;
        node.namespace = namespace;
        node.num_children = 0;
        node.chain = NO_NODE;
        node.lock = 0;
        node.stamp = 0;
        node.frequency = 0;
        node.checkpoint = NO_CHECKPOINT;
        id
    }

    /// Unlinks a leaf and frees its id. Its arrays keep their memory for the next node.
    pub fn retire(&mut self, id: NodeId) {
        self.unlink(id);
        let node = self.get_mut(id);
        node.parent = NO_NODE;
        node.tokens.clear();
        node.pages.clear();
        self.unused.push(id);
    }

    /// Returns the child of `parent` in `namespace` whose tokens begin with `first_page`.
    pub fn child(&self, parent: NodeId, namespace: Namespace, first_page: &[i32]) -> Option<NodeId> {
        if self.get(parent).num_children == 0 {
            return None;
        }
        let key = key(parent, namespace, first_page);
        let mut at = self.heads[self.head(key)];
        while at != NO_NODE {
            let node = self.get(at);
            if node.key == key
                && (node.parent, node.namespace) == (parent, namespace)
                && node.tokens[..self.page_size] == *first_page
            {
                return Some(at);
            }
            at = node.chain;
        }
        None
    }

    /// Links `id` below its parent. Its tokens must be set.
    pub fn link(&mut self, id: NodeId) {
        if self.num_linked == self.heads.len() {
            self.double();
        }
        let node = self.get(id);
        let parent = node.parent;
        let key = key(parent, node.namespace, &node.tokens[..self.page_size]);
        self.get_mut(id).key = key;
        self.chain(id);
        self.get_mut(parent).num_children += 1;
        self.num_linked += 1;
    }

    /// Unlinks `id` from its parent.
    pub fn unlink(&mut self, id: NodeId) {
        let &Node {
            parent,
            key,
            chain: next,
            ..
        } = self.get(id);
        self.get_mut(parent).num_children -= 1;
        self.num_linked -= 1;
        let head = self.head(key);
        let mut at = self.heads[head];
        if at == id {
            self.heads[head] = next;
            return;
        }
        while at != NO_NODE {
            let node = self.get_mut(at);
            if node.chain == id {
                node.chain = next;
                return;
            }
            at = node.chain;
        }
    }

    fn head(&self, key: u64) -> usize {
        key.low_u32().to_usize() & (self.heads.len() - 1)
    }

    fn chain(&mut self, id: NodeId) {
        let head = self.head(self.get(id).key);
        self.get_mut(id).chain = self.heads[head];
        self.heads[head] = id;
    }

    fn double(&mut self) {
        let num_heads = 2 * self.heads.len();
        for mut at in std::mem::replace(&mut self.heads, vec![NO_NODE; num_heads]) {
            while at != NO_NODE {
                let next = self.get(at).chain;
                self.chain(at);
                at = next;
            }
        }
    }
}

fn root() -> Node {
    Node {
        parent: NO_NODE,
        chain: NO_NODE,
        checkpoint: NO_CHECKPOINT,
        ..Node::default()
    }
}

fn key(parent: NodeId, namespace: Namespace, first_page: &[i32]) -> u64 {
    let mut hash = u64::from(parent) | u64::from(namespace) << 32;
    for &token in first_page {
        hash = mix(hash ^ u64::from(token.cast_unsigned()));
    }
    hash
}

/// Mixes the bits of a hash: the finalizer of splitmix64 (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
