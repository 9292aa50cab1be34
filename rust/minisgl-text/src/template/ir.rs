//! A template as it is run: names are places, literals are values.

use std::sync::Arc;

pub(super) use minijinja::machinery::ast::{BinOpKind as Math, CompareOpKind as Comparison};
use serde::Deserialize;
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error, StrDeserializer};

/// A constant.
#[derive(Clone)]
pub(super) enum Const {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
}

/// Where a variable is: in the frame of the template, or of the macro that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) is_root: bool,
    pub(super) at: usize,
}

pub(super) enum Expr {
    Const(Const),
    Var(Slot),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Math(Math, Box<Expr>, Box<Expr>),
    Concat(Box<Expr>, Box<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    If {
        test: Box<Expr>,
        yes: Box<Expr>,
        no: Option<Box<Expr>>,
    },
    Filter(Filter, Box<Expr>, Args),
    Test(Test, Box<Expr>, Args),
    Call(Box<Expr>, Args),
}

#[derive(Default)]
pub(super) struct Args {
    pub(super) by_place: Vec<Expr>,
    pub(super) by_name: Vec<(Arc<str>, Expr)>,
}

/// The names are jinja's.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Filter {
    Capitalize,
    #[serde(alias = "d")]
    Default,
    DictSort,
    First,
    Float,
    Indent,
    Int,
    Items,
    Join,
    Last,
    #[serde(alias = "count")]
    Length,
    List,
    Lower,
    Map,
    Reject,
    RejectAttr,
    Replace,
    Reverse,
    Safe,
    Select,
    SelectAttr,
    String,
    ToJson,
    Trim,
    Upper,
}

impl Filter {
    pub(super) fn of(name: &str) -> Option<Self> {
        by_name(name)
    }
}

fn by_name<'de, T: Deserialize<'de>>(name: &'de str) -> Option<T> {
    let name: StrDeserializer<'_, Error> = name.into_deserializer();
    T::deserialize(name).ok()
}

/// The names are jinja's.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Test {
    Boolean,
    #[serde(skip)]
    Compare(Comparison),
    Defined,
    DivisibleBy,
    Even,
    False,
    Float,
    Integer,
    Iterable,
    Mapping,
    None,
    Number,
    Odd,
    Sequence,
    String,
    True,
    Undefined,
}

impl Test {
    pub(super) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "eq" | "equalto" | "==" => Self::Compare(Comparison::Eq),
            "ne" | "!=" => Self::Compare(Comparison::Ne),
            "lt" | "lessthan" | "<" => Self::Compare(Comparison::Lt),
            "le" | "<=" => Self::Compare(Comparison::Lte),
            "gt" | "greaterthan" | ">" => Self::Compare(Comparison::Gt),
            "ge" | ">=" => Self::Compare(Comparison::Gte),
            "in" => Self::Compare(Comparison::In),
            _ => return by_name(name),
        })
    }
}

pub(super) enum Stmt {
    Text(Box<str>),
    Emit(Expr),
    If(Expr, Vec<Stmt>, Vec<Stmt>),
    For(Box<For>),
    Set(Target, Expr),
    SetBlock(Target, Scope),
    /// Names and values, these of the frame around.
    With(Vec<(Target, Expr)>, Scope),
    /// By its place among the template's macros.
    Macro(Slot, usize),
    Continue,
    Break,
}

pub(super) enum Target {
    Var(Slot),
    Tuple(Vec<Target>),
    /// A namespace's attribute.
    Attr(Slot, Arc<str>),
}

pub(super) struct For {
    pub(super) iter: Expr,
    /// In a frame of its own.
    pub(super) filter: Option<LoopFilter>,
    pub(super) target: Target,
    pub(super) this: Slot,
    pub(super) body: Scope,
    pub(super) other: Scope,
}

/// The condition of a loop: a frame of its own.
pub(super) struct LoopFilter {
    pub(super) target: Target,
    pub(super) loads: Loads,
    pub(super) test: Expr,
}

pub(super) type Loads = Vec<(Slot, Load)>;

/// Statements with a frame of their own.
#[derive(Default)]
pub(super) struct Scope {
    pub(super) loads: Loads,
    pub(super) body: Vec<Stmt>,
}

/// What a variable is at the beginning of its frame.
#[derive(Clone, Debug)]
pub(super) enum Load {
    Undefined,
    /// What the caller gave by this name.
    Resolve(Arc<str>),
    /// What the same name is in the frame around.
    Alias(Slot),
}

pub(super) struct Macro {
    pub(super) args: Vec<(Arc<str>, Slot)>,
    /// The defaults of the last parameters.
    pub(super) defaults: Vec<Expr>,
    pub(super) body: Scope,
    pub(super) num_slots: usize,
}

#[derive(Default)]
pub(super) struct Program {
    pub(super) root: Scope,
    pub(super) macros: Vec<Macro>,
    pub(super) num_slots: usize,
}
