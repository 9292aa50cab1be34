//! New connections.
//!
//! Keeps true: many are taken at a turn; without file descriptors it waits for some instead of asking on and on.

use std::io;
use std::net::TcpListener;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::options::{Options, count};
use super::{Handler, serve_connection};

const WAIT_FOR_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Serve the clients of a listener until [`super::Stop`] ends that and they are gone. Inside of a
/// [`tokio::task::LocalSet`]. Dropping it ends all its connections.
pub async fn accept<H: Handler>(listener: TcpListener, handler: Rc<H>, options: Rc<Options>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    let mut is_short = false;
    while !options.stop.is_closing() {
        tokio::select! {
            biased;
            () = options.stop.closing() => {}
            Some(_) = connections.join_next() => {}
            found = listener.accept() => match found {
                Ok((stream, _)) => {
                    is_short = false;
                    connections.spawn_local(serve_connection(stream, handler.clone(), options.clone()));
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
