//! Sockets of a pool: sends what the switchboard has queued, and passes messages of front ends to it.
//!
//! Invariants: frames leave whole and in order; sending never waits: unread frames are queued, up to a limit.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, pending, poll_fn};
use std::io::ErrorKind;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use minisgl_gateway::engine::{EngineLink, Frames};
use minisgl_gateway::message::{ToEngine, decode_to_engine};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::task::{spawn_local, yield_now};
use tokio::time::{sleep, timeout};

use super::requests::FrontEndRules;
use super::switchboard::{Out, Readings, Switchboard};

pub(super) struct Io {
    board: RefCell<Switchboard>,
    links: RefCell<Vec<Option<Rc<EngineLink>>>>,
    peers: RefCell<BTreeMap<u32, Rc<Peer>>>,
    readings: Arc<Mutex<Readings>>,
    pub(super) rules: Rc<FrontEndRules>,
    /// Signal for tasks that wait for free send buffers to check again.
    pub(super) news: Notify,
    /// Signal that the switchboard has ended.
    pub(super) ended: Notify,
}

impl Io {
    pub(super) fn new(
        board: Switchboard,
        num_engines: usize,
        readings: Arc<Mutex<Readings>>,
        rules: Rc<FrontEndRules>,
    ) -> Self {
        Self {
            board: RefCell::new(board),
            links: RefCell::new((0..num_engines).map(|_| None).collect()),
            peers: RefCell::default(),
            readings,
            rules,
            news: Notify::new(),
            ended: Notify::new(),
        }
    }

    /// Runs `what` on the switchboard and sends the messages that follow from it. Never blocks.
    pub(super) fn act<T>(&self, what: impl FnOnce(&mut Switchboard) -> T) -> T {
        let (result, out) = {
            let board = &mut *self.board.borrow_mut();
            let result = what(board);
            let out = board.take_out();
            self.publish(board);
            if board.ended().is_some() {
                self.ended.notify_one();
            }
            (result, out)
        };
        out.into_iter().for_each(|one| self.deliver(one));
        self.news.notify_waiters();
        result
    }

    fn deliver(&self, out: Out) {
        match out {
            Out::Engine(engine, message) => {
                if let Some(link) = &self.links.borrow()[engine] {
                    link.send(message);
                }
            }
            Out::Frame { to, frame, droppable } => {
                if let Some(peer) = self.peers.borrow().get(&to) {
                    peer.send(&frame, droppable);
                }
            }
            Out::Close(id) => {
                if let Some(peer) = self.peers.borrow().get(&id) {
                    peer.close();
                }
            }
        }
    }

    fn publish(&self, board: &Switchboard) {
        let mut readings = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        board.write_metrics(&mut readings);
    }

    /// Returns true if the pool has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.board.borrow().ended().is_some()
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.board.borrow().is_shutting_down()
    }

    // ------------------------------------------------------------------------------------------------- come and go

    /// Registers a front end, sends the state of the engines to it, and returns its id.
    pub(super) fn add_peer(&self, peer: &Rc<Peer>) -> u32 {
        let id = self.board.borrow_mut().add_front_end();
        self.peers.borrow_mut().insert(id, Rc::clone(peer));
        self.act(|_| ()); // sends the queued snapshot
        id
    }

    pub(super) fn remove_peer(&self, id: u32) {
        self.peers.borrow_mut().remove(&id);
        self.news.notify_waiters();
    }

    pub(super) fn num_peers(&self) -> usize {
        self.peers.borrow().len()
    }

    /// Closes all front ends for new messages; what is queued is still sent.
    pub(super) fn close_all(&self) {
        self.peers.borrow().values().for_each(|peer| peer.close());
    }

    /// Sets the connection to `engine`, or `None` if it has none.
    pub(super) fn set_link(&self, engine: usize, link: Option<Rc<EngineLink>>) {
        self.links.borrow_mut()[engine] = link;
    }

    // --------------------------------------------------------------------------------------------- who cannot follow

    /// Waits until a front end that has requests can accept data, or no front end has requests.
    pub(super) async fn wait_until_writable(&self) {
        loop {
            let news = self.news.notified();
            let busy = self.busy();
            if busy.is_empty() || busy.iter().any(|peer| peer.can_send()) {
                return;
            }
            let mut waits: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(news)];
            for peer in &busy {
                waits.push(Box::pin(peer.wait_until_writable()));
            }
            poll_fn(|context| {
                let is_any = waits.iter_mut().any(|one| one.as_mut().poll(context).is_ready());
                if is_any { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            yield_now().await; // lets the tasks that send queues run: nothing above waits for them
        }
    }

    /// Returns true if so many bytes wait for engines that further images must wait in their front end.
    fn is_congested(&self) -> bool {
        let links = self.links.borrow();
        links.iter().flatten().map(|link| link.queued_bytes()).sum::<usize>() > MAX_ENGINE_BYTES
    }

    fn busy(&self) -> Vec<Rc<Peer>> {
        let board = self.board.borrow();
        let peers = self.peers.borrow();
        let busy = peers.iter().filter(|(id, _)| board.is_busy(**id));
        busy.map(|(_, peer)| Rc::clone(peer)).collect()
    }
}

/// Time for a fatal error message to be sent before a connection is closed.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes that may wait for engines while a front end that has sent images is read: as many as one of its frames has.
const MAX_ENGINE_BYTES: usize = 256 << 20;
/// Time until a front end that is not read for that reason is looked at again.
const CONGESTION: Duration = Duration::from_millis(10);

/// Connection of one front end, with its send queue. The reference is `minisgl.runner.front_ends`.
pub(super) struct Peer {
    stream: UnixStream,
    rules: Rc<FrontEndRules>,
    queue: RefCell<VecDeque<(Rc<Vec<u8>>, usize)>>,
    num_queued: Cell<usize>,
    filled: Notify,
    is_lost: Cell<bool>,
    is_closing: Cell<bool>,
    closing: Notify,
    sends_images: Cell<bool>,
}

impl Peer {
    pub(super) fn new(stream: UnixStream, rules: &Rc<FrontEndRules>) -> Self {
        // the kernel doubles the value; on an error the default size is as good
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, rules.send_buffer_bytes / 2);
        Self {
            stream,
            rules: Rc::clone(rules),
            queue: RefCell::default(),
            num_queued: Cell::new(0),
            filled: Notify::new(),
            is_lost: Cell::new(false),
            is_closing: Cell::new(false),
            closing: Notify::new(),
            sends_images: Cell::new(false),
        }
    }

    /// Sends a frame. The part that the socket does not accept is queued, or all of it dropped if `droppable`. A queue
    /// above the rules' limit closes the connection.
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
        if self.num_queued.get() > self.rules.max_queued_bytes {
            self.is_lost.set(true);
            self.closing.notify_one();
        }
    }

    /// Closes the connection for new messages; what is queued is still sent.
    pub(super) fn close(&self) {
        self.is_closing.set(true);
        self.closing.notify_one();
        self.filled.notify_one();
    }

    /// Returns true if nothing is queued and the socket's send buffer has free space. Never blocks.
    pub(super) fn can_send(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // polls the kernel: tokio's readiness stays set until a write fails
        let polled = self.stream.try_io(Interest::WRITABLE, || {
            let mut descriptors = [PollFd::new(&self.stream, PollFlags::OUT)];
            match poll(&mut descriptors, Some(&now)) {
                Ok(1..) => Ok(()),
                _ => Err(ErrorKind::WouldBlock.into()),
            }
        });
        self.queue.borrow().is_empty() && polled.is_ok()
    }

    /// Waits until the socket may accept data or has failed. Never returns while frames are queued: `Io::news` tells of
    /// that.
    pub(super) async fn wait_until_writable(&self) {
        if !self.queue.borrow().is_empty() {
            return pending().await;
        }
        let _ = self.stream.writable().await;
    }

    /// Writes without blocking and returns the number of bytes sent: all if the connection is broken, which the reader
    /// sees.
    fn write(&self, data: &[u8]) -> usize {
        match self.stream.try_write(data) {
            Ok(sent) => sent,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => data.len(),
        }
    }

    /// Writes as much of the send queue as the socket accepts without blocking.
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
                let _ = self.stream.writable().await; // a broken connection accepts everything
                self.flush();
            }
            io.news.notify_waiters();
            if self.is_closing.get() {
                return;
            }
            self.filled.notified().await;
        }
    }

    /// Handles the front end's messages until it disconnects or must be disconnected.
    async fn listen(&self, io: &Io, id: u32) {
        let mut frames = Frames::default();
        let reason = loop {
            let waits = self.sends_images.get() && io.is_congested();
            tokio::select! {
                () = sleep(CONGESTION), if waits => {}
                () = self.closing.notified() => {
                    if self.is_closing.get() {
                        return;
                    }
                    if self.is_lost.get() {
                        break Some(self.rules.does_not_read.clone());
                    }
                }
                ready = self.stream.readable(), if !waits => {
                    if ready.is_err() || frames.fill(&self.stream).is_err() {
                        break None;
                    }
                    if let Err(reason) = self.handle_frames(&mut frames, io, id) {
                        break Some(reason);
                    }
                }
            }
        };
        io.act(|board| board.remove_front_end(id, reason.as_deref()));
    }

    fn handle_frames(&self, frames: &mut Frames, io: &Io, id: u32) -> Result<(), String> {
        loop {
            let mut messages = Vec::new();
            let num_frames = frames.take(|frame| {
                messages.extend(decode_to_engine(frame)?);
                Ok(())
            });
            if messages
                .iter()
                .any(|one| matches!(one, ToEngine::AddRequest(new) if !new.images.is_empty()))
            {
                self.sends_images.set(true);
            }
            io.act(|board| (messages.into_iter()).try_for_each(|message| board.handle_message(id, message)))?;
            match num_frames {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// Starts the tasks that serve a new front end.
pub(super) fn serve(io: &Rc<Io>, stream: UnixStream) {
    let peer = Rc::new(Peer::new(stream, &io.rules));
    let id = io.add_peer(&peer);
    let (io, reader) = (Rc::clone(io), Rc::clone(&peer));
    spawn_local(async move {
        let writing = spawn_local({
            let (io, peer) = (Rc::clone(&io), Rc::clone(&reader));
            async move { peer.send_queue(&io).await }
        });
        reader.listen(&io, id).await;
        reader.close();
        let stop = writing.abort_handle();
        if timeout(LINGER, writing).await.is_err() {
            stop.abort();
        }
        io.remove_peer(id);
    });
}

/// Sends `frame`, if the socket accepts it, to a front end that is refused.
pub(super) async fn refuse(stream: &UnixStream, frame: &[u8]) {
    if stream.writable().await.is_ok() {
        let _ = stream.try_write(frame); // an error means that it has disconnected
    }
}
