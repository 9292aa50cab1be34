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

const NGRAM: usize = 5; // tokens that must have stood in the text
const FIRST_LEN: usize = 2; // of a draft of a text whose guesses were not right yet
const MAX_PAUSE: usize = 256; // tokens without a draft, at most

type Ends = HashMap<[i32; NGRAM], u32, BuildHasherDefault<DefaultHasher>>;

/// Draft generator of one request, and its accuracy so far. Lengths in tokens.
pub(crate) struct Drafter {
    max_len: usize,
    pub draft_len: usize,    // of the next one, at most
    pub draft: Vec<i32>,     // the guess for the tokens after the committed ones
    pub in_flight: Vec<i32>, // what a step in flight computes of one
    pub num_accepted: usize, // of these
    pause: usize,            // the last one
    pub paused_until: usize, // length of the text
    ends: Ends,              // by n-gram, where it ended the last time
    num_seen: usize,         // length of the text up to which `ends` goes
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
    pub fn guess(&mut self, tokens: &[i32], count: usize) {
        self.ends.reserve(tokens.len().saturating_sub(self.num_seen.max(NGRAM)));
        for end in self.num_seen.max(NGRAM)..tokens.len() {
            if let Some(gram) = last_of(&tokens[..end]) {
                self.ends.insert(gram, end.to_u32());
            }
        }
        self.num_seen = tokens.len();
        let start = last_of(tokens).and_then(|gram| self.ends.get(&gram));
        if let Some(&start) = start {
            let found = tokens[start.to_usize()..].iter().cycle().take(count);
            self.draft.extend(found);
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
