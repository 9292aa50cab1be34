//! Writer of one response to its client.
//!
//! Invariants: one response per request, and nothing after its end; the same framing as uvicorn.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::rc::Rc;

use bytes::Bytes;

use super::Head;
use super::link::Link;

/// Capacity in bytes up to which a buffer is reused for the next response.
const MAX_SCRATCH_BYTES: usize = 1 << 18;

/// Name and value of a header.
pub type Pair<'a> = (&'a str, &'a str);

/// Borrows the names and values of headers.
pub fn pairs(headers: &[(String, String)]) -> Vec<Pair<'_>> {
    headers.iter().map(|(name, value)| (&**name, &**value)).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    None,
    Begun,
    Ended,
}

/// Shared handle that writes one response. It never blocks and wakes no task: bytes go to the socket at once, and those
/// that the socket does not accept are queued.
pub type Writer = Rc<Answer>;

/// State of the response to one request.
pub struct Answer {
    link: Rc<Link>,
    is_head: bool,
    keep_alive: Cell<bool>,
    progress: Cell<Progress>,
    body: RefCell<Option<Bytes>>,
}

impl Answer {
    /// Makes the writer of a response. `body` is the request's body, stored until the request cannot be proxied any
    /// more.
    pub(crate) fn new(link: Rc<Link>, head: Option<&Head>, body: Option<Bytes>) -> Writer {
        Rc::new(Self {
            link,
            is_head: head.is_some_and(|head| head.method == "HEAD"),
            keep_alive: Cell::new(head.is_some_and(|head| head.keep_alive)),
            progress: Cell::new(Progress::None),
            body: RefCell::new(body),
        })
    }

    pub(crate) fn progress(&self) -> Progress {
        self.progress.get()
    }

    pub(crate) fn take_body(&self) -> Option<Bytes> {
        self.body.take()
    }

    /// Ends all writing for this request. Returns true if the connection may stay open.
    pub(crate) fn close(&self) -> bool {
        let is_whole = self.progress.replace(Progress::Ended) == Progress::Ended;
        self.link.is_stream.set(false);
        self.link.set_on_resume(None);
        self.link.name.borrow_mut().clear();
        self.body.take();
        is_whole && self.keep_alive.get()
    }

    /// Makes the connection close after this response.
    pub(crate) fn end_connection(&self) {
        self.keep_alive.set(false);
    }

    fn push_head(&self, to: &mut Vec<u8>, status: u16, content_type: &str, head: &[Pair<'_>], length: Option<usize>) {
        let _ = write!(to, "HTTP/1.1 {status} {}\r\ndate: ", phrase(status));
        self.link.options.push_date(to);
        if let Some(length) = length {
            let _ = write!(to, "\r\ncontent-length: {length}");
        }
        let types = [("content-type", content_type)];
        let types = types.iter().filter(|(_, value)| !value.is_empty());
        let mut closes = false;
        for (name, value) in types.chain(head) {
            to.extend_from_slice(b"\r\n");
            to.extend_from_slice(name.as_bytes());
            to.extend_from_slice(b": ");
            to.extend_from_slice(value.as_bytes());
            closes |= *name == "connection" && value.eq_ignore_ascii_case("close");
        }
        if closes || self.link.is_last.get() {
            self.end_connection();
        }
        if !self.keep_alive.get() && !closes {
            to.extend_from_slice(b"\r\nconnection: close");
        }
        if length.is_none() && status != 204 && status != 304 {
            to.extend_from_slice(b"\r\ntransfer-encoding: chunked");
        }
        to.extend_from_slice(b"\r\n\r\n");
    }

    /// Calls `call` with an empty buffer that is reused.
    fn with_scratch(&self, call: impl FnOnce(&mut Vec<u8>)) {
        let mut scratch = self.link.options.scratch.take();
        scratch.clear();
        call(&mut scratch);
        if scratch.capacity() <= MAX_SCRATCH_BYTES {
            self.link.options.scratch.replace(scratch);
        }
    }

    /// Sets the request's name, which log lines about the connection use.
    pub fn set_name(&self, name: &str) {
        if self.progress.get() != Progress::Ended {
            name.clone_into(&mut self.link.name.borrow_mut());
        }
    }

    /// Drops the stored request body: the request is not proxied any more. Starting a response does the same.
    pub fn commit(&self) {
        self.body.take();
    }

    /// Writes a whole response, with further headers `head`. No-op if a response has begun.
    pub fn whole(&self, status: u16, content_type: &str, head: &[Pair<'_>], body: &[u8]) {
        if self.progress.replace(Progress::Ended) != Progress::None {
            return;
        }
        self.commit();
        let length = (!body.is_empty() || !matches!(status, 204 | 304)).then_some(body.len());
        self.with_scratch(|scratch| {
            self.push_head(scratch, status, content_type, head, length);
            if !self.is_head {
                scratch.extend_from_slice(body);
            }
            self.link.write(scratch);
        });
    }

    /// Begins a streamed response with status 200. Its header is sent with the first part.
    pub fn begin(&self, content_type: &str, head: &[Pair<'_>]) {
        if self.progress.get() != Progress::None {
            return;
        }
        self.progress.set(Progress::Begun);
        self.link.is_stream.set(true);
        self.commit();
        self.with_scratch(|scratch| {
            self.push_head(scratch, 200, content_type, head, None);
            self.link.write_deferred(scratch);
        });
    }

    /// Writes the next part of a streamed response. Empty parts are ignored.
    pub fn part(&self, bytes: &[u8]) {
        self.write(bytes, false);
    }

    /// Ends a streamed response. No-op if none is in progress.
    pub fn end(&self) {
        self.write(b"", true);
    }

    /// Writes the last part and the end of a streamed response at once.
    pub fn end_with(&self, bytes: &[u8]) {
        self.write(bytes, true);
    }

    fn write(&self, bytes: &[u8], is_end: bool) {
        if self.progress.get() != Progress::Begun || (bytes.is_empty() && !is_end) {
            return;
        }
        if is_end {
            self.progress.set(Progress::Ended);
        }
        self.with_scratch(|scratch| {
            if !bytes.is_empty() {
                let _ = write!(scratch, "{:x}\r\n", bytes.len());
                scratch.extend_from_slice(bytes);
                scratch.extend_from_slice(b"\r\n");
            }
            if is_end {
                scratch.extend_from_slice(b"0\r\n\r\n");
            }
            self.link.write(scratch);
        });
    }

    /// Returns true if the client has not read all that was written. The caller should wait for `on_resume` then.
    pub fn is_paused(&self) -> bool {
        self.progress.get() != Progress::Ended && self.link.is_blocked()
    }

    /// Sets the callback for each time that the client has read all that was written; replaces an earlier one.
    pub fn on_resume(&self, call: Box<dyn Fn()>) {
        if self.progress.get() != Progress::Ended {
            self.link.set_on_resume(Some(call));
        }
    }
}

fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        304 => "Not Modified",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Request Entity Too Large",
        415 => "Unsupported Media Type",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "",
    }
}

/// Result of a request's handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The response is written; the client may not have read all of it.
    Answered,
    /// Nothing was written: the request is proxied unchanged.
    Proxy,
}

/// Handler of requests. Dropping the future of [`Handler::answer`] means that the client has disconnected.
pub trait Handler: 'static {
    /// Decides by the header alone. Returns the largest accepted body in bytes, and [`Handler::answer`] is called next;
    /// or `None`: the request is proxied unchanged.
    fn route(&self, head: &Head) -> Option<usize>;

    /// Returns true if the caller may send a body above [`super::SMALL_BYTES`]; if not, the request is proxied.
    fn can_send_body(&self, head: &Head) -> impl Future<Output = bool> {
        let _ = head;
        std::future::ready(true)
    }

    /// Notifies of a request that `route` accepted but that is proxied: its body is too large for now, or too slow.
    fn on_proxied(&self, head: &Head) {
        let _ = head;
    }

    /// Answers a request whose whole body has arrived, through `writer`, unless it returns `Outcome::Proxy`.
    fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> impl Future<Output = Outcome>;
}
