//! A connection to an engine process, for one thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use std::{fmt, io};

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

/// Why nothing more comes.
#[derive(Debug)]
pub enum LinkError {
    /// The engine process is gone, or has ended the connection.
    Closed,
    /// Reading or writing failed otherwise.
    Io(io::Error),
    /// A frame cannot be read.
    Message(MessageError),
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the engine process died"),
            Self::Io(error) => write!(f, "the connection to the engine process failed: {error}"),
            Self::Message(error) => write!(f, "a message from the engine cannot be read: {error}"),
        }
    }
}

impl LinkError {
    /// Without the words around it: for who reads what a front end sends.
    #[must_use]
    pub fn why(&self) -> String {
        match self {
            Self::Message(error) => error.to_string(),
            other => other.to_string(),
        }
    }
}

impl std::error::Error for LinkError {}

impl From<MessageError> for LinkError {
    fn from(error: MessageError) -> Self {
        Self::Message(error)
    }
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
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
    /// future is dropped.
    pub async fn receive(&self, into: &mut Vec<FromEngine>) -> Result<(), LinkError> {
        self.receive_frames(|frame| {
            into.extend(decode(frame)?);
            Ok(())
        })
        .await
    }

    /// The same, with the frames as they came, without their lengths.
    pub async fn receive_frames(
        &self,
        mut take: impl FnMut(&[u8]) -> Result<(), MessageError>,
    ) -> Result<(), LinkError> {
        loop {
            if self.inbox.borrow_mut().take(&mut take)? > 0 {
                return Ok(());
            }
            self.stream.readable().await?;
            self.inbox.borrow_mut().fill(&self.stream)?;
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
    pub fn take(&mut self, mut take: impl FnMut(&[u8]) -> Result<(), MessageError>) -> Result<usize, LinkError> {
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
    pub fn fill(&mut self, stream: &UnixStream) -> Result<(), LinkError> {
        self.bytes.drain(..self.at);
        self.at = 0;
        // as much as the frame that has begun lacks, or the usual; room is made as it comes, not as a length claims
        let missing = frame_length(&self.bytes)?.map_or(0, |length| length + LENGTH_BYTES - self.bytes.len());
        let room = missing.clamp(READ_BYTES, 32 * READ_BYTES);
        self.bytes.reserve(room);
        match stream.try_read_buf(&mut self.bytes) {
            Ok(0) => Err(LinkError::Closed),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
