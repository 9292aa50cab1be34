//! `minisgl._rust.run_load`: the load generator, in threads of its own.
//!
//! The generator's threads never call Python; the calling thread releases the GIL while it waits, and checks for
//! signals ten times a second.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use minisgl_loadgen::{Arrivals, FAILURES, Failure, Outcome, Plan, Record, Shared, Target, run};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// Column of the result: its name, and the function that reads a record's value. Missing values are NaN, -1 or 0.
type Column<T> = (&'static str, fn(&Record) -> T);

const LOOK: Duration = Duration::from_millis(100);

/// Runs the load generator and returns the records of all requests. See `_rust.pyi`.
#[pyfunction]
#[pyo3(signature = (
    url, bodies, *, chains, arrivals=None, concurrency=0, ramp_s=0.0, stop_after_s=f64::INFINITY, method="POST",
    headers=Vec::new(), keep_alive=true, timeout_s=600.0, threads=1, progress=None
))]
#[allow(clippy::too_many_arguments)] // keywords of a Python function
pub(crate) fn run_load<'py>(
    py: Python<'py>,
    url: &str,
    bodies: Vec<Bound<'py, PyBytes>>,
    chains: Vec<usize>,
    arrivals: Option<Vec<f64>>,
    concurrency: usize,
    ramp_s: f64,
    stop_after_s: f64,
    method: &str,
    headers: Vec<(String, String)>,
    keep_alive: bool,
    timeout_s: f64,
    threads: usize,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value).map_err(|error| PyValueError::new_err(format!("{name}: {error}")))
    };
    let plan = Plan {
        target: Target::parse(url, method, &headers).map_err(PyValueError::new_err)?,
        bodies: bodies.iter().map(|body| body.as_bytes().to_vec()).collect(),
        chains,
        arrivals: match arrivals {
            Some(times) => Arrivals::At(times),
            None => Arrivals::Clients {
                count: concurrency,
                ramp_s,
                stop_after_s,
            },
        },
        keep_alive,
        timeout: seconds("timeout_s", timeout_s)?,
        threads,
    };
    plan.check().map_err(PyValueError::new_err)?;
    let shared = Arc::new(Shared::default());
    let (sender, mut receiver) = mpsc::channel();
    let for_thread = Arc::clone(&shared);
    let thread = thread::spawn(move || {
        // the receiver may be gone: then the result is dropped
        let _unwanted = sender.send(run(plan, &for_thread));
    });
    let result = wait(py, &mut receiver, &shared, progress.as_ref());
    if result.is_err() {
        shared.stop.store(true, Relaxed);
    }
    let joined = py.detach(|| thread.join());
    let outcome = result?;
    joined.map_err(|_| PyRuntimeError::new_err("the load generator panicked"))?;
    to_python(py, &outcome)
}

fn wait(
    py: Python<'_>,
    receiver: &mut mpsc::Receiver<Result<Outcome, String>>,
    shared: &Shared,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Outcome> {
    loop {
        // a shared reference to a receiver must not cross threads, an exclusive one may
        let receiver = &mut *receiver;
        let received = py.detach(move || receiver.recv_timeout(LOOK));
        if let Some(call) = progress {
            let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
            call.call1((
                count(&shared.finished),
                count(&shared.failed),
                count(&shared.in_flight),
                count(&shared.tokens),
            ))?;
        }
        match received {
            Ok(outcome) => return outcome.map_err(PyRuntimeError::new_err),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the load generator panicked"));
            }
        }
    }
}

fn to_python<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let records = &outcome.records;
    let result = PyDict::new(py);
    let columns: [Column<f64>; 7] = [
        ("scheduled", |record| record.scheduled),
        ("connected", |record| record.connected.unwrap_or(f64::NAN)),
        ("sent", |record| record.sent.unwrap_or(f64::NAN)),
        ("headers", |record| record.headers.unwrap_or(f64::NAN)),
        ("first", |record| record.first.unwrap_or(f64::NAN)),
        ("last", |record| record.last.unwrap_or(f64::NAN)),
        ("end", |record| record.end.unwrap_or(f64::NAN)),
    ];
    for (name, field) in columns {
        let values = records.iter().map(|record| field(record).to_ne_bytes());
        result.set_item(name, array(py, "float64", values.flatten().collect())?)?;
    }
    let counts: [Column<i64>; 9] = [
        ("index", |record| int64(record.index)),
        ("events", |record| i64::from(record.events)),
        ("text_events", |record| i64::from(record.text_events)),
        ("prompt_tokens", |record| record.usage.prompt.unwrap_or(-1)),
        ("completion_tokens", |record| record.usage.completion.unwrap_or(-1)),
        ("cached_tokens", |record| record.usage.cached.unwrap_or(-1)),
        ("status", |record| record.status.map_or(0, i64::from)),
        ("failure", |record| record.failure.map_or(0, number)),
        ("bytes", |record| int64(record.bytes)),
    ];
    for (name, field) in counts {
        let values = records.iter().map(|record| field(record).to_ne_bytes());
        result.set_item(name, array(py, "int64", values.flatten().collect())?)?;
    }
    let gaps = records.iter().flat_map(|record| &record.gaps);
    result.set_item(
        "gaps",
        array(py, "float32", gaps.flat_map(|gap| gap.to_ne_bytes()).collect())?,
    )?;
    let num_gaps = records.iter().map(|record| int64(record.gaps.len()).to_ne_bytes());
    result.set_item("num_gaps", array(py, "int64", num_gaps.flatten().collect())?)?;
    result.set_item("errors", PyList::new(py, records.iter().map(|record| &record.error))?)?;
    result.set_item("failures", FAILURES.to_vec())?;
    result.set_item("started", outcome.started)?;
    result.set_item("duration_s", outcome.duration_s)?;
    result.set_item("cpu_s", outcome.cpu_s)?;
    Ok(result)
}

fn int64(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// Returns the index in `FAILURES`.
const fn number(failure: Failure) -> i64 {
    failure as i64
}

/// Returns a one-dimensional, read-only numpy array.
fn array<'py>(py: Python<'py>, dtype: &str, bytes: Vec<u8>) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import("numpy")?;
    numpy.call_method1("frombuffer", (PyBytes::new(py, &bytes), dtype))
}
