//! The text of one request as it grows: detokenized, and cut at the first stop string (`tokenizer/decode.py`).
//!
//! Invariants: the deltas joined are the text before the first match, whatever the chunks were.

use std::sync::Arc;

use super::stop::StopMatcher;
use super::{Decoder, Tokenizer};

/// `push` generated ids, get text; `stopped` once a stop string was found; `finish` gives what was held back.
pub struct TextStream {
    decoder: Decoder,
    matcher: StopMatcher,
    text: String,
}

impl TextStream {
    /// Special tokens are no text.
    pub fn new(tokenizer: &Arc<Tokenizer>, stop: &[String]) -> Self {
        Self {
            decoder: tokenizer.decoder(true),
            matcher: StopMatcher::new(stop),
            text: String::new(),
        }
    }

    /// Append the new text. With `may_stop` false it is text whatever it spells, and begins no stop string either.
    pub fn push(&mut self, ids: &[i32], may_stop: bool, out: &mut String) {
        if self.matcher.is_empty() {
            return self.decoder.push(ids, out);
        }
        self.text.clear();
        self.decoder.push(ids, &mut self.text);
        if may_stop {
            self.matcher.push(&self.text, out);
        } else {
            self.matcher.skip(&self.text, out);
        }
    }

    /// Whether a stop string was found.
    pub fn stopped(&self) -> bool {
        self.matcher.found().is_some()
    }

    /// Which one.
    pub fn matched_stop(&self) -> Option<&str> {
        self.matcher.found()
    }

    /// End of the request: nothing may be pushed any more.
    pub fn finish(&mut self, out: &mut String) {
        self.text.clear();
        self.decoder.flush(&mut self.text);
        self.matcher.push(&self.text, out);
        self.matcher.flush(out);
    }
}
