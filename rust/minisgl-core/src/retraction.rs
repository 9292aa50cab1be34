//! Releasing the pages of a request: at its end, and at a retraction, when it returns to the queue because pages are
//! lacking.
//!
//! Invariants: a released page belongs to the tree or to the pool before the call returns; pages that the tree has
//! already are freed; the lock is released last, deepest node first.
//!
//! Pages may be allocated again at once, while a step in flight still reads them: forward passes run in one ordered
//! stream, so the new owner writes later.

use crate::api::CachePolicy;
use crate::api::{Result, broken};
use crate::decode_set::DecodeSet;
use crate::numbers::ToUsize;
use crate::radix::{NO_CHECKPOINT, ROOT, RadixTree};
use crate::request::{Index, Requests};

/// Returns the request to retract so that `for_request` gets a page: the one started last, or `None` if that is
/// `for_request` itself. It never is in the plan already, because rows are planned in order.
pub(crate) fn pick_victim(started: &DecodeSet, for_request: Index) -> Option<Index> {
    let last = started.indices().last();
    last.copied().filter(|&last| last != for_request)
}

/// Releases the pages of a synchronized request. Full pages enter the tree below its locked node (not without a cache);
/// the rest is freed by ascending page index, and the lock is released. For a model with states, pages enter up to the
/// request's checkpoint.
///
/// The KV covers all scheduled inputs, whose tokens are known by now: only the token of the last scheduled row can be
/// unknown, and it is no input yet.
pub(crate) fn give_up_pages(requests: &mut Requests, index: Index, tree: &mut RadixTree) -> Result<()> {
    let (request, cold) = (requests.get(index), requests.cold(index));
    let Some(mut handle) = cold.handle else {
        return broken(format!("request {} has no pages to give up", request.req_id));
    };
    let first = cold.num_tree_pages;
    let full = match (&tree.checkpoints, cold.tail) {
        (None, _) => request.kv_len.to_usize() / tree.page_size(),
        (Some(_), tail) => tail.map_or(first, |tail| first.max(tail.len.to_usize() / tree.page_size())),
    };
    if tree.policy() != CachePolicy::Naive && full > first {
        if request.kv_len > request.len {
            return broken(format!(
                "request {}: KV of unknown tokens would enter the cache",
                request.req_id
            ));
        }
        let pages = &requests.pages(index)[..full];
        let (end, had) = tree.insert(handle, cold.namespace, requests.tokens(index), pages, first)?;
        handle = end;
        let pages = requests.pages(index);
        let freed = pages[first..had].iter().chain(&pages[full..]);
        tree.pool.push(freed.copied())?;
        if let Some(tail) = cold.tail
            && tree.node(handle).checkpoint == NO_CHECKPOINT
        {
            tree.put_checkpoint(handle, tail.slot, tail.step)?;
            requests.cold_mut(index).tail = None;
        }
    } else {
        tree.pool.push(requests.pages(index)[first..].iter().copied())?;
    }
    free_tail(requests, index, tree);
    tree.release(handle)?;
    requests.forget_pages(index);
    Ok(())
}

/// Releases the pages of a synchronized request whose prompt is too long to stay cached: frees its own pages, and those
/// that it added to the tree since its first admission, unless another request uses them. (For a request with
/// `no_match`, pages that a retraction cached stay.)
pub(crate) fn drop_pages(requests: &mut Requests, index: Index, tree: &mut RadixTree) -> Result<()> {
    let (cold, tokens) = (requests.cold(index), requests.tokens(index));
    let (handle, first) = (cold.handle.unwrap_or(ROOT), cold.num_tree_pages);
    let max_pages = tokens.len() / tree.page_size();
    let matched = tree.find(handle, cold.namespace, tokens, first, max_pages);
    tree.pool.push(requests.pages(index)[first..].iter().copied())?;
    free_tail(requests, index, tree);
    tree.release(handle)?;
    if let (true, Some(end), Some(keep)) = (requests.get(index).uses_cache, matched.end(), cold.num_found_pages) {
        tree.drop_end(end, first + matched.pages.len(), keep)?;
    }
    requests.forget_pages(index);
    Ok(())
}

fn free_tail(requests: &Requests, index: Index, tree: &mut RadixTree) {
    if let Some(tail) = requests.cold(index).tail {
        tree.free_slot(tail.slot);
    }
}

/// Frees the pages outside of the tree of a synchronized request and releases its lock. Nothing enters the tree.
pub(crate) fn free_pages(requests: &mut Requests, index: Index, tree: &mut RadixTree) -> Result<()> {
    let (handle, first) = (
        requests.cold(index).handle.unwrap_or(ROOT),
        requests.cold(index).num_tree_pages,
    );
    tree.pool.push(requests.pages(index)[first..].iter().copied())?;
    free_tail(requests, index, tree);
    tree.release(handle)?;
    requests.forget_pages(index);
    Ok(())
}

/// Removes the sequence of a request with a non-finite row from the tree, as far as no other request uses it. (Others
/// read the same KV, fail too, and the last one removes it.)
pub(crate) fn drop_path(requests: &Requests, index: Index, tree: &mut RadixTree) -> Result<()> {
    let (namespace, tokens) = (requests.cold(index).namespace, requests.tokens(index));
    let matched = tree.find(ROOT, namespace, tokens, 0, tokens.len() / tree.page_size());
    match matched.end() {
        Some(end) => tree.drop_end(end, matched.pages.len(), 0),
        None => Ok(()),
    }
}
