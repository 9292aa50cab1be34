//! What a template may call by name.
//!
//! Invariants: jinja's other globals are known to be there, and refused.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::rc::Rc;

use chrono::{DateTime, Datelike as _, Local, Timelike as _};

use super::call::Given;
use super::print::to_str;
use super::value::{Function, Result, SeqKind, Value, refuse};

/// Jinja's sandbox allows no more.
const MAX_RANGE: i128 = 100_000;
const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

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
    let mut out = String::new();
    let mut chars = pattern.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        let mut kind = chars.next();
        let is_bare = kind == Some('-');
        if is_bare {
            kind = chars.next();
        }
        let day = DAYS[usize::try_from(now.weekday().num_days_from_monday()).unwrap_or(0)];
        let month = MONTHS[usize::try_from(now.month0()).unwrap_or(0)];
        let (number, width) = match kind {
            Some('d') => (now.day(), 2),
            Some('m') => (now.month(), 2),
            Some('H') => (now.hour(), 2),
            Some('I') => (now.hour12().1, 2),
            Some('M') => (now.minute(), 2),
            Some('S') => (now.second(), 2),
            Some('j') => (now.ordinal(), 3),
            Some('y') => (u32::try_from(now.year().rem_euclid(100)).unwrap_or(0), 2),
            Some('Y') if !is_bare => (u32::try_from(now.year()).unwrap_or(0), 4),
            Some(kind @ ('A' | 'a' | 'B' | 'b' | 'p' | '%')) if !is_bare => {
                out.push_str(match kind {
                    'A' => day,
                    'a' => &day[..3],
                    'B' => month,
                    'b' => &month[..3],
                    'p' => ["AM", "PM"][usize::from(now.hour12().0)],
                    _ => "%",
                });
                continue;
            }
            _ => return refuse(format!("the date {pattern}")),
        };
        let width = if is_bare { 0 } else { width };
        let _ = write!(out, "{number:0width$}"); // a String takes everything
    }
    Ok(out)
}
