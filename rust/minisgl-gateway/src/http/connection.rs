//! A client connection and its requests, handled one after the other.
//!
//! Invariants: responses are in the order of the requests; a header or body that arrives too slowly blocks no other
//! work; a panic in one request is an error of that request only.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::client::{Inbox, Watch};
use super::fallback;
use super::head::{Finder, Search};
use super::link::Link;
use super::options::{BudgetPermit, Options, SMALL_BYTES, count};
use super::writer::{Answer, Progress};
use super::{Handler, Head, Outcome};

/// Pause in a body after which the request is proxied: the Python server reports the timeout.
const BODY_PAUSE: Duration = Duration::from_secs(1);
/// Time that a client may go on sending after the last response, so that it can read that response.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 4 << 20;
const PANICKED: &str =
    r#"{"error":{"message":"internal error: panic","type":"server_error","param":null,"code":"internal_error"}}"#;

/// Serves one client until its connection ends.
pub async fn serve_connection<H: Handler>(stream: TcpStream, handler: Rc<H>, options: Rc<Options>) {
    let _ = stream.set_nodelay(true);
    let stream = Rc::new(stream);
    let link = Rc::new(Link::new(stream.clone(), options));
    let _open = Open::new(link.clone());
    let (inbox, own_link) = (Inbox::new(stream.clone()), link.clone());
    let task = ConnectionTask {
        inbox,
        link: own_link,
        handler,
    };
    let mut task = pin!(task.run());
    let mut failed = pin!(stream.ready(Interest::ERROR));
    poll_fn(|context| {
        // queued bytes are written first: the other two check what is left
        if link.poll_flush(context).is_ready() || failed.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        task.as_mut().poll(context)
    })
    .await;
}

/// Counts an open connection. Dropping it closes the socket, whatever else still holds the link.
struct Open(Rc<Link>);

impl Open {
    fn new(link: Rc<Link>) -> Self {
        let open = &link.options.counts.open;
        open.set(open.get() + 1);
        Self(link)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
        let open = &self.0.options.counts.open;
        open.set(open.get() - 1);
    }
}

struct ConnectionTask<H> {
    inbox: Inbox,
    link: Rc<Link>,
    handler: Rc<H>,
}

enum NextRequest {
    Head(Head),
    Odd,
    End,
}

enum Body {
    Whole(Bytes),
    /// Proxy the request; the bytes that arrived are still in the inbox.
    Proxy,
    End,
}

impl<H: Handler> ConnectionTask<H> {
    async fn run(mut self) {
        let mut first_deadline = Some(Instant::now() + self.link.options.slow_client_timeout.get());
        let lingers = loop {
            match self.next_head(first_deadline).await {
                NextRequest::End => break false,
                NextRequest::Odd => {
                    count(&self.link.options.counts.tunnelled);
                    self.proxy(None, Bytes::new()).await;
                    break true;
                }
                NextRequest::Head(head) => {
                    if !self.request(Rc::new(head)).await {
                        break true;
                    }
                }
            }
            first_deadline = None;
            if self.inbox.bytes.is_empty() {
                self.inbox.release();
            } else {
                yield_now().await; // let other connections run before the next pipelined request
            }
        };
        self.finish(lingers).await;
    }

    /// Reads the next header. `deadline`: for the connection's first one; a later one has a timeout from its first
    /// byte.
    async fn next_head(&mut self, deadline: Option<Instant>) -> NextRequest {
        let mut finder = Finder::default();
        let mut head_deadline = deadline;
        let idle_until = Instant::now() + self.link.options.keep_alive_timeout.get();
        loop {
            if !self.inbox.bytes.is_empty() {
                match finder.find(&mut self.inbox.bytes, self.link.options.max_head_bytes) {
                    Search::Head(head) => return NextRequest::Head(head),
                    Search::Odd => return NextRequest::Odd,
                    Search::Incomplete => {}
                }
                head_deadline.get_or_insert_with(|| Instant::now() + self.link.options.slow_client_timeout.get());
            }
            if self.inbox.has_ended || self.link.options.stop.is_closing() {
                return NextRequest::End;
            }
            tokio::select! {
                biased;
                () = self.inbox.more(&self.link) => {}
                () = sleep_until(head_deadline.unwrap_or(idle_until)) => return NextRequest::End,
                () = self.link.options.stop.closing() => {}
            }
        }
    }

    /// Handles one request and returns whether the connection stays open.
    async fn request(&mut self, head: Rc<Head>) -> bool {
        let max_size = match catch_unwind(AssertUnwindSafe(|| self.handler.route(&head))) {
            Ok(max_size) => max_size,
            Err(panic) => return self.write_panic(&Answer::new(self.link.clone(), None, None), &*panic),
        };
        let body = match max_size {
            Some(max_size) if head.content_length <= max_size => self.body(&head).await,
            _ => Body::Proxy,
        };
        let keep = match body {
            Body::End => return false,
            Body::Proxy => {
                if max_size.is_some() {
                    self.handler.on_proxied(&head);
                }
                self.proxy(Some(&head), Bytes::new()).await
            }
            Body::Whole(body) => self.answer(head, body).await,
        };
        self.link.drained().await;
        keep && !self.inbox.is_last()
    }

    async fn body(&mut self, head: &Head) -> Body {
        let (size, mut permit) = (head.content_length, None);
        if size > SMALL_BYTES {
            if !self.handler.can_send_body(head).await {
                return Body::Proxy;
            }
            permit = self.link.options.bodies.take(size);
            if permit.is_none() {
                return Body::Proxy;
            }
            self.inbox.bytes.reserve(size.saturating_sub(self.inbox.bytes.len())); // a single allocation
        }
        let slow = self.link.options.slow_client_timeout.get();
        let deadline = Instant::now() + slow;
        while self.inbox.bytes.len() < size {
            if self.inbox.has_ended {
                return Body::End;
            }
            let pause = (Instant::now() + BODY_PAUSE.min(slow / 4)).min(deadline);
            if timeout_at(pause, self.inbox.more(&self.link)).await.is_err() {
                return Body::Proxy;
            }
            if size > SMALL_BYTES {
                yield_now().await; // let other connections run between the parts of a large body
            }
        }
        let body = self.inbox.bytes.split_to(size).freeze();
        Body::Whole(match permit {
            None => body,
            Some(permit) => Bytes::from_owner(LargeBody { body, _permit: permit }),
        })
    }

    async fn answer(&mut self, head: Rc<Head>, body: Bytes) -> bool {
        let answer = Answer::new(self.link.clone(), Some(&head), Some(body.clone()));
        let mut future = Box::pin(self.handler.clone().answer(head.clone(), body, answer.clone()));
        let mut watch = Watch::default();
        let outcome = poll_fn(|context| {
            if watch
                .poll(context, &mut self.inbox, &self.link, || answer.progress())
                .is_ready()
            {
                return Poll::Ready(None); // the client has disconnected
            }
            if self.link.options.stop.is_closing() {
                answer.end_connection();
            }
            match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
                Ok(poll) => poll.map(|outcome| Some(Ok(outcome))),
                Err(panic) => Poll::Ready(Some(Err(panic))),
            }
        })
        .await;
        drop(future);
        match outcome {
            None => {
                answer.close();
                self.link.mark_lost();
                false
            }
            Some(Err(panic)) => self.write_panic(&answer, &*panic),
            Some(Ok(Outcome::Proxy)) => {
                let body = answer.take_body();
                let is_fresh = answer.progress() == Progress::None;
                answer.close();
                match body {
                    Some(body) if is_fresh => self.proxy(Some(&head), body).await,
                    _ => false, // the body is dropped already: nothing can be proxied
                }
            }
            Some(Ok(Outcome::Answered)) => answer.close(),
        }
    }

    fn write_panic(&self, answer: &Answer, panic: &(dyn Any + Send)) -> bool {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("?");
        (self.link.options.log)(&format!("{}: the handler panicked: {text}", self.link.name.borrow()));
        count(&self.link.options.counts.panics);
        answer.whole(500, "application/json", &[], PANICKED.as_bytes());
        answer.close()
    }

    /// Proxies a request (without `head`: the rest of the connection) and returns whether the connection stays open.
    async fn proxy(&mut self, head: Option<&Head>, body: Bytes) -> bool {
        fallback::proxy(&mut self.inbox, &self.link, head, body).await
    }

    /// Sends all output and closes; with `lingers`, drops further input for a while first, so that the client can read.
    async fn finish(mut self, lingers: bool) {
        self.link.drained().await;
        if self.inbox.has_ended || !lingers {
            return;
        }
        let _ = shutdown(self.inbox.stream(), Shutdown::Write);
        let _ = timeout(LINGER, async {
            let mut left = LINGER_BYTES;
            while !self.inbox.has_ended && left > 0 {
                left = left.saturating_sub(self.inbox.bytes.len());
                self.inbox.bytes.clear();
                self.inbox.more(&self.link).await;
            }
        })
        .await;
    }
}

/// A large request body; dropping it returns its bytes to the budget.
struct LargeBody {
    body: Bytes,
    _permit: BudgetPermit,
}

impl AsRef<[u8]> for LargeBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}
