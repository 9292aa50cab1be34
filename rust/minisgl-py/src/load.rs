//! `minisgl._rust.run_load`: the load generator, run beside Python.
//!
//! Keeps true: the generator's threads never touch Python; the calling thread gives the GIL up while it waits, and looks
//! for signals ten times a second.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use minisgl_loadgen::{Arrivals, FAILURES, Outcome, Plan, PlanError, Record, Shared, Target, run};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// A column of the result: its name, and where its values are.
type Column<T> = (&'static str, fn(&Record) -> T);

const LOOK: Duration = Duration::from_millis(100);

/// See `_rust.pyi`.
#[pyfunction]
#[pyo3(signature = (
    url, bodies, *, chains, arrivals=None, concurrency=0, ramp_s=0.0, stop_after_s=f64::INFINITY, method="POST",
    headers=Vec::new(), keep_alive=true, connect_timeout_s=10.0, timeout_s=600.0, threads=1, progress=None
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
    connect_timeout_s: f64,
    timeout_s: f64,
    threads: usize,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value)
            .map_err(|error| PyValueError::new_err(format!("{name}: {error}")))
    };
    let plan = Plan {
        target: Target::parse(url, method, &headers).map_err(value_error)?,
        bodies: bodies
            .iter()
            .map(|body| body.as_bytes().to_vec().into())
            .collect(),
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
        connect_timeout: seconds("connect_timeout_s", connect_timeout_s)?,
        timeout: seconds("timeout_s", timeout_s)?,
        threads,
    };
    plan.check().map_err(value_error)?;
    let shared = Arc::new(Shared::default());
    let (sender, mut receiver) = mpsc::channel();
    let for_thread = Arc::clone(&shared);
    let thread = thread::spawn(move || {
        // nobody may wait any more: then the result is not wanted
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
    receiver: &mut mpsc::Receiver<Result<Outcome, PlanError>>,
    shared: &Shared,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Outcome> {
    loop {
        // a shared reference to a receiver must not cross threads, an exclusive one may
        let receiver = &mut *receiver;
        let got = py.detach(move || receiver.recv_timeout(LOOK));
        if let Some(call) = progress {
            let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
            call.call1((
                count(&shared.finished),
                count(&shared.failed),
                count(&shared.in_flight),
                count(&shared.tokens),
            ))?;
        }
        match got {
            Ok(outcome) => return outcome.map_err(|PlanError(text)| PyRuntimeError::new_err(text)),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the load generator panicked"));
            }
        }
    }
}

fn value_error(PlanError(text): PlanError) -> PyErr {
    PyValueError::new_err(text)
}

fn to_python<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let records = &outcome.records;
    let result = PyDict::new(py);
    let columns: [Column<f64>; 7] = [
        ("scheduled", |record| record.scheduled),
        ("connected", |record| record.connected),
        ("sent", |record| record.sent),
        ("headers", |record| record.headers),
        ("first", |record| record.first),
        ("last", |record| record.last),
        ("end", |record| record.end),
    ];
    for (name, field) in columns {
        let values = records.iter().map(|record| field(record).to_ne_bytes());
        result.set_item(name, array(py, "float64", values.flatten().collect())?)?;
    }
    let counts: [Column<i64>; 9] = [
        ("index", |record| record.index as i64),
        ("events", |record| i64::from(record.events)),
        ("text_events", |record| i64::from(record.text_events)),
        ("prompt_tokens", |record| record.usage.prompt),
        ("completion_tokens", |record| record.usage.completion),
        ("cached_tokens", |record| record.usage.cached),
        ("status", |record| i64::from(record.status)),
        ("failure", |record| record.failure as i64),
        ("bytes", |record| record.bytes as i64),
    ];
    for (name, field) in counts {
        let values = records.iter().map(|record| field(record).to_ne_bytes());
        result.set_item(name, array(py, "int64", values.flatten().collect())?)?;
    }
    let gaps = records.iter().flat_map(|record| &record.gaps);
    result.set_item(
        "gaps",
        array(
            py,
            "float32",
            gaps.flat_map(|gap| gap.to_ne_bytes()).collect(),
        )?,
    )?;
    let num_gaps = records
        .iter()
        .map(|record| (record.gaps.len() as i64).to_ne_bytes());
    result.set_item(
        "num_gaps",
        array(py, "int64", num_gaps.flatten().collect())?,
    )?;
    result.set_item(
        "errors",
        PyList::new(py, records.iter().map(|record| &record.error))?,
    )?;
    result.set_item("failures", FAILURES.to_vec())?;
    result.set_item("started", outcome.started)?;
    result.set_item("duration_s", outcome.duration_s)?;
    result.set_item("cpu_s", outcome.cpu_s)?;
    Ok(result)
}

/// A numpy array of one dimension, read-only.
fn array<'py>(py: Python<'py>, dtype: &str, bytes: Vec<u8>) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import("numpy")?;
    numpy.call_method1("frombuffer", (PyBytes::new(py, &bytes), dtype))
}
