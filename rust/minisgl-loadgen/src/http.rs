//! The client's half of HTTP/1.1: one request over a connection, and its response body piece by piece as it arrives.
//!
//! Invariants: a body that ends before its framing says so is an error; heads, chunk lines and trailers are bounded; a
//! connection is reused only if its response was read to its end and both sides keep it open.

use std::future::poll_fn;
use std::io::{Error, ErrorKind, IoSlice};
use std::ops::Range;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use memchr::memchr;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

const READ_BYTES: usize = 8 << 10;
/// Maximum bytes of a response head, and of the trailers of a chunked body.
const HEAD_BYTES: usize = 64 << 10;
const HEADERS: usize = 100;
/// Maximum bytes of the line before a chunk, extensions included.
const LINE_BYTES: usize = 4 << 10;

/// An open connection and the bytes received over it.
pub(crate) struct Connection<S = TcpStream> {
    stream: S,
    received: Received,
}

/// A request in progress over a connection, and its response.
pub(crate) struct Exchange<'a, S = TcpStream> {
    connection: Connection<S>,
    head: Vec<u8>,
    body: &'a [u8],
    written: usize,
    unwritable: Option<Error>,
    keep_alive: bool,
    framing: Framing,
}

/// The head of a response: its size in bytes, its status, and how its body ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Head {
    size: usize,
    pub(crate) status: u16,
    /// True if the body is a stream of server-sent events.
    pub(crate) events: bool,
    keep_alive: bool,
    framing: Framing,
}

/// State of reading a body: its framing, and the bytes of it that are left.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Framing {
    Length(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    Trailers(usize),
    UntilClose,
    Ended,
}

#[derive(Debug, PartialEq)]
enum Step {
    /// Range of a piece of the body in the buffer.
    Piece(Range<usize>),
    /// Bytes received so far do not suffice.
    More,
    End,
}

/// Received bytes; those from `start` to `end` are unread.
#[derive(Default)]
struct Received {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl<S> Connection<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            received: Received::default(),
        }
    }

    /// Returns true if the server has left an idle connection open and silent, by asking the kernel.
    pub(crate) fn is_idle(&self) -> bool
    where
        S: AsFd,
    {
        recv(&self.stream, &mut [0; 1], RecvFlags::PEEK) == Err(rustix::io::Errno::AGAIN)
    }

    /// Begins an exchange. `head` is the request's whole head; it is written while the response is awaited.
    pub(crate) const fn request(self, head: Vec<u8>, body: &[u8]) -> Exchange<'_, S> {
        Exchange {
            connection: self,
            head,
            body,
            written: 0,
            unwritable: None,
            keep_alive: false,
            framing: Framing::Ended,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Exchange<'_, S> {
    /// Reads and returns the head of the response. Interim responses (1xx) are skipped.
    pub(crate) async fn head(&mut self) -> Result<Head, String> {
        loop {
            if let Some(head) = parse(self.connection.received.unread())? {
                self.connection.received.start += head.size;
                if !(100..200).contains(&head.status) || head.status == 101 {
                    (self.keep_alive, self.framing) = (head.keep_alive, head.framing);
                    return Ok(head);
                }
            } else if self.receive().await? == 0 {
                return Err("connection closed before message completed".to_owned());
            }
        }
    }

    /// Returns the next piece of the body, as large as it was received; `None` at the body's end.
    pub(crate) async fn piece(&mut self) -> Result<Option<&[u8]>, String> {
        let body = |error: String| format!("error reading a body from connection: {error}");
        loop {
            match self.framing.step(&mut self.connection.received).map_err(body)? {
                Step::Piece(range) => return Ok(Some(&self.connection.received.bytes[range])),
                Step::End => return Ok(None),
                Step::More if self.receive().await.map_err(body)? > 0 => {}
                Step::More if self.framing == Framing::UntilClose => self.framing = Framing::Ended,
                Step::More => return Err(body("end of file before message length reached".to_owned())),
            }
        }
    }

    /// Returns the connection if another request may be sent over it.
    pub(crate) fn finish(self) -> Option<Connection<S>> {
        let is_written = self.written == self.head.len() + self.body.len();
        let is_read = self.framing == Framing::Ended && self.connection.received.unread().is_empty();
        (self.keep_alive && is_written && is_read).then_some(self.connection)
    }

    /// Writes the rest of the request and reads once; returns the number of bytes read, 0 at the connection's end.
    async fn receive(&mut self) -> Result<usize, String> {
        let result = poll_fn(|context| {
            self.write(context);
            let Connection { stream, received } = &mut self.connection;
            let mut room = ReadBuf::new(received.room()?);
            let read = Pin::new(stream).poll_read(context, &mut room);
            let size = room.filled().len();
            received.end += size;
            read.map_ok(|()| size)
        });
        let result = result.await;
        match self.unwritable.take() {
            Some(error) if !matches!(result, Ok(1..)) => Err(error.to_string()),
            error => {
                self.unwritable = error;
                result.map_err(|error| error.to_string())
            }
        }
    }

    /// Writes as much of the request as the connection accepts. Stores an error: the response may have come before.
    fn write(&mut self, context: &mut Context<'_>) {
        while self.written < self.head.len() + self.body.len() && self.unwritable.is_none() {
            let head = &self.head[self.written.min(self.head.len())..];
            let body = &self.body[self.written.saturating_sub(self.head.len())..];
            let stream = Pin::new(&mut self.connection.stream);
            match stream.poll_write_vectored(context, &[IoSlice::new(head), IoSlice::new(body)]) {
                Poll::Ready(Ok(0)) => self.unwritable = Some(ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(size)) => self.written += size,
                Poll::Ready(Err(error)) => self.unwritable = Some(error),
                Poll::Pending => return,
            }
        }
    }
}

impl Received {
    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Returns the free part of the buffer, at least one byte. Fails if the unread bytes are as long as a head may be.
    fn room(&mut self) -> Result<&mut [u8], Error> {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if self.end == self.bytes.len() {
            if self.end >= HEAD_BYTES {
                return Err(Error::other("message head is too large"));
            }
            self.bytes.resize((2 * self.end).max(READ_BYTES), 0);
        }
        Ok(&mut self.bytes[self.end..])
    }

    /// Takes the unread bytes, at most `limit`, and returns their range in the buffer.
    fn take(&mut self, limit: u64) -> Range<usize> {
        let size = usize::try_from(limit).unwrap_or(usize::MAX).min(self.unread().len());
        self.start += size;
        self.start - size..self.start
    }

    /// Takes a line that ends with CR LF; `None` if its end is not received yet.
    fn line(&mut self) -> Result<Option<&[u8]>, String> {
        let Some(size) = memchr(b'\n', self.unread()) else {
            let is_long = self.unread().len() > LINE_BYTES;
            return if is_long {
                Err("line is too long".to_owned())
            } else {
                Ok(None)
            };
        };
        let line = self.start..self.start + size;
        self.start += size + 1;
        let line = self.bytes[line].strip_suffix(b"\r");
        line.map(Some).ok_or_else(|| "line without CR".to_owned())
    }
}

impl Framing {
    /// Takes the next piece of a body from the received bytes.
    fn step(&mut self, received: &mut Received) -> Result<Step, String> {
        loop {
            match self {
                Self::Ended => return Ok(Step::End),
                Self::Length(0) => *self = Self::Ended,
                Self::Chunk(0) => *self = Self::ChunkEnd,
                Self::Length(_) | Self::Chunk(_) | Self::UntilClose => {
                    let piece = received.take(match self {
                        Self::Length(left) | Self::Chunk(left) => *left,
                        _ => u64::MAX,
                    });
                    if let Self::Length(left) | Self::Chunk(left) = self {
                        *left -= u64::try_from(piece.len()).unwrap_or(*left);
                    }
                    return Ok(if piece.is_empty() {
                        Step::More
                    } else {
                        Step::Piece(piece)
                    });
                }
                Self::ChunkSize | Self::ChunkEnd | Self::Trailers(_) => {
                    let Some(line) = received.line()? else {
                        return Ok(Step::More);
                    };
                    *self = self.after(line)?;
                }
            }
        }
    }

    /// Returns the state after a line of a chunked body.
    fn after(&self, line: &[u8]) -> Result<Self, String> {
        match self {
            Self::ChunkEnd if line.is_empty() => Ok(Self::ChunkSize),
            Self::ChunkEnd => Err("a chunk is longer than its size".to_owned()),
            Self::Trailers(_) if line.is_empty() => Ok(Self::Ended),
            Self::Trailers(left) => {
                let left = left.checked_sub(line.len() + 2);
                left.map(Self::Trailers)
                    .ok_or_else(|| "trailers are too large".to_owned())
            }
            _ => match chunk_size(line) {
                Some(0) => Ok(Self::Trailers(HEAD_BYTES)),
                Some(size) => Ok(Self::Chunk(size)),
                None => Err("invalid chunk size".to_owned()),
            },
        }
    }
}

/// Parses the hexadecimal size before a chunk; extensions after it are skipped.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?.trim_ascii_end();
    if !digits.iter().all(u8::is_ascii_hexdigit) {
        return None; // `from_str_radix` would accept a sign
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Parses the head of a response; `None` if its end is not received yet.
fn parse(bytes: &[u8]) -> Result<Option<Head>, String> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut answer = httparse::Response::new(&mut headers);
    let size = match answer.parse(bytes) {
        Ok(httparse::Status::Complete(size)) => size,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(format!("invalid HTTP: {error}")),
    };
    let status = answer.code.unwrap_or(0);
    let values = |name: &'static str| {
        let named = answer
            .headers
            .iter()
            .filter(move |one| one.name.eq_ignore_ascii_case(name));
        named.map(|one| one.value)
    };
    let words = |name: &'static str| {
        values(name)
            .flat_map(|value| value.split(|byte| *byte == b','))
            .map(<[u8]>::trim_ascii)
    };
    let asks = |word: &str| words("connection").any(|one| one.eq_ignore_ascii_case(word.as_bytes()));
    let framing = if status < 200 || status == 204 || status == 304 {
        Framing::Ended
    } else if let Some(coding) = words("transfer-encoding").next_back() {
        let is_chunked = coding.eq_ignore_ascii_case(b"chunked");
        if is_chunked {
            Framing::ChunkSize
        } else {
            Framing::UntilClose
        }
    } else {
        let mut lengths = words("content-length").map(length);
        match lengths.next() {
            None => Framing::UntilClose,
            Some(Some(first)) if lengths.all(|other| other == Some(first)) => Framing::Length(first),
            Some(_) => return Err("invalid HTTP: invalid content-length".to_owned()),
        }
    };
    let stays = answer.version == Some(1) || asks("keep-alive");
    let mut kinds = values("content-type");
    Ok(Some(Head {
        size,
        status,
        events: kinds.next().is_some_and(|kind| kind.starts_with(b"text/event-stream")),
        keep_alive: stays && !asks("close") && status != 101 && framing != Framing::UntilClose,
        framing,
    }))
}

/// Parses a length in bytes.
fn length(digits: &[u8]) -> Option<u64> {
    let are_digits = digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| are_digits)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::io::{Result as IoResult, Write};
    use std::net::{TcpListener, TcpStream};
    use std::pin::pin;
    use std::task::Waker;

    use super::*;

    /// A connection that returns these pieces, one per read, then its end, and accepts `room` bytes of a request.
    struct Scripted<'a> {
        pieces: std::slice::Iter<'a, &'a [u8]>,
        room: usize,
        written: Vec<u8>,
    }

    impl AsyncRead for Scripted<'_> {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
            if let Some(piece) = self.pieces.next() {
                room.put_slice(piece);
            }
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Scripted<'_> {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<IoResult<usize>> {
            let size = bytes.len().min(self.room).min(3);
            self.room -= size;
            self.written.extend_from_slice(&bytes[..size]);
            Poll::Ready(if size > 0 {
                Ok(size)
            } else {
                Err(ErrorKind::BrokenPipe.into())
            })
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<IoResult<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<IoResult<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A response read to its end: status, body, and whether its connection may be reused.
    type Read = (u16, Vec<u8>, bool);

    fn answer_within(room: usize, pieces: &[&[u8]]) -> Result<Read, String> {
        let (pieces, written) = (pieces.iter(), Vec::new());
        let connection = Connection::new(Scripted { pieces, room, written });
        let read = async {
            let mut answer = connection.request(b"head ".to_vec(), b"body");
            let (status, mut body) = (answer.head().await?.status, Vec::new());
            while let Some(piece) = answer.piece().await? {
                assert!(!piece.is_empty());
                body.extend_from_slice(piece);
            }
            let connection = answer.finish();
            assert!(connection.as_ref().is_none_or(|one| one.stream.written == b"head body"));
            Ok((status, body, connection.is_some()))
        };
        match pin!(read).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(read) => read,
            Poll::Pending => unreachable!(),
        }
    }

    fn answer(pieces: &[&[u8]]) -> Result<Read, String> {
        answer_within(usize::MAX, pieces)
    }

    const CHUNKED: &str = concat!(
        "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n",
        "4\r\none \r\n00C ;a=\"b\"\r\ntwo\r\n\r\nthree\r\n0\r\nx-trailer: y\r\n\r\n"
    );
    const COUNTED: &str =
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 \r\ncontent-length: 5, 5\r\nContent-Length: 5\r\n\r\nabcde";
    const UNTIL_CLOSE: &str = "HTTP/1.1 200 OK\r\nconnection: keep-alive\r\n\r\nabc";

    fn cases() -> [(&'static [u8], Read); 3] {
        [
            (CHUNKED.as_bytes(), (200, b"one two\r\n\r\nthree"[..].to_vec(), true)),
            (COUNTED.as_bytes(), (404, b"abcde".to_vec(), true)),
            (UNTIL_CLOSE.as_bytes(), (200, b"abc".to_vec(), false)),
        ]
    }

    #[test]
    fn answer_cut_at_any_bytes_has_the_same_body() {
        for (wire, read) in cases() {
            for first in 1..wire.len() - 1 {
                for second in first + 1..wire.len().min(first + 16) {
                    let pieces = [&wire[..first], &wire[first..second], &wire[second..]];
                    assert_eq!(answer(&pieces).as_ref(), Ok(&read), "cut at {first} and {second}");
                }
            }
            let bytes: Vec<&[u8]> = wire.chunks(1).collect();
            assert_eq!(answer(&bytes), Ok(read));
        }
    }

    #[test]
    fn connection_closed_before_the_end_is_an_error() {
        for (wire, _) in &cases()[..2] {
            for size in 0..wire.len() {
                let found = answer(&[&wire[..size.min(90)], &wire[size.min(90)..size]]);
                assert!(found.is_err(), "{size}: {found:?}");
            }
        }
    }

    #[test]
    fn connection_is_kept_only_if_both_sides_keep_it_open() {
        for (head, body, kept) in [
            ("HTTP/1.1 204 No Content\r\n\r\n", "", true),
            ("HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", "", true),
            ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "", true),
            (
                "HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 1\r\n\r\na",
                "a",
                false,
            ),
            ("HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na", "a", false),
            (
                "HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\ncontent-length: 1\r\n\r\na",
                "a",
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
                "0\r\n\r\n",
                false,
            ),
            ("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab", "a", false),
            ("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n", "", false),
        ] {
            let (_, found, is_kept) = answer(&[head.as_bytes()]).unwrap();
            assert_eq!((found.as_slice(), is_kept), (body.as_bytes(), kept), "{head}");
        }
    }

    #[test]
    fn answer_before_the_whole_request_is_written_is_read_but_ends_the_connection() {
        let wire = COUNTED.as_bytes();
        assert_eq!(answer_within(4, &[wire]), Ok((404, b"abcde".to_vec(), false)));
        let error = answer_within(4, &[&wire[..60]]).unwrap_err();
        assert!(error.contains("broken pipe"), "{error}");
    }

    #[test]
    fn answer_that_is_no_http_is_an_error() {
        let chunk = |line: &str| format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{line}");
        for (wire, error) in [
            ("SSH-2.0-x\r\n\r\n".to_owned(), "invalid HTTP"),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab".to_owned(),
                "content-length",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\nab".to_owned(),
                "content-length",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\nab".to_owned(),
                "content-length",
            ),
            (chunk("+1\r\na\r\n0\r\n\r\n"), "chunk size"),
            (chunk("\r\na\r\n0\r\n\r\n"), "chunk size"),
            (chunk("10000000000000000\r\na"), "chunk size"),
            (chunk("1\na\r\n0\r\n\r\n"), "without CR"),
            (chunk("1\r\nab\r\n0\r\n\r\n"), "longer than its size"),
            (chunk(&"0".repeat(LINE_BYTES + 1)), "line is too long"),
            (
                chunk(&("0\r\n".to_owned() + &"a: b\r\n".repeat(HEAD_BYTES / 6 + 1))),
                "trailers are too large",
            ),
            (
                format!("HTTP/1.1 200 OK\r\na: {}", "b".repeat(HEAD_BYTES)),
                "head is too large",
            ),
            (
                format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(HEADERS + 1)),
                "too many headers",
            ),
        ] {
            let pieces: Vec<&[u8]> = wire.as_bytes().chunks(READ_BYTES / 4).collect();
            let found = answer(&pieces).unwrap_err();
            assert!(found.contains(error), "{found}, not {error}");
        }
    }

    #[test]
    fn connection_with_bytes_or_its_end_to_read_is_not_idle() {
        for word in [&b"HTTP/1.1 408 Request Timeout\r\n\r\n"[..], b""] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let connection = Connection::new(stream);
            assert!(connection.is_idle());
            server.write_all(word).unwrap();
            drop(server);
            connection.stream.set_nonblocking(false).unwrap();
            connection.stream.peek(&mut [0]).unwrap(); // waits until the bytes have arrived
            connection.stream.set_nonblocking(true).unwrap();
            assert!(!connection.is_idle());
        }
    }
}
