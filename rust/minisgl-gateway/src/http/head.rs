//! The head of a request, and where it ends.
//!
//! Invariants: what is taken apart here, the Python server's parser takes apart in the same way; all else is odd, and
//! goes on as bytes. Reading costs no more than a few passes over what came, however it is cut.

use std::mem::MaybeUninit;

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memchr_iter, memmem};

/// More headers are odd.
const MAX_HEADERS: usize = 128;
const METHODS: [&str; 7] = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"];
/// They change how a request is framed, or what its connection is for.
const ODD: [&str; 5] = [
    "transfer-encoding",
    "expect",
    "upgrade",
    "proxy-connection",
    "http2-settings",
];
const ONCE: [&str; 3] = ["host", "content-length", "connection"];

/// The head of a plain HTTP/1.1 request, as it came and taken apart.
#[derive(Debug)]
pub struct Head {
    /// The bytes, up to and with the empty line.
    pub raw: Bytes,
    /// `GET`, `POST`, ...
    pub method: String,
    /// As it was sent, with the query.
    pub target: String,
    /// Names in lower case, in their order.
    pub headers: Vec<(String, Bytes)>,
    /// 0 without a body.
    pub content_length: usize,
    /// Whether the connection stays open after the answer.
    pub keep_alive: bool,
}

impl Head {
    /// The only header of a name; an error if it comes more than once.
    #[allow(clippy::result_unit_err)]
    pub fn header(&self, name: &str) -> Result<Option<&[u8]>, ()> {
        let mut found = self.headers.iter().filter(|(one, _)| one == name);
        match (found.next(), found.next()) {
            (_, Some(_)) => Err(()),
            (first, None) => Ok(first.map(|(_, value)| value.as_ref())),
        }
    }

    /// None: it is odd. `raw` ends with the empty line.
    fn parse(raw: Bytes) -> Option<Self> {
        let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut []);
        let size = request.parse_with_uninit_headers(&raw, &mut headers).ok()?;
        if size != httparse::Status::Complete(raw.len()) || request.version != Some(1) {
            return None;
        }
        let (method, target) = (request.method?, request.path?);
        let line = [method.as_bytes(), b" ", target.as_bytes(), b" HTTP/1.1\r\n"].concat();
        let is_plain = target.starts_with('/') && target.bytes().all(|one| one.is_ascii_graphic() && one != b'#');
        if !METHODS.contains(&method) || !is_plain || !raw.starts_with(&line) {
            return None;
        }
        let mut head = Self {
            method: method.to_owned(),
            target: target.to_owned(),
            headers: Vec::with_capacity(request.headers.len()),
            content_length: 0,
            keep_alive: true,
            raw: Bytes::new(),
        };
        for header in request.headers.iter() {
            let name = header.name.to_ascii_lowercase();
            let value = raw.slice_ref(header.value);
            head.take(&name, &value, &raw)?;
            head.headers.push((name, value));
        }
        head.raw = raw;
        Some(head)
    }

    /// None: the header is odd.
    fn take(&mut self, name: &str, value: &Bytes, raw: &Bytes) -> Option<()> {
        // the parser of the Python server keeps spaces at the end of a value, ours does not
        let is_padded = !value.is_empty() && {
            let end = value.as_ptr() as usize - raw.as_ptr() as usize + value.len();
            raw.get(end..end + 2) != Some(b"\r\n")
        };
        let is_again = ONCE.contains(&name) && self.headers.iter().any(|(one, _)| one == name);
        if is_padded || is_again || ODD.contains(&name) {
            return None;
        }
        match name {
            "content-length" => self.content_length = length(value)?,
            "connection" if value.eq_ignore_ascii_case(b"close") => self.keep_alive = false,
            "connection" if !value.eq_ignore_ascii_case(b"keep-alive") => return None,
            _ => {}
        }
        Some(())
    }
}

/// Digits without a zero before them, of a number that fits.
fn length(value: &[u8]) -> Option<usize> {
    let is_plain = (1..=15).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
    if !is_plain || (value[0] == b'0' && value.len() > 1) {
        return None;
    }
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// What the bytes of a connection begin with.
#[derive(Debug)]
pub(crate) enum Found {
    /// A head that needs more bytes.
    Part,
    /// A head, which was taken out.
    Head(Head),
    /// No plain request. All bytes are still there.
    Odd,
}

/// Looks for the head that comes next, while it comes.
#[derive(Debug, Default)]
pub(crate) struct Finder {
    looked_at: usize,
    parsed: usize,
}

impl Finder {
    pub(crate) fn find(&mut self, bytes: &mut BytesMut, max_head_bytes: usize) -> Found {
        let found = self.look(bytes, max_head_bytes);
        if !matches!(found, Found::Part) {
            *self = Self::default();
        }
        found
    }

    fn look(&mut self, bytes: &mut BytesMut, max_head_bytes: usize) -> Found {
        let begin = self.looked_at.saturating_sub(3);
        let end = memmem::find(&bytes[begin..], b"\r\n\r\n").map(|at| begin + at + 4);
        let head = &bytes[..end.unwrap_or(bytes.len())];
        if !begins_like_a_request(head) || head.len() > max_head_bytes || has_bare_line_end(head, self.looked_at) {
            return Found::Odd;
        }
        if end.is_some() {
            let head = bytes.split_to(head.len()).freeze();
            return match Head::parse(head.clone()) {
                Some(head) => Found::Head(head),
                None => {
                    give_back(bytes, &head);
                    Found::Odd
                }
            };
        }
        self.looked_at = head.len();
        if head.len() > self.parsed + self.parsed / 8 {
            self.parsed = head.len(); // not at each byte, and not all of them again and again
            let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
            match httparse::Request::new(&mut []).parse_with_uninit_headers(head, &mut headers) {
                Ok(httparse::Status::Partial) => {}
                _ => return Found::Odd,
            }
        }
        Found::Part
    }
}

fn give_back(bytes: &mut BytesMut, head: &[u8]) {
    let rest = bytes.split();
    bytes.extend_from_slice(head);
    bytes.unsplit(rest);
}

fn begins_like_a_request(head: &[u8]) -> bool {
    let method = &head[..memchr(b' ', &head[..head.len().min(8)]).map_or(head.len().min(8), |at| at + 1)];
    METHODS.iter().any(|one| {
        let (one, size) = (one.as_bytes(), method.len());
        if size <= one.len() {
            one.starts_with(method)
        } else {
            method.strip_suffix(b" ") == Some(one)
        }
    })
}

/// A line feed alone: an end for one parser and none for another.
fn has_bare_line_end(head: &[u8], looked_at: usize) -> bool {
    memchr_iter(b'\n', &head[looked_at..]).any(|at| looked_at + at == 0 || head[looked_at + at - 1] != b'\r')
}

/// Whether nothing but whole requests is there: what is odd counts as whole, since nobody here knows its end.
pub(crate) fn only_whole_requests(bytes: &[u8], max_head_bytes: usize) -> bool {
    let mut rest = BytesMut::from(bytes);
    while !rest.is_empty() {
        match Finder::default().find(&mut rest, max_head_bytes) {
            Found::Part => return false,
            Found::Odd => return true,
            Found::Head(head) if rest.len() < head.content_length => return false,
            Found::Head(head) => drop(rest.split_to(head.content_length)),
        }
    }
    true
}
