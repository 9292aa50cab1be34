//! An answer of the Python server for the gateway itself.

use std::io;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Head;
use super::answer_end::AnswerEnd;
use super::fallback::connect;
use super::writer::Progress;

const MAX_BYTES: usize = 16 << 20;

/// A whole answer with status 200.
#[derive(Debug)]
pub struct Fetched {
    /// Names in lower case, without those of its framing.
    pub headers: Vec<(String, String)>,
    /// Of the length that was announced.
    pub body: Vec<u8>,
}

/// Send a request without a body on, as it is. None: whatever the answer is, it is no [`Fetched`].
pub async fn fetch(fallback: &Path, head: &Head) -> io::Result<Option<Fetched>> {
    let mut upstream = connect(fallback).await?;
    upstream.write_all(&head.raw).await?;
    let (mut end, mut answer) = (AnswerEnd::new(false), Vec::new());
    while end.progress() != Progress::Ended {
        let begin = answer.len();
        if upstream.read_buf(&mut answer).await? == 0 || answer.len() > MAX_BYTES || end.feed(&answer[begin..]).is_err()
        {
            return Ok(None);
        }
    }
    Ok(parse(&answer))
}

fn parse(answer: &[u8]) -> Option<Fetched> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut found = httparse::Response::new(&mut headers);
    let Ok(httparse::Status::Complete(size)) = found.parse(answer) else {
        return None;
    };
    let body = answer[size..].to_vec();
    let mut length = None;
    let mut kept = Vec::new();
    for header in found.headers.iter() {
        let (name, value) = (
            header.name.to_ascii_lowercase(),
            std::str::from_utf8(header.value).ok()?,
        );
        match name.as_str() {
            "content-length" => length = value.parse().ok(),
            "date" | "connection" => {}
            _ => kept.push((name, value.to_owned())),
        }
    }
    (found.code == Some(200) && length == Some(body.len())).then_some(Fetched { headers: kept, body })
}
