//! Connection to one engine process: reconnects after each loss, and drops the connection if heartbeats are missing.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use minisgl_gateway::engine::{EngineLink, Watchdog};
use minisgl_gateway::message::{FromEngine, decode_each};
use tokio::net::UnixStream;
use tokio::task::yield_now;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::io::Io;

/// Wait between attempts to connect; it doubles from `RETRY` to `MAX_RETRY`.
const RETRY: Duration = Duration::from_millis(5);
const MAX_RETRY: Duration = Duration::from_millis(100);

/// Cause of a lost connection to an engine: missing heartbeats or an error.
struct Loss {
    is_silent: bool,
    reason: String,
}

/// Connects to an engine and forwards its messages to the pool, again and again until the pool ends.
pub(super) async fn follow(io: Rc<Io>, engine: usize, path: &Path, watchdog: impl Fn() -> Watchdog) {
    loop {
        let link = Rc::new(EngineLink::over(connect(path).await, "pool"));
        io.set_link(engine, Some(Rc::clone(&link)));
        io.act(|board| board.on_engine_connected(engine));
        let loss = listen(&io, engine, &link, watchdog()).await;
        io.set_link(engine, None);
        drop(link);
        io.act(|board| board.on_engine_lost(engine, loss.is_silent, &loss.reason));
        if io.is_shutting_down() || io.has_ended() {
            return;
        }
    }
}

async fn connect(path: &Path) -> UnixStream {
    let mut wait = RETRY;
    loop {
        match UnixStream::connect(path).await {
            Ok(stream) => return stream,
            Err(_) => sleep(wait).await, // the engine does not listen yet, or another error that may pass
        }
        wait = (wait * 2).min(MAX_RETRY);
    }
}

async fn listen(io: &Io, engine: usize, link: &EngineLink, watchdog: Watchdog) -> Loss {
    let watchdog = RefCell::new(watchdog);
    let mut polls = interval(watchdog.borrow().poll_interval().max(Duration::from_millis(1)));
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failure = None;
    loop {
        tokio::select! {
            biased;
            () = io.wait_until_writable() => {}
            _ = polls.tick() => {
                watchdog.borrow_mut().restart_silence(Instant::now()); // messages were not read in the meantime
                continue;
            }
        }
        let received = tokio::select! {
            biased;
            received = link.receive_frames(|frame| handle_frame(io, engine, frame, &watchdog, &mut failure)) => received,
            _ = polls.tick() => {
                if let Some(reason) = watchdog.borrow_mut().poll(Instant::now()) {
                    return Loss { is_silent: true, reason };
                }
                continue;
            }
        };
        if let Some(reason) = failure.take().or(received.err()) {
            return Loss {
                is_silent: false,
                reason,
            };
        }
        yield_now().await; // let other tasks run
    }
}

/// Handles one frame of an engine. Stores the engine's fatal error message in `failure`.
fn handle_frame(
    io: &Io,
    engine: usize,
    frame: &[u8],
    watchdog: &RefCell<Watchdog>,
    failure: &mut Option<String>,
) -> Result<(), minisgl_gateway::message::MessageError> {
    let now = Instant::now();
    io.act(|board| {
        decode_each(frame, |message, raw| match message {
            FromEngine::Heartbeat(beat) => watchdog.borrow_mut().on_heartbeat(beat, now),
            FromEngine::EngineFailed(text) => *failure = Some(text),
            message => {
                if matches!(message, FromEngine::EngineReady(_)) {
                    watchdog.borrow_mut().expect(now);
                }
                board.handle_engine_message(engine, message, raw);
            }
        })
    })
}
