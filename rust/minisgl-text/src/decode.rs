//! Incremental detokenization: token ids in, text out, each character once and whole.
//!
//! Byte-level BPE and sentencepiece with byte fallback, which nearly all models use, have a table from id to bytes;
//! split characters are held back. That is linear in the output for any ids, where decoding a growing window (as
//! `DecodeStream` of the tokenizers library does) is quadratic in a flood of invalid bytes and fails where a decoding
//! does not begin with the one before it. Other decoders (WordPiece, CTC) get a short window. That is approximate: the
//! first id is decoded as if it began the text, and rules with a wider context are missed.
//!
//! Invariants: deltas and flush together equal the whole-text decoding of the generated ids in a continued text (the
//! space that sentencepiece strips at the very beginning is kept), however the ids are grouped. So they equal
//! decode(prompt + generated) without decode(prompt), unless the prompt ends inside a character. One exception, which
//! whole-text decoding decides in hindsight: an invalid byte turns all bytes of its byte-fallback run into U+FFFD
//! there; here, characters delivered before it stay.

use std::sync::Arc;

use std::collections::VecDeque;

use super::Tokenizer;
use super::answer::ContentScan;
use super::bytes::Kind;
use super::stop::StopMatcher;

const REPLACEMENT: char = '\u{fffd}';
const WINDOW_HOLD: usize = 8; // maximum number of ids held back for an incomplete character
const WINDOW_CONTEXT: usize = 4; // ids decoded again, so that joining rules have a left neighbour

/// Incremental decoder of one stream of token ids.
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    skips_special: bool,
    /// Special tokens that are decoded as text nevertheless.
    shown: Box<[i32]>,
    state: State,
}

enum State {
    /// First bytes of an incomplete character.
    ByteLevel(Vec<u8>),
    /// Undelivered bytes of the current run of byte tokens, and whether the run is invalid UTF-8.
    Literal {
        pending: Vec<u8>,
        is_invalid: bool,
    },
    Window(Window),
}

impl Tokenizer {
    /// Creates a decoder for a new stream.
    pub fn decoder(self: &Arc<Self>, skip_special_tokens: bool) -> Decoder {
        let state = match self.table().kind {
            Kind::ByteLevel => State::ByteLevel(Vec::new()),
            Kind::Literal => State::Literal {
                pending: Vec::new(),
                is_invalid: false,
            },
            Kind::Window => State::Window(Window::default()),
        };
        Decoder {
            tokenizer: Arc::clone(self),
            skips_special: skip_special_tokens,
            shown: Box::default(),
            state,
        }
    }
}

impl Decoder {
    /// Sets the special tokens to decode as text.
    #[must_use]
    pub fn showing(mut self, shown: &[i32]) -> Self {
        self.shown = shown.into();
        self
    }

    fn is_skipped(&self, id: i32) -> bool {
        self.skips_special && self.tokenizer.table().is_special(id) && !self.shown.contains(&id)
    }

    /// Decodes `ids` and appends the new text to `out`.
    pub fn push(&mut self, ids: &[i32], out: &mut String) {
        for &id in ids {
            self.push_one(id, out);
        }
    }

    /// Decodes one id, as `push` does. Returns how many characters of the new text precede the one in which the id
    /// begins: those of held-back bytes that the id does not continue.
    pub fn place(&mut self, id: i32, out: &mut String) -> usize {
        let table = self.tokenizer.table();
        let is_skipped = self.is_skipped(id);
        let before = match &self.state {
            State::ByteLevel(held) => match table.of(id).first() {
                Some(&first) if !is_skipped && !held.is_empty() => {
                    let mut begun = held.clone();
                    begun.push(first);
                    String::from_utf8_lossy(&begun).chars().count() - 1
                }
                _ => 0,
            },
            State::Literal { pending, .. } => pending.len(),
            State::Window(_) => 0,
        };
        let is_byte = table.is_byte(id);
        let begin = out.len();
        self.push_one(id, out);
        if let State::Literal { is_invalid, .. } = self.state {
            let goes_on = is_byte && !is_invalid;
            return if out.len() > begin && !goes_on { before } else { 0 };
        }
        before
    }

    /// Appends the held-back bytes of an incomplete character as U+FFFD. Call at the end of the stream.
    pub fn flush(&mut self, out: &mut String) {
        let skips = self.skips_special && self.shown.is_empty();
        match &mut self.state {
            State::ByteLevel(held) => {
                push_lossy(held, out);
                held.clear();
            }
            State::Literal { pending, is_invalid } => flush_run(pending, is_invalid, out),
            State::Window(window) => window.deliver(&self.tokenizer, skips, true, out),
        }
    }

    fn push_one(&mut self, id: i32, out: &mut String) {
        let (table, is_skipped) = (self.tokenizer.table(), self.is_skipped(id));
        if let State::Window(window) = &mut self.state {
            if let Ok(id) = u32::try_from(id)
                && table.num_ids() > super::bytes::to_usize(id)
                && (!is_skipped || self.shown.is_empty())
            {
                window.held.push(id);
                let skips = self.skips_special && self.shown.is_empty();
                window.deliver(&self.tokenizer, skips, false, out);
            }
            return;
        }
        if is_skipped {
            return;
        }
        let bytes = table.of(id);
        match &mut self.state {
            State::ByteLevel(held) => push_bytes(held, bytes, out),
            State::Literal { pending, is_invalid } => {
                if table.is_byte(id) {
                    bytes.iter().for_each(|&byte| push_byte(pending, is_invalid, byte, out));
                } else if !bytes.is_empty() {
                    flush_run(pending, is_invalid, out);
                    push_lossy(bytes, out);
                }
            }
            State::Window(_) => {}
        }
    }
}

/// Last decoded ids (`context`), and ids whose text is not delivered yet (`held`).
#[derive(Default)]
struct Window {
    context: Vec<u32>,
    held: Vec<u32>,
}

impl Window {
    /// Appends the text that the held ids add after the context, unless it ends inside a character.
    fn deliver(&mut self, tokenizer: &Tokenizer, skips_special: bool, is_end: bool, out: &mut String) {
        let decode = |ids: &[u32]| match ids {
            [] => String::new(),
            ids => tokenizer.decode(ids, skips_special).unwrap_or_default(),
        };
        let before = decode(&self.context).chars().count();
        let text: String = decode(&[&self.context[..], &self.held].concat())
            .chars()
            .skip(before)
            .collect();
        if self.held.is_empty() || (!is_end && text.ends_with(REPLACEMENT) && self.held.len() < WINDOW_HOLD) {
            return;
        }
        out.push_str(&text);
        self.context = self.held.split_off(self.held.len().saturating_sub(WINDOW_CONTEXT));
        self.held.clear();
    }
}

/// Appends the whole characters of `held` and `bytes`. Each maximal invalid sequence becomes one U+FFFD; the beginning
/// of a character stays in `held`.
fn push_bytes(held: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    if held.is_empty()
        && let Ok(text) = std::str::from_utf8(bytes)
    {
        out.push_str(text); // fast path, nearly always taken
        return;
    }
    held.extend(bytes);
    let mut begin = 0;
    loop {
        match std::str::from_utf8(&held[begin..]) {
            Ok(text) => {
                out.push_str(text);
                held.clear();
                return;
            }
            Err(error) => {
                let valid = begin + error.valid_up_to();
                push_lossy(&held[begin..valid], out);
                let len = match error.error_len() {
                    Some(len) if !is_half_surrogate(&held[valid..]) => len,
                    _ => {
                        held.drain(..valid);
                        return;
                    }
                };
                out.push(REPLACEMENT);
                begin = valid + len;
            }
        }
    }
}

/// Returns true for the first two bytes of a UTF-8 surrogate, for which Python's decoder waits for a third before it
/// reports an error. Deltas match Python's that way.
fn is_half_surrogate(bytes: &[u8]) -> bool {
    matches!(bytes, [0xed, 0xa0..=0xbf])
}

/// Adds a byte to a run of byte tokens. A run is text if it is valid UTF-8; else each byte is one U+FFFD.
fn push_byte(pending: &mut Vec<u8>, is_invalid: &mut bool, byte: u8, out: &mut String) {
    if *is_invalid {
        out.push(REPLACEMENT);
        return;
    }
    pending.push(byte);
    match std::str::from_utf8(pending) {
        Ok(text) => out.push_str(text),
        Err(error) if error.error_len().is_none() => return,
        Err(_) => {
            *is_invalid = true;
            out.extend(std::iter::repeat_n(REPLACEMENT, pending.len()));
        }
    }
    pending.clear();
}

fn flush_run(pending: &mut Vec<u8>, is_invalid: &mut bool, out: &mut String) {
    out.extend(std::iter::repeat_n(REPLACEMENT, pending.len()));
    pending.clear();
    *is_invalid = false;
}

fn push_lossy(bytes: &[u8], out: &mut String) {
    out.push_str(&String::from_utf8_lossy(bytes));
}

/// Text of one output as its ids arrive, truncated at the first stop string. Tokens after a stop string count as never
/// generated, and stop strings are ignored in the first `min_tokens` ids: neither depends on how many ids come at once.
pub struct TextStream {
    decoder: Decoder,
    matcher: StopMatcher,
    /// Special tokens that are decoded as text but not searched for stop strings.
    shown: Box<[i32]>,
    /// Number of next ids that are not searched for stop strings. Not maintained without stop strings.
    num_unsearched: i64,
    text: String,
    /// Scan for the content of the output; `None` if all of the text is content.
    scan: Option<ContentScan>,
    /// Lengths in bytes of text that the scan has not decided yet, and whether it is searched for stop strings.
    searched: VecDeque<(usize, bool)>,
}

impl TextStream {
    /// Creates a stream. Special tokens are omitted from the text, but for those in `shown`.
    pub fn new(tokenizer: &Arc<Tokenizer>, stop: &[String], shown: &[i32], min_tokens: i64) -> Self {
        Self {
            decoder: tokenizer.decoder(true).showing(shown),
            matcher: StopMatcher::new(stop),
            shown: shown.into(),
            num_unsearched: min_tokens.saturating_sub(1),
            text: String::new(),
            scan: None,
            searched: VecDeque::new(),
        }
    }

    /// Restricts the search for stop strings to the content that `scan` finds.
    pub fn search_within(&mut self, scan: ContentScan) {
        self.scan = Some(scan).filter(|_| !self.matcher.is_empty());
    }

    /// Decodes ids and appends the new text to `out`. Returns how many ids count: up to the end of a match.
    pub fn push(&mut self, ids: &[i32], out: &mut String) -> usize {
        if self.matcher.is_empty() {
            self.decoder.push(ids, out);
            return ids.len();
        }
        for (at, id) in ids.iter().enumerate() {
            if self.stopped() {
                return at;
            }
            self.text.clear();
            self.decoder.push(std::slice::from_ref(id), &mut self.text);
            let is_searched = self.num_unsearched <= 0 && !self.shown.contains(id);
            self.search(is_searched, false, out);
            self.num_unsearched = self.num_unsearched.saturating_sub(1);
        }
        ids.len()
    }

    /// Decodes ids as `push` does; `ended` also ends the output, which releases held-back text. `by_token`: the last
    /// id, if any, is the stop token. It counts, unless a stop string comes before it, but has no text.
    pub fn take(&mut self, ids: &[i32], ended: bool, by_token: bool, out: &mut String) -> usize {
        let num_shown = ids.len().saturating_sub(usize::from(by_token));
        let num_used = self.push(&ids[..num_shown], out);
        if self.stopped() {
            return num_used;
        }
        if ended {
            self.text.clear();
            self.decoder.flush(&mut self.text);
            self.search(true, true, out);
            if !self.stopped() {
                self.matcher.flush(out);
            }
        }
        ids.len()
    }

    /// Appends the part of the new text that is final.
    fn search(&mut self, is_searched: bool, ended: bool, out: &mut String) {
        let Some(scan) = &mut self.scan else {
            if is_searched {
                self.matcher.push(&self.text, out);
            } else {
                self.matcher.skip(&self.text, out);
            }
            return;
        };
        self.searched.push_back((self.text.len(), is_searched));
        for (text, is_content) in scan.push(&self.text, ended) {
            let mut rest = text.as_str();
            while let Some((len, is_searched)) = self.searched.front_mut().filter(|_| !rest.is_empty()) {
                let (piece, after) = rest.split_at(rest.len().min(*len));
                if is_content && *is_searched {
                    self.matcher.push(piece, out);
                } else {
                    self.matcher.skip(piece, out);
                }
                if self.matcher.matched().is_some() {
                    return;
                }
                *len -= piece.len();
                rest = after;
                if *len > 0 {
                    break;
                }
                self.searched.pop_front();
            }
        }
    }

    /// Returns true if a stop string has matched.
    pub fn stopped(&self) -> bool {
        self.matcher.matched().is_some()
    }

    /// Returns the stop string that matched.
    pub fn matched_stop(&self) -> Option<&str> {
        self.matcher.matched()
    }
}
