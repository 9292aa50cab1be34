//! Incremental detokenization: token ids in, text out, each character once and whole.
//!
//! Byte-level BPE and sentencepiece with byte fallback, which nearly all models use, have a table from id to bytes; split
//! characters are carried. That is linear in the output whatever the ids are, where decoding a growing window (as
//! `DecodeStream` of the tokenizers library does) is quadratic in a flood of invalid bytes and fails where a decoding does
//! not begin with the one before it. Other decoders (WordPiece, CTC) get a short window. That is approximate: the first id
//! is decoded as if it began the text, and rules of wider reach are missed.
//!
//! Invariants: the deltas and the flush together equal the whole-text decoding of the generated ids, in a text that goes on
//! (the space that sentencepiece strips at the very beginning is kept), however the ids are grouped. So they equal
//! decode(prompt + generated) without decode(prompt), unless the prompt ends inside a character. One exception, which
//! whole-text decoding decides in hindsight: an invalid byte turns all bytes of its byte-fallback run into U+FFFD there;
//! here, characters delivered before it stay.

use std::sync::Arc;

use std::collections::VecDeque;

use super::Tokenizer;
use super::answer::ContentScan;
use super::bytes::Kind;
use super::stop::StopMatcher;

const REPLACEMENT: char = '\u{fffd}';
const WINDOW_HOLD: usize = 8; // ids held back at most for a character that does not come
const WINDOW_CONTEXT: usize = 4; // ids decoded again, so that joining rules see a left neighbour

/// State of one stream.
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    skips_special: bool,
    /// Special tokens that are text all the same.
    shown: Box<[i32]>,
    state: State,
}

enum State {
    /// The beginning of a character.
    ByteLevel(Vec<u8>),
    /// What of the current run of byte tokens is not delivered, and whether the run is no text.
    Literal {
        pending: Vec<u8>,
        is_invalid: bool,
    },
    Window(Window),
}

impl Tokenizer {
    /// A new stream.
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
    /// With these special tokens as text.
    #[must_use]
    pub fn showing(mut self, shown: &[i32]) -> Self {
        self.shown = shown.into();
        self
    }

    fn is_skipped(&self, id: i32) -> bool {
        self.skips_special && self.tokenizer.table().is_special(id) && !self.shown.contains(&id)
    }

    /// Append the new text.
    pub fn push(&mut self, ids: &[i32], out: &mut String) {
        for &id in ids {
            self.push_one(id, out);
        }
    }

    /// `push` of one id; the number of characters of the new text that stand before the one in which the id begins:
    /// those of held back bytes, if it does not go on with them.
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

    /// What was held back: the bytes of an unfinished character as U+FFFD.
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

/// The last ids, and those that are not text yet.
#[derive(Default)]
struct Window {
    context: Vec<u32>,
    held: Vec<u32>,
}

impl Window {
    /// Append what the held ids add to the text of those before them, unless it ends within a character.
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

/// Whole characters of `held` and `bytes`; every longest part of bytes that begins none is one U+FFFD. The beginning of
/// a character stays held.
fn push_bytes(held: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    if held.is_empty()
        && let Ok(text) = std::str::from_utf8(bytes)
    {
        out.push_str(text); // nearly always
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

/// Python's decoder waits for a surrogate's third byte, which some of its error handlers take, before it says that it is
/// none; whoever compares deltas with it sees that.
fn is_half_surrogate(bytes: &[u8]) -> bool {
    matches!(bytes, [0xed, 0xa0..=0xbf])
}

/// A run of byte tokens is text if it is valid UTF-8, else each byte is one U+FFFD.
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

/// The text of one answer as its ids come, cut at the first stop string. What follows a stop string counts as never
/// generated, and before `min_tokens` ids all is text, whatever it spells: neither depends on how many come at once.
pub struct TextStream {
    decoder: Decoder,
    matcher: StopMatcher,
    /// Special tokens that are text, but for stop strings.
    shown: Box<[i32]>,
    /// So many of the next ids belong to no stop string; not kept without stop strings.
    num_unsearched: i64,
    text: String,
    /// None: all of the text is content.
    scan: Option<ContentScan>,
    /// Lengths of what the scan has not decided yet, and whether stop strings are looked for in it.
    searched: VecDeque<(usize, bool)>,
}

impl TextStream {
    /// Special tokens are no text, but for those that are `shown`.
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

    /// Looks for stop strings in the content alone that this tells from the rest of the answer.
    pub fn search_within(&mut self, scan: ContentScan) {
        self.scan = Some(scan).filter(|_| !self.matcher.is_empty());
    }

    /// Appends the new text of ids that come before the end, and returns how many of them count: all, or those up to
    /// the one that completes a stop string.
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

    /// `push`, and with `ended` the end of the answer: what was held back is text or completes a stop string, and
    /// nothing may come any more. `by_token`: the last id, if there is one, is the stop token that ended it. It counts,
    /// unless a stop string comes before it, and is no text.
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

    /// Appends what is decided of the new text.
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
                let (piece, behind) = rest.split_at(rest.len().min(*len));
                if is_content && *is_searched {
                    self.matcher.push(piece, out);
                } else {
                    self.matcher.skip(piece, out);
                }
                if self.matcher.found().is_some() {
                    return;
                }
                *len -= piece.len();
                rest = behind;
                if *len > 0 {
                    break;
                }
                self.searched.pop_front();
            }
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
}
