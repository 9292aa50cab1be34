//! The way of one answer to its client.
//!
//! Invariants: one answer to a request, and nothing behind its end; framing as uvicorn writes it.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::rc::Rc;

use bytes::Bytes;

use super::Head;
use super::link::Link;

/// A larger buffer is not kept for the next answer.
const MAX_SCRATCH_BYTES: usize = 1 << 18;

/// Name and value of a header.
pub type Pair<'a> = (&'a str, &'a str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    None,
    Begun,
    Ended,
}

/// Writes one answer. Cheap to clone; nothing here blocks or wakes a task: bytes go to the socket at once, what it does
/// not take waits in a buffer.
pub type Writer = Rc<Answer>;

/// The answer that is under way.
pub struct Answer {
    link: Rc<Link>,
    is_head: bool,
    keep_alive: Cell<bool>,
    progress: Cell<Progress>,
    body: RefCell<Option<Bytes>>,
}

impl Answer {
    /// `body`: to pass on if the request is.
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

    /// Nothing more is written for it. Whether the connection may go on.
    pub(crate) fn close(&self) -> bool {
        let is_whole = self.progress.replace(Progress::Ended) == Progress::Ended;
        self.link.is_stream.set(false);
        self.link.set_on_resume(None);
        self.link.name.borrow_mut().clear();
        self.body.take();
        is_whole && self.keep_alive.get()
    }

    /// The connection ends with this answer.
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

    /// Call with an empty buffer that is used again and again.
    fn with_scratch(&self, call: impl FnOnce(&mut Vec<u8>)) {
        let mut scratch = self.link.options.scratch.take();
        scratch.clear();
        call(&mut scratch);
        if scratch.capacity() <= MAX_SCRATCH_BYTES {
            self.link.options.scratch.replace(scratch);
        }
    }

    /// The name of the request in log lines.
    pub fn set_name(&self, name: &str) {
        if self.progress.get() != Progress::Ended {
            name.clone_into(&mut self.link.name.borrow_mut());
        }
    }

    /// The request is not passed on any more: its body need not be kept for that. What begins an answer says it too.
    pub fn commit(&self) {
        self.body.take();
    }

    /// A whole answer. `head` are further headers; length, date and connection are added.
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

    /// The head of a streamed answer, status 200. It goes out with the first part.
    pub fn begin(&self, content_type: &str, head: &[Pair<'_>]) {
        if self.progress.get() != Progress::None {
            return;
        }
        self.progress.set(Progress::Begun);
        self.link.is_stream.set(true);
        self.commit();
        self.with_scratch(|scratch| {
            self.push_head(scratch, 200, content_type, head, None);
            self.link.hold(scratch);
        });
    }

    /// The next part of a streamed answer. Empty parts are none.
    pub fn part(&self, bytes: &[u8]) {
        self.write(bytes, false);
    }

    /// The end of a streamed answer.
    pub fn end(&self) {
        self.write(b"", true);
    }

    /// The last part and the end in one write.
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

    /// Whether the client lags behind: what was written is not taken yet. Nothing more should be written until
    /// `on_resume` is called.
    pub fn is_paused(&self) -> bool {
        self.progress.get() != Progress::Ended && self.link.is_blocked()
    }

    /// Called each time when the client has caught up; replaces what was set before.
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

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its answer is written, as far as its client takes it.
    Answered,
    /// Nothing was written for it: it goes on, unchanged.
    PassOn,
}

/// Answers requests. Dropping the future of [`Handler::answer`] means that the client is gone.
pub trait Handler: 'static {
    /// By the head alone: its body, of at most so many bytes, is wanted, and [`Handler::answer`] is next. None: it goes
    /// on, unchanged.
    fn route(&self, head: &Head) -> Option<usize>;

    /// Whether the caller may send a body of more than [`super::SMALL_BYTES`], which `route` wants; else it goes on.
    fn may_send(&self, head: &Head) -> impl Future<Output = bool> {
        let _ = head;
        std::future::ready(true)
    }

    /// A request that `route` wants goes on all the same: its body is too large for now, or comes too slowly.
    fn passed_on(&self, head: &Head) {
        let _ = head;
    }

    /// A request whose whole body is here.
    fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> impl Future<Output = Outcome>;
}
