//! The receiving side of a client's connection: its bytes, its end, and whether it is still connected while it waits.
//!
//! Invariants: bytes read ahead are bounded; a client that closes its sending half before its response begins still
//! gets it, and is probed with interim responses, which clients ignore.

use std::future::poll_fn;
use std::io::ErrorKind;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use super::head::only_whole_requests;
use super::link::Link;
use super::options::READ_BYTES;
use super::writer::Progress;

const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

pub(crate) struct Inbox {
    stream: Rc<TcpStream>,
    pub(crate) bytes: BytesMut,
    /// The client has closed its sending half.
    pub(crate) has_ended: bool,
}

impl Inbox {
    pub(crate) fn new(stream: Rc<TcpStream>) -> Self {
        Self {
            stream,
            bytes: BytesMut::new(),
            has_ended: false,
        }
    }

    /// Polls for more bytes. Ready if bytes arrived or the client closed its half; an I/O error marks `link` as lost
    /// instead.
    pub(crate) fn poll_more(&mut self, context: &mut Context<'_>, link: &Link) -> Poll<()> {
        while !self.has_ended {
            if ready!(self.stream.poll_read_ready(context)).is_err() {
                link.mark_lost();
                return Poll::Pending;
            }
            let mut input = link.options.input.borrow_mut();
            match self.stream.try_read(&mut input) {
                Ok(0) => self.has_ended = true,
                Ok(size) => {
                    self.bytes.extend_from_slice(&input[..size]);
                    return Poll::Ready(());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => {
                    link.mark_lost();
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(())
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(crate) async fn more(&mut self, link: &Link) {
        poll_fn(|context| self.poll_more(context, link)).await;
    }

    /// Frees the memory of the empty receive buffer.
    pub(crate) fn release(&mut self) {
        self.bytes = BytesMut::new();
    }

    /// Returns true if the client sends nothing more and no further request is buffered.
    pub(crate) fn is_last(&self) -> bool {
        self.has_ended && self.bytes.is_empty()
    }
}

/// Detects that a client has disconnected while its request is answered.
#[derive(Default)]
pub(crate) struct Watch {
    probe: Option<Probe>,
}

struct Probe {
    timer: Pin<Box<Sleep>>,
    wait: Duration,
    /// Ready once the connection was reset, in response to a probe or at any later time.
    reset: Pin<Box<dyn Future<Output = ()>>>,
}

async fn until_reset(stream: Rc<TcpStream>) {
    let _ = stream.ready(Interest::ERROR).await; // an error means the same: the connection is lost
}

impl Watch {
    /// Polls for the client's disconnection. The body of the current request must have been taken from the inbox.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
        inbox: &mut Inbox,
        link: &Link,
        progress: impl Fn() -> Progress,
    ) -> Poll<()> {
        while !inbox.has_ended {
            if inbox.bytes.len() >= READ_BYTES {
                return Poll::Pending; // a reset is still noticed
            }
            ready!(inbox.poll_more(context, link));
        }
        if self.probe.is_none() {
            let is_whole = only_whole_requests(&inbox.bytes, link.options.max_head_bytes);
            if progress() == Progress::Begun || !is_whole {
                return Poll::Ready(());
            }
            let wait = link.options.probe_after.get();
            self.probe = Some(Probe {
                timer: Box::pin(sleep_until(Instant::now() + wait)),
                wait: wait / 10,
                reset: Box::pin(until_reset(Rc::clone(&inbox.stream))),
            });
        }
        link.is_last.set(inbox.bytes.is_empty());
        if let Some(probe) = &mut self.probe {
            if probe.reset.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            while probe.timer.as_mut().poll(context).is_ready() {
                if progress() == Progress::None {
                    link.write(PROBE);
                }
                probe.timer.as_mut().reset(Instant::now() + probe.wait);
                probe.wait *= 2;
            }
        }
        Poll::Pending
    }
}
