//! Connection to an engine process, for one thread.

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

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
/// Size up to which the messages of one turn leave in one frame, in bytes.
const MAX_SENT_BYTES: usize = 64 << 20;

/// Returns the reason for a lost connection: the engine process has exited, or an I/O error.
fn loss_reason(error: io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
            "the engine process died".to_owned()
        }
        _ => format!("the connection to the engine process failed: {error}"),
    }
}

/// Messages that wait to be sent.
#[derive(Default)]
struct Outbox {
    messages: RefCell<VecDeque<ToEngine>>,
    filled: Notify,
}

/// Connection to an engine process. Use within a `LocalSet` of a `current_thread` runtime.
pub struct EngineLink {
    stream: Rc<UnixStream>,
    outbox: Rc<Outbox>,
    inbox: RefCell<Frames>,
    writer: JoinHandle<()>,
}

impl EngineLink {
    /// Connects and sends `Hello` with `name`; retries while the engine does not listen. Drop the future to give up.
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

    /// Makes a link over an existing connection and sends `Hello` with `name`.
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

    /// Queues a message. Messages are sent in order; all of one turn of the event loop leave in one frame. Never waits:
    /// what the engine process does not read yet stays queued, without a limit.
    pub fn send(&self, message: ToEngine) {
        self.outbox.messages.borrow_mut().push_back(message);
        self.outbox.filled.notify_one();
    }

    /// Returns the estimated size in bytes of the messages that wait to be sent.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.outbox.messages.borrow().iter().map(estimate).sum()
    }

    /// Waits for at least one frame and appends the messages of up to eight. One call at a time. Nothing is lost if the
    /// future is dropped. An error is the reason for which no more messages will arrive.
    pub async fn receive(&self, into: &mut Vec<FromEngine>) -> Result<(), String> {
        self.receive_frames(|frame| {
            into.extend(decode(frame)?);
            Ok(())
        })
        .await
    }

    /// Waits for at least one frame and passes up to eight to `take`, undecoded and without their length prefix. Cancel
    /// safety and errors are those of [`receive`](Self::receive).
    pub async fn receive_frames(&self, mut take: impl FnMut(&[u8]) -> Result<(), MessageError>) -> Result<(), String> {
        let invalid = |error| format!("a message from the engine cannot be read: {error}");
        loop {
            if self.inbox.borrow_mut().take(&mut take).map_err(invalid)? > 0 {
                return Ok(());
            }
            self.stream.readable().await.map_err(loss_reason)?;
            self.inbox.borrow_mut().fill(&self.stream).map_err(loss_reason)?;
        }
    }
}

impl Drop for EngineLink {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

/// Returns true if the engine does not listen yet, or its connection queue is full.
fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
    )
}

/// Sends queued messages until the connection ends. The receiving side reports the end.
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
                Ok(size) => left = &left[size..],
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
    /// Takes queued messages and encodes them as one frame; empty if none is queued.
    fn next_frame(&self) -> Vec<u8> {
        let mut waiting = self.messages.borrow_mut();
        let mut bytes = 0;
        let count = waiting
            .iter()
            .take_while(|message| {
                let fits = bytes == 0 || bytes + estimate(message) <= MAX_SENT_BYTES;
                bytes += estimate(message);
                fits
            })
            .count();
        if count == 0 {
            return Vec::new();
        }
        waiting.make_contiguous();
        let frame = encode(&waiting.as_slices().0[..count]);
        waiting.drain(..count);
        frame
    }
}

/// Bytes that one read takes from the socket at least: enough for the frames of one `take`, unless they are large.
const READ_BYTES: usize = 32 * 1024;
/// Frames that one call of `take` handles at most.
const MAX_FRAMES: usize = 8;

/// Receive buffer that splits a byte stream into length-prefixed frames.
#[derive(Default)]
pub struct Frames {
    bytes: Vec<u8>,
    at: usize,
}

impl Frames {
    /// Passes up to `MAX_FRAMES` complete frames to `take`, each without its length prefix, and returns their number.
    pub fn take(&mut self, mut take: impl FnMut(&[u8]) -> Result<(), MessageError>) -> Result<usize, MessageError> {
        for num_frames in 0..MAX_FRAMES {
            let rest = &self.bytes[self.at..];
            let Some(length) = frame_length(rest)? else {
                return Ok(num_frames);
            };
            let Some(frame) = rest[LENGTH_BYTES..].get(..length) else {
                return Ok(num_frames);
            };
            take(frame)?;
            self.at += LENGTH_BYTES + length;
        }
        Ok(MAX_FRAMES)
    }

    /// Reads available bytes without blocking. An error of kind `UnexpectedEof` means that the peer has closed.
    pub fn fill(&mut self, stream: &UnixStream) -> io::Result<()> {
        self.bytes.drain(..self.at);
        self.at = 0;
        // read what the current frame lacks, or `READ_BYTES`; memory grows with the input, not with a claimed length
        let begun = frame_length(&self.bytes).ok().flatten(); // after an invalid length nothing is read any more
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
