//! Relay of bytes between a client and the Python server, in both directions.
//!
//! Invariants: neither side is read faster than the other accepts; bytes are unchanged; each side sees the other's end.

use std::io::ErrorKind;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use rustix::net::{Shutdown, shutdown};
use tokio::net::UnixStream;

use super::Head;
use super::client::{Inbox, Watch};
use super::link::Link;
use super::writer::Progress;

/// Reads of one poll at most, so that other connections get their turn.
const MAX_READS: usize = 8;

pub(crate) struct Relay {
    upstream: UnixStream,
    to_send: [Bytes; 2],
    /// Bytes of the body that remain, without those in `to_send`; `None` if the end is unknown.
    left: Option<usize>,
    /// Finder of the response's end; `None` if the response ends with the connection.
    end: Option<AnswerEnd>,
    is_shut: bool,
    is_refused: bool,
}

pub(crate) enum Relayed {
    Answered {
        keep: bool,
    },
    /// The server closed before a response began; `left` is the rest of the body.
    Unanswered {
        left: Option<usize>,
    },
    /// The client disconnected before the exchange was complete.
    Gone,
}

impl Relay {
    pub(crate) fn new(upstream: UnixStream, head: Option<&Head>, body: Bytes, left: Option<usize>) -> Self {
        Self {
            upstream,
            to_send: [head.map_or_else(Bytes::new, |head| head.raw.clone()), body],
            left,
            end: head.map(|head| AnswerEnd::new(head.method == "HEAD")),
            is_shut: false,
            is_refused: false,
        }
    }

    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
        inbox: &mut Inbox,
        link: &Link,
        watch: &mut Watch,
    ) -> Poll<Relayed> {
        if self.poll_client(context, inbox, link, watch).is_ready() {
            return Poll::Ready(Relayed::Gone);
        }
        self.poll_server(context, inbox, link)
    }

    fn progress(&self) -> Progress {
        self.end.as_ref().map_or(Progress::Begun, AnswerEnd::progress)
    }

    fn has_sent_all(&self) -> bool {
        self.left == Some(0) && self.to_send.iter().all(Bytes::is_empty)
    }

    /// Sends the client's bytes to the server. Ready if the client has disconnected.
    fn poll_client(
        &mut self,
        context: &mut Context<'_>,
        inbox: &mut Inbox,
        link: &Link,
        watch: &mut Watch,
    ) -> Poll<()> {
        let mut reads = 0..MAX_READS;
        loop {
            if self.poll_send(context).is_pending() {
                return Poll::Pending;
            }
            if self.left == Some(0) {
                break;
            }
            if reads.next().is_none() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !inbox.bytes.is_empty() {
                let size = self.left.unwrap_or(usize::MAX).min(inbox.bytes.len());
                self.to_send[1] = inbox.bytes.split_to(size).freeze();
                self.left = self.left.map(|left| left - size);
            } else if inbox.has_ended {
                break;
            } else if self.is_refused || inbox.poll_more(context, link).is_pending() {
                return Poll::Pending;
            }
        }
        if inbox.is_last() {
            self.shut(); // the server decides how long it goes on with the response
            return Poll::Pending;
        }
        let disconnected = watch.poll(context, inbox, link, || self.progress());
        if inbox.is_last() {
            self.shut();
            return Poll::Pending;
        }
        disconnected
    }

    fn shut(&mut self) {
        if !self.is_shut {
            let _ = shutdown(&self.upstream, Shutdown::Write);
            self.is_shut = true;
        }
    }

    /// Sends the bytes of `to_send`. Ready if none are left.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(bytes) = self.to_send.iter_mut().find(|bytes| !bytes.is_empty()) else {
                return Poll::Ready(());
            };
            if self.is_refused {
                bytes.clear();
                continue;
            }
            match self.upstream.poll_write_ready(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(_)) => self.is_refused = true,
                Poll::Ready(Ok(())) => match self.upstream.try_write(bytes) {
                    Ok(size) => bytes.advance(size),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => self.is_refused = true, // the server may have responded nevertheless
                },
            }
        }
    }

    /// Sends the server's bytes to the client. Ready if the exchange has ended.
    fn poll_server(&mut self, context: &mut Context<'_>, inbox: &Inbox, link: &Link) -> Poll<Relayed> {
        for _ in 0..MAX_READS {
            if self.progress() == Progress::Ended && (self.has_sent_all() || self.is_refused || inbox.has_ended) {
                let keep = self.has_sent_all() && self.end.as_ref().is_some_and(|end| end.keep_alive);
                return Poll::Ready(Relayed::Answered { keep });
            }
            if link.is_blocked() || self.upstream.poll_read_ready(context).is_pending() {
                return Poll::Pending;
            }
            let mut input = link.options.input.borrow_mut();
            let size = match self.upstream.try_read(&mut input) {
                Ok(size) => size,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(_) => 0,
            };
            if size == 0 {
                return Poll::Ready(self.server_has_ended(inbox));
            }
            let used = self
                .end
                .as_mut()
                .map_or(Ok(size), |end| end.feed(&input[..size]))
                .unwrap_or(0);
            link.write(&input[..used]);
            if used < size {
                return Poll::Ready(Relayed::Answered { keep: false }); // an invalid response, or bytes after its end
            }
            if let Some(id) = self.end.as_mut().and_then(|end| end.request_id.take()) {
                *link.name.borrow_mut() = id;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn server_has_ended(&self, inbox: &Inbox) -> Relayed {
        let has_answered = self.end.as_ref().is_none_or(|end| end.has_begun());
        if has_answered || (inbox.has_ended && self.left != Some(0)) {
            return Relayed::Answered { keep: false }; // a truncated response is truncated for the client, too
        }
        Relayed::Unanswered { left: self.left }
    }
}

const MAX_HEAD_BYTES: usize = 1 << 20;
const MAX_HEADERS: usize = 256;

/// Incremental parser that finds the end of one response.
pub(crate) struct AnswerEnd {
    is_to_head: bool,
    state: State,
    head: Vec<u8>,
    /// Whether the server keeps the connection open.
    pub(crate) keep_alive: bool,
    /// Value of the response's `x-request-id` header.
    pub(crate) request_id: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Length(u64),
    Size(u64),
    Extension(u64),
    SizeEnd(u64),
    Data(u64),
    DataEnd,
    DataLineEnd,
    /// A trailer line, with its length so far in bytes.
    Trailer(usize),
    UntilClose,
    Ended,
}

/// Error for bytes that are not a valid HTTP/1 response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl AnswerEnd {
    pub(crate) fn new(is_to_head: bool) -> Self {
        Self {
            is_to_head,
            state: State::Head,
            head: Vec::new(),
            keep_alive: true,
            request_id: None,
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        match self.state {
            State::Head => Progress::None, // an interim response does not count
            State::Ended => Progress::Ended,
            _ => Progress::Begun,
        }
    }

    /// Returns true if any byte of the response was handled: it was sent to the client, so no other response may begin.
    pub(crate) fn has_begun(&self) -> bool {
        self.progress() != Progress::None || !self.head.is_empty()
    }

    /// Parses the next bytes and returns how many of them belong to the response.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let mut at = 0;
        while at < bytes.len() && self.state != State::Ended {
            let rest = &bytes[at..];
            at += match self.state {
                State::Head => self.feed_head(rest)?,
                State::UntilClose => rest.len(),
                State::Length(left) | State::Data(left) => {
                    let size = left.min(rest.len() as u64);
                    self.state = match self.state {
                        State::Length(_) if left == size => State::Ended,
                        State::Length(_) => State::Length(left - size),
                        _ if left == size => State::DataEnd,
                        _ => State::Data(left - size),
                    };
                    size as usize
                }
                _ => {
                    self.state = self.feed_framing(rest[0])?;
                    1
                }
            };
        }
        Ok(at)
    }

    fn feed_framing(&self, byte: u8) -> Result<State, Broken> {
        Ok(match (self.state, byte) {
            (State::Size(size), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte).to_digit(16).ok_or(Broken)?;
                State::Size(size.checked_mul(16).ok_or(Broken)? + u64::from(digit))
            }
            (State::Size(size) | State::Extension(size), b'\r') => State::SizeEnd(size),
            (State::Size(size), b';') => State::Extension(size),
            (State::Extension(size), _) => State::Extension(size),
            (State::SizeEnd(0), b'\n') => State::Trailer(0),
            (State::SizeEnd(size), b'\n') => State::Data(size),
            (State::DataEnd, b'\r') => State::DataLineEnd,
            (State::DataLineEnd, b'\n') => State::Size(0),
            (State::Trailer(0), b'\n') => State::Ended,
            (State::Trailer(_), b'\n') => State::Trailer(0),
            (State::Trailer(size), b'\r') => State::Trailer(size),
            (State::Trailer(size), _) => State::Trailer(size + 1),
            _ => return Err(Broken),
        })
    }

    fn feed_head(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let before = self.head.len();
        self.head.extend_from_slice(bytes);
        let begin = before.saturating_sub(3);
        let Some(end) = memchr::memmem::find(&self.head[begin..], b"\r\n\r\n").map(|at| begin + at + 4) else {
            return if self.head.len() > MAX_HEAD_BYTES {
                Err(Broken)
            } else {
                Ok(bytes.len())
            };
        };
        self.head.truncate(end);
        let head = std::mem::take(&mut self.head);
        self.take_head(&head)?;
        Ok(end - before)
    }

    fn take_head(&mut self, head: &[u8]) -> Result<(), Broken> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut headers);
        if answer.parse(head) != Ok(httparse::Status::Complete(head.len())) {
            return Err(Broken);
        }
        let status = answer.code.ok_or(Broken)?;
        if (100..200).contains(&status) && status != 101 {
            return Ok(());
        }
        let (mut length, mut is_chunked) = (None, false);
        self.keep_alive = answer.version == Some(1);
        for header in answer.headers.iter() {
            let value = std::str::from_utf8(header.value).unwrap_or_default();
            match header.name.to_ascii_lowercase().as_str() {
                "content-length" => length = Some(value.parse().map_err(|_| Broken)?),
                "transfer-encoding" => is_chunked = value.eq_ignore_ascii_case("chunked"),
                "connection" => {
                    self.keep_alive &= !value.split(',').any(|one| one.trim().eq_ignore_ascii_case("close"));
                }
                "x-request-id" => self.request_id = Some(value.to_owned()),
                _ => {}
            }
        }
        self.state = match length {
            _ if self.is_to_head || matches!(status, 204 | 304) => State::Ended,
            _ if is_chunked => State::Size(0),
            Some(0) => State::Ended,
            Some(length) => State::Length(length),
            None => State::UntilClose,
        };
        self.keep_alive &= self.state != State::UntilClose && status != 101;
        Ok(())
    }
}
