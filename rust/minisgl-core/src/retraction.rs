//! Giving up pages: at a request's end, and when it is sent back to the queue because pages lack.
//!
//! Invariants: a page that a request gives up belongs to the tree or to the pool before the call returns; what the tree
//! has already is freed; the lock goes last, deepest node first.
//!
//! Pages may be given out again at once, while a step in flight still reads them: forwards run in one ordered stream,
//! so whoever gets them writes later.

use crate::api::CachePolicy;
use crate::api::{Result, broken};
use crate::decode_set::DecodeSet;
use crate::numbers::ToUsize;
use crate::radix::{NO_CHECKPOINT, ROOT, RadixTree};
use crate::request::{Index, Requests};

/// Whom to retract so that `for_request` gets a page: the last one started. Never itself (it waits), and never one in
/// the plan: rows are planned in order, so whoever stands behind `for_request` is not in it yet.
pub(crate) fn pick_victim(started: &DecodeSet, for_request: Index) -> Option<Index> {
    let last = started.indices().last();
    last.copied().filter(|&last| last != for_request)
}

/// Full pages of the tail enter the tree below the node that the request locks (without a cache they don't), the rest
/// is freed by ascending column, the lock is released. Of a model with states those enter at whose end the request has
/// a checkpoint. The request is synchronized.
///
/// The tail's KV goes as far as inputs were scheduled. Their tokens are all known by now: only the token that the last
/// scheduled row makes can be unknown, and it is no input yet.
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

/// At the end of a request whose prompt is too long to be kept: its tail is freed, and with it what the request brought
/// into the tree, beyond what it found there when it was first admitted, as far as nobody else has it. (What a
/// retraction put there of a request that matches nothing stays: it does not know what it had found.) The request is
/// synchronized.
pub(crate) fn drop_pages(requests: &mut Requests, index: Index, tree: &mut RadixTree) -> Result<()> {
    let (cold, tokens) = (requests.cold(index), requests.tokens(index));
    let (handle, first) = (cold.handle.unwrap_or(ROOT), cold.num_tree_pages);
    let max_pages = tokens.len() / tree.page_size();
    let found = tree.find(handle, cold.namespace, tokens, first, max_pages);
    tree.pool.push(requests.pages(index)[first..].iter().copied())?;
    free_tail(requests, index, tree);
    tree.release(handle)?;
    if let (true, Some(end), Some(keep)) = (requests.get(index).uses_cache, found.end(), cold.num_found_pages) {
        tree.drop_end(end, first + found.pages.len(), keep)?;
    }
    requests.forget_pages(index);
    Ok(())
}

fn free_tail(requests: &Requests, index: Index, tree: &mut RadixTree) {
    if let Some(tail) = requests.cold(index).tail {
        tree.free_slot(tail.slot);
    }
}

/// The tail is freed, and the lock is released. The request is synchronized.
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

/// A row of the request is not finite: the tree forgets the request's text, as far as nobody else has it. (Who has it
/// reads the same numbers, is found out as well, and the last one drops it.)
pub(crate) fn drop_path(requests: &Requests, index: Index, tree: &mut RadixTree) -> Result<()> {
    let (namespace, tokens) = (requests.cold(index).namespace, requests.tokens(index));
    let found = tree.find(ROOT, namespace, tokens, 0, tokens.len() / tree.page_size());
    match found.end() {
        Some(end) => tree.drop_end(end, found.pages.len(), 0),
        None => Ok(()),
    }
}
