//! What a template may call by name.
//!
//! Invariants: jinja's other globals are known to be there, and refused.

use std::cell::RefCell;
use std::rc::Rc;

use chrono::{DateTime, Local};

use super::call::Given;
use super::print::to_str;
use super::value::{Function, Result, SeqKind, Value, refuse};

/// Jinja's sandbox allows no more.
const MAX_RANGE: i128 = 100_000;
/// What of a date has no locale, as C and chrono write it alike: numbers, which may go without zeros before them, and
/// words.
const NUMBERS: &str = "dmHIMSjy";
const WORDS: &str = "YAaBbp%";

pub(super) fn named(name: &str) -> Option<Value> {
    Some(Value::Function(match name {
        "namespace" => Function::Namespace,
        "range" => Function::Range,
        "dict" => Function::Dict,
        "raise_exception" => Function::RaiseException,
        "strftime_now" => Function::StrftimeNow,
        "lipsum" | "cycler" | "joiner" => Function::Other,
        _ => return None,
    }))
}

pub(super) fn call(function: Function, mut given: Given) -> Result<Value> {
    match function {
        Function::Namespace | Function::Dict if !given.by_place.is_empty() => refuse("a dict of a dict"),
        Function::Namespace => Ok(Value::Namespace(Rc::new(RefCell::new(
            given.by_name.into_iter().collect(),
        )))),
        Function::Dict => Ok(Value::Dict(Rc::new(given.by_name.into_iter().collect()))),
        Function::Range => range(&mut given),
        Function::RaiseException => {
            let why = given.next().map_or_else(|| Ok(String::new()), |value| to_str(&value))?;
            refuse(format!("it refuses the messages: {why}"))
        }
        Function::StrftimeNow => {
            let pattern = given.text()?;
            given.end()?;
            Ok(Value::Str(strftime(&Local::now(), &pattern)?.into()))
        }
        Function::Other => refuse("one of jinja's rarer functions"),
    }
}

fn range(given: &mut Given) -> Result<Value> {
    let mut bounds = Vec::new();
    while let Some(bound) = given.next() {
        let Value::Int(bound) = bound else {
            return refuse("a range of what is no integer");
        };
        bounds.push(bound);
    }
    given.end()?;
    let (start, stop, step) = match bounds.as_slice() {
        [stop] => (0, *stop, 1),
        [start, stop] => (*start, *stop, 1),
        [start, stop, step] => (*start, *stop, *step),
        _ => return refuse("a range of nothing"),
    };
    let span = if step > 0 {
        stop.checked_sub(start)
    } else {
        start.checked_sub(stop)
    };
    match span {
        Some(span) if step != 0 && span / step.abs() < MAX_RANGE => {}
        _ => return refuse("a long range"),
    }
    let mut items = Vec::new();
    let mut at = start;
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        items.push(Value::Int(at));
        at += step;
    }
    Ok(Value::Seq(SeqKind::View, Rc::new(items)))
}

/// As C's `strftime` in its own locale.
fn strftime(now: &DateTime<Local>, pattern: &str) -> Result<String> {
    let mut chars = pattern.chars();
    while let Some(char) = chars.next() {
        let is_known = match (char, chars.clone().next()) {
            ('%', Some('-')) => chars.by_ref().nth(1).is_some_and(|kind| NUMBERS.contains(kind)),
            ('%', _) => chars
                .next()
                .is_some_and(|kind| NUMBERS.contains(kind) || WORDS.contains(kind)),
            _ => true,
        };
        if !is_known {
            return refuse(format!("the date {pattern}"));
        }
    }
    Ok(now.format(pattern).to_string())
}
