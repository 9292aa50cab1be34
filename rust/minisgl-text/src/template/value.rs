//! What expressions of a template are worth: Python's values as far as templates meet them.
//!
//! Invariants: a value that Python would tell apart from another is another kind here (a list, a tuple, a generator).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use indexmap::IndexMap;

/// JSON is read to 128 levels.
const MAX_DEPTH: usize = 200;
const MAX_WEIGHT: usize = 1 << 20;

/// Why a template or a rendering of it is left to Python.
#[derive(Debug)]
pub(super) struct Refused(pub(super) String);

pub(super) type Result<T> = std::result::Result<T, Refused>;

pub(super) fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(Refused(why.into()))
}

pub(super) type Dict = IndexMap<Arc<str>, Value>;

#[derive(Clone)]
pub(super) enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Seq(SeqKind, Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    Namespace(Rc<RefCell<Dict>>),
    Loop(Rc<Loop>),
    /// By its place among the template's macros.
    Macro(usize),
    /// A method of a string or a dict.
    Method(Rc<(Value, Arc<str>)>),
    Function(Function),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeqKind {
    List,
    Tuple,
    /// A range, or a view of a dict: has a length, cannot be indexed or shown here.
    View,
    /// Can be gone through once, and has no length.
    Generator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Namespace,
    Range,
    Dict,
    RaiseException,
    StrftimeNow,
    /// Jinja has it, this does not.
    Other,
}

/// `loop` of one iteration.
pub(super) struct Loop {
    pub(super) items: Rc<Vec<Value>>,
    pub(super) index0: usize,
}

impl Value {
    pub(super) fn str(text: &str) -> Self {
        Self::Str(text.into())
    }

    pub(super) fn list(items: Vec<Self>) -> Self {
        Self::Seq(SeqKind::List, Rc::new(items))
    }

    pub(super) fn tuple(items: Vec<Self>) -> Self {
        Self::Seq(SeqKind::Tuple, Rc::new(items))
    }

    pub(super) fn generator(items: Vec<Self>) -> Self {
        Self::Seq(SeqKind::Generator, Rc::new(items))
    }

    pub(super) fn size(count: usize) -> Self {
        Self::Int(i128::try_from(count).unwrap_or(i128::MAX))
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined)
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined => "undefined",
            Self::None => "none",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Seq(SeqKind::List, _) => "list",
            Self::Seq(SeqKind::Tuple, _) => "tuple",
            Self::Seq(SeqKind::View, _) => "view",
            Self::Seq(SeqKind::Generator, _) => "generator",
            Self::Dict(_) => "dict",
            Self::Namespace(_) => "namespace",
            Self::Loop(_) => "loop",
            Self::Macro(_) => "macro",
            Self::Method(_) => "method",
            Self::Function(_) => "function",
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text) => !text.is_empty(),
            Self::Seq(SeqKind::Generator, _) => true,
            Self::Seq(_, items) => !items.is_empty(),
            Self::Dict(dict) => !dict.is_empty(),
            _ => true,
        }
    }

    /// A value that may be named: a generator that is gone through twice is empty the second time.
    pub(super) fn nameable(self) -> Result<Self> {
        match self {
            Self::Seq(SeqKind::Generator, _) => refuse("a generator is kept"),
            value => Ok(value),
        }
    }

    /// How many values it is made of, itself included. Values share their parts: a few rounds of `[x, x]` make one that
    /// no machine could print. Very many, or very deep, are refused.
    pub(super) fn weight(&self) -> Result<usize> {
        let mut count = 0;
        self.weigh(0, &mut count)?;
        Ok(count)
    }

    fn weigh(&self, depth: usize, count: &mut usize) -> Result<()> {
        *count += 1;
        if depth > MAX_DEPTH || *count > MAX_WEIGHT {
            return refuse("a value of very many parts");
        }
        match self {
            Self::Seq(_, items) => items.iter().try_for_each(|item| item.weigh(depth + 1, count)),
            Self::Dict(dict) => dict.values().try_for_each(|item| item.weigh(depth + 1, count)),
            _ => Ok(()),
        }
    }

    /// What a loop over it goes through.
    pub(super) fn items(&self) -> Result<Rc<Vec<Self>>> {
        match self {
            Self::Undefined => Ok(Rc::default()),
            Self::Seq(_, items) => Ok(Rc::clone(items)),
            Self::Str(text) if text.len() > MAX_WEIGHT => refuse("the characters of a very long text"),
            Self::Str(text) => Ok(Rc::new(
                text.chars()
                    .map(|char| Self::str(char.encode_utf8(&mut [0; 4])))
                    .collect(),
            )),
            Self::Dict(dict) => Ok(Rc::new(dict.keys().cloned().map(Self::Str).collect())),
            other => refuse(format!("{} is not iterable", other.kind())),
        }
    }

    pub(super) fn len(&self) -> Result<usize> {
        match self {
            Self::Undefined => Ok(0),
            Self::Str(text) => Ok(text.chars().count()),
            Self::Seq(SeqKind::Generator, _) => refuse("a generator has no length"),
            Self::Seq(_, items) => Ok(items.len()),
            Self::Dict(dict) => Ok(dict.len()),
            other => refuse(format!("{} has no length", other.kind())),
        }
    }

    /// The value is what JSON means. A number that JSON does not tell to be a float or an integer beyond 64 bits is refused.
    pub(super) fn of_json(json: &serde_json::Value) -> Result<Self> {
        Ok(match json {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(value) => Self::Bool(*value),
            serde_json::Value::String(text) => Self::str(text),
            serde_json::Value::Number(number) => return of_number(number),
            serde_json::Value::Array(items) => Self::list(items.iter().map(Self::of_json).collect::<Result<_>>()?),
            serde_json::Value::Object(dict) => Self::Dict(Rc::new(
                dict.iter()
                    .map(|(key, value)| Ok((key.as_str().into(), Self::of_json(value)?)))
                    .collect::<Result<_>>()?,
            )),
        })
    }
}

fn of_number(number: &serde_json::Number) -> Result<Value> {
    if let Some(int) = number.as_i128() {
        return Ok(Value::Int(int));
    }
    match number.as_f64() {
        Some(float) if float == 0.0 && float.is_sign_negative() => refuse("a number that may be -0 or -0.0"),
        Some(float) if float.fract() == 0.0 && float.abs() >= 9e18 => refuse("a number that may be a large integer"),
        Some(float) if float.is_finite() => Ok(Value::Float(float)),
        _ => refuse("a number that is none"),
    }
}
