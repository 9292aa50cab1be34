//! Sending side of a client's connection, with its queue of unsent bytes.
//!
//! Invariants: bytes are sent in the order of writing; writing never waits; a client that does not read is
//! disconnected.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::ErrorKind;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BytesMut};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use super::options::{Options, count};

pub(crate) struct Link {
    stream: RefCell<Option<Rc<TcpStream>>>,
    waiting: RefCell<BytesMut>, // written, but not accepted by the socket
    /// The queued bytes wait to be sent together with later ones, not for the client to read.
    is_deferred: Cell<bool>,
    is_lost: Cell<bool>,
    /// The client has closed its half, or the server shuts down: the next response is the last one.
    pub(crate) is_last: Cell<bool>,
    /// A stream is in progress: its client must read all queued bytes from time to time.
    pub(crate) is_stream: Cell<bool>,
    /// Name of the current request, for the log.
    pub(crate) name: RefCell<String>,
    on_resume: RefCell<Option<Box<dyn Fn()>>>,
    task: RefCell<Option<Waker>>,
    slow: RefCell<Option<Slow>>,
    pub(crate) options: Rc<Options>,
}

/// Slow client timer, while bytes are queued.
struct Slow {
    since: Instant,
    progress: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Link {
    pub(crate) fn new(stream: Rc<TcpStream>, options: Rc<Options>) -> Self {
        Self {
            stream: RefCell::new(Some(stream)),
            waiting: RefCell::default(),
            is_deferred: Cell::new(false),
            is_lost: Cell::new(false),
            is_last: Cell::new(false),
            is_stream: Cell::new(false),
            name: RefCell::default(),
            on_resume: RefCell::default(),
            task: RefCell::default(),
            slow: RefCell::default(),
            options,
        }
    }

    /// Returns true if bytes wait for the client to read.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.is_deferred.get() && !self.waiting.borrow().is_empty()
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        if self.is_lost.get() {
            return;
        }
        if self.is_deferred.get() {
            self.is_deferred.set(false);
            self.waiting.borrow_mut().extend_from_slice(bytes);
            let sent = self.try_write(&self.waiting.borrow());
            self.waiting.borrow_mut().advance(sent);
        } else if self.is_blocked() {
            self.waiting.borrow_mut().extend_from_slice(bytes);
            return;
        } else {
            let sent = self.try_write(bytes);
            self.waiting.borrow_mut().extend_from_slice(&bytes[sent..]);
        }
        if self.is_blocked() {
            self.wake();
        }
    }

    /// Queues bytes to be sent with the next write, or at the end of this turn of the event loop.
    pub(crate) fn write_deferred(&self, bytes: &[u8]) {
        if self.is_blocked() || self.is_lost.get() {
            self.write(bytes);
        } else {
            self.waiting.borrow_mut().extend_from_slice(bytes);
            self.is_deferred.set(true);
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// Writes without blocking and returns the number of bytes accepted by the socket (all of them if the client is
    /// lost).
    fn try_write(&self, bytes: &[u8]) -> usize {
        let Some(stream) = self.stream.borrow().clone() else {
            return bytes.len();
        };
        match stream.try_write(bytes) {
            Ok(size) => size,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => {
                self.mark_lost();
                bytes.len()
            }
        }
    }

    /// Marks the connection as lost and wakes its task.
    pub(crate) fn mark_lost(&self) {
        self.is_lost.set(true);
        self.wake();
    }

    /// Sets the callback for when all queued bytes were sent; `None` removes it.
    pub(crate) fn set_on_resume(&self, call: Option<Box<dyn Fn()>>) {
        *self.on_resume.borrow_mut() = call;
    }

    /// Waits until no bytes are queued. Only for the connection's own task, which polls [`Link::poll_flush`] first.
    pub(crate) async fn drained(&self) {
        poll_fn(|_| {
            if self.waiting.borrow().is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Sends queued bytes. Ready if the client has disconnected or was disconnected for reading too slowly.
    pub(crate) fn poll_flush(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.is_lost.get() {
            return Poll::Ready(());
        }
        if !self
            .task
            .borrow()
            .as_ref()
            .is_some_and(|task| task.will_wake(context.waker()))
        {
            *self.task.borrow_mut() = Some(context.waker().clone());
        }
        self.is_deferred.set(false);
        if self.waiting.borrow().is_empty() {
            return Poll::Pending;
        }
        let Some(stream) = self.stream.borrow().clone() else {
            return Poll::Ready(());
        };
        let mut has_progress = false;
        while !self.waiting.borrow().is_empty() {
            match stream.poll_write_ready(context) {
                Poll::Pending => return self.poll_slow(context, has_progress),
                Poll::Ready(Err(_)) => self.mark_lost(),
                Poll::Ready(Ok(())) => {
                    let sent = self.try_write(&self.waiting.borrow());
                    has_progress |= sent > 0;
                    self.waiting.borrow_mut().advance(sent);
                }
            }
            if self.is_lost.get() {
                return Poll::Ready(());
            }
        }
        *self.waiting.borrow_mut() = BytesMut::new();
        *self.slow.borrow_mut() = None;
        self.resume();
        if self.is_lost.get() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    fn resume(&self) {
        let call = self.on_resume.borrow_mut().take(); // the callback may write, and set another callback
        if let Some(call) = call {
            call();
            self.on_resume.borrow_mut().get_or_insert(call);
        }
    }

    fn poll_slow(&self, context: &mut Context<'_>, has_progress: bool) -> Poll<()> {
        let now = Instant::now();
        let mut timer = self.slow.borrow_mut();
        let slow = timer.get_or_insert_with(|| Slow {
            since: now,
            progress: now,
            timer: Box::pin(sleep_until(now)),
        });
        if has_progress {
            slow.progress = now;
        }
        let since = if self.is_stream.get() {
            slow.since
        } else {
            slow.progress
        };
        let timeout = self.options.slow_client_timeout.get();
        let end = since + timeout;
        if now < end {
            slow.timer.as_mut().reset(end);
            if slow.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
        let name = self.name.borrow();
        let name = if name.is_empty() { "a connection" } else { &name };
        let waits = now.duration_since(since).max(timeout).as_secs_f64();
        (self.options.log)(&format!(
            "{name}: dropped: its client has read nothing for {waits:.1} s (--slow-client-timeout)"
        ));
        count(&self.options.counts.dropped);
        if let Some(stream) = &*self.stream.borrow() {
            let _ = stream.set_zero_linger(); // drops the bytes in the kernel's buffer, too
        }
        self.is_lost.set(true);
        Poll::Ready(())
    }

    /// Closes the socket and drops all queued bytes and callbacks, whatever else still holds the link.
    pub(crate) fn close(&self) {
        self.is_lost.set(true);
        *self.stream.borrow_mut() = None;
        *self.waiting.borrow_mut() = BytesMut::new();
        *self.slow.borrow_mut() = None;
        *self.task.borrow_mut() = None;
        self.set_on_resume(None);
    }
}
