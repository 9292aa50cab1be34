//! Parser of request headers, which also finds where a header ends.
//!
//! Invariants: a header that is parsed here is parsed by the Python server in the same way; any other one is odd and is
//! proxied as bytes. Parsing costs at most a few passes over the bytes, however they are split.

use std::mem::MaybeUninit;

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memchr_iter, memmem};

/// Header fields of a request at most; a request with more is odd.
const MAX_HEADERS: usize = 128;
const METHODS: [&str; 7] = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"];
/// Header fields that make a request odd: they change its framing or the purpose of its connection.
const ODD: [&str; 5] = [
    "transfer-encoding",
    "expect",
    "upgrade",
    "proxy-connection",
    "http2-settings",
];
const ONCE: [&str; 3] = ["host", "content-length", "connection"];

/// Header of a plain HTTP/1.1 request, raw and parsed.
#[derive(Debug)]
pub struct Head {
    /// Raw bytes of the header, including the empty line at its end.
    pub raw: Bytes,
    /// HTTP method: `GET`, `POST`, ...
    pub method: String,
    /// Request target as it was sent, with the query.
    pub target: String,
    /// Header fields in order, with names in lower case.
    pub headers: Vec<(String, Bytes)>,
    /// Body length in bytes; 0 without a body.
    pub content_length: usize,
    /// Whether the connection stays open after the response.
    pub keep_alive: bool,
}

impl Head {
    /// Returns the value of the only header field `name`, or `None` without one. An error if there are several.
    #[allow(clippy::result_unit_err)]
    pub fn header(&self, name: &str) -> Result<Option<&[u8]>, ()> {
        let mut fields = self.headers.iter().filter(|(one, _)| one == name);
        match (fields.next(), fields.next()) {
            (_, Some(_)) => Err(()),
            (first, None) => Ok(first.map(|(_, value)| value.as_ref())),
        }
    }

    /// Parses a header that ends with the empty line. `None` if it is odd.
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
            head.add_field(&name, &value, &raw)?;
            head.headers.push((name, value));
        }
        head.raw = raw;
        Some(head)
    }

    /// Handles one header field. `None` if it makes the request odd.
    fn add_field(&mut self, name: &str, value: &Bytes, raw: &Bytes) -> Option<()> {
        // the Python server's parser keeps spaces at the end of a value, httparse does not
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

/// Parses a content length: at most 15 digits without a leading zero.
fn length(value: &[u8]) -> Option<usize> {
    let is_plain = (1..=15).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
    if !is_plain || (value[0] == b'0' && value.len() > 1) {
        return None;
    }
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// Result of a search for a request header at the start of a connection's bytes.
#[derive(Debug)]
pub(crate) enum Search {
    /// The header is incomplete.
    Incomplete,
    /// A header, which was taken out of the bytes.
    Head(Head),
    /// No plain request. All bytes are still there.
    Odd,
}

/// Incremental search for the next request header in a growing buffer.
#[derive(Debug, Default)]
pub(crate) struct Finder {
    searched: usize,
    parsed: usize,
}

impl Finder {
    pub(crate) fn find(&mut self, bytes: &mut BytesMut, max_head_bytes: usize) -> Search {
        let result = self.search(bytes, max_head_bytes);
        if !matches!(result, Search::Incomplete) {
            *self = Self::default();
        }
        result
    }

    fn search(&mut self, bytes: &mut BytesMut, max_head_bytes: usize) -> Search {
        let begin = self.searched.saturating_sub(3);
        let end = memmem::find(&bytes[begin..], b"\r\n\r\n").map(|at| begin + at + 4);
        let head = &bytes[..end.unwrap_or(bytes.len())];
        if !begins_like_a_request(head) || head.len() > max_head_bytes || has_bare_line_end(head, self.searched) {
            return Search::Odd;
        }
        if end.is_some() {
            let head = bytes.split_to(head.len()).freeze();
            return match Head::parse(head.clone()) {
                Some(head) => Search::Head(head),
                None => {
                    give_back(bytes, &head);
                    Search::Odd
                }
            };
        }
        self.searched = head.len();
        if head.len() > self.parsed + self.parsed / 8 {
            self.parsed = head.len(); // parse again only after growth by an eighth: linear time in total
            let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
            match httparse::Request::new(&mut []).parse_with_uninit_headers(head, &mut headers) {
                Ok(httparse::Status::Partial) => {}
                _ => return Search::Odd,
            }
        }
        Search::Incomplete
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

/// Returns true if a line feed has no carriage return before it: some parsers take that as a line end, others do not.
fn has_bare_line_end(head: &[u8], searched: usize) -> bool {
    memchr_iter(b'\n', &head[searched..]).any(|at| searched + at == 0 || head[searched + at - 1] != b'\r')
}

/// Returns true if the bytes are complete requests only. An odd request counts as complete, since its end is unknown.
pub(crate) fn only_whole_requests(bytes: &[u8], max_head_bytes: usize) -> bool {
    let mut rest = BytesMut::from(bytes);
    while !rest.is_empty() {
        match Finder::default().find(&mut rest, max_head_bytes) {
            Search::Incomplete => return false,
            Search::Odd => return true,
            Search::Head(head) if rest.len() < head.content_length => return false,
            Search::Head(head) => drop(rest.split_to(head.content_length)),
        }
    }
    true
}
