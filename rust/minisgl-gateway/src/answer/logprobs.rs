//! Log probabilities in responses, in OpenAI's two shapes (as in `server/core/formatter.py`): one list of objects for
//! chat, parallel lists for completions.
//!
//! Invariants: the same JSON as there; each token is formatted when it arrives, not in one long pause at the end.

use std::io::Write as _;
use std::sync::Arc;

use minisgl_text::{Decoder, Tokenizer};
use serde::Serialize;

use crate::message::TokenLogprobs;

/// Token id and its log probabilities.
pub type ScoredToken = (i32, TokenLogprobs);

/// Formatted log probabilities of one choice that have not been sent.
pub struct Logprobs {
    tokenizer: Arc<Tokenizer>,
    /// JSON lists without brackets: one for chat; for completions `tokens`, `token_logprobs`, `top_logprobs`,
    /// `text_offset`.
    lists: Vec<Vec<u8>>,
    offsets: Option<TextOffsets>,
}

/// Offsets of a completion's tokens in its text, in characters.
struct TextOffsets {
    decoder: Decoder,
    at: usize,
    /// Offset of the previous token in the unsent lists: offsets never decrease, also for tokens without text.
    last: usize,
    text: String,
}

impl Logprobs {
    /// Makes an empty list in the shape of chat completions.
    pub fn for_chat(tokenizer: &Arc<Tokenizer>) -> Logprobs {
        Logprobs {
            tokenizer: Arc::clone(tokenizer),
            lists: vec![Vec::new()],
            offsets: None,
        }
    }

    /// Makes empty lists in the shape of text completions.
    pub fn for_completion(tokenizer: &Arc<Tokenizer>) -> Logprobs {
        let offsets = TextOffsets {
            decoder: tokenizer.decoder(true),
            at: 0,
            last: 0,
            text: String::new(),
        };
        Logprobs {
            tokenizer: Arc::clone(tokenizer),
            lists: vec![Vec::new(); 4],
            offsets: Some(offsets),
        }
    }

    /// Returns true if no log probabilities wait to be sent.
    pub fn is_empty(&self) -> bool {
        self.lists[0].is_empty()
    }

    /// Formats the log probabilities of new tokens for the next `write`.
    pub fn add(&mut self, tokens: &[ScoredToken]) {
        for (token, scored) in tokens {
            for list in &mut self.lists {
                if !list.is_empty() {
                    list.push(b',');
                }
            }
            match &mut self.offsets {
                None => chat_entry(&self.tokenizer, *token, scored, &mut self.lists[0]),
                Some(offsets) => {
                    write(&mut self.lists[0], &shown(&self.tokenizer, *token));
                    write(&mut self.lists[1], &scored.logprob);
                    write_top(&self.tokenizer, *token, scored, &mut self.lists[2]);
                    let offset = offsets.next(*token);
                    let _ = write!(&mut self.lists[3], "{offset}");
                }
            }
        }
    }

    /// Appends the unsent log probabilities to `out` as JSON and clears them.
    pub fn write(&mut self, out: &mut Vec<u8>) {
        if let Some(offsets) = &mut self.offsets {
            offsets.last = 0;
            let names = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
            for (at, (name, list)) in names.iter().zip(&mut self.lists).enumerate() {
                let _ = write!(out, r#"{}"{name}":["#, if at == 0 { '{' } else { ',' });
                out.append(list);
                out.push(b']');
            }
            out.push(b'}');
            return;
        }
        out.extend_from_slice(br#"{"content":["#);
        out.append(&mut self.lists[0]);
        out.extend_from_slice(br#"],"refusal":null}"#);
    }
}

impl TextOffsets {
    fn next(&mut self, token: i32) -> usize {
        self.text.clear();
        let before = self.decoder.place(token, &mut self.text);
        self.last = self.last.max(self.at + before);
        self.at += self.text.chars().count();
        self.last
    }
}

fn chat_entry(tokenizer: &Tokenizer, token: i32, scored: &TokenLogprobs, out: &mut Vec<u8>) {
    let entry = |token: i32, logprob: f64, out: &mut Vec<u8>| {
        let bytes = tokenizer.token_bytes(token);
        out.extend_from_slice(br#"{"token":"#);
        write(out, &String::from_utf8_lossy(bytes));
        out.extend_from_slice(br#","logprob":"#);
        write(out, &logprob);
        out.extend_from_slice(br#","bytes":"#);
        write(out, bytes);
    };
    entry(token, scored.logprob, out);
    out.extend_from_slice(br#","top_logprobs":["#);
    for (at, (&token, &logprob)) in scored.top_ids.iter().zip(&scored.top_logprobs).enumerate() {
        if at > 0 {
            out.push(b',');
        }
        entry(token, logprob, out);
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
}

/// Appends a JSON object of the most likely tokens and the token itself; of tokens with the same text the last counts.
fn write_top(tokenizer: &Tokenizer, token: i32, scored: &TokenLogprobs, out: &mut Vec<u8>) {
    let mut entries: Vec<(String, f64)> = Vec::with_capacity(1 + scored.top_ids.len());
    let top = scored.top_ids.iter().copied().zip(scored.top_logprobs.iter().copied());
    for (token, logprob) in top.chain([(token, scored.logprob)]) {
        let text = shown(tokenizer, token);
        match entries.iter_mut().find(|(one, _)| *one == text) {
            Some(one) => one.1 = logprob,
            None => entries.push((text, logprob)),
        }
    }
    out.push(b'{');
    for (at, (text, logprob)) in entries.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write(out, text);
        out.push(b':');
        write(out, logprob);
    }
    out.push(b'}');
}

/// Returns the token's text, or its bytes as `bytes:\xNN...` if they are not valid UTF-8.
fn shown(tokenizer: &Tokenizer, token: i32) -> String {
    let bytes = tokenizer.token_bytes(token);
    std::str::from_utf8(bytes).map_or_else(
        |_| {
            bytes
                .iter()
                .fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}"))
        },
        str::to_owned,
    )
}

/// Appends `value` as JSON; a float that is not finite becomes null.
fn write<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) {
    let _ = serde_json::to_writer(out, value); // writing to memory does not fail
}
