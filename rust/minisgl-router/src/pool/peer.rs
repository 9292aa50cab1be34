//! The connection of one front end, as a pool sees it: `minisgl.runner.front_ends`.
//!
//! Invariants: frames leave whole and in order; sending never waits: what the front end does not take yet is kept, in
//! bounds.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::pending;
use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use minisgl_gateway::engine::Frames;
use minisgl_gateway::message::decode_to_engine;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::io::Io;

/// What the kernel holds for a front end. It says that there is room when at most a quarter is used.
const SEND_BUFFER_BYTES: usize = 1 << 17;
/// For one that stalls while others go on.
const MAX_QUEUED_BYTES: usize = 64 << 20;
/// For last words, once the connection is to end.
const LINGER: Duration = Duration::from_secs(1);

pub(super) struct Peer {
    stream: UnixStream,
    queue: RefCell<VecDeque<(Rc<Vec<u8>>, usize)>>,
    num_queued: Cell<usize>,
    filled: Notify,
    is_lost: Cell<bool>,
    is_closing: Cell<bool>,
    closing: Notify,
}

impl Peer {
    pub(super) fn new(stream: UnixStream) -> Self {
        // the kernel doubles it; where it does not follow, there is only more or less room
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES / 2);
        Self {
            stream,
            queue: RefCell::default(),
            num_queued: Cell::new(0),
            filled: Notify::new(),
            is_lost: Cell::new(false),
            is_closing: Cell::new(false),
            closing: Notify::new(),
        }
    }

    /// One that is `droppable` is not queued.
    pub(super) fn send(&self, frame: &Rc<Vec<u8>>, droppable: bool) {
        if self.is_closing.get() {
            return;
        }
        let is_first = self.queue.borrow().is_empty();
        let sent = if is_first { self.write(frame) } else { 0 };
        if sent == frame.len() || (sent == 0 && droppable) {
            return;
        }
        self.queue.borrow_mut().push_back((Rc::clone(frame), sent));
        self.num_queued.set(self.num_queued.get() + frame.len() - sent);
        self.filled.notify_one();
        if self.num_queued.get() > MAX_QUEUED_BYTES {
            self.is_lost.set(true);
            self.closing.notify_one();
        }
    }

    /// Nothing more is sent but what is queued.
    pub(super) fn close(&self) {
        self.is_closing.set(true);
        self.closing.notify_one();
        self.filled.notify_one();
    }

    /// Whether nothing is queued, and the socket has room.
    pub(super) fn has_room(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // asked of the kernel: what tokio remembers is true until the socket is full
        let asked = self.stream.try_io(Interest::WRITABLE, || {
            let mut asked = [PollFd::new(&self.stream, PollFlags::OUT)];
            match poll(&mut asked, Some(&now)) {
                Ok(1..) => Ok(()),
                _ => Err(ErrorKind::WouldBlock.into()),
            }
        });
        self.queue.borrow().is_empty() && asked.is_ok()
    }

    /// Until the socket may have room. One that is gone has. While something is queued, that is for who sends it to say
    /// (`Io::news`): the socket may have room long before.
    pub(super) async fn room(&self) {
        if !self.queue.borrow().is_empty() {
            return pending().await;
        }
        let _ = self.stream.writable().await;
    }

    /// How much was sent. One that is gone takes everything: who reads finds out.
    fn write(&self, data: &[u8]) -> usize {
        match self.stream.try_write(data) {
            Ok(sent) => sent,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => data.len(),
        }
    }

    /// Send of what is queued what the front end takes now.
    fn flush(&self) {
        let mut queue = self.queue.borrow_mut();
        while let Some((frame, at)) = queue.front_mut() {
            let sent = self.write(&frame[*at..]);
            *at += sent;
            self.num_queued.set(self.num_queued.get() - sent);
            if *at < frame.len() {
                return;
            }
            queue.pop_front();
        }
    }

    async fn send_queue(&self, io: &Io) {
        loop {
            while !self.queue.borrow().is_empty() {
                let _ = self.stream.writable().await; // one that is gone takes everything
                self.flush();
            }
            io.news.notify_waiters();
            if self.is_closing.get() {
                return;
            }
            self.filled.notified().await;
        }
    }

    /// Takes in what it says, until it is gone or must go.
    async fn listen(&self, io: &Io, number: u32) {
        let mut frames = Frames::default();
        let reason = loop {
            tokio::select! {
                () = self.closing.notified() => {
                    if self.is_closing.get() {
                        return;
                    }
                    if self.is_lost.get() {
                        break Some("it does not read what is sent to it".to_owned());
                    }
                }
                ready = self.stream.readable() => {
                    if ready.is_err() || frames.fill(&self.stream).is_err() {
                        break None;
                    }
                    if let Err(reason) = take(&mut frames, io, number) {
                        break Some(reason);
                    }
                }
            }
        };
        io.act(|board| board.front_end_gone(number, reason.as_deref()));
    }
}

fn take(frames: &mut Frames, io: &Io, number: u32) -> Result<(), String> {
    loop {
        let mut messages = Vec::new();
        let taken = frames.take(|frame| {
            messages.extend(decode_to_engine(frame)?);
            Ok(())
        });
        io.act(|board| (messages.into_iter()).try_for_each(|message| board.front_end_says(number, message)))?;
        match taken {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.why()),
        }
    }
}

/// A front end has connected.
pub(super) fn serve(io: &Rc<Io>, stream: UnixStream) {
    let peer = Rc::new(Peer::new(stream));
    let number = io.welcome(&peer);
    let (io, reader) = (Rc::clone(io), Rc::clone(&peer));
    spawn_local(async move {
        let writing = spawn_local({
            let (io, peer) = (Rc::clone(&io), Rc::clone(&reader));
            async move { peer.send_queue(&io).await }
        });
        reader.listen(&io, number).await;
        reader.close();
        let stop = writing.abort_handle();
        if timeout(LINGER, writing).await.is_err() {
            stop.abort();
        }
        io.leave(number);
    });
}

/// Tells it so, and hangs up.
pub(super) async fn refuse(stream: &UnixStream, frame: &[u8]) {
    if stream.writable().await.is_ok() {
        let _ = stream.try_write(frame); // or it has gone
    }
}
