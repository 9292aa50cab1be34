//! One request and its answer, over a connection that may be used again.
//!
//! An exchange that ended badly leaves no connection behind; only a request that was never written is sent
//! a second time.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::frame::{Frame, classify, usage};
use crate::plan::{Plan, Target};
use crate::record::Shared;
use crate::record::{Failure, Record};
use crate::sse::Splitter;

/// The sending half of an open connection.
pub(crate) type Connection = http1::SendRequest<Full<Bytes>>;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ERROR_TEXT_BYTES: usize = 300;
const JSON_BYTES: usize = 1 << 20;

type Failed = (Failure, String);

/// Send request `record.index`, read its answer to the end, note everything in `record`. `idle` is a connection to use,
/// and afterwards one to use again.
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
        Ok(connection) => *idle = connection.filter(|one| plan.keep_alive && !one.is_closed()),
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
    let mut connection = match reusable(idle).await {
        Some(one) => one,
        None => connect(plan, start, record).await?,
    };
    let body = &plan.bodies[record.index % plan.bodies.len()];
    record.sent = Some(start.elapsed().as_secs_f64());
    let answer = match connection.try_send_request(request(&plan.target, body)).await {
        Ok(answer) => answer,
        Err(mut error) => {
            let Some(unsent) = error.take_message() else {
                return Err((Failure::Broken, said(&error.into_error())));
            };
            connection = connect(plan, start, record).await?;
            record.sent = Some(start.elapsed().as_secs_f64());
            connection
                .send_request(unsent)
                .await
                .map_err(|error| (Failure::Broken, said(&error)))?
        }
    };
    record.headers = Some(start.elapsed().as_secs_f64());
    record.status = Some(answer.status().as_u16());
    read(answer, shared, start, record).await?;
    Ok(Some(connection))
}

/// What the server closed while it was idle is known here.
async fn reusable(idle: Option<Connection>) -> Option<Connection> {
    let mut one = idle?;
    one.ready().await.ok()?;
    Some(one)
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
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failed(said(&error)))?;
    tokio::spawn(connection); // its errors reach the request too
    Ok(sender)
}

fn request(target: &Target, body: &Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = target.method.clone();
    *request.uri_mut() = target.uri.clone();
    *request.headers_mut() = target.headers.clone();
    request
}

async fn read(answer: Response<Incoming>, shared: &Shared, start: Instant, record: &mut Record) -> Result<(), Failed> {
    let ok = answer.status().is_success();
    let streamed = answer
        .headers()
        .get(hyper::header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let mut body = answer.into_body();
    if ok && streamed {
        return read_events(body, shared, start, record).await;
    }
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| (Failure::Broken, said(&error)))?;
        if let Some(data) = frame.data_ref() {
            record.bytes += data.len();
            let room = JSON_BYTES.saturating_sub(text.len()).min(data.len());
            text.extend_from_slice(&data[..room]);
        }
    }
    if !ok {
        text.truncate(ERROR_TEXT_BYTES);
        return Err((Failure::Status, String::from_utf8_lossy(&text).into_owned()));
    }
    // not streamed: all of it comes at once
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

async fn read_events(mut body: Incoming, shared: &Shared, start: Instant, record: &mut Record) -> Result<(), Failed> {
    let mut splitter = Splitter::default();
    let (mut done, mut error) = (false, None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| (Failure::Broken, said(&error)))?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
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

/// An error with its causes.
fn said(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
