//! What a gateway that is a process of its own does beside the others: `/metrics` is the Python server's with its own
//! added. In one process, the Python server adds them up.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;

use crate::http::{Handler, Head, Outcome, Pair, Route, Writer, fetch};
use crate::metrics_text::{exposition, merged};
use crate::shared::Shared;

/// Before another handler.
pub struct Alone<H> {
    inner: Rc<H>,
    shared: Arc<Shared>,
    fallback: PathBuf,
}

impl<H: Handler> Alone<H> {
    /// `fallback`: the Python server's socket.
    pub fn new(inner: Rc<H>, shared: Arc<Shared>, fallback: PathBuf) -> Self {
        Self {
            inner,
            shared,
            fallback,
        }
    }

    /// Whether a request may ask is the Python server's to say.
    async fn answer_metrics(&self, head: &Head, writer: &Writer) -> Outcome {
        let found = fetch(&self.fallback, head).await.ok().flatten();
        let Some((found, theirs)) = found.and_then(|mut found| {
            let theirs = String::from_utf8(std::mem::take(&mut found.body)).ok()?;
            Some((found, theirs))
        }) else {
            return Outcome::PassOn;
        };
        let loaded = self.shared.loaded();
        let cache = loaded
            .as_ref()
            .map(|one| one.tokenizer.cache_stats())
            .unwrap_or_default();
        let keys = loaded.map(|one| one.counts_by_name()).unwrap_or_default();
        let headers: Vec<Pair<'_>> = found.headers.iter().map(|(name, value)| (&**name, &**value)).collect();
        let text = merged(&exposition(&self.shared.metrics, &cache, &keys), &theirs);
        writer.whole(200, "", &headers, text.as_bytes());
        Outcome::Answered
    }
}

fn asks_for_metrics(head: &Head) -> bool {
    head.method == "GET" && head.content_length == 0 && head.target == "/metrics"
}

impl<H: Handler> Handler for Alone<H> {
    fn route(&self, head: &Head) -> Route {
        if asks_for_metrics(head) {
            Route::Body(0)
        } else {
            self.inner.route(head)
        }
    }

    async fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> Outcome {
        if asks_for_metrics(&head) {
            return self.answer_metrics(&head, &writer).await;
        }
        Rc::clone(&self.inner).answer(head, body, writer).await
    }
}
