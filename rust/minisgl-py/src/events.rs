//! From the event objects of `minisgl.step` to those of the core.

use minisgl_core::{
    Arrival, CheckedEvents, Draft, Error, Event, PagesRead, RESERVED_OUTPUT, Scheduler, TokenBudget, not_ids,
};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};

use crate::buffers::View;
use crate::errors::to_python;

/// The classes of `minisgl.step`.
pub(crate) struct EventTypes {
    arrival: Py<PyType>,
    finish: Py<PyType>,
    abort: Py<PyType>,
    forward_failed: Py<PyType>,
    unpin: Py<PyType>,
    clear_cache: Py<PyType>,
    token_budget: Py<PyType>,
    pages_read: Py<PyType>,
    draft: Py<PyType>,
}

impl EventTypes {
    pub fn import(py: Python<'_>) -> PyResult<Self> {
        let module = py.import("minisgl.step")?;
        let class = |name: &str| -> PyResult<Py<PyType>> { Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind()) };
        Ok(Self {
            arrival: class("Arrival")?,
            finish: class("Finish")?,
            abort: class("Abort")?,
            forward_failed: class("ForwardFailed")?,
            unpin: class("Unpin")?,
            clear_cache: class("ClearCache")?,
            token_budget: class("TokenBudget")?,
            pages_read: class("PagesRead")?,
            draft: class("Draft")?,
        })
    }

    /// Convert and check each event, in order. Raises `EventError` at the first that is malformed.
    pub fn read(&self, events: &Bound<'_, PyList>, scheduler: &Scheduler) -> PyResult<CheckedEvents> {
        let mut checked = CheckedEvents::default();
        for (index, one) in events.iter().enumerate() {
            scheduler
                .check_event(self.convert(index, &one)?, &mut checked)
                .map_err(|error| to_python(events.py(), &error))?;
        }
        Ok(checked)
    }

    fn convert(&self, index: usize, event: &Bound<'_, PyAny>) -> PyResult<Event> {
        let py = event.py();
        let kind = event.get_type();
        let req_id = || integer(&event.getattr(intern!(py, "req_id"))?);
        if kind.is(&self.arrival) {
            return Ok(Event::Arrival(convert_arrival(index, event)?));
        }
        if kind.is(&self.finish) {
            return Ok(Event::Finish(req_id()?));
        }
        if kind.is(&self.abort) {
            return Ok(Event::Abort(req_id()?));
        }
        if kind.is(&self.forward_failed) {
            return Ok(Event::ForwardFailed(integer(&event.getattr(intern!(py, "step"))?)?));
        }
        if kind.is(&self.unpin) {
            return Ok(Event::Unpin(req_id()?));
        }
        if kind.is(&self.clear_cache) {
            return Ok(Event::ClearCache);
        }
        if kind.is(&self.token_budget) {
            return Ok(Event::TokenBudget(TokenBudget {
                beside_decode: integer(&event.getattr(intern!(py, "beside_decode"))?)?,
                prefill_only: integer(&event.getattr(intern!(py, "prefill_only"))?)?,
                background: integer(&event.getattr(intern!(py, "background"))?)?,
            }));
        }
        if kind.is(&self.pages_read) {
            return Ok(Event::PagesRead(PagesRead {
                req_id: req_id()?,
                stored_from: integer(&event.getattr(intern!(py, "stored_from"))?)?,
                stored_to: integer(&event.getattr(intern!(py, "stored_to"))?)?,
            }));
        }
        if kind.is(&self.draft) {
            let tokens = event.getattr(intern!(py, "tokens"))?;
            return Ok(Event::Draft(Draft {
                req_id: req_id()?,
                length: integer(&event.getattr(intern!(py, "length"))?)?,
                tokens: tokens.extract().map_err(|_| to_python(py, &not_ids(index)))?,
            }));
        }
        Err(PyTypeError::new_err(format!("event {index}: {kind} is no event")))
    }
}

fn convert_arrival(index: usize, event: &Bound<'_, PyAny>) -> PyResult<Arrival> {
    let py = event.py();
    let get = |name| event.getattr(name);
    let number = |name| integer(&event.getattr(name)?);
    let flag = |name| event.getattr(name)?.is_truthy();
    let refuse = |field, reason: &str| {
        let reason = reason.to_string();
        to_python(py, &Error::Event { index, field, reason })
    };
    let tokens = get(intern!(py, "tokens"))?;
    let Some(view) = View::of(&tokens) else {
        let dimensions = tokens.getattr("ndim").and_then(|ndim| ndim.extract::<usize>());
        let reason = match dimensions {
            Ok(ndim) if ndim != 1 && is_int32(&tokens) => "must have one dimension",
            _ => "must be an int32 array",
        };
        return Err(refuse("tokens", reason));
    };
    let req_id = get(intern!(py, "req_id"))?;
    let max_tokens = number(intern!(py, "max_tokens"))?;
    let tokens = view.as_slice(py);
    let room = usize::try_from(max_tokens).unwrap_or(0).min(RESERVED_OUTPUT);
    let mut sequence = Vec::with_capacity(tokens.len() + room);
    sequence.extend_from_slice(tokens);
    Ok(Arrival {
        req_id: req_id
            .extract()
            .map_err(|_| refuse("req_id", "must be a signed 64-bit integer"))?,
        tokens: sequence,
        num_prompt: number(intern!(py, "num_prompt"))?,
        num_generated: number(intern!(py, "num_generated"))?,
        max_tokens,
        min_tokens: number(intern!(py, "min_tokens"))?,
        stop_ids: stop_ids(&get(intern!(py, "stop_ids"))?)?,
        ignore_eos: flag(intern!(py, "ignore_eos"))?,
        priority: number(intern!(py, "priority"))?,
        no_overlap: flag(intern!(py, "no_overlap"))?,
        no_match: flag(intern!(py, "no_match"))?,
        background: flag(intern!(py, "background"))?,
        pin: flag(intern!(py, "pin"))?,
        namespace: number(intern!(py, "namespace"))?,
        no_drafts: flag(intern!(py, "no_drafts"))?,
        stored_from: number(intern!(py, "stored_from"))?,
        stored_to: number(intern!(py, "stored_to"))?,
    })
}

fn is_int32(array: &Bound<'_, PyAny>) -> bool {
    let name = array.getattr("dtype").and_then(|dtype| dtype.getattr("name"));
    name.is_ok_and(|name| name.eq("int32").unwrap_or(false))
}

/// A Python integer; one beyond 64 bits is as good as the largest.
fn integer(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    match value.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Ok(if value.gt(0)? { i64::MAX } else { i64::MIN + 1 })
        }
        other => other,
    }
}

/// Ids that no token can have never stop anything.
fn stop_ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    let mut found = Vec::new();
    for id in value.try_iter()? {
        if let Ok(id) = i32::try_from(integer(&id?)?) {
            found.push(id);
        }
    }
    Ok(found)
}
