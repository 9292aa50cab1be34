//! Exchange of a request and its response over a connection that may be reused.
//!
//! Invariants: an exchange that fails closes its connection, and no request is sent a second time.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::frame::{Frame, classify, usage};
use crate::http::{Connection, Exchange};
use crate::plan::Plan;
use crate::record::Shared;
use crate::record::{Failure, Record};
use crate::sse::Splitter;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ERROR_TEXT_BYTES: usize = 300;
const JSON_BYTES: usize = 1 << 20;

type Failed = (Failure, String);

/// Sends request `record.index`, reads its response to the end, and stores everything in `record`. `idle` is a
/// connection to reuse, and afterwards the one that can be reused.
pub(crate) async fn exchange(
    plan: &Plan,
    shared: &Shared,
    start: Instant,
    idle: &mut Option<Connection>,
    record: &mut Record,
) {
    shared.in_flight.fetch_add(1, Relaxed);
    let connection = idle.take();
    let result = match timeout(plan.timeout, attempt(plan, shared, start, connection, record)).await {
        Ok(result) => result,
        Err(_) => Err((Failure::Timeout, format!("not over after {:?}", plan.timeout))),
    };
    record.end = Some(start.elapsed().as_secs_f64());
    shared.in_flight.fetch_sub(1, Relaxed);
    shared.finished.fetch_add(1, Relaxed);
    match result {
        Ok(connection) => *idle = connection.filter(|_| plan.keep_alive),
        Err((failure, error)) => {
            shared.failed.fetch_add(1, Relaxed);
            (record.failure, record.error) = (Some(failure), error);
        }
    }
}

async fn attempt(
    plan: &Plan,
    shared: &Shared,
    start: Instant,
    idle: Option<Connection>,
    record: &mut Record,
) -> Result<Option<Connection>, Failed> {
    let connection = match idle.filter(Connection::is_idle) {
        Some(one) => one,
        None => connect(plan, start, record).await?,
    };
    let body = &plan.bodies[record.index % plan.bodies.len()];
    record.sent = Some(start.elapsed().as_secs_f64());
    let mut answer = connection.request(plan.target.head(body), body);
    let head = answer.head().await.map_err(broken)?;
    record.headers = Some(start.elapsed().as_secs_f64());
    record.status = Some(head.status);
    let is_ok = (200..300).contains(&head.status);
    if is_ok && head.events {
        read_events(&mut answer, shared, start, record).await?;
    } else {
        read(&mut answer, is_ok, shared, start, record).await?;
    }
    Ok(answer.finish())
}

const fn broken(error: String) -> Failed {
    (Failure::Broken, error)
}

async fn connect(plan: &Plan, start: Instant, record: &mut Record) -> Result<Connection, Failed> {
    let failed = |error: String| (Failure::Connect, error);
    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(&plan.target.addresses[..]))
        .await
        .map_err(|_| failed(format!("not connected after {CONNECT_TIMEOUT:?}")))?
        .map_err(|error| failed(error.to_string()))?;
    record.connected = Some(start.elapsed().as_secs_f64());
    // a request is one write; without this a delayed acknowledgement could hold back the end of a long one
    stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
    Ok(Connection::new(stream))
}

async fn read(
    answer: &mut Exchange<'_>,
    is_ok: bool,
    shared: &Shared,
    start: Instant,
    record: &mut Record,
) -> Result<(), Failed> {
    let mut text = Vec::new();
    while let Some(data) = answer.piece().await.map_err(broken)? {
        record.bytes += data.len();
        let room = JSON_BYTES.saturating_sub(text.len()).min(data.len());
        text.extend_from_slice(&data[..room]);
    }
    if !is_ok {
        text.truncate(ERROR_TEXT_BYTES);
        return Err((Failure::Status, String::from_utf8_lossy(&text).into_owned()));
    }
    // not streamed: the response arrives as a whole
    if let Some(counts) = usage(&text) {
        record.usage = counts;
    }
    if classify(&text) == Frame::Text {
        record.text_at(start.elapsed().as_secs_f64());
        let tokens = record.usage.completion.unwrap_or(0);
        shared.tokens.fetch_add(u64::try_from(tokens).unwrap_or(0), Relaxed);
    }
    Ok(())
}

async fn read_events(
    answer: &mut Exchange<'_>,
    shared: &Shared,
    start: Instant,
    record: &mut Record,
) -> Result<(), Failed> {
    let mut splitter = Splitter::default();
    let (mut done, mut error) = (false, None);
    while let Some(data) = answer.piece().await.map_err(broken)? {
        let now = start.elapsed().as_secs_f64();
        let before = record.text_events;
        record.bytes += data.len();
        splitter.push(data, |event| {
            record.events += 1;
            match classify(event) {
                Frame::Text => record.text_at(now),
                Frame::Done => done = true,
                Frame::Error if error.is_none() => {
                    let end = event.len().min(ERROR_TEXT_BYTES);
                    error = Some(String::from_utf8_lossy(&event[..end]).into_owned());
                }
                Frame::Error | Frame::Other => {}
            }
            if let Some(counts) = usage(event) {
                record.usage = counts;
            }
        });
        shared.tokens.fetch_add(u64::from(record.text_events - before), Relaxed);
    }
    match error {
        Some(text) => Err((Failure::Error, text)),
        None if !done => Err((Failure::Cut, "ended without [DONE]".to_owned())),
        None => Ok(()),
    }
}
