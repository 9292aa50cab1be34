//! Drafts: tokens that a step computes behind the one that is sure to come, because they may follow it.
//!
//! Each drafted token has a decode row of its own: its request's slot again, at its next positions. So every engine
//! computes it as it computes any decode row, to the same bits, and each row makes one token. A row's token counts if
//! the tokens before it turned out to be those that it was computed from; the KV of the others is given back at the
//! commit.
//!
//! Invariants: a request owns pages beyond its `kv_len` only while its draft is in flight. It has no row in the step
//! after one with its draft: what comes next is not known before the commit.
//!
//! What follows is looked up in the prefix cache, below the request's own node: there is what another text went on with
//! after the same tokens. Else in the request's own text (`drafter`). Where neither knows anything somebody outside
//! may: an event brings what a model of its own thinks. Requests are synchronized.

use crate::api::Result;
use crate::numbers::ToUsize;
use crate::page_pool::PageSize;
use crate::radix::RadixTree;
use crate::request::{Index, Requests, State};
use crate::step::Draft;

/// A decode row that computes a drafted token.
#[derive(Clone, Copy)]
pub(crate) struct DraftRow {
    pub index: Index,
    pub position: u32,
    pub token: i32,
}

/// Guess what follows the committed tokens; where the next one is in flight, that one too.
pub(crate) fn propose(requests: &mut Requests, index: Index, tree: &RadixTree) {
    let num_pending = requests.get(index).num_pending.to_usize();
    let uses_cache = requests.get(index).uses_cache;
    let (sequence, cold) = requests.parts_mut(index);
    let (handle, first, namespace) = (cold.handle, cold.num_tree_pages, cold.namespace);
    let Some(drafter) = &mut cold.drafter else {
        return;
    };
    drafter.draft.clear();
    let tokens = &sequence.tokens[..];
    if tokens.len() < drafter.paused_until {
        return;
    }
    let count = drafter.draft_len + num_pending;
    if let (true, Some(handle)) = (uses_cache, handle) {
        let found = tree.following(handle, tokens, first, count, namespace);
        drafter.draft.extend_from_slice(found);
    }
    if drafter.draft.is_empty() {
        drafter.guess(tokens, count);
    }
}

/// A draft from outside, if it is of the text as it is now and the text may be guessed; whether it is.
pub(crate) fn take(requests: &mut Requests, index: Index, draft: &Draft) -> bool {
    let request = requests.get(index);
    let decodes = request.state == State::Started && !request.is_prefilling();
    let (length, num_pending) = (request.len.to_usize(), request.num_pending.to_usize());
    let Some(drafter) = &mut requests.cold_mut(index).drafter else {
        return false;
    };
    let is_of_text = usize::try_from(draft.length) == Ok(length) && length >= drafter.paused_until;
    if !decodes || !is_of_text || !drafter.in_flight.is_empty() {
        return false;
    }
    drafter.draft.clear();
    let count = drafter.draft_len + num_pending;
    drafter.draft.extend(draft.tokens.iter().take(count));
    true
}

/// Tokens that may be computed behind the row of the request that the step has.
pub(crate) fn draft_len(requests: &Requests, index: Index) -> usize {
    let request = requests.get(index);
    match &requests.cold(index).drafter {
        Some(drafter) if request.num_pending == 1 => drafter.draft.len().min(request.num_unscheduled().to_usize()),
        _ => 0,
    }
}

/// Pages that a draft needs beyond those of the request.
pub(crate) fn num_new_pages(requests: &Requests, index: Index, num_tokens: usize, page_size: usize) -> usize {
    let end = requests.get(index).kv_len.to_usize() + num_tokens;
    end.div_ceil(page_size) - requests.pages(index).len()
}

/// The step computes so many tokens of the request's draft. Their rows are appended to `rows`.
pub(crate) fn schedule_draft(
    requests: &mut Requests,
    index: Index,
    num_tokens: usize,
    tree: &mut RadixTree,
    rows: &mut Vec<DraftRow>,
) -> Result<()> {
    let num_pages = num_new_pages(requests, index, num_tokens, tree.page_size());
    let kv_len = requests.get(index).kv_len;
    let (sequence, cold) = requests.parts_mut(index);
    tree.take(num_pages, &mut sequence.pages)?;
    if let Some(drafter) = &mut cold.drafter {
        let drafter = &mut **drafter;
        drafter.in_flight.extend_from_slice(&drafter.draft[..num_tokens]);
        let places = drafter.in_flight.iter().zip(kv_len..);
        rows.extend(places.map(|(&token, position)| DraftRow { index, position, token }));
    }
    Ok(())
}

/// A drafted token was the right one: the text goes on with `token`.
pub(crate) fn accept(requests: &mut Requests, index: Index, token: i32) {
    requests.get_mut(index).kv_len += 1;
    requests.get_mut(index).len += 1;
    let (sequence, cold) = requests.parts_mut(index);
    sequence.tokens.push(token);
    if let Some(drafter) = &mut cold.drafter {
        drafter.num_accepted += 1;
    }
}

/// The step with the request's draft is committed: pages that the text did not get to are given back.
pub(crate) fn settle(requests: &mut Requests, index: Index, tree: &mut RadixTree, page_size: PageSize) -> Result<()> {
    let request = requests.get(index);
    let (num_pages, length) = (page_size.count(request.kv_len).to_usize(), request.len.to_usize());
    let (sequence, cold) = requests.parts_mut(index);
    tree.pool.push(sequence.pages.drain(num_pages..))?;
    if let Some(drafter) = &mut cold.drafter {
        drafter.learn(length);
    }
    Ok(())
}
