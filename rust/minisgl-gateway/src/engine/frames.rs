//! Frames out of a stream socket.

use std::io::ErrorKind;

use tokio::net::UnixStream;

use super::LinkError;
use crate::message::{LENGTH_BYTES, MessageError, frame_length};

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
