//! Accepts new connections.
//!
//! Invariants: the number of open connections is limited; without free file descriptors it waits, with no busy loop.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::options::{Options, count};
use super::{Handler, serve_connection};

/// Response for a connection beyond the limit, as in `server/core/http.py`.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 140\r\nconnection: close\r\n\r\n\
    {\"error\":{\"message\":\"there are as many connections as may be: close some\",\"type\":\"server_error\",\"param\":null,\"code\":\"too_many_connections\"}}";
const WAIT_FOR_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Serves the clients of a listener until [`super::Stop`] is closed and all connections have ended. Must run inside a
/// [`tokio::task::LocalSet`]. Dropping the future ends all connections.
pub async fn accept<H: Handler>(listener: TcpListener, handler: Rc<H>, options: Rc<Options>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    let mut is_short = false;
    let (limiter, mut is_full) = (ConnectionLimiter::new(), false);
    while !options.stop.is_closing() {
        tokio::select! {
            biased;
            () = options.stop.closing() => {}
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    is_short = false;
                    let Some(permit) = limiter.acquire(address.ip()) else {
                        let _ = stream.try_write(FULL); // a client whose socket does not accept it has disconnected
                        if !is_full {
                            (options.log)("connection limit reached: new clients get status 503 until others leave");
                        }
                        is_full = true;
                        continue;
                    };
                    is_full = false;
                    let serving = serve_connection(stream, handler.clone(), options.clone());
                    connections.spawn_local(async move {
                        serving.await;
                        drop(permit);
                    });
                    count(&options.counts.accepted);
                }
                Err(error) if is_of_one_client(&error) => {}
                Err(error) => {
                    if !is_short {
                        (options.log)(&format!("cannot accept a new connection: {error}"));
                    }
                    is_short = true;
                    sleep(WAIT_FOR_DESCRIPTORS).await;
                }
            },
        }
    }
    drop(listener);
    tokio::select! {
        () = options.stop.cutting() => {}
        () = async { while connections.join_next().await.is_some() {} } => {}
    }
    Ok(())
}

/// Returns true for an error of one client, which left before its connection was accepted.
fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// Connections that are open at once at most; fewer if file descriptors are scarce: a proxied connection uses three.
const MAX_CONNECTIONS: usize = 16_384;
const OTHER_DESCRIPTORS: usize = 100;
const PER_CONNECTION: usize = 2;

pub(super) struct ConnectionLimiter {
    max: usize,
    open: RefCell<(usize, HashMap<IpAddr, usize>)>,
}

/// Permit for one open connection; dropping it returns the permit.
pub(super) struct ConnectionPermit {
    limiter: Rc<ConnectionLimiter>,
    address: IpAddr,
}

impl ConnectionLimiter {
    /// Makes a limiter for as many connections as the process has file descriptors for.
    pub(super) fn new() -> Rc<ConnectionLimiter> {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit
            .and_then(|limit| usize::try_from(limit).ok())
            .unwrap_or(usize::MAX);
        Self::of(MAX_CONNECTIONS.min(limit.saturating_sub(OTHER_DESCRIPTORS) / PER_CONNECTION))
    }

    fn of(max: usize) -> Rc<ConnectionLimiter> {
        let open = RefCell::default();
        Rc::new(ConnectionLimiter { max, open })
    }

    /// Returns a permit, or `None` if the limit is reached. One address may have three quarters of all connections.
    pub(super) fn acquire(self: &Rc<Self>, address: IpAddr) -> Option<ConnectionPermit> {
        let address = address.to_canonical();
        let (all, by_address) = &mut *self.open.borrow_mut();
        let own = by_address.get(&address).copied().unwrap_or(0);
        (*all < self.max && own < (self.max * 3).div_ceil(4)).then_some(())?;
        *all += 1;
        by_address.insert(address, own + 1);
        let limiter = Rc::clone(self);
        Some(ConnectionPermit { limiter, address })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let (all, by_address) = &mut *self.limiter.open.borrow_mut();
        *all -= 1;
        if let Some(own) = by_address.get_mut(&self.address) {
            *own -= 1;
            if *own == 0 {
                by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_gets_at_most_three_quarters_of_connections() {
        let limiter = ConnectionLimiter::of(8);
        let [one, other] = [[1, 2, 3, 4], [5, 6, 7, 8]].map(IpAddr::from);
        let mut permits: Vec<_> = (0..9).filter_map(|_| limiter.acquire(one)).collect();
        assert_eq!(permits.len(), 6);
        permits.extend((0..9).filter_map(|_| limiter.acquire(other)));
        assert_eq!(permits.len(), 8);
        drop(permits.drain(..2));
        assert!(limiter.acquire(one).is_some());
        permits.clear();
        assert_eq!(
            (0..9).filter_map(|_| limiter.acquire(other)).count(),
            9,
            "each leaves at once"
        );
        assert!(limiter.open.borrow().1.is_empty());
    }
}
