//! `minisgl._rust.Gateway`: the gateway in the process of the Python server. Its thread never calls Python: Python
//! polls its questions and answers them.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use minisgl_gateway::config::GatewayConfig;
use minisgl_gateway::message::decode_prepared;
use minisgl_gateway::metrics::Peak;
use minisgl_gateway::server::Gateway as Served;
use minisgl_gateway::waiting::KeyCounts;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use serde_json::json;

use crate::arrays::from_json;
use crate::text::TextTokenizer;

const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// HTTP gateway in front of the Python server. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct Gateway {
    served: Served,
}

/// Question to the Python server: id, method, target, headers, body.
type Question<'py> = (
    u64,
    String,
    String,
    Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>,
    Option<Bound<'py, PyBytes>>,
);

#[pymethods]
impl Gateway {
    #[new]
    fn new(listener_fd: i32, engine: PathBuf, fallback: PathBuf) -> PyResult<Self> {
        if listener_fd < 0 {
            return Err(PyValueError::new_err(format!(
                "listener_fd is {listener_fd}; must be a descriptor"
            )));
        }
        // SAFETY: the descriptor is borrowed for the call that duplicates it, which fails if it is invalid.
        let borrowed = unsafe { BorrowedFd::borrow_raw(listener_fd) };
        let listener = borrowed.try_clone_to_owned().map(TcpListener::from);
        let served = listener.and_then(|listener| Served::start(listener, engine, fallback));
        Ok(Gateway {
            served: served.map_err(|error| PyOSError::new_err(error.to_string()))?,
        })
    }

    fn serve(&self, py: Python<'_>, config: &str, tokenizer: &TextTokenizer) -> PyResult<bool> {
        let config = GatewayConfig::read(config)
            .map_err(|error| PyValueError::new_err(format!("the gateway's configuration: {error}")))?;
        let tokenizer = Arc::clone(&tokenizer.inner);
        Ok(py.detach(|| self.served.serve(config, tokenizer)))
    }

    fn questions_fd(&self) -> i32 {
        self.served.shared().questions.woken().as_raw_fd()
    }

    fn questions<'py>(&self, py: Python<'py>) -> Vec<Question<'py>> {
        let bytes = |text: &[u8]| PyBytes::new(py, text);
        let questions = self.served.shared().questions.take().into_iter();
        questions
            .map(|one| {
                let headers = one.headers.iter();
                let headers = headers.map(|(name, value)| (bytes(name.as_bytes()), bytes(value)));
                let body = one.body.as_deref().map(bytes);
                (one.number, one.method, one.target, headers.collect(), body)
            })
            .collect()
    }

    fn withdrawn(&self) -> Vec<u64> {
        self.served.shared().questions.withdrawn()
    }

    fn answer(&self, number: u64, prepared: &[u8]) -> PyResult<bool> {
        let prepared = decode_prepared(prepared)
            .map_err(|error| PyValueError::new_err(format!("the answer to question {number}: {error}")))?;
        Ok(self.served.shared().answer(number, prepared))
    }

    fn drain(&self) {
        self.served.drain();
    }

    fn fail(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.served.fail(reason));
    }

    fn stop(&self, py: Python<'_>, grace_s: f64) -> PyResult<()> {
        let grace =
            Duration::try_from_secs_f64(grace_s).map_err(|error| PyValueError::new_err(format!("grace_s: {error}")))?;
        py.detach(|| self.served.stop(grace));
        Ok(())
    }

    fn beat(&self) {
        self.served.shared().beat();
    }

    #[getter]
    fn num_open(&self) -> usize {
        self.served.shared().num_open.load(Relaxed)
    }

    fn waiting(&self) -> (usize, usize, usize) {
        let shared = self.served.shared();
        let numbers = [&shared.waiting.requests, &shared.waiting.tokens, &shared.num_live];
        numbers.map(|one| one.load(Relaxed)).into()
    }

    fn key<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Option<Bound<'py, PyDict>>> {
        let loaded = self.served.shared().loaded();
        let counts = loaded.as_ref().and_then(|loaded| loaded.keys.get(number));
        counts.map(|counts| key_usage(py, counts)).transpose()
    }

    fn readings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let shared = self.served.shared();
        let (metrics, loaded) = (&shared.metrics, shared.loaded());
        shared.turn_windows();
        let peak = |peak: &Peak| {
            let (recent, most) = peak.read();
            json!({"recent": recent, "most": most})
        };
        let cache = loaded.as_ref().map(|loaded| loaded.tokenizer.cache_stats());
        let cache = cache.unwrap_or_default();
        let finished: BTreeMap<_, _> = REASONS.iter().zip(&metrics.finished).collect();
        let histograms = metrics.histograms().map(|(name, histogram)| {
            let (counts, sum) = histogram.read();
            (name, json!({"counts": counts, "sum": sum}))
        });
        let meters = metrics.meters().map(|(name, meter)| {
            let (count, total_s, longest_s, recent_s) = meter.read();
            let values = json!({"count": count, "total_s": total_s, "longest_s": longest_s, "recent_s": recent_s});
            (name, values)
        });
        let readings = json!({
            "num_open": shared.num_open,
            "num_live": shared.num_live,
            "num_waiting": shared.waiting.requests,
            "num_waiting_tokens": shared.waiting.tokens,
            "num_accepted": metrics.accepted,
            "num_generated": metrics.generated,
            "num_finished": finished,
            "most": {"in_flight": peak(&metrics.in_flight), "queued": peak(&metrics.queued)},
            "cache": {
                "hits": cache.hits,
                "misses": cache.misses,
                "hit_bytes": cache.bytes_hit,
                "bytes": cache.bytes_held,
            },
            "histograms": BTreeMap::from(histograms),
            "meters": BTreeMap::from(meters),
        });
        let readings = from_json(py, &readings)?;
        let keys = loaded.iter().flat_map(|loaded| &loaded.keys);
        let keys: Vec<_> = keys.map(|counts| key_usage(py, counts)).collect::<PyResult<_>>()?;
        readings.set_item("keys", keys)?;
        readings.set_item("requests", metrics.requests.read())?;
        Ok(readings)
    }
}

fn key_usage<'py>(py: Python<'py>, counts: &KeyCounts) -> PyResult<Bound<'py, PyDict>> {
    let usage = PyDict::new(py);
    usage.set_item("num_waiting", counts.num_waiting.load(Relaxed))?;
    usage.set_item("num_waiting_tokens", counts.num_waiting_tokens.load(Relaxed))?;
    usage.set_item("num_requests", counts.num_requests.load(Relaxed))?;
    usage.set_item("num_prompt", counts.num_prompt.load(Relaxed))?;
    usage.set_item("num_generated", counts.num_generated.load(Relaxed))?;
    Ok(usage)
}
