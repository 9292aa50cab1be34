//! A text that grows, and what a parser of it asks: written as if the text were whole, it waits where it needs more.
//!
//! Invariants: what is decided depends on the text alone, not on the pieces in which it comes; what waits in the buffer
//! is shorter than the longest marker, so that all work is linear in the text.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use super::parts::Part;
use crate::is_space;

/// How a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Where the model ended it.
    Whole,
    /// In the middle, by a limit: what may be the beginning of a call is no text.
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
    /// So much of the text came before what is in the buffer.
    passed: usize,
    /// So much of what was taken is lost.
    lost: usize,
    /// None: nobody asks for them.
    spans: Option<Vec<Span>>,
}

/// A part of the text of an answer, up to this place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) end: usize,
    pub(super) is_content: bool,
}

/// Shared by the parser and whoever pushes.
#[derive(Clone, Default)]
pub(super) struct Growing(Arc<Mutex<State>>);

impl Growing {
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

    /// What was emitted since the last call.
    pub(super) fn parts(&self) -> Vec<Part> {
        self.with(|state| std::mem::take(&mut state.parts))
    }

    /// From now on it is noted which parts of the text are content.
    pub(super) fn note_spans(&self) {
        self.with(|state| state.spans = Some(Vec::new()));
    }

    /// Those that are decided since the last call.
    pub(super) fn spans(&self) -> Vec<Span> {
        self.with(|state| state.spans.as_mut().map(std::mem::take).unwrap_or_default())
    }

    /// The arguments of a call are not what the model meant.
    pub(super) fn break_call(&self, index: usize) {
        self.with(|state| {
            if !state.broken.contains(&index) {
                state.broken.push(index);
            }
        });
    }

    /// The numbers of the calls that are broken.
    pub(super) fn broken(&self) -> Vec<usize> {
        self.with(|state| state.broken.clone())
    }

    /// Takes content, which ends `behind` bytes before what comes next. Neighbours of a kind become one.
    pub(super) fn emit_text(&self, text: String, behind: usize) {
        self.with(|state| {
            let end = state.passed + state.at - state.lost - behind;
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

    /// Neighbours of a kind become one.
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

    /// Until `push` or `finish` was called.
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

    /// What `look` finds in the rest of the text; None: more of it is needed. At the end of the text it must know.
    pub(super) async fn look<T>(&self, mut look: impl FnMut(&str, bool) -> Option<T>) -> T {
        loop {
            if let Some(found) = self.with(|state| look(&state.text[state.at..], state.end.is_some())) {
                return found;
            }
            self.more().await;
        }
    }

    // ----------------------------------------------------------------------------------------------- what comes next

    /// The next character; None at the end.
    pub(super) async fn peek(&self) -> Option<char> {
        self.look(|rest, ended| match rest.chars().next() {
            None if !ended => None,
            found => Some(found),
        })
        .await
    }

    /// Whether `marker` comes next; no more is waited for than that needs.
    pub(super) async fn comes(&self, marker: &str) -> bool {
        let found = self
            .look(|rest, ended| {
                if rest.starts_with(marker) {
                    return Some(Ok(true));
                }
                let may_come = marker.as_bytes().starts_with(rest.as_bytes());
                (ended || !may_come).then_some(if may_come { Err(()) } else { Ok(false) })
            })
            .await;
        if found.is_err() {
            self.with(|state| state.broke_off = true);
        }
        found == Ok(true)
    }

    /// Whether a limit ended the text, and all that came was taken but for the beginning of what was looked for.
    pub(super) fn is_cut(&self) -> bool {
        self.with(|state| state.end == Some(End::Cut) && (state.broke_off || state.at == state.text.len()))
    }

    /// Whether nothing comes any more.
    pub(super) async fn is_at_end(&self) -> bool {
        self.peek().await.is_none()
    }

    /// What is still there is lost.
    pub(super) fn drop_rest(&self) {
        self.with(|state| state.at = state.text.len());
    }

    // ----------------------------------------------------------------------------------------------------- consuming

    /// The next `len` bytes, which are known to be there.
    pub(super) fn take(&self, len: usize) -> String {
        self.with(|state| {
            let begin = state.at;
            state.at += len;
            state.text[begin..state.at].to_owned()
        })
    }

    /// More of the characters that `belongs` takes; None: another one or the end of the text comes.
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

    /// Takes as much of the text as `read` says, which sees what is there, and how it ends once that is known.
    pub(super) fn take_by(&self, read: impl FnOnce(&str, Option<End>) -> usize) {
        self.with(|state| state.at += read(&state.text[state.at..], state.end));
    }

    /// More of a value, and whether that is its end; None at the end of the text.
    pub(super) async fn more_of(&self, scan: &mut ValueScan) -> Option<(String, bool)> {
        self.peek().await?;
        let (len, ends) = self.with(|state| {
            let rest = &state.text[state.at..];
            let end = scan.push(rest);
            (end.unwrap_or(rest.len()), end.is_some())
        });
        Some((self.take(len), ends))
    }

    /// Text before the first of `markers`, as far as it is certain, and which of them comes behind it; None at the end
    /// of the text. Only what may be a marker waits.
    pub(super) async fn before(&self, markers: &[&str]) -> Option<(String, Option<usize>)> {
        let (len, found, dropped) = self
            .look(|rest, ended| match first_of(rest, markers) {
                Ahead::Marker(at, which) => Some((at, Some(which), false)),
                Ahead::Perhaps(at) if ended => Some((rest.len(), None, rest.len() - at > 1)),
                Ahead::Perhaps(0) => None,
                Ahead::Perhaps(at) => Some((at, None, false)),
                Ahead::Text if rest.is_empty() && !ended => None,
                Ahead::Text => Some((rest.len(), None, false)),
            })
            .await;
        let mut text = self.take(len);
        if dropped
            && self.is_cut()
            && let Ahead::Perhaps(at) = first_of(&text, markers)
        {
            let whole = text.len();
            text.truncate(at);
            self.with(|state| state.lost += whole - at);
        }
        (!text.is_empty() || found.is_some()).then_some((text, found))
    }
}

enum Ahead {
    /// Where one is, and which.
    Marker(usize, usize),
    /// Where the text may end with the beginning of one.
    Perhaps(usize),
    Text,
}

fn first_of(text: &str, markers: &[&str]) -> Ahead {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(skipped) = bytes[at..]
        .iter()
        .position(|byte| markers.iter().any(|one| one.as_bytes()[0] == *byte))
    {
        at += skipped;
        if let Some(which) = markers.iter().position(|one| bytes[at..].starts_with(one.as_bytes())) {
            return Ahead::Marker(at, which);
        }
        if markers.iter().any(|one| one.as_bytes().starts_with(&bytes[at..])) {
            return Ahead::Perhaps(at);
        }
        at += 1;
    }
    Ahead::Text
}

/// Finds the end of one value of JSON, or of a list of arguments in Python's way, in a text that comes in pieces.
#[derive(Default)]
pub(super) struct ValueScan {
    is_python: bool,
    closers: Vec<u8>,
    quote: Option<u8>,
    is_escaped: bool,
    /// A number or a word; not known before the first character.
    is_scalar: Option<bool>,
    /// Its brackets do not match.
    pub(super) is_broken: bool,
}

impl ValueScan {
    pub(super) fn new(is_python: bool) -> Self {
        Self {
            is_python,
            ..Self::default()
        }
    }

    /// Where in `text`, the next piece, the value ends or turns out to be broken; None if it goes on. The first piece
    /// begins with its first character.
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
