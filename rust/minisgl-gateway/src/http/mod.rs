//! Client connections, and the proxy to the Python server.
//!
//! One thread, one event loop, no locks: a connection's task reads headers and bodies and waits; responses are written
//! through a [`Writer`], from any task of the same thread, without waking the connection's task.
//!
//! Invariants: what is not a plain HTTP/1.1 request is proxied byte for byte; the work for a client ends when it
//! disconnects; the bytes queued for a client are bounded.

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
pub use options::{Budget, BudgetPermit, Counts, Options, SMALL_BYTES, Stop};
pub use writer::{Answer, Handler, Outcome, Pair, Writer, pairs};
