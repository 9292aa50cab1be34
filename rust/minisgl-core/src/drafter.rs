//! Drafts from repetitions within one sequence (prompt lookup; Saxena 2023), and how long they may be.
//!
//! Invariants: the same sequence and the same verdicts give the same drafts; a draft costs O(its length).
//!
//! The draft is what followed the last occurrence of the final `NGRAM` tokens. Drafts grow while they are accepted. A
//! draft with no accepted token is followed by a pause, and each further one by a pause twice as long, so that a
//! sequence that does not repeat soon costs nothing.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::numbers::{ToU32, ToUsize};

const NGRAM: usize = 5; // length of the n-gram that must recur
const FIRST_LEN: usize = 2; // length of the first draft, and after a rejected one
const MAX_PAUSE: usize = 256; // maximum number of tokens without a draft

type Ends = HashMap<[i32; NGRAM], u32, BuildHasherDefault<DefaultHasher>>;

/// Draft generator of one request, and its accuracy so far. Lengths in tokens.
pub(crate) struct Drafter {
    max_len: usize,
    pub draft_len: usize,    // maximum length of the next draft
    pub draft: Vec<i32>,     // draft of the tokens after the committed ones
    pub in_flight: Vec<i32>, // draft tokens that a step in flight computes
    pub num_accepted: usize, // accepted tokens of `in_flight`
    pause: usize,            // length of the last pause
    pub paused_until: usize, // sequence length at which the pause ends
    ends: Ends,              // position after the last occurrence of an n-gram
    num_seen: usize,         // sequence length that `ends` covers
}

impl Drafter {
    pub fn new(max_draft_len: usize) -> Self {
        Self {
            max_len: max_draft_len,
            draft_len: FIRST_LEN.min(max_draft_len),
            draft: Vec::new(),
            in_flight: Vec::new(),
            num_accepted: 0,
            pause: 0,
            paused_until: 0,
            ends: Ends::default(),
            num_seen: 0,
        }
    }

    /// Extends `draft` by up to `count` tokens that may follow `tokens`, which have only grown since the last call. A
    /// draft may reach into itself and repeat.
    pub fn propose(&mut self, tokens: &[i32], count: usize) {
        self.ends.reserve(tokens.len().saturating_sub(self.num_seen.max(NGRAM)));
        for end in self.num_seen.max(NGRAM)..tokens.len() {
            if let Some(gram) = last_of(&tokens[..end]) {
                self.ends.insert(gram, end.to_u32());
            }
        }
        self.num_seen = tokens.len();
        let start = last_of(tokens).and_then(|gram| self.ends.get(&gram));
        if let Some(&start) = start {
            let continuation = tokens[start.to_usize()..].iter().cycle().take(count);
            self.draft.extend(continuation);
        }
    }

    /// Updates draft length and pause after a draft was verified. `length` is the sequence's length in tokens now.
    pub fn learn(&mut self, length: usize) {
        self.draft_len = (2 * self.num_accepted).max(FIRST_LEN).min(self.max_len);
        self.pause = match self.num_accepted {
            0 => (2 * self.pause).clamp(1, MAX_PAUSE),
            _ => 0,
        };
        self.paused_until = length + self.pause;
        self.in_flight.clear();
        self.num_accepted = 0;
    }

    /// Clears the draft, also one in flight, when the request is retracted or ends.
    pub fn forget(&mut self) {
        self.draft.clear();
        self.in_flight.clear();
        self.num_accepted = 0;
    }
}

fn last_of(tokens: &[i32]) -> Option<[i32; NGRAM]> {
    tokens.last_chunk().copied()
}
