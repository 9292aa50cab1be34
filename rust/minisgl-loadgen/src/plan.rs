//! The plan of a run: its requests, their times and their target. Checked once, then read-only.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// Times at which requests are sent.
#[derive(Clone, Debug)]
pub enum Arrivals {
    /// Open loop: seconds from the start, one per chain, ascending.
    At(Vec<f64>),
    /// Closed loop: each client begins its next chain when its last one has ended.
    Clients {
        /// Number of clients.
        count: usize,
        /// Seconds over which the clients' starts are spread evenly.
        ramp_s: f64,
        /// Seconds after which no request is begun.
        stop_after_s: f64,
    },
}

/// The server and path that requests are sent to, and their headers.
#[derive(Clone, Debug)]
pub struct Target {
    /// Addresses of the host, tried in order.
    pub addresses: Vec<SocketAddr>,
    /// Head of every request, without Content-Length and the empty line.
    head: String,
}

/// A whole run: target, requests, arrivals and limits.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Server and path of the requests.
    pub target: Target,
    /// Bodies of the requests: request `i` has body `i % bodies.len()`.
    pub bodies: Vec<Vec<u8>>,
    /// Number of requests by chain: those of a chain are sent one after the other, like the turns of a chat.
    pub chains: Vec<usize>,
    /// Times at which requests are sent.
    pub arrivals: Arrivals,
    /// Whether connections are reused.
    pub keep_alive: bool,
    /// Time limit of a request, from its sending to its last byte.
    pub timeout: Duration,
    /// Number of threads of the generator.
    pub threads: usize,
}

impl Target {
    /// Parses `http://host[:port]/path` and resolves the host. Fails with the part of the target that is not allowed.
    pub fn parse(url: &str, method: &str, headers: &[(String, String)]) -> Result<Self, String> {
        let wrong = |what: &str| format!("url: {url}: {what}");
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("not a URL"))?;
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(wrong("must begin with http:// (TLS is not supported)"));
        }
        let rest = rest.split_once('#').map_or(rest, |(before, _)| before);
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let authority = authority.rsplit_once('@').map_or(authority, |(_, after)| after);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, port),
            _ => (authority, ""),
        };
        if host.is_empty() {
            return Err(wrong("has no host"));
        }
        let port: u16 = if port.is_empty() { "80" } else { port }
            .parse()
            .map_err(|_| wrong("not a URL"))?;
        if url.bytes().any(|byte| byte.is_ascii_control() || byte == b' ') {
            return Err(wrong("not a URL"));
        }
        let addresses = (host.trim_start_matches('[').trim_end_matches(']'), port).to_socket_addrs();
        let addresses: Vec<_> = addresses.map_err(|error| wrong(&error.to_string()))?.collect();
        if !matches!(method, "GET" | "POST") {
            return Err(format!("method: {method}: unknown"));
        }
        let slash = if path.starts_with('/') { "" } else { "/" };
        let mut head = format!("{method} {slash}{path} HTTP/1.1\r\nhost: {host}:{port}\r\n");
        for (name, value) in headers {
            let bad = || format!("header {name}: not allowed");
            let lower = name.to_ascii_lowercase();
            let is_allowed = !name.is_empty() && name.bytes().all(is_token) && value.bytes().all(is_text);
            match lower.as_str() {
                "host" => {}
                "content-length" | "transfer-encoding" => return Err(bad()),
                _ if is_allowed => head += &format!("{lower}: {value}\r\n"),
                _ => return Err(bad()),
            }
        }
        Ok(Self { addresses, head })
    }

    /// Returns the head of a request with this body.
    pub(crate) fn head(&self, body: &[u8]) -> Vec<u8> {
        if body.is_empty() && self.head.starts_with("GET ") {
            return format!("{}\r\n", self.head).into_bytes();
        }
        format!("{}content-length: {}\r\n\r\n", self.head, body.len()).into_bytes()
    }
}

/// Returns true if a header's name may contain this byte.
const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^'..=b'`' | b'|' | b'~')
}

/// Returns true if a header's value may contain this byte.
const fn is_text(byte: u8) -> bool {
    matches!(byte, b' '..=b'~' | b'\t')
}

impl Plan {
    /// Returns the number of requests, if all are sent.
    pub fn num_requests(&self) -> usize {
        self.chains.iter().sum()
    }

    /// Checks that the plan can be executed. Fails with the field that is invalid.
    pub fn check(&self) -> Result<(), String> {
        let fail = |what: &str| Err(what.to_owned());
        if self.bodies.is_empty() {
            return fail("bodies: must not be empty");
        }
        if self.chains.contains(&0) {
            return fail("chains: each must have at least 1 request");
        }
        if self.threads == 0 {
            return fail("threads: must be at least 1");
        }
        match &self.arrivals {
            Arrivals::At(times) => {
                if times.len() != self.chains.len() {
                    return fail("arrivals: must be one per chain");
                }
                if times.first().is_some_and(|first| *first < 0.0)
                    || !times.iter().all(|time| time.is_finite())
                    || !times.is_sorted()
                {
                    return fail("arrivals: must be ascending seconds from 0");
                }
            }
            Arrivals::Clients { count, ramp_s, .. } => {
                if *count == 0 {
                    return fail("concurrency: must be at least 1");
                }
                if !ramp_s.is_finite() || *ramp_s < 0.0 {
                    return fail("ramp_s: must be seconds from 0");
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Target;

    fn parse(url: &str, method: &str, headers: &[(&str, &str)]) -> Result<Target, String> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Target::parse(url, method, &headers.iter().map(owned).collect::<Vec<_>>())
    }

    #[test]
    fn request_head_has_path_host_headers_and_length() {
        let headers = [
            ("Authorization", "Bearer a b"),
            ("HOST", "other"),
            ("x-a", "1"),
            ("x-a", ""),
        ];
        let target = parse("http://127.0.0.1:8000/v1/x?y=1#z", "POST", &headers).unwrap();
        assert_eq!(target.addresses, ["127.0.0.1:8000".parse().unwrap()]);
        let head =
            "POST /v1/x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:8000\r\nauthorization: Bearer a b\r\nx-a: 1\r\nx-a: \r\n";
        for (body, length) in [("{}", "content-length: 2"), ("", "content-length: 0")] {
            assert_eq!(
                target.head(body.as_bytes()),
                format!("{head}{length}\r\n\r\n").as_bytes()
            );
        }
        let target = parse("HTTP://u:p@[::1]?q", "GET", &[]).unwrap();
        assert_eq!(target.addresses, ["[::1]:80".parse().unwrap()]);
        assert_eq!(target.head(b""), b"GET /?q HTTP/1.1\r\nhost: [::1]:80\r\n\r\n");
        assert!(target.head(b"a").ends_with(b"content-length: 1\r\n\r\n"));
    }

    #[test]
    fn target_that_is_not_allowed_is_an_error_with_its_name() {
        for (url, method, header, error) in [
            ("127.0.0.1", "POST", ("a", ""), "url: 127.0.0.1: not a URL"),
            ("https://127.0.0.1", "POST", ("a", ""), "must begin with http://"),
            ("http:///path", "POST", ("a", ""), "has no host"),
            ("http://127.0.0.1:99999/", "POST", ("a", ""), "not a URL"),
            ("http://127.0.0.1/a b", "POST", ("a", ""), "not a URL"),
            ("http://127.0.0.1/\r\nx", "POST", ("a", ""), "not a URL"),
            ("http://127.0.0.1/", "HEAD", ("a", ""), "method: HEAD: unknown"),
            ("http://127.0.0.1/", "POST", ("", ""), "header : not allowed"),
            ("http://127.0.0.1/", "POST", ("a:", ""), "header a:: not allowed"),
            ("http://127.0.0.1/", "POST", ("a", "b\r\nc"), "header a: not allowed"),
            (
                "http://127.0.0.1/",
                "POST",
                ("Content-Length", "1"),
                "header Content-Length: not allowed",
            ),
        ] {
            let found = parse(url, method, &[header]).err().unwrap();
            assert!(found.contains(error), "{found}");
        }
    }
}
