//! Token allowance of background requests in a step, so that other requests hardly wait for them.
//! `minisgl.scheduler.reference.background` says what a background request is guaranteed.

use crate::step::{TOKEN_PARTS, UNBOUNDED};

/// Divisor for the background's share: one token for each 20 that other requests prefill.
const PREFILL_SHARE: i64 = 20;

/// Token allowance of background requests, in 1/1024 token: `gain` for each step with other requests; `credit` left,
/// negative after a page without credit; `pace`, the credit of the next step without others.
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
    /// Returns how many tokens background requests may compute in this step, in which `num_ordinary` other requests are
    /// started and compute `num_prefilled` tokens if they prefill (else 0).
    ///
    /// Unused credit is lost but for a fraction of a token. Without other requests the bound grows by a quarter each
    /// step, so that a returning request finds a step in progress of at most about a quarter of the time that it was
    /// away, where step time grows with tokens.
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

    /// Deducts the `num_tokens` that background requests compute in this step.
    pub fn spend(&mut self, num_tokens: i64) {
        self.credit -= num_tokens * TOKEN_PARTS;
    }
}
