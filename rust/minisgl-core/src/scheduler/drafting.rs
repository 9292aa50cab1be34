//! Drafts in a step and its commit: which rows compute them, which of their tokens are accepted, and the next drafts.
//!
//! Invariants: drafts get only rows, tokens and pages that are left over; the record of a request whose draft changes
//! is synchronized, and its row in the decode set follows.

use super::Scheduler;
use crate::api::Result;
use crate::drafts::{self, DraftRow};
use crate::numbers::{ToI64, ToU64, ToUsize};
use crate::request::{Index, State};
use crate::state::InFlight;
use crate::step::{CommitEntry, Draft, Sampled};

impl Scheduler {
    /// Returns (request id, number of draft tokens) for requests without a draft. See
    /// `minisgl.scheduler.api.ControlPlane.drafts_wanted`.
    #[must_use]
    pub fn drafts_wanted(&self) -> Vec<(i64, usize)> {
        let (started, max_len) = (&self.state.started, self.config.max_draft_len);
        let fits = started.len() * (1 + max_len) <= self.limits.max_rows;
        if max_len == 0 || !fits || started.iter().any(|row| row.kind.prefills) {
            return Vec::new();
        }
        let wanted = started.iter().filter_map(|row| {
            let drafter = self.state.requests.cold(row.index).drafter.as_ref()?;
            let pauses = row.len().to_usize() < drafter.paused_until;
            let left = (row.left + row.num_pending).saturating_sub(1).to_usize();
            let count = drafter.draft_len.min(left);
            (count > 0 && !pauses && drafter.draft.is_empty()).then_some((row.req_id, count))
        });
        wanted.collect()
    }

    /// Replaces a request's own draft with one from outside, if that is acceptable.
    pub(super) fn take_draft(&mut self, index: Index, draft: &Draft) {
        self.synchronize(index);
        if drafts::take(&mut self.state.requests, index, draft) {
            self.state.started.load(index, &self.state.requests);
        }
    }

    /// Schedules drafts in request order with the rows, tokens and pages left over; background requests are retracted
    /// for their pages. A draft that gets no row is dropped, so that it delays no step.
    pub(super) fn add_drafts(&mut self, budget: i64) -> Result<()> {
        for at in 0..self.decided.decode_rows.len() {
            let index = self.decided.decode_rows[at];
            if self.state.requests.cold(index).drafter.is_none() {
                continue;
            }
            self.synchronize(index);
            let num_rows = self.decided.num_rows().to_i64();
            let left = (budget - self.decided.draft_rows.len().to_i64()).min(self.limits.max_rows.to_i64() - num_rows);
            let left = usize::try_from(left).unwrap_or(0);
            let wanted = drafts::draft_len(&self.state.requests, index).min(left);
            let count = self.draft_with_pages(index, wanted)?;
            if count > 0 {
                let (requests, rows) = (&mut self.state.requests, &mut self.decided.draft_rows);
                drafts::schedule_draft(requests, index, count, &mut self.state.tree, rows)?;
            }
            if let Some(drafter) = &mut self.state.requests.cold_mut(index).drafter {
                drafter.draft.clear();
            }
            self.state.started.load(index, &self.state.requests);
        }
        self.num_drafted += self.decided.draft_rows.len().to_u64();
        Ok(())
    }

    /// Returns how many of `num_tokens` draft tokens have pages, after retracting background requests if needed.
    fn draft_with_pages(&mut self, index: Index, num_tokens: usize) -> Result<usize> {
        let size = self.limits.page_size;
        while drafts::num_new_pages(&self.state.requests, index, num_tokens, size) > self.state.tree.num_available() {
            if !self.retract_background()? {
                let num_pages = self.state.requests.pages(index).len() + self.state.tree.num_available();
                return Ok(num_pages * size - self.state.requests.get(index).kv_len.to_usize());
            }
        }
        Ok(num_tokens)
    }

    /// Takes the token of a draft row if the sequence matches the draft up to the row's input.
    pub(super) fn take_drafted_token(
        &mut self,
        draft: &DraftRow,
        row: u32,
        tokens: &[i32],
        into: &mut Vec<CommitEntry>,
        ending: &mut Vec<Index>,
    ) {
        let index = draft.index;
        if self.state.requests.get(index).state == State::Ended || ending.contains(&index) {
            return;
        }
        if !self.draft_matches(draft) {
            return;
        }
        self.num_accepted += 1;
        let token = tokens[row.to_usize()];
        let eos_ids = &self.config.eos_ids;
        let reason = if self.state.requests.get(index).state == State::Started {
            drafts::accept(&mut self.state.requests, index, token);
            self.state.started.load(index, &self.state.requests);
            let len = self.state.requests.get(index).len;
            self.state.requests.end_at(index, token, len, eos_ids)
        } else {
            self.state.requests.accept(index, token, eos_ids)
        };
        into.push(CommitEntry {
            req_id: self.state.requests.get(index).req_id,
            sampled: Some(Sampled { token, row }),
            reason,
        });
        if reason.is_some() {
            ending.push(index);
        }
    }

    /// Returns true if the sequence ends with the input of the row of `draft`, at its position.
    pub(super) fn draft_matches(&mut self, draft: &DraftRow) -> bool {
        self.synchronize(draft.index);
        let tokens = self.state.requests.tokens(draft.index);
        tokens.len() == draft.position.to_usize() + 1 && tokens.last() == Some(&draft.token)
    }

    /// Releases the pages of rejected drafts. Skips retracted requests, which hold none, and ending ones (`failed`).
    pub(super) fn settle(&mut self, done: &InFlight, failed: &[Index]) -> Result<()> {
        for (at, draft) in done.drafts.iter().enumerate() {
            let index = draft.index;
            let is_first = at == 0 || done.drafts[at - 1].index != index;
            if is_first && !failed.contains(&index) && self.state.requests.get(index).state == State::Started {
                self.synchronize(index);
                drafts::settle(&mut self.state.requests, index, &mut self.state.tree, self.page_size)?;
                self.state.started.load(index, &self.state.requests);
            }
        }
        Ok(())
    }

    /// Proposes the next drafts of the step's requests that continue.
    pub(super) fn propose(&mut self, done: &InFlight) {
        if self.config.max_draft_len == 0 {
            return;
        }
        for (row, &index) in (0..).zip(&done.rows) {
            let request = self.state.requests.get(index);
            let goes_on = request.state == State::Started && self.state.requests.cold(index).drafter.is_some();
            if !goes_on || done.draft(row).is_some() {
                continue;
            }
            self.synchronize(index);
            if !self.state.requests.get(index).is_prefilling() {
                drafts::propose(&mut self.state.requests, index, &self.state.tree);
                self.state.started.load(index, &self.state.requests);
            }
        }
    }
}
