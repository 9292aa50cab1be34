//! What expressions are worth while a program runs.
//!
//! Invariants: an operand that Python does not evaluate is not evaluated; names and calls take no generator but where it
//! is gone through at once.

use std::rc::Rc;
use std::sync::Arc;

use super::call::Given;
use super::ir::{Args, Comparison, Const, Expr, Math};
use super::ops::{self, checked_len};
use super::print::push_str;
use super::run::{BYTES_PER_STEP, Run};
use super::value::{Dict, Result, SeqKind, Value, refuse};
use super::{attrs, filters, functions, methods};

impl Run<'_> {
    pub(super) fn eval(&mut self, expr: &Expr) -> Result<Value> {
        self.step()?;
        match expr {
            Expr::Const(one) => Ok(constant(one)),
            Expr::Var(slot) => Ok(self.get(*slot).unwrap_or(Value::Undefined)),
            _ => self.deeper(|run| run.eval_inner(expr)),
        }
    }

    fn eval_inner(&mut self, expr: &Expr) -> Result<Value> {
        Ok(match expr {
            Expr::Const(one) => constant(one),
            Expr::Var(slot) => self.get(*slot).unwrap_or(Value::Undefined),
            Expr::List(items) => Value::list(self.all(items)?),
            Expr::Tuple(items) => Value::tuple(self.all(items)?),
            Expr::Dict(entries) => self.dict(entries)?,
            Expr::Attr(..) | Expr::Item(..) | Expr::Slice(..) => self.access(expr)?,
            Expr::Not(inner) => Value::Bool(!self.eval(inner)?.is_true()),
            Expr::Neg(inner) => ops::negative(&self.eval(inner)?)?,
            Expr::And(left, right) => {
                let left = self.eval(left)?;
                if left.is_true() { self.eval(right)? } else { left }
            }
            Expr::Or(left, right) => {
                let left = self.eval(left)?;
                if left.is_true() { left } else { self.eval(right)? }
            }
            Expr::Math(Math::Add, ..) => self.sum(expr)?,
            Expr::Math(op, left, right) => {
                let left = self.eval(left)?;
                let found = ops::math(*op, &left, &self.eval(right)?)?;
                self.spend_on(&found)?;
                found
            }
            Expr::Concat(left, right) => {
                let mut text = String::new();
                push_str(&self.eval(left)?, &mut text)?;
                push_str(&self.eval(right)?, &mut text)?;
                checked_len(text.len())?;
                self.spend(text.len())?;
                Value::Str(text.into())
            }
            Expr::Compare(first, rest) => self.comparison(first, rest)?,
            Expr::If { test, yes, no } => match (self.eval(test)?.is_true(), no) {
                (true, _) => self.eval(yes)?,
                (false, Some(no)) => self.eval(no)?,
                (false, None) => Value::Undefined,
            },
            Expr::Filter(filter, inner, args) => {
                let value = self.eval(inner)?;
                self.spend_on(&value)?;
                let given = self.given(args)?;
                let found = filters::filter(*filter, &value, given)?;
                self.spend_on(&found)?;
                found
            }
            Expr::Test(test, inner, args) => {
                let value = self.eval(inner)?;
                Value::Bool(filters::test(*test, &value, self.given(args)?)?)
            }
            Expr::Call(inner, args) => {
                let function = self.eval(inner)?;
                self.call(&function, args)?
            }
        })
    }

    /// Texts that are added up are written once, not once for each.
    fn sum(&mut self, expr: &Expr) -> Result<Value> {
        let mut operands = Vec::new();
        let mut rest = expr;
        while let Expr::Math(Math::Add, left, right) = rest {
            operands.push(&**right);
            rest = &**left;
        }
        let mut found = self.eval(rest)?;
        let mut text: Option<String> = None;
        for operand in operands.into_iter().rev() {
            let value = self.eval(operand)?;
            match (&mut text, &found, &value) {
                (Some(text), _, Value::Str(more)) => text.push_str(more),
                (None, Value::Str(first), Value::Str(more)) => text = Some([&**first, &**more].concat()),
                (None, _, _) => found = ops::math(Math::Add, &found, &value)?,
                (Some(_), _, other) => return refuse(format!("a text and {} are added", other.kind())),
            }
            if let Some(text) = &text {
                checked_len(text.len())?;
            } else {
                self.spend_on(&found)?;
            }
        }
        if let Some(text) = text {
            self.spend(text.len())?;
            found = Value::Str(text.into());
        }
        Ok(found)
    }

    fn access(&mut self, expr: &Expr) -> Result<Value> {
        Ok(match expr {
            Expr::Attr(inner, name) => {
                let value = self.eval(inner)?;
                if self.in_filter && matches!(value, Value::Namespace(_) | Value::Loop(_)) {
                    return refuse("a loop's condition that asks what its rounds may change");
                }
                attrs::attr(&value, name)?
            }
            Expr::Item(inner, key) => {
                let value = self.eval(inner)?;
                let key = self.eval(key)?;
                self.check_item(&value)?;
                attrs::item(&value, &key)?
            }
            Expr::Slice(inner, bounds) => {
                let value = self.eval(inner)?;
                let mut found = [None, None, None];
                for (place, bound) in found.iter_mut().zip(bounds) {
                    *place = bound.as_ref().map(|bound| self.eval(bound)).transpose()?;
                }
                self.check_item(&value)?;
                attrs::slice(&value, found)?
            }
            _ => Value::Undefined,
        })
    }

    /// An item of a text is looked for from its beginning.
    fn check_item(&mut self, value: &Value) -> Result<()> {
        match value {
            Value::Namespace(_) | Value::Loop(_) if self.in_filter => {
                refuse("a loop's condition that asks what its rounds may change")
            }
            _ => self.spend_on(value),
        }
    }

    fn spend_on(&mut self, value: &Value) -> Result<()> {
        match value {
            Value::Str(text) => self.spend(text.len()),
            Value::Seq(_, items) => self.spend(items.len() * BYTES_PER_STEP),
            _ => Ok(()),
        }
    }

    fn all(&mut self, exprs: &[Expr]) -> Result<Vec<Value>> {
        exprs
            .iter()
            .map(|expr| {
                let value = self.eval(expr)?;
                self.part(value)
            })
            .collect()
    }

    fn dict(&mut self, entries: &[(Expr, Expr)]) -> Result<Value> {
        let mut dict = Dict::new();
        for (key, value) in entries {
            let Value::Str(key) = self.eval(key)? else {
                return refuse("a key that is no string");
            };
            let value = self.eval(value)?;
            dict.insert(key, self.part(value)?);
        }
        Ok(Value::Dict(Rc::new(dict)))
    }

    fn comparison(&mut self, first: &Expr, rest: &[(Comparison, Expr)]) -> Result<Value> {
        let mut left = self.eval(first)?;
        for (op, right) in rest {
            let right = self.eval(right)?;
            self.spend_on(&right)?;
            self.spend_weight(&right)?;
            if !ops::compare(*op, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn given(&mut self, args: &Args) -> Result<Given> {
        let mut given = Given::default();
        for expr in &args.by_place {
            given.by_place.push_back(self.eval(expr)?.nameable()?);
        }
        for (name, expr) in &args.by_name {
            given.by_name.push((Arc::clone(name), self.eval(expr)?.nameable()?));
        }
        Ok(given)
    }

    fn call(&mut self, function: &Value, args: &Args) -> Result<Value> {
        let mut given = self.given_for(function, args)?;
        let found = match function {
            Value::Method(method) => {
                self.spend_on(&method.0)?;
                methods::call(&method.0, &method.1, given)?
            }
            Value::Macro(at) => self.call_macro(*at, given)?,
            Value::Function(function) => {
                for (_, value) in &mut given.by_name {
                    *value = self.part(std::mem::replace(value, Value::None))?;
                }
                functions::call(*function, given)?
            }
            other => return refuse(format!("{} is called", other.kind())),
        };
        self.spend_on(&found)?;
        Ok(found)
    }

    /// A string's `join` may be given a generator: it goes through it at once.
    fn given_for(&mut self, function: &Value, args: &Args) -> Result<Given> {
        if let (Value::Method(method), [only]) = (function, args.by_place.as_slice())
            && &*method.1 == "join"
            && args.by_name.is_empty()
        {
            let value = match self.eval(only)? {
                Value::Seq(SeqKind::Generator, items) => Value::Seq(SeqKind::List, items),
                value => value,
            };
            return Ok(Given {
                by_place: [value].into(),
                by_name: Vec::new(),
            });
        }
        self.given(args)
    }
}

fn constant(one: &Const) -> Value {
    match one {
        Const::None => Value::None,
        Const::Bool(value) => Value::Bool(*value),
        Const::Int(value) => Value::Int(*value),
        Const::Float(value) => Value::Float(*value),
        Const::Str(text) => Value::Str(Arc::clone(text)),
    }
}
