//! Decode rows: started requests that have their prompt behind them and make one token a step.
//!
//! Keeps true: a row is scheduled only if the token it makes is within the request's limits, which is known before the
//! token is; its input is the last token of the sequence, known to the host or not.
//! Doesn't know: where a new page comes from, what else runs in the step.

use crate::request::Request;

/// Whether a started request may decode now. Not while it prefills; not once its last token is in flight; a `no_overlap`
/// request not while any token is.
pub(crate) fn is_eligible(request: &Request) -> bool {
    request.kv_len >= request.prefill_len
        && request.len + u32::from(request.num_pending) < request.max_len
        && !(request.no_overlap && request.num_pending > 0)
}

/// The row computes the KV of the last token and makes the next one.
pub(crate) fn schedule_row(request: &mut Request, step: i64) {
    request.kv_len += 1;
    request.num_pending += 1;
    request.last_step = step;
}

/// The input of a decode row just scheduled. A token that is not committed yet stands as -(slot + 1): the engine takes it
/// from its own last_token[slot].
pub(crate) fn input_token(request: &Request) -> i32 {
    if request.kv_len <= request.len {
        // a decode row's position is that of the last committed token
        request.last_token
    } else {
        -(request.slot as i32 + 1)
    }
}
