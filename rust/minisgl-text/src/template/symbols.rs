//! Which variable a name means where, as jinja decides it before a template runs (its `idtracking`).
//!
//! Invariants: a name that a frame sets is the frame's own from the beginning of the frame, also where it is read before;
//! a name that it only reads is that of the nearest frame around, else the caller's.

use std::collections::BTreeSet;
use std::sync::Arc;

use indexmap::IndexMap;
use minijinja::machinery::ast::{CallArg, Expr, Stmt};

use super::ir::{Load, Slot};
use super::value::{Result, refuse};

/// Names of one frame.
#[derive(Clone, Debug, Default)]
struct Symbols {
    refs: IndexMap<Arc<str>, Slot>,
    loads: IndexMap<usize, Load>,
    stores: BTreeSet<Arc<str>>,
}

/// The frames from the outermost to the one that is looked at, and how many variables there are.
#[derive(Default)]
pub(super) struct Frames {
    frames: Vec<Symbols>,
    /// The places of the innermost frames: each name has one, whichever branch meets it first.
    places: Vec<IndexMap<Arc<str>, Slot>>,
    pub(super) num_slots: usize,
    is_root: bool,
}

impl Frames {
    pub(super) fn root() -> Self {
        Self {
            is_root: true,
            ..Self::default()
        }
    }

    /// The frames of a macro begin within those of the template.
    pub(super) fn of_macro(&self) -> Self {
        Self {
            frames: self.frames.clone(),
            places: self.places.clone(),
            ..Self::default()
        }
    }

    pub(super) fn enter(&mut self) {
        self.frames.push(Symbols::default());
        self.places.push(IndexMap::new());
    }

    /// What the frame's variables are when it begins. Parameters are not among them.
    pub(super) fn leave(&mut self) -> Vec<(Slot, Load)> {
        self.places.pop();
        let is_root = self.is_root;
        let loads = self.frames.pop().map(|frame| frame.loads).unwrap_or_default();
        loads
            .into_iter()
            .map(|(at, load)| (Slot { is_root, at }, load))
            .collect()
    }

    pub(super) fn depth(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn slot(&self, name: &str) -> Result<Slot> {
        match self.find(name, self.frames.len()) {
            Some(slot) => Ok(slot),
            None => refuse(format!("the name {name} is not known to its frame")),
        }
    }

    pub(super) fn parameter(&mut self, name: &str) -> Slot {
        let slot = self.define(name, None);
        self.with_frame(|frame| {
            frame.stores.insert(name.into());
            frame.loads.shift_remove(&slot.at);
        });
        slot
    }

    pub(super) fn visit_all(&mut self, body: &[Stmt<'_>]) -> Result<()> {
        body.iter().try_for_each(|stmt| self.visit(stmt))
    }

    fn find(&self, name: &str, depth: usize) -> Option<Slot> {
        self.frames[..depth]
            .iter()
            .rev()
            .find_map(|frame| frame.refs.get(name).copied())
    }

    fn around(&self, name: &str) -> Option<Slot> {
        self.find(name, self.frames.len().saturating_sub(1))
    }

    fn with_frame(&mut self, change: impl FnOnce(&mut Symbols)) {
        if let Some(frame) = self.frames.last_mut() {
            change(frame);
        }
    }

    fn define(&mut self, name: &str, load: Option<Load>) -> Slot {
        let known = self.places.last().and_then(|places| places.get(name).copied());
        let slot = known.unwrap_or(Slot {
            is_root: self.is_root,
            at: self.num_slots,
        });
        if known.is_none() {
            self.num_slots += 1;
            if let Some(places) = self.places.last_mut() {
                places.insert(name.into(), slot);
            }
        }
        self.with_frame(|frame| {
            frame.refs.insert(name.into(), slot);
            if let Some(load) = load {
                frame.loads.insert(slot.at, load);
            }
        });
        slot
    }

    fn store(&mut self, name: &str) {
        self.with_frame(|frame| {
            frame.stores.insert(name.into());
        });
        if self.frames.last().is_some_and(|frame| !frame.refs.contains_key(name)) {
            let load = self.around(name).map_or(Load::Undefined, Load::Alias);
            self.define(name, Some(load));
        }
    }

    fn load(&mut self, name: &str) {
        if self.find(name, self.frames.len()).is_none() {
            self.define(name, Some(Load::Resolve(name.into())));
        }
    }

    fn visit(&mut self, stmt: &Stmt<'_>) -> Result<()> {
        match stmt {
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::EmitExpr(emit) => self.visit_expr(&emit.expr)?,
            Stmt::ForLoop(one) => self.visit_expr(&one.iter)?,
            Stmt::IfCond(one) => {
                self.visit_expr(&one.expr)?;
                self.visit_branches(&one.true_body, &one.false_body)?;
            }
            Stmt::WithBlock(one) => one
                .assignments
                .iter()
                .try_for_each(|(_, value)| self.visit_expr(value))?,
            Stmt::Set(one) => {
                self.visit_expr(&one.expr)?;
                self.visit_target(&one.target, false)?;
            }
            Stmt::SetBlock(one) => self.visit_target(&one.target, false)?,
            Stmt::Macro(one) => self.store(one.name),
            _ => return refuse("a statement beyond chat templates"),
        }
        Ok(())
    }

    /// Each branch begins with the names before the condition; what any of them sets may be set.
    fn visit_branches(&mut self, yes: &[Stmt<'_>], no: &[Stmt<'_>]) -> Result<()> {
        let Some(before) = self.frames.last().cloned() else {
            return Ok(());
        };
        let mut branches = Vec::new();
        for body in [yes, no] {
            self.with_frame(|frame| frame.clone_from(&before));
            self.visit_all(body)?;
            branches.extend(self.frames.last().cloned());
        }
        let mut merged = before.clone();
        let mut new_stores = BTreeSet::new();
        for branch in branches {
            new_stores.extend(branch.stores.difference(&before.stores).cloned());
            merged.refs.extend(branch.refs);
            merged.loads.extend(branch.loads);
            merged.stores.extend(branch.stores);
        }
        self.with_frame(|frame| *frame = merged);
        for name in new_stores {
            let slot = self.slot(&name)?;
            let load = self.around(&name).map_or(Load::Resolve(name), Load::Alias);
            self.with_frame(|frame| {
                frame.loads.insert(slot.at, load);
            });
        }
        Ok(())
    }

    /// What a statement sets: as a parameter of the frame, or among what it does.
    pub(super) fn visit_target(&mut self, target: &Expr<'_>, is_parameter: bool) -> Result<()> {
        match target {
            Expr::Var(var) if is_parameter => {
                self.parameter(var.id);
            }
            Expr::Var(var) => self.store(var.id),
            Expr::List(list) => list
                .items
                .iter()
                .try_for_each(|item| self.visit_target(item, is_parameter))?,
            Expr::GetAttr(attr) => self.visit_expr(&attr.expr)?,
            _ => return refuse("an unusual target"),
        }
        Ok(())
    }

    pub(super) fn visit_expr(&mut self, expr: &Expr<'_>) -> Result<()> {
        if let Expr::Var(var) = expr {
            self.load(var.id);
        }
        parts(expr)?.into_iter().try_for_each(|part| self.visit_expr(part))
    }
}

/// The expressions of which an expression is made, in the order in which jinja looks at them.
pub(super) fn parts<'a, 'b>(expr: &'b Expr<'a>) -> Result<Vec<&'b Expr<'a>>> {
    let with = |first: &'b Expr<'a>, args: &'b [CallArg<'a>]| {
        let args = args.iter().map(|arg| match arg {
            CallArg::Pos(expr) | CallArg::Kwarg(_, expr) => Ok(expr),
            CallArg::PosSplat(_) | CallArg::KwargSplat(_) => refuse("arguments from a list or dict"),
        });
        [Ok(first)].into_iter().chain(args).collect::<Result<Vec<_>>>()
    };
    Ok(match expr {
        Expr::Var(_) | Expr::Const(_) => Vec::new(),
        Expr::Slice(one) => {
            let bounds = [&one.start, &one.stop, &one.step].into_iter().flatten();
            [&one.expr].into_iter().chain(bounds).collect()
        }
        Expr::UnaryOp(one) => vec![&one.expr],
        Expr::BinOp(one) => vec![&one.left, &one.right],
        Expr::Compare(one) => [&one.expr]
            .into_iter()
            .chain(one.ops.iter().map(|op| &op.expr))
            .collect(),
        Expr::IfExpr(one) => [&one.test_expr, &one.true_expr]
            .into_iter()
            .chain(&one.false_expr)
            .collect(),
        Expr::Filter(one) => match &one.expr {
            Some(inner) => with(inner, &one.args)?,
            None => Vec::new(), // it is refused elsewhere
        },
        Expr::Test(one) => with(&one.expr, &one.args)?,
        Expr::GetAttr(one) => vec![&one.expr],
        Expr::GetItem(one) => vec![&one.expr, &one.subscript_expr],
        Expr::Call(one) => with(&one.expr, &one.args)?,
        Expr::List(one) => one.items.iter().collect(),
        Expr::Map(one) => one.keys.iter().chain(&one.values).collect(),
    })
}
