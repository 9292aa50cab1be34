//! Bytes between a client and the Python server, both ways, as they come.
//!
//! Invariants: neither side is read faster than the other one takes it; nothing is changed; the end of one side's
//! sending is the other's to know.

use std::io::ErrorKind;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use rustix::net::{Shutdown, shutdown};
use tokio::net::UnixStream;

use super::Head;
use super::answer_end::AnswerEnd;
use super::client::{Inbox, Watch};
use super::link::Link;
use super::writer::Progress;

/// Of one poll: others want to be read as well.
const MAX_READS: usize = 8;

pub(crate) struct Relay {
    upstream: UnixStream,
    to_send: [Bytes; 2],
    /// Of the body, beside those; None: no end is known.
    left: Option<usize>,
    /// None: it ends with the connection.
    end: Option<AnswerEnd>,
    is_shut: bool,
    is_refused: bool,
}

pub(crate) enum Relayed {
    Answered {
        keep: bool,
    },
    /// The server went away before it answered; `left` as it was.
    Unanswered {
        left: Option<usize>,
    },
    /// The client went away.
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

    /// To the server. Ready: the client is gone.
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
            self.shut(); // how long it is waited for is the server's to decide
            return Poll::Pending;
        }
        let found = watch.poll(context, inbox, link, || self.progress());
        if inbox.is_last() {
            self.shut();
            return Poll::Pending;
        }
        found
    }

    fn shut(&mut self) {
        if !self.is_shut {
            let _ = shutdown(&self.upstream, Shutdown::Write);
            self.is_shut = true;
        }
    }

    /// Ready: nothing waits to be sent.
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
                    Err(_) => self.is_refused = true, // it may have answered all the same
                },
            }
        }
    }

    /// To the client.
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
                return Poll::Ready(Relayed::Answered { keep: false }); // no answer, or more than one
            }
            if let Some(id) = self.end.as_mut().and_then(|end| end.request_id.take()) {
                *link.name.borrow_mut() = id;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn server_has_ended(&self, inbox: &Inbox) -> Relayed {
        let has_answered = self.end.as_ref().is_none_or(|end| end.has_come());
        if has_answered || (inbox.has_ended && self.left != Some(0)) {
            return Relayed::Answered { keep: false }; // also if it was cut off: so is ours
        }
        Relayed::Unanswered { left: self.left }
    }
}
