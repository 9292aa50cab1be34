//! Connections of clients, and passing requests on.
//!
//! One thread, one event loop, no locks: a connection's task reads heads and bodies and waits; whoever answers writes
//! through a [`Writer`], from any task of the same thread, without waking the connection's own.
//!
//! Invariants: what is no plain HTTP/1.1 request goes on byte for byte; a client that is gone ends what is done for it;
//! what waits for a client is bounded.

mod accept;
mod client;
mod connection;
mod fallback;
mod head;
mod link;
mod options;
mod relay;
#[cfg(test)]
mod tests;
mod writer;

pub use accept::accept;
pub use connection::serve_connection;
pub use fallback::{hex, request_id};
pub use head::Head;
pub use options::{Budget, Counts, Held, Options, SMALL_BYTES, Stop};
pub use writer::{Answer, Handler, Outcome, Pair, Writer};
