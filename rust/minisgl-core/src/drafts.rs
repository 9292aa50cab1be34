//! Drafts (speculative decoding): tokens that a step computes after a request's next token, because they may follow it.
//!
//! Each draft token has a decode row of its own: the same request slot, the next positions. So every engine computes it
//! like any decode row, bit for bit, and each row samples one token. A row's token counts if the tokens before it match
//! the draft; the KV of the others is released at the commit.
//!
//! Invariants: a request owns pages beyond its `kv_len` only while its draft is in flight. It has no row in the step
//! after one with its draft: the next token is not known before the commit.
//!
//! Drafts come from the prefix cache, below the request's own node: what followed the same tokens in another sequence.
//! Else from the request's own sequence (`drafter`). Where both have none, an event may bring the draft of another
//! model. Requests are synchronized.

use crate::api::Result;
use crate::numbers::ToUsize;
use crate::page_pool::PageSize;
use crate::radix::RadixTree;
use crate::request::{Index, Requests, State};
use crate::step::Draft;

/// Decode row that computes one draft token.
#[derive(Clone, Copy)]
pub(crate) struct DraftRow {
    pub index: Index,
    pub position: u32,
    pub token: i32,
}

/// Proposes a draft to follow the committed tokens, including the token in flight if there is one.
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
        let continuation = tree.following(handle, tokens, first, count, namespace);
        drafter.draft.extend_from_slice(continuation);
    }
    if drafter.draft.is_empty() {
        drafter.propose(tokens, count);
    }
}

/// Accepts a draft from outside. Returns false if the sequence has another length or takes no drafts now.
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

/// Returns how many draft tokens may follow the request's row in this step.
pub(crate) fn draft_len(requests: &Requests, index: Index) -> usize {
    let request = requests.get(index);
    match &requests.cold(index).drafter {
        Some(drafter) if request.num_pending == 1 => drafter.draft.len().min(request.num_unscheduled().to_usize()),
        _ => 0,
    }
}

/// Returns how many pages `num_tokens` draft tokens need beyond those of the request.
pub(crate) fn num_new_pages(requests: &Requests, index: Index, num_tokens: usize, page_size: usize) -> usize {
    let end = requests.get(index).kv_len.to_usize() + num_tokens;
    end.div_ceil(page_size) - requests.pages(index).len()
}

/// Schedules the first `num_tokens` draft tokens of a request: allocates their pages and appends their rows to `rows`.
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

/// Commits a token sampled by a draft row whose input was right.
pub(crate) fn accept(requests: &mut Requests, index: Index, token: i32) {
    requests.get_mut(index).kv_len += 1;
    requests.get_mut(index).len += 1;
    let (sequence, cold) = requests.parts_mut(index);
    sequence.tokens.push(token);
    if let Some(drafter) = &mut cold.drafter {
        drafter.num_accepted += 1;
    }
}

/// Releases pages beyond the committed tokens after a step with the request's draft, and updates its drafter.
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
