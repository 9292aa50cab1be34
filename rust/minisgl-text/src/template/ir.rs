//! A template as it is run: names are places, literals are values.

use std::sync::Arc;

/// A constant.
#[derive(Clone, Debug)]
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

#[derive(Debug)]
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

#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) by_place: Vec<Expr>,
    pub(super) by_name: Vec<(Arc<str>, Expr)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Math {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

/// The names are jinja's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    Capitalize,
    Default,
    DictSort,
    First,
    Float,
    Indent,
    Int,
    Items,
    Join,
    Last,
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
        Some(match name {
            "capitalize" => Self::Capitalize,
            "default" | "d" => Self::Default,
            "dictsort" => Self::DictSort,
            "first" => Self::First,
            "float" => Self::Float,
            "indent" => Self::Indent,
            "int" => Self::Int,
            "items" => Self::Items,
            "join" => Self::Join,
            "last" => Self::Last,
            "length" | "count" => Self::Length,
            "list" => Self::List,
            "lower" => Self::Lower,
            "map" => Self::Map,
            "reject" => Self::Reject,
            "rejectattr" => Self::RejectAttr,
            "replace" => Self::Replace,
            "reverse" => Self::Reverse,
            "safe" => Self::Safe,
            "select" => Self::Select,
            "selectattr" => Self::SelectAttr,
            "string" => Self::String,
            "tojson" => Self::ToJson,
            "trim" => Self::Trim,
            "upper" => Self::Upper,
            _ => return None,
        })
    }
}

/// The names are jinja's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    Boolean,
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
            "boolean" => Self::Boolean,
            "eq" | "equalto" | "==" => Self::Compare(Comparison::Eq),
            "ne" | "!=" => Self::Compare(Comparison::Ne),
            "lt" | "lessthan" | "<" => Self::Compare(Comparison::Lt),
            "le" | "<=" => Self::Compare(Comparison::Le),
            "gt" | "greaterthan" | ">" => Self::Compare(Comparison::Gt),
            "ge" | ">=" => Self::Compare(Comparison::Ge),
            "in" => Self::Compare(Comparison::In),
            "defined" => Self::Defined,
            "divisibleby" => Self::DivisibleBy,
            "even" => Self::Even,
            "false" => Self::False,
            "float" => Self::Float,
            "integer" => Self::Integer,
            "iterable" => Self::Iterable,
            "mapping" => Self::Mapping,
            "none" => Self::None,
            "number" => Self::Number,
            "odd" => Self::Odd,
            "sequence" => Self::Sequence,
            "string" => Self::String,
            "true" => Self::True,
            "undefined" => Self::Undefined,
            _ => return None,
        })
    }
}

#[derive(Debug)]
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

#[derive(Debug)]
pub(super) enum Target {
    Var(Slot),
    Tuple(Vec<Target>),
    /// A namespace's attribute.
    Attr(Slot, Arc<str>),
}

#[derive(Debug)]
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
#[derive(Debug)]
pub(super) struct LoopFilter {
    pub(super) target: Target,
    pub(super) loads: Loads,
    pub(super) test: Expr,
}

pub(super) type Loads = Vec<(Slot, Load)>;

/// Statements with a frame of their own.
#[derive(Debug, Default)]
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

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) args: Vec<(Arc<str>, Slot)>,
    /// The defaults of the last parameters.
    pub(super) defaults: Vec<Expr>,
    pub(super) body: Scope,
    pub(super) num_slots: usize,
}

#[derive(Debug, Default)]
pub(super) struct Program {
    pub(super) root: Scope,
    pub(super) macros: Vec<Macro>,
    pub(super) num_slots: usize,
}
