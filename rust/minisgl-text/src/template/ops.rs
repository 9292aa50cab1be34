//! Python's operators.
//!
//! Invariants: what Python raises, and what could be another number here, is refused.

use std::cmp::Ordering;
use std::rc::Rc;

use super::ir::{Comparison, Math};
use super::value::{Result, SeqKind, Value, refuse};

/// No text or list that an operator makes is longer.
pub(super) const MAX_LEN: usize = 16 << 20;
/// Integers up to here are floats without a loss.
const MAX_EXACT: i128 = 1 << 53;

pub(super) fn checked_len(len: usize) -> Result<()> {
    if len > MAX_LEN {
        refuse("a very long text")
    } else {
        Ok(())
    }
}

pub(super) fn math(op: Math, left: &Value, right: &Value) -> Result<Value> {
    match (op, left, right) {
        (Math::Div, Value::Int(left), Value::Int(right)) => divide(exact(*left)?, exact(*right)?),
        (_, Value::Int(left), Value::Int(right)) => of_ints(op, *left, *right),
        (_, Value::Float(left), Value::Float(right)) => of_floats(op, *left, *right),
        (_, Value::Int(left), Value::Float(right)) => of_floats(op, exact(*left)?, *right),
        (_, Value::Float(left), Value::Int(right)) => of_floats(op, *left, exact(*right)?),
        (Math::Add, Value::Str(left), Value::Str(right)) => {
            checked_len(left.len() + right.len())?;
            Ok(Value::Str([&**left, &**right].concat().into()))
        }
        (Math::Add, Value::Seq(left_kind, left), Value::Seq(right_kind, right))
            if left_kind == right_kind && matches!(left_kind, SeqKind::List | SeqKind::Tuple) =>
        {
            checked_len((left.len() + right.len()) * size_of::<Value>())?;
            Ok(Value::Seq(
                *left_kind,
                Rc::new(left.iter().chain(right.iter()).cloned().collect()),
            ))
        }
        (Math::Mul, Value::Str(text), Value::Int(times)) | (Math::Mul, Value::Int(times), Value::Str(text)) => {
            let times = usize::try_from((*times).max(0)).unwrap_or(usize::MAX);
            checked_len(text.len().saturating_mul(times))?;
            Ok(Value::Str(text.repeat(times).into()))
        }
        _ => refuse(format!("{} and {} are computed with", left.kind(), right.kind())),
    }
}

fn of_ints(op: Math, left: i128, right: i128) -> Result<Value> {
    let found = match op {
        Math::Add => left.checked_add(right),
        Math::Sub => left.checked_sub(right),
        Math::Mul => left.checked_mul(right),
        Math::FloorDiv => floor_div(left, right),
        Math::Rem => floor_div(left, right).and_then(|times| left.checked_sub(times.checked_mul(right)?)),
        _ => None,
    };
    match found {
        Some(found) => Ok(Value::Int(found)),
        None => refuse("an integer without an end, or a division by zero"),
    }
}

fn floor_div(left: i128, right: i128) -> Option<i128> {
    let found = left.checked_div(right)?;
    let is_below = left % right != 0 && (left < 0) != (right < 0);
    Some(if is_below { found - 1 } else { found })
}

fn of_floats(op: Math, left: f64, right: f64) -> Result<Value> {
    match op {
        Math::Add => Ok(Value::Float(left + right)),
        Math::Sub => Ok(Value::Float(left - right)),
        Math::Mul => Ok(Value::Float(left * right)),
        Math::Div => divide(left, right),
        _ => refuse("a remainder of floats"),
    }
}

fn exact(value: i128) -> Result<f64> {
    if value.abs() > MAX_EXACT {
        refuse("a large integer as a float")
    } else {
        Ok(value as f64)
    }
}

fn divide(left: f64, right: f64) -> Result<Value> {
    if right == 0.0 {
        refuse("a division by zero")
    } else {
        Ok(Value::Float(left / right))
    }
}

pub(super) fn negative(value: &Value) -> Result<Value> {
    match value {
        Value::Int(value) => match value.checked_neg() {
            Some(value) => Ok(Value::Int(value)),
            None => refuse("an integer without an end"),
        },
        Value::Float(value) => Ok(Value::Float(-value)),
        other => refuse(format!("the negative of {}", other.kind())),
    }
}

pub(super) fn compare(op: Comparison, left: &Value, right: &Value) -> Result<bool> {
    Ok(match op {
        Comparison::Eq => is_equal(left, right)?,
        Comparison::Ne => !is_equal(left, right)?,
        Comparison::Lt => order(left, right)? == Ordering::Less,
        Comparison::Lte => order(left, right)? != Ordering::Greater,
        Comparison::Gt => order(left, right)? == Ordering::Greater,
        Comparison::Gte => order(left, right)? != Ordering::Less,
        Comparison::In => contains(right, left)?,
        Comparison::NotIn => !contains(right, left)?,
    })
}

/// A bool is a number to Python.
fn as_number(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(value) => Some(Value::Int(i128::from(*value))),
        Value::Int(_) | Value::Float(_) => Some(value.clone()),
        _ => None,
    }
}

pub(super) fn is_equal(left: &Value, right: &Value) -> Result<bool> {
    if let (Some(left), Some(right)) = (as_number(left), as_number(right)) {
        return Ok(number_order(&left, &right)? == Ordering::Equal);
    }
    Ok(match (left, right) {
        (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
        (Value::Str(left), Value::Str(right)) => left == right,
        (Value::Seq(left_kind, left), Value::Seq(right_kind, right)) => match (left_kind, right_kind) {
            (SeqKind::List | SeqKind::Tuple, SeqKind::List | SeqKind::Tuple) => {
                left_kind == right_kind && left.len() == right.len() && all_equal(left.iter().zip(right.iter()))?
            }
            _ => return refuse("a view or a generator is compared"),
        },
        (Value::Dict(left), Value::Dict(right)) => {
            let same = |(key, value): (&_, &_)| right.get(key).map_or(Ok(false), |other| is_equal(value, other));
            let mut is_same = left.len() == right.len();
            for pair in left.iter() {
                is_same = is_same && same(pair)?;
            }
            is_same
        }
        (left, right) if is_plain(left) && is_plain(right) => false,
        (left, right) => return refuse(format!("{} is compared with {}", left.kind(), right.kind())),
    })
}

fn all_equal<'a>(mut pairs: impl Iterator<Item = (&'a Value, &'a Value)>) -> Result<bool> {
    pairs.try_fold(true, |is_same, (left, right)| Ok(is_same && is_equal(left, right)?))
}

/// Whether the value is of a kind that equals no other kind, and that hides nothing.
fn is_plain(value: &Value) -> bool {
    matches!(
        value,
        Value::Undefined
            | Value::None
            | Value::Bool(_)
            | Value::Int(_)
            | Value::Float(_)
            | Value::Str(_)
            | Value::Seq(SeqKind::List | SeqKind::Tuple, _)
            | Value::Dict(_)
    )
}

fn order(left: &Value, right: &Value) -> Result<Ordering> {
    match (left, right) {
        (Value::Str(left), Value::Str(right)) => Ok(left.cmp(right)),
        _ => match (as_number(left), as_number(right)) {
            (Some(left), Some(right)) => number_order(&left, &right),
            _ => refuse(format!("{} is compared with {}", left.kind(), right.kind())),
        },
    }
}

fn number_order(left: &Value, right: &Value) -> Result<Ordering> {
    let found = match (left, right) {
        (Value::Int(left), Value::Int(right)) => Some(left.cmp(right)),
        (Value::Float(left), Value::Float(right)) => left.partial_cmp(right),
        (Value::Int(left), Value::Float(right)) => exact(*left)?.partial_cmp(right),
        (Value::Float(left), Value::Int(right)) => left.partial_cmp(&exact(*right)?),
        _ => None,
    };
    found.map_or_else(|| refuse("numbers without an order"), Ok)
}

fn contains(container: &Value, item: &Value) -> Result<bool> {
    match (container, item) {
        (Value::Undefined, _) => Ok(false),
        (Value::Str(text), Value::Str(part)) => Ok(text.contains(&**part)),
        (Value::Dict(dict), Value::Str(key)) => Ok(dict.contains_key(key)),
        (Value::Dict(_), Value::Undefined | Value::None | Value::Bool(_) | Value::Int(_)) => Ok(false),
        (Value::Seq(SeqKind::List | SeqKind::Tuple | SeqKind::View, items), item) => {
            for other in items.iter() {
                if is_equal(other, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => refuse(format!("{} in {}", item.kind(), container.kind())),
    }
}

/// The places that a Python slice of `len` takes.
pub(super) fn slice_places(len: usize, bounds: [Option<i128>; 3]) -> Result<Vec<usize>> {
    let len = i128::try_from(len).unwrap_or(i128::MAX);
    let [start, stop, step] = bounds;
    let step = step.unwrap_or(1);
    if step == 0 || step.abs() > len.max(1) * 2 + 2 {
        return refuse("an unusual step");
    }
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let bound = |given: Option<i128>, default| match given {
        None => default,
        Some(at) if at < 0 => at.saturating_add(len).max(low),
        Some(at) => at.min(high),
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let (mut at, stop) = (bound(start, first), bound(stop, last));
    let mut found = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        found.extend(usize::try_from(at));
        at += step;
    }
    Ok(found)
}
