//! Proxy to the Python server, with a new connection to its Unix socket for each request or tunnelled connection.

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::UnixStream;
use tokio::time::sleep;

use super::Head;
use super::client::{Inbox, Watch};
use super::link::Link;
use super::options::count;
use super::relay::{Relay, Relayed};
use super::writer::{Answer, Progress};

const UNREACHABLE: &str = r#"{"error":{"message":"the Python server, which handles this request, is unavailable: try again later","type":"server_error","param":null,"code":"fallback_unavailable"}}"#;
/// Wait before reconnecting when the connection queue of the Python server's socket is full.
const QUEUE_IS_FULL_WAIT: Duration = Duration::from_millis(20);

/// Proxies one request, or without `head` all bytes in both directions. `body`: the part of the body that is no longer
/// in the inbox. Returns whether the connection stays open.
pub(crate) async fn proxy(inbox: &mut Inbox, link: &Rc<Link>, head: Option<&Head>, body: Bytes) -> bool {
    if head.is_some() {
        count(&link.options.counts.proxied);
    }
    let left = head.map(|head| head.content_length - body.len());
    let upstream = match connect(&link.options.fallback).await {
        Ok(upstream) => upstream,
        Err(_) => return write_unreachable(inbox, link, head, left),
    };
    let mut relay = Relay::new(upstream, head, body, left);
    let mut watch = Watch::default();
    let relayed = poll_fn(|context| relay.poll(context, inbox, link, &mut watch)).await;
    drop(relay); // closes the connection to the server
    link.drained().await;
    link.name.borrow_mut().clear();
    match relayed {
        Relayed::Answered { keep } => keep && head.is_some_and(|head| head.keep_alive),
        Relayed::Gone => {
            link.mark_lost();
            false
        }
        Relayed::Unanswered { left } => write_unreachable(inbox, link, head, left),
    }
}

pub(super) async fn connect(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(QUEUE_IS_FULL_WAIT).await,
            result => return result,
        }
    }
}

/// Answers one request with status 503. Returns whether the connection stays open.
fn write_unreachable(inbox: &mut Inbox, link: &Rc<Link>, head: Option<&Head>, left: Option<usize>) -> bool {
    count(&link.options.counts.unreachable);
    link.is_last.set(inbox.is_last());
    let answer = Answer::new(link.clone(), head, None);
    let left = left.unwrap_or(usize::MAX);
    if left <= inbox.bytes.len() {
        let _ = inbox.bytes.split_to(left);
    } else {
        answer.end_connection(); // the rest of the body is not read
    }
    debug_assert_eq!(answer.progress(), Progress::None);
    let id = request_id(head);
    let headers = [("retry-after", "1"), ("x-request-id", &*id)];
    answer.whole(503, "application/json", &headers, UNREACHABLE.as_bytes());
    answer.close()
}

/// Returns the client's request id if it is safe in a log and a header, else a new one.
pub fn request_id(head: Option<&Head>) -> String {
    // the last of several counts, as in the Python server
    let given = head.and_then(|head| head.headers.iter().rev().find(|(name, _)| name == "x-request-id"));
    let is_plain = |one: &u8| one.is_ascii_alphanumeric() || b"._:/+=@-".contains(one);
    match given.and_then(|(_, value)| std::str::from_utf8(value).ok()) {
        Some(id) if (1..=128).contains(&id.len()) && id.as_bytes().iter().all(is_plain) => id.to_owned(),
        _ => {
            let mut random = [0_u8; 12];
            let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
            format!("req-{}", hex(&random))
        }
    }
}

/// Returns the bytes as lower-case hexadecimal, two digits per byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
