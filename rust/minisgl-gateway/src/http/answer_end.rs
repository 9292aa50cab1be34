//! Where an answer ends: its bytes come from the Python server and go on as they are.

use super::writer::Progress;

const MAX_HEAD_BYTES: usize = 1 << 20;
const MAX_HEADERS: usize = 256;

/// Fed with the bytes of one answer.
pub(crate) struct AnswerEnd {
    is_to_head: bool,
    state: State,
    head: Vec<u8>,
    /// Whether the server keeps the connection open.
    pub(crate) keep_alive: bool,
    /// As it says.
    pub(crate) request_id: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Length(u64),
    Size(u64),
    Extension(u64),
    SizeEnd(u64),
    Data(u64),
    DataEnd,
    DataLineEnd,
    /// Bytes of the trailer's line that were there.
    Trailer(usize),
    UntilClose,
    Ended,
}

/// No answer that we know.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl AnswerEnd {
    pub(crate) fn new(is_to_head: bool) -> Self {
        Self {
            is_to_head,
            state: State::Head,
            head: Vec::new(),
            keep_alive: true,
            request_id: None,
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        match self.state {
            State::Head => Progress::None, // an interim answer is none
            State::Ended => Progress::Ended,
            _ => Progress::Begun,
        }
    }

    /// Some of it was passed on: no other answer may begin.
    pub(crate) fn has_come(&self) -> bool {
        self.progress() != Progress::None || !self.head.is_empty()
    }

    /// How many of these bytes belong to the answer.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let mut at = 0;
        while at < bytes.len() && self.state != State::Ended {
            let rest = &bytes[at..];
            at += match self.state {
                State::Head => self.feed_head(rest)?,
                State::UntilClose => rest.len(),
                State::Length(left) | State::Data(left) => {
                    let size = left.min(rest.len() as u64);
                    self.state = match self.state {
                        State::Length(_) if left == size => State::Ended,
                        State::Length(_) => State::Length(left - size),
                        _ if left == size => State::DataEnd,
                        _ => State::Data(left - size),
                    };
                    size as usize
                }
                _ => {
                    self.state = self.feed_framing(rest[0])?;
                    1
                }
            };
        }
        Ok(at)
    }

    fn feed_framing(&self, byte: u8) -> Result<State, Broken> {
        Ok(match (self.state, byte) {
            (State::Size(size), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte).to_digit(16).ok_or(Broken)?;
                State::Size(size.checked_mul(16).ok_or(Broken)? + u64::from(digit))
            }
            (State::Size(size) | State::Extension(size), b'\r') => State::SizeEnd(size),
            (State::Size(size), b';') => State::Extension(size),
            (State::Extension(size), _) => State::Extension(size),
            (State::SizeEnd(0), b'\n') => State::Trailer(0),
            (State::SizeEnd(size), b'\n') => State::Data(size),
            (State::DataEnd, b'\r') => State::DataLineEnd,
            (State::DataLineEnd, b'\n') => State::Size(0),
            (State::Trailer(0), b'\n') => State::Ended,
            (State::Trailer(_), b'\n') => State::Trailer(0),
            (State::Trailer(size), b'\r') => State::Trailer(size),
            (State::Trailer(size), _) => State::Trailer(size + 1),
            _ => return Err(Broken),
        })
    }

    fn feed_head(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let before = self.head.len();
        self.head.extend_from_slice(bytes);
        let begin = before.saturating_sub(3);
        let Some(end) = memchr::memmem::find(&self.head[begin..], b"\r\n\r\n").map(|at| begin + at + 4) else {
            return if self.head.len() > MAX_HEAD_BYTES {
                Err(Broken)
            } else {
                Ok(bytes.len())
            };
        };
        self.head.truncate(end);
        let head = std::mem::take(&mut self.head);
        self.take_head(&head)?;
        Ok(end - before)
    }

    fn take_head(&mut self, head: &[u8]) -> Result<(), Broken> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut headers);
        if answer.parse(head) != Ok(httparse::Status::Complete(head.len())) {
            return Err(Broken);
        }
        let status = answer.code.ok_or(Broken)?;
        if (100..200).contains(&status) && status != 101 {
            return Ok(());
        }
        let (mut length, mut is_chunked) = (None, false);
        self.keep_alive = answer.version == Some(1);
        for header in answer.headers.iter() {
            let value = std::str::from_utf8(header.value).unwrap_or_default();
            match header.name.to_ascii_lowercase().as_str() {
                "content-length" => length = Some(value.parse().map_err(|_| Broken)?),
                "transfer-encoding" => is_chunked = value.eq_ignore_ascii_case("chunked"),
                "connection" => {
                    self.keep_alive &= !value.split(',').any(|one| one.trim().eq_ignore_ascii_case("close"));
                }
                "x-request-id" => self.request_id = Some(value.to_owned()),
                _ => {}
            }
        }
        self.state = match length {
            _ if self.is_to_head || matches!(status, 204 | 304) => State::Ended,
            _ if is_chunked => State::Size(0),
            Some(0) => State::Ended,
            Some(length) => State::Length(length),
            None => State::UntilClose,
        };
        self.keep_alive &= self.state != State::UntilClose && status != 101;
        Ok(())
    }
}
