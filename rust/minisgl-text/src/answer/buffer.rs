//! A growing text with asynchronous queries, so that a parser is written as if the text were complete and waits where
//! it needs more.
//!
//! Invariants: decisions depend on the text alone, not on the chunks in which it arrives; the buffered rest is shorter
//! than the longest marker, so that all work is linear in the text.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use super::parts::Part;
use crate::is_space;

/// Way in which a model's output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model ended the output.
    Whole,
    /// A limit ended it in the middle: the beginning of a possible call is not emitted as text.
    Cut,
}

#[derive(Default)]
struct State {
    text: String,
    at: usize,
    end: Option<End>,
    broke_off: bool,
    parts: Vec<Part>,
    broken: Vec<usize>,
    /// Bytes of the text before the buffer.
    passed: usize,
    /// Bytes that were consumed and dropped.
    lost: usize,
    /// Spans of content and other text since the last query. `None` if they are not recorded.
    spans: Option<Vec<Span>>,
}

/// Stretch of an output's text that is content or not, up to the byte offset `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) end: usize,
    pub(super) is_content: bool,
}

/// Handle of a growing text, shared by the parser and the code that pushes text.
#[derive(Clone, Default)]
pub(super) struct TextBuffer(Arc<Mutex<State>>);

impl TextBuffer {
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn push(&self, text: &str) {
        self.with(|state| {
            state.text.drain(..state.at);
            state.passed += state.at;
            state.at = 0;
            state.text.push_str(text);
        });
    }

    pub(super) fn finish(&self, end: End) {
        self.with(|state| {
            state.end.get_or_insert(end);
        });
    }

    /// Returns the parts emitted since the last call.
    pub(super) fn parts(&self) -> Vec<Part> {
        self.with(|state| std::mem::take(&mut state.parts))
    }

    /// Starts recording which spans of the text are content.
    pub(super) fn note_spans(&self) {
        self.with(|state| state.spans = Some(Vec::new()));
    }

    /// Returns the spans decided since the last call.
    pub(super) fn spans(&self) -> Vec<Span> {
        self.with(|state| state.spans.as_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Marks the call `index` as broken: its arguments are not what the model meant.
    pub(super) fn break_call(&self, index: usize) {
        self.with(|state| {
            if !state.broken.contains(&index) {
                state.broken.push(index);
            }
        });
    }

    /// Returns the indices of the broken calls.
    pub(super) fn broken(&self) -> Vec<usize> {
        self.with(|state| state.broken.clone())
    }

    /// Emits content that ends `after` bytes before the current position, merged with content just before it.
    pub(super) fn emit_text(&self, text: String, after: usize) {
        self.with(|state| {
            let end = state.passed + state.at - state.lost - after;
            if let Some(spans) = &mut state.spans {
                let begin = end.saturating_sub(text.len());
                spans.push(Span {
                    end: begin,
                    is_content: false,
                });
                spans.push(Span { end, is_content: true });
            }
        });
        self.emit(Part::Text(text));
    }

    /// Emits a part of the output. Merges it with the last one if both are of one kind.
    pub(super) fn emit(&self, part: Part) {
        self.with(|state| {
            if !matches!(part, Part::Text(_)) {
                let end = state.passed + state.at;
                if let Some(spans) = &mut state.spans {
                    spans.push(Span { end, is_content: false });
                }
            }
            let joined = match (state.parts.last_mut(), &part) {
                (Some(Part::Text(last)), Part::Text(more)) | (Some(Part::Reasoning(last)), Part::Reasoning(more)) => {
                    last.push_str(more);
                    true
                }
                (Some(Part::CallArguments(last, text)), Part::CallArguments(index, more)) if *last == *index => {
                    text.push_str(more);
                    true
                }
                _ => false,
            };
            if !joined {
                state.parts.push(part);
            }
        });
    }

    /// Waits until `push` or `finish` was called.
    pub(super) async fn more(&self) {
        let mut waited = false;
        poll_fn(|_| {
            if std::mem::replace(&mut waited, true) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Waits until `look` returns a value for the rest of the text; `None` means that it needs more, never at the end.
    pub(super) async fn look<T>(&self, mut look: impl FnMut(&str, bool) -> Option<T>) -> T {
        loop {
            if let Some(found) = self.with(|state| look(&state.text[state.at..], state.end.is_some())) {
                return found;
            }
            self.more().await;
        }
    }

    // ----------------------------------------------------------------------------------------------- what comes next

    /// Waits for the next character and returns it without consuming it. `None` at the end.
    pub(super) async fn peek(&self) -> Option<char> {
        self.look(|rest, ended| match rest.chars().next() {
            None if !ended => None,
            found => Some(found),
        })
        .await
    }

    /// Returns true if `marker` comes next. Waits for no more text than that needs.
    pub(super) async fn comes(&self, marker: &str) -> bool {
        let outcome = self
            .look(|rest, ended| {
                if rest.starts_with(marker) {
                    return Some(Ok(true));
                }
                let may_come = marker.as_bytes().starts_with(rest.as_bytes());
                (ended || !may_come).then_some(if may_come { Err(()) } else { Ok(false) })
            })
            .await;
        if outcome.is_err() {
            self.with(|state| state.broke_off = true);
        }
        outcome == Ok(true)
    }

    /// Returns true if a limit ended the text, and all of it was consumed but for the beginning of a marker.
    pub(super) fn is_cut(&self) -> bool {
        self.with(|state| state.end == Some(End::Cut) && (state.broke_off || state.at == state.text.len()))
    }

    /// Returns true at the end of the text. Waits for a character or the end.
    pub(super) async fn is_at_end(&self) -> bool {
        self.peek().await.is_none()
    }

    /// Drops the rest of the text.
    pub(super) fn drop_rest(&self) {
        self.with(|state| state.at = state.text.len());
    }

    // ----------------------------------------------------------------------------------------------------- consuming

    /// Consumes and returns the next `len` bytes. They must be in the buffer.
    pub(super) fn take(&self, len: usize) -> String {
        self.with(|state| {
            let begin = state.at;
            state.at += len;
            state.text[begin..state.at].to_owned()
        })
    }

    /// Consumes the available characters that satisfy `belongs`. `None` if another one or the end of the text comes.
    pub(super) async fn run_of(&self, belongs: impl Fn(char) -> bool) -> Option<String> {
        let len = self
            .look(|rest, ended| {
                if rest.is_empty() && !ended {
                    return None;
                }
                Some(rest.find(|found| !belongs(found)).unwrap_or(rest.len()))
            })
            .await;
        (len > 0).then(|| self.take(len))
    }

    /// Consumes as many bytes as `read` returns for the available text and, if known, its end.
    pub(super) fn take_by(&self, read: impl FnOnce(&str, Option<End>) -> usize) {
        self.with(|state| state.at += read(&state.text[state.at..], state.end));
    }

    /// Consumes more of a value. Returns its text and whether the value ends there; `None` at the end of the text.
    pub(super) async fn more_of(&self, scan: &mut ValueScan) -> Option<(String, bool)> {
        self.peek().await?;
        let (len, ends) = self.with(|state| {
            let rest = &state.text[state.at..];
            let end = scan.push(rest);
            (end.unwrap_or(rest.len()), end.is_some())
        });
        Some((self.take(len), ends))
    }

    /// Consumes the text before the first of `markers`, as far as it is certain. Returns it and the index of the marker
    /// that follows; `None` at the end of the text. Only a possible beginning of a marker waits.
    pub(super) async fn before(&self, markers: &[&str]) -> Option<(String, Option<usize>)> {
        let (len, found, dropped) = self
            .look(|rest, ended| match first_of(rest, markers) {
                MarkerSearch::Marker(at, which) => Some((at, Some(which), false)),
                MarkerSearch::Perhaps(at) if ended => Some((rest.len(), None, rest.len() - at > 1)),
                MarkerSearch::Perhaps(0) => None,
                MarkerSearch::Perhaps(at) => Some((at, None, false)),
                MarkerSearch::Text if rest.is_empty() && !ended => None,
                MarkerSearch::Text => Some((rest.len(), None, false)),
            })
            .await;
        let mut text = self.take(len);
        if dropped
            && self.is_cut()
            && let MarkerSearch::Perhaps(at) = first_of(&text, markers)
        {
            let whole = text.len();
            text.truncate(at);
            self.with(|state| state.lost += whole - at);
        }
        (!text.is_empty() || found.is_some()).then_some((text, found))
    }
}

enum MarkerSearch {
    /// Byte offset and index of a marker.
    Marker(usize, usize),
    /// Byte offset of a marker's possible beginning at the end of the text.
    Perhaps(usize),
    Text,
}

fn first_of(text: &str, markers: &[&str]) -> MarkerSearch {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(skipped) = bytes[at..]
        .iter()
        .position(|byte| markers.iter().any(|one| one.as_bytes()[0] == *byte))
    {
        at += skipped;
        if let Some(which) = markers.iter().position(|one| bytes[at..].starts_with(one.as_bytes())) {
            return MarkerSearch::Marker(at, which);
        }
        if markers.iter().any(|one| one.as_bytes().starts_with(&bytes[at..])) {
            return MarkerSearch::Perhaps(at);
        }
        at += 1;
    }
    MarkerSearch::Text
}

/// Incremental scan for the end of one JSON value, or of a list of Python arguments.
#[derive(Default)]
pub(super) struct ValueScan {
    is_python: bool,
    closers: Vec<u8>,
    quote: Option<u8>,
    is_escaped: bool,
    /// Whether the value is a number or a word; unknown before the first character.
    is_scalar: Option<bool>,
    /// Whether the brackets do not match.
    pub(super) is_broken: bool,
}

impl ValueScan {
    pub(super) fn new(is_python: bool) -> Self {
        Self {
            is_python,
            ..Self::default()
        }
    }

    /// Scans the next chunk. Returns the offset at which the value ends or breaks, or `None` if it continues. The first
    /// chunk begins with the value.
    fn push(&mut self, text: &str) -> Option<usize> {
        let bytes = text.as_bytes();
        let is_scalar = *self
            .is_scalar
            .get_or_insert_with(|| !matches!(bytes.first(), Some(b'{' | b'[' | b'"' | b'(')));
        if is_scalar {
            return text.find(|found| is_space(found) || ",:{}[]\"".contains(found));
        }
        let mut at = 0;
        while at < bytes.len() {
            let byte = bytes[at];
            at += 1;
            if let Some(quote) = self.quote {
                if std::mem::take(&mut self.is_escaped) {
                    continue;
                }
                self.is_escaped = byte == b'\\';
                if byte != quote {
                    continue;
                }
                self.quote = None;
            } else {
                match byte {
                    b'"' => self.quote = Some(byte),
                    b'\'' if self.is_python => self.quote = Some(byte),
                    b'{' => self.closers.push(b'}'),
                    b'[' => self.closers.push(b']'),
                    b'(' if self.is_python => self.closers.push(b')'),
                    b'}' | b']' | b')' if byte != b')' || self.is_python => {
                        if self.closers.pop() != Some(byte) {
                            self.is_broken = true;
                            return Some(at - 1);
                        }
                        if self.closers.is_empty() {
                            return Some(at);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            if self.closers.is_empty() {
                return Some(at);
            }
        }
        None
    }
}
