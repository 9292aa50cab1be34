//! What is to be sent, when and where: checked once, then read only.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method};

/// When requests are sent.
#[derive(Clone, Debug)]
pub enum Arrivals {
    /// Seconds from the start, one per chain, ascending: open loop.
    At(Vec<f64>),
    /// Closed loop.
    Clients {
        /// How many there are.
        count: usize,
        /// They begin evenly spread over so many seconds.
        ramp_s: f64,
        /// No request is begun after so many seconds.
        stop_after_s: f64,
    },
}

/// Where to.
#[derive(Clone, Debug)]
pub struct Target {
    /// The addresses of the host, tried in order.
    pub addresses: Vec<SocketAddr>,
    /// Path and query.
    pub uri: hyper::Uri,
    /// `Host` and everything else; the length is added.
    pub headers: HeaderMap,
    /// POST, or GET for requests without a body.
    pub method: Method,
}

/// A whole run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where to.
    pub target: Target,
    /// Request `i` has body `i % bodies.len()`.
    pub bodies: Vec<Bytes>,
    /// Number of requests by chain: those of a chain are sent one after the other, like the turns of a chat.
    pub chains: Vec<usize>,
    /// When.
    pub arrivals: Arrivals,
    /// Whether connections are used again.
    pub keep_alive: bool,
    /// For a request from its sending to its last byte.
    pub timeout: Duration,
    /// Threads of the generator.
    pub threads: usize,
}

impl Target {
    /// `url`: `http://host[:port]/path`. Looks up the host.
    pub fn parse(url: &str, method: &str, headers: &[(String, String)]) -> Result<Self, String> {
        let wrong = |what: &str| format!("url: {url}: {what}");
        let uri: hyper::Uri = url.parse().map_err(|_| wrong("not a URL"))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong("must begin with http:// (TLS is not supported)"));
        }
        let host = uri.host().ok_or_else(|| wrong("without a host"))?;
        let port = uri.port_u16().unwrap_or(80);
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let addresses: Vec<_> = (bare, port)
            .to_socket_addrs()
            .map_err(|error| wrong(&error.to_string()))?
            .collect();
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let bad = || format!("header {name}: not allowed");
            let name: HeaderName = name.parse().map_err(|_| bad())?;
            map.append(name, HeaderValue::from_str(value).map_err(|_| bad())?);
        }
        let authority = format!("{host}:{port}");
        map.insert(
            hyper::header::HOST,
            HeaderValue::from_str(&authority).map_err(|_| wrong("bad host"))?,
        );
        Ok(Self {
            addresses,
            uri: uri
                .path_and_query()
                .map_or_else(hyper::Uri::default, |path| path.clone().into()),
            headers: map,
            method: method.parse().map_err(|_| format!("method: {method}: unknown"))?,
        })
    }
}

impl Plan {
    /// The number of requests, if all are sent.
    pub fn num_requests(&self) -> usize {
        self.chains.iter().sum()
    }

    /// Whether it can be carried out; Err: why not.
    pub fn check(&self) -> Result<(), String> {
        let fail = |what: &str| Err(what.to_owned());
        if self.bodies.is_empty() {
            return fail("bodies: none");
        }
        if self.chains.contains(&0) {
            return fail("chains: one has no request");
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
