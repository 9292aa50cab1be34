//! Connections of clients, and passing requests on.
//!
//! One thread, one event loop, no locks: a connection's task reads heads and bodies and waits; whoever answers writes
//! through a [`Writer`], from any task of the same thread, without waking the connection's own.
//!
//! Invariants: what is no plain HTTP/1.1 request goes on byte for byte; a client that is gone ends what is done for it;
//! what waits for a client is bounded.

mod accept;
mod answer_end;
mod client;
mod connection;
mod crowd;
mod fallback;
mod head;
mod link;
mod options;
mod relay;
#[cfg(test)]
mod tests;
mod writer;

use std::rc::Rc;

use bytes::Bytes;

pub use accept::accept;
pub use connection::serve_connection;
pub use fallback::request_id;
pub use head::Head;
pub use options::{Budget, Counts, Held, Options, SMALL_BYTES, Stop};
pub use writer::{Pair, Writer};

/// What becomes of a request, by its head alone.
#[derive(Debug)]
pub enum Route {
    /// Its body, of at most so many bytes, is wanted; [`Handler::answer`] is next.
    Body(usize),
    /// It goes on, unchanged.
    PassOn,
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
    /// By the head alone.
    fn route(&self, head: &Head) -> Route;

    /// A request whose whole body is here.
    fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> impl Future<Output = Outcome>;
}
