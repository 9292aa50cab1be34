//! Between the switchboard and the sockets.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use minisgl_gateway::engine::EngineLink;
use tokio::sync::Notify;
use tokio::task::yield_now;

use super::peer::Peer;
use super::server::Readings;
use super::switchboard::{Out, Switchboard};

/// Front ends at once.
pub(super) const MAX_FRONT_ENDS: usize = 64;

pub(super) struct Io {
    board: RefCell<Switchboard>,
    links: RefCell<Vec<Option<Rc<EngineLink>>>>,
    peers: RefCell<BTreeMap<u32, Rc<Peer>>>,
    readings: Arc<Mutex<Readings>>,
    /// Whoever waits for room looks again.
    pub(super) news: Notify,
    /// The switchboard has ended.
    pub(super) ended: Notify,
}

impl Io {
    pub(super) fn new(board: Switchboard, num_engines: usize, readings: Arc<Mutex<Readings>>) -> Self {
        Self {
            board: RefCell::new(board),
            links: RefCell::new((0..num_engines).map(|_| None).collect()),
            peers: RefCell::default(),
            readings,
            news: Notify::new(),
            ended: Notify::new(),
        }
    }

    /// Something happened; what follows from it is sent.
    pub(super) fn act<T>(&self, what: impl FnOnce(&mut Switchboard) -> T) -> T {
        let (found, out) = {
            let board = &mut *self.board.borrow_mut();
            let found = what(board);
            let out = board.take_out();
            self.publish(board);
            if board.ended().is_some() {
                self.ended.notify_one();
            }
            (found, out)
        };
        out.into_iter().for_each(|one| self.deliver(one));
        self.news.notify_waiters();
        found
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
            Out::Close(number) => {
                if let Some(peer) = self.peers.borrow().get(&number) {
                    peer.close();
                }
            }
        }
    }

    fn publish(&self, board: &Switchboard) {
        let mut readings = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        board.read(&mut readings);
    }

    /// Why the pool has ended, if it has.
    pub(super) fn has_ended(&self) -> bool {
        self.board.borrow().ended().is_some()
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.board.borrow().is_shutting_down()
    }

    // ------------------------------------------------------------------------------------------------- come and go

    /// The number of a new front end.
    pub(super) fn welcome(&self, peer: &Rc<Peer>) -> u32 {
        let number = self.board.borrow_mut().front_end_came();
        self.peers.borrow_mut().insert(number, Rc::clone(peer));
        self.act(|_| ()); // what was said to it
        number
    }

    pub(super) fn leave(&self, number: u32) {
        self.peers.borrow_mut().remove(&number);
        self.news.notify_waiters();
    }

    pub(super) fn num_peers(&self) -> usize {
        self.peers.borrow().len()
    }

    /// Nothing more is sent to front ends but what is queued.
    pub(super) fn close_all(&self) {
        self.peers.borrow().values().for_each(|peer| peer.close());
    }

    /// The connection to an engine, or that there is none.
    pub(super) fn set_link(&self, engine: usize, link: Option<Rc<EngineLink>>) {
        self.links.borrow_mut()[engine] = link;
    }

    // --------------------------------------------------------------------------------------------- who cannot follow

    /// Until a front end that has requests can follow, or none has any.
    pub(super) async fn room(&self) {
        loop {
            let news = self.news.notified();
            let busy = self.busy();
            if busy.is_empty() || busy.iter().any(|peer| peer.has_room()) {
                return;
            }
            let mut waits: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(news)];
            for peer in &busy {
                waits.push(Box::pin(peer.room()));
            }
            poll_fn(|context| {
                let is_any = waits.iter_mut().any(|one| one.as_mut().poll(context).is_ready());
                if is_any { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            yield_now().await; // to who sends what is queued: nothing above waits for it
        }
    }

    fn busy(&self) -> Vec<Rc<Peer>> {
        let board = self.board.borrow();
        let peers = self.peers.borrow();
        let busy = peers.iter().filter(|(number, _)| board.is_busy(**number));
        busy.map(|(_, peer)| Rc::clone(peer)).collect()
    }
}
