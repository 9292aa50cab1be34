//! A connection to an engine process, for one thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;

use crate::message::{FromEngine, LENGTH_BYTES, MessageError, ToEngine, decode, encode, estimate, frame_length};

/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
/// Messages of one turn leave in one frame, but for those beyond.
const MAX_SENT_BYTES: usize = 64 << 20;

/// Why nothing more comes: the engine process is gone, or reading or writing failed otherwise.
fn lost(error: io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
            "the engine process died".to_owned()
        }
        _ => format!("the connection to the engine process failed: {error}"),
    }
}

/// What waits to be sent.
#[derive(Default)]
struct Outbox {
    messages: RefCell<VecDeque<ToEngine>>,
    filled: Notify,
}

/// A connection to an engine process. Use within a `LocalSet` of a `current_thread` runtime.
pub struct EngineLink {
    stream: Rc<UnixStream>,
    outbox: Rc<Outbox>,
    inbox: RefCell<Frames>,
    writer: JoinHandle<()>,
}

impl EngineLink {
    /// Connect and say hello as `name`; tries again while nobody listens. Drop the future to give up.
    pub async fn connect(path: &Path, name: &str) -> io::Result<Self> {
        let stream = loop {
            match UnixStream::connect(path).await {
                Ok(stream) => break stream,
                Err(error) if is_early(&error) => sleep(RETRY).await,
                Err(error) => return Err(error),
            }
        };
        Ok(Self::over(stream, name))
    }

    /// Say hello as `name` on a connection that was made already.
    pub fn over(stream: UnixStream, name: &str) -> Self {
        let stream = Rc::new(stream);
        let outbox = Rc::new(Outbox::default());
        let writer = spawn_local(write(Rc::clone(&stream), Rc::clone(&outbox)));
        let link = Self {
            stream,
            outbox,
            inbox: RefCell::default(),
            writer,
        };
        link.send(ToEngine::Hello { name: name.to_owned() });
        link
    }

    /// Soon and in order; all messages of one turn of the event loop leave in one frame. Never waits: what the engine
    /// process does not take yet is kept.
    pub fn send(&self, message: ToEngine) {
        self.outbox.messages.borrow_mut().push_back(message);
        self.outbox.filled.notify_one();
    }

    /// Waits for at least one frame; takes what is there, up to eight. One call at a time. Nothing is lost when the
    /// future is dropped. Err: why nothing more comes.
    pub async fn receive(&self, into: &mut Vec<FromEngine>) -> Result<(), String> {
        self.receive_frames(|frame| {
            into.extend(decode(frame)?);
            Ok(())
        })
        .await
    }

    /// The same, with the frames as they came, without their lengths.
    pub async fn receive_frames(&self, mut take: impl FnMut(&[u8]) -> Result<(), MessageError>) -> Result<(), String> {
        let unreadable = |error| format!("a message from the engine cannot be read: {error}");
        loop {
            if self.inbox.borrow_mut().take(&mut take).map_err(unreadable)? > 0 {
                return Ok(());
            }
            self.stream.readable().await.map_err(lost)?;
            self.inbox.borrow_mut().fill(&self.stream).map_err(lost)?;
        }
    }
}

impl Drop for EngineLink {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

/// Nobody listens yet, or too many connect just now.
fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
    )
}

/// Sends what comes into the outbox, until the connection ends; who receives notices that.
async fn write(stream: Rc<UnixStream>, outbox: Rc<Outbox>) {
    loop {
        let frame = outbox.next_frame();
        if frame.is_empty() {
            outbox.filled.notified().await;
            continue;
        }
        let mut left = &frame[..];
        while !left.is_empty() {
            match stream.try_write(left) {
                Ok(taken) => left = &left[taken..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if stream.ready(Interest::WRITABLE).await.is_err() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }
}

impl Outbox {
    /// Empty if nothing waits.
    fn next_frame(&self) -> Vec<u8> {
        let mut waiting = self.messages.borrow_mut();
        let mut bytes = 0;
        let number = waiting
            .iter()
            .take_while(|message| {
                let fits = bytes == 0 || bytes + estimate(message) <= MAX_SENT_BYTES;
                bytes += estimate(message);
                fits
            })
            .count();
        if number == 0 {
            return Vec::new();
        }
        waiting.make_contiguous();
        let frame = encode(&waiting.as_slices().0[..number]);
        waiting.drain(..number);
        frame
    }
}

/// Taken out of the socket at once: as many frames as one call of `take` takes, but those in which much stands.
const READ_BYTES: usize = 32 * 1024;
/// One call of `take` takes no more.
const MAX_FRAMES: usize = 8;

/// What came and was not taken yet.
#[derive(Default)]
pub struct Frames {
    bytes: Vec<u8>,
    at: usize,
}

impl Frames {
    /// Take up to `MAX_FRAMES` that are here whole, each without its length; how many.
    pub fn take(&mut self, mut take: impl FnMut(&[u8]) -> Result<(), MessageError>) -> Result<usize, MessageError> {
        for taken in 0..MAX_FRAMES {
            let rest = &self.bytes[self.at..];
            let Some(length) = frame_length(rest)? else {
                return Ok(taken);
            };
            let Some(frame) = rest[LENGTH_BYTES..].get(..length) else {
                return Ok(taken);
            };
            take(frame)?;
            self.at += LENGTH_BYTES + length;
        }
        Ok(MAX_FRAMES)
    }

    /// Read what is there, as much as fits beside what stands here already.
    pub fn fill(&mut self, stream: &UnixStream) -> io::Result<()> {
        self.bytes.drain(..self.at);
        self.at = 0;
        // as much as the frame that has begun lacks, or the usual; room is made as it comes, not as a length claims
        let begun = frame_length(&self.bytes).ok().flatten(); // one that cannot be was not taken: nobody reads on
        let missing = begun.map_or(0, |length| length + LENGTH_BYTES - self.bytes.len());
        let room = missing.clamp(READ_BYTES, 32 * READ_BYTES);
        self.bytes.reserve(room);
        match stream.try_read_buf(&mut self.bytes) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }
}
