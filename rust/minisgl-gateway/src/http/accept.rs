//! New connections.
//!
//! Invariants: many are taken at a turn, and no more than there is room for; without file descriptors it waits for some instead of asking on and on.

use std::io;
use std::net::TcpListener;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::crowd::Crowd;
use super::options::{Options, count};
use super::{Handler, serve_connection};

/// As `server/connection.py` has it.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 140\r\nconnection: close\r\n\r\n\
    {\"error\":{\"message\":\"there are as many connections as may be: close some\",\"type\":\"server_error\",\"param\":null,\"code\":\"too_many_connections\"}}";
const WAIT_FOR_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Serve the clients of a listener until [`super::Stop`] ends that and they are gone. Inside of a
/// [`tokio::task::LocalSet`]. Dropping it ends all its connections.
pub async fn accept<H: Handler>(listener: TcpListener, handler: Rc<H>, options: Rc<Options>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    let mut is_short = false;
    let (crowd, mut is_full) = (Crowd::new(), false);
    while !options.stop.is_closing() {
        tokio::select! {
            biased;
            () = options.stop.closing() => {}
            Some(_) = connections.join_next() => {}
            found = listener.accept() => match found {
                Ok((stream, address)) => {
                    is_short = false;
                    let Some(place) = crowd.enter(address.ip()) else {
                        let _ = stream.try_write(FULL); // whoever cannot take that much is gone
                        if !is_full {
                            (options.log)("there are as many connections as may be: no more are taken until some end");
                        }
                        is_full = true;
                        continue;
                    };
                    is_full = false;
                    let serving = serve_connection(stream, handler.clone(), options.clone());
                    connections.spawn_local(async move {
                        serving.await;
                        drop(place);
                    });
                    count(&options.counts.accepted);
                }
                Err(error) if is_of_one_client(&error) => {}
                Err(error) => {
                    if !is_short {
                        (options.log)(&format!("no new connection can be taken: {error}"));
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

/// It left before it was taken.
fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}
