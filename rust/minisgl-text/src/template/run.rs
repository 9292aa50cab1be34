//! Runs a program.
//!
//! Invariants: work, output and depth are bounded; what Python would not certainly make the same of is refused.

use std::rc::Rc;
use std::sync::Arc;

use super::call::Given;
use super::functions;
use super::ir::{For, Load, Program, Scope, Slot, Stmt, Target};
use super::ops::checked_len;
use super::print::push_str;
use super::value::{Dict, Loop, Result, Value, refuse};

/// Steps that a rendering may take: some tenths of a second. Python counts pieces of output and characters together, up
/// to twice as many.
pub const MAX_STEPS: u64 = 12 << 20;
const MAX_CALLS: usize = 40; // macros that call macros
const MAX_DEPTH: usize = 400; // expressions and statements within each other
/// As many bytes as this cost as much as a step.
pub(super) const BYTES_PER_STEP: usize = 64;

/// A rendering.
pub(super) struct Run<'a> {
    program: &'a Program,
    given: &'a Dict,
    root: Vec<Option<Value>>,
    /// Variables of the macros that run.
    calls: Vec<Vec<Option<Value>>>,
    steps: u64,
    most_steps: u64,
    depth: usize,
    pub(super) in_filter: bool,
}

#[derive(PartialEq)]
enum Flow {
    Next,
    Continue,
    Break,
}

/// The text that `program` makes of `given`, in so many steps at most.
pub(super) fn run(program: &Program, given: &Dict, most_steps: u64) -> Result<String> {
    let root = vec![None; program.num_slots];
    let mut run = Run {
        program,
        given,
        root,
        calls: Vec::new(),
        steps: 0,
        most_steps,
        depth: 0,
        in_filter: false,
    };
    let mut out = String::new();
    run.scope(&program.root, &mut out)?;
    Ok(out)
}

impl Run<'_> {
    pub(super) fn step(&mut self) -> Result<()> {
        self.steps += 1;
        if self.steps > self.most_steps {
            refuse("it runs very long")
        } else {
            Ok(())
        }
    }

    pub(super) fn spend(&mut self, bytes: usize) -> Result<()> {
        self.steps += u64::try_from(bytes / BYTES_PER_STEP).unwrap_or(u64::MAX);
        self.step()
    }

    /// A value that becomes a part of another: not a namespace, which could come to hold itself.
    pub(super) fn part(&mut self, value: Value) -> Result<Value> {
        if matches!(value, Value::Namespace(_)) {
            return refuse("a namespace within another value");
        }
        self.spend_weight(&value)?;
        value.nameable()
    }

    pub(super) fn spend_weight(&mut self, value: &Value) -> Result<()> {
        let weight = value.weight()?;
        self.spend(weight * BYTES_PER_STEP)
    }

    // -------------------------------------------------------------------------------------------------- variables

    fn slots(&mut self, slot: Slot) -> &mut Vec<Option<Value>> {
        match self.calls.last_mut() {
            Some(slots) if !slot.is_root => slots,
            _ => &mut self.root,
        }
    }

    pub(super) fn get(&mut self, slot: Slot) -> Option<Value> {
        self.slots(slot).get(slot.at).cloned().flatten()
    }

    fn put(&mut self, slot: Slot, value: Option<Value>) {
        if let Some(place) = self.slots(slot).get_mut(slot.at) {
            *place = value;
        }
    }

    fn enter(&mut self, loads: &[(Slot, Load)]) {
        for (slot, load) in loads {
            let value = match load {
                Load::Undefined => None,
                Load::Alias(other) => self.get(*other),
                Load::Resolve(name) => self.given.get(name).cloned().or_else(|| functions::named(name)),
            };
            self.put(*slot, value);
        }
    }

    pub(super) fn set(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Var(slot) => self.put(*slot, Some(value.nameable()?)),
            Target::Tuple(targets) => {
                let items = value.items()?;
                if items.len() != targets.len() {
                    return refuse("values that are not as many as their names");
                }
                for (target, item) in targets.iter().zip(items.iter()) {
                    self.set(target, item.clone())?;
                }
            }
            Target::Attr(slot, name) => match self.get(*slot) {
                Some(Value::Namespace(names)) => {
                    let value = self.part(value)?;
                    names.borrow_mut().insert(Arc::clone(name), value);
                }
                _ => return refuse("an attribute of what is no namespace is set"),
            },
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------------- statements

    fn scope(&mut self, scope: &Scope, out: &mut String) -> Result<Flow> {
        self.enter(&scope.loads);
        self.body(&scope.body, out)
    }

    fn body(&mut self, body: &[Stmt], out: &mut String) -> Result<Flow> {
        self.deeper(|run| run.all_of(body, out))
    }

    fn all_of(&mut self, body: &[Stmt], out: &mut String) -> Result<Flow> {
        for stmt in body {
            self.step()?;
            let flow = self.stmt(stmt, out)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn stmt(&mut self, stmt: &Stmt, out: &mut String) -> Result<Flow> {
        match stmt {
            Stmt::Text(text) => out.push_str(text),
            Stmt::Emit(expr) => {
                let value = self.eval(expr)?;
                push_str(&value, out)?;
            }
            Stmt::If(test, yes, no) => {
                let body = if self.eval(test)?.is_true() { yes } else { no };
                return self.body(body, out);
            }
            Stmt::For(one) => return self.for_loop(one, out),
            Stmt::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.set(target, value)?;
            }
            Stmt::SetBlock(target, scope) => {
                let mut text = String::new();
                if self.scope(scope, &mut text)? != Flow::Next {
                    return refuse("a loop ends within a set block");
                }
                self.set(target, Value::Str(text.into()))?;
            }
            Stmt::With(assignments, scope) => {
                let mut values = Vec::with_capacity(assignments.len());
                for (target, expr) in assignments {
                    values.push((target, self.eval(expr)?));
                }
                self.enter(&scope.loads);
                for (target, value) in values {
                    self.set(target, value)?;
                }
                return self.body(&scope.body, out);
            }
            Stmt::Macro(slot, at) => self.put(*slot, Some(Value::Macro(*at))),
            Stmt::Continue => return Ok(Flow::Continue),
            Stmt::Break => return Ok(Flow::Break),
        }
        checked_len(out.len())?;
        Ok(Flow::Next)
    }

    fn for_loop(&mut self, one: &For, out: &mut String) -> Result<Flow> {
        let mut items = self.eval(&one.iter)?.items()?;
        self.spend(items.len())?;
        if let Some(filter) = &one.filter {
            self.enter(&filter.loads);
            let mut kept = Vec::new();
            for item in items.iter() {
                self.step()?;
                self.set(&filter.target, item.clone())?;
                let outer = std::mem::replace(&mut self.in_filter, true);
                let passes = self.eval(&filter.test)?.is_true();
                self.in_filter = outer;
                if passes {
                    kept.push(item.clone());
                }
            }
            items = Rc::new(kept);
        }
        if items.is_empty() {
            return self.scope(&one.other, out);
        }
        for (index0, item) in items.iter().enumerate() {
            self.step()?;
            self.set(&one.target, item.clone())?;
            let this = Loop {
                items: Rc::clone(&items),
                index0,
            };
            self.put(one.this, Some(Value::Loop(Rc::new(this))));
            if self.scope(&one.body, out)? == Flow::Break {
                break;
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth > MAX_DEPTH {
            return refuse("it is very deep");
        }
        self.depth += 1;
        let found = work(self);
        self.depth -= 1;
        found
    }

    pub(super) fn call_macro(&mut self, at: usize, mut given: Given) -> Result<Value> {
        let program = self.program;
        let Some(one) = program.macros.get(at).filter(|_| self.calls.len() < MAX_CALLS) else {
            return refuse("macros that call macros");
        };
        self.calls.push(vec![None; one.num_slots]);
        self.enter(&one.body.loads);
        let num_required = one.args.len() - one.defaults.len();
        let mut missing = Vec::new();
        for (at, (name, slot)) in one.args.iter().enumerate() {
            match given.named_or_next(name) {
                Some(value) => self.put(*slot, Some(value)),
                None => missing.push((at, *slot)),
            }
        }
        given.end()?;
        for (at, slot) in missing {
            let value = match at.checked_sub(num_required) {
                Some(at) => self.eval(&one.defaults[at])?.nameable()?,
                None => Value::Undefined,
            };
            self.put(slot, Some(value));
        }
        let mut text = String::new();
        let flow = self.body(&one.body.body, &mut text)?;
        self.calls.pop();
        if flow == Flow::Next {
            Ok(Value::Str(text.into()))
        } else {
            refuse("a loop ends within a macro")
        }
    }
}
