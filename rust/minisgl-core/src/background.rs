//! How much requests in the background may compute in a step, so that others hardly wait for it. What one of them is
//! guaranteed is said in `minisgl.scheduler.reference.background`.

use crate::step::{TOKEN_PARTS, UNBOUNDED};

/// The background gets one in so many of the tokens that others compute.
const PREFILL_SHARE: i64 = 20;

/// Parts of tokens: `gain` for each step beside others; `credit` of those in the background, negative after a page that
/// they had no credit for; `pace`, what a step that has nobody else would give them.
pub(crate) struct Background {
    pub gain: i64,
    credit: i64,
    pace: i64,
}

impl Default for Background {
    fn default() -> Self {
        Self {
            gain: UNBOUNDED,
            credit: 0,
            pace: UNBOUNDED,
        }
    }
}

impl Background {
    /// Tokens that they may compute in this step, in which `num_ordinary` others have started. `num_prefilled`: the
    /// tokens of others in it, if those prefill.
    ///
    /// What they do not use is lost but for the fraction of a token. With nobody else there the bound grows by a
    /// quarter from step to step. So others who come back find a step before them that takes about a quarter of the
    /// time that they were away at most, where it takes the longer the more it computes.
    pub fn bound(&mut self, num_ordinary: usize, num_prefilled: i64) -> i64 {
        if num_ordinary > 0 {
            let mut gain = self.gain;
            if num_prefilled > 0 && gain < UNBOUNDED {
                let others = num_prefilled * TOKEN_PARTS;
                gain = gain.min((gain - others).max(others / PREFILL_SHARE));
            }
            self.pace = self.gain.max(TOKEN_PARTS);
            self.credit = self.credit.min(TOKEN_PARTS - 1) + gain;
        } else {
            self.credit = self.pace;
            self.pace = (self.pace + self.pace / 4).min(UNBOUNDED);
        }
        self.credit.div_euclid(TOKEN_PARTS)
    }

    /// They compute so many in this step.
    pub fn spend(&mut self, num_tokens: i64) {
        self.credit -= num_tokens * TOKEN_PARTS;
    }
}
