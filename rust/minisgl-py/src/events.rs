//! Conversion of the event objects of `minisgl.step` to the core's events.

use minisgl_core::{
    Arrival, CheckedEvents, Draft, Error, Event, PagesRead, RESERVED_OUTPUT, Scheduler, TokenBudget, invalid_token_ids,
};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::buffers::View;
use crate::errors::to_python;

/// Converts and validates the events in order. Raises `EventError` at the first malformed one.
pub(crate) fn read(events: &Bound<'_, PyList>, scheduler: &Scheduler) -> PyResult<CheckedEvents> {
    let mut checked = CheckedEvents::default();
    for (index, one) in events.iter().enumerate() {
        scheduler
            .check_event(convert(index, &one)?, &mut checked)
            .map_err(|error| to_python(events.py(), &error))?;
    }
    Ok(checked)
}

/// Converts an event by its class name, one of `minisgl.step`.
fn convert(index: usize, event: &Bound<'_, PyAny>) -> PyResult<Event> {
    let py = event.py();
    let number = |name| integer(&event.getattr(name)?);
    let req_id = || number(intern!(py, "req_id"));
    let kind = event.get_type();
    Ok(match kind.name()?.to_str()? {
        "Arrival" => Event::Arrival(convert_arrival(index, event)?),
        "Finish" => Event::Finish(req_id()?),
        "Abort" => Event::Abort(req_id()?),
        "ForwardFailed" => Event::ForwardFailed(number(intern!(py, "step"))?),
        "Unpin" => Event::Unpin(req_id()?),
        "ClearCache" => Event::ClearCache,
        "TokenBudget" => Event::TokenBudget(TokenBudget {
            beside_decode: number(intern!(py, "beside_decode"))?,
            prefill_only: number(intern!(py, "prefill_only"))?,
            background: number(intern!(py, "background"))?,
        }),
        "PagesRead" => Event::PagesRead(PagesRead {
            req_id: req_id()?,
            stored_from: number(intern!(py, "stored_from"))?,
            stored_to: number(intern!(py, "stored_to"))?,
        }),
        "Draft" => Event::Draft(Draft {
            req_id: req_id()?,
            length: number(intern!(py, "length"))?,
            tokens: event
                .getattr(intern!(py, "tokens"))?
                .extract()
                .map_err(|_| to_python(py, &invalid_token_ids(index)))?,
        }),
        _ => return Err(PyTypeError::new_err(format!("event {index}: {kind} is no event"))),
    })
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
    macro_rules! arrival {
        ({ $($own:ident: $value:expr,)* } numbers: $($number:ident)*; flags: $($flag:ident)*;) => {
            Arrival {
                $($own: $value,)*
                $($number: number(intern!(py, stringify!($number)))?,)*
                $($flag: flag(intern!(py, stringify!($flag)))?,)*
            }
        };
    }
    Ok(arrival! {
        {
            req_id: req_id.extract().map_err(|_| refuse("req_id", "must be a signed 64-bit integer"))?,
            tokens: sequence,
            max_tokens: max_tokens,
            stop_ids: stop_ids(&get(intern!(py, "stop_ids"))?)?,
        }
        numbers: num_prompt num_generated min_tokens priority namespace stored_from stored_to;
        flags: ignore_eos no_overlap no_match background pin no_drafts;
    })
}

fn is_int32(array: &Bound<'_, PyAny>) -> bool {
    let name = array.getattr("dtype").and_then(|dtype| dtype.getattr("name"));
    name.is_ok_and(|name| name.eq("int32").unwrap_or(false))
}

/// Converts a Python integer, clamped to 64 bits.
fn integer(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    match value.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Ok(if value.gt(0)? { i64::MAX } else { i64::MIN + 1 })
        }
        other => other,
    }
}

/// Converts stop ids. Drops those outside of int32, which no token can have.
fn stop_ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    let mut ids = Vec::new();
    for id in value.try_iter()? {
        if let Ok(id) = i32::try_from(integer(&id?)?) {
            ids.push(id);
        }
    }
    Ok(ids)
}
