//! From minijinja's syntax tree to a program, or a refusal.
//!
//! Invariants: where minijinja's parser reads something differently than jinja's, or takes what jinja's does not, the
//! template is refused. What jinja's compiler would refuse is too.

use std::sync::Arc;

use minijinja::machinery::ast::{self, Stmt as Node};
use minijinja::machinery::{Span, WhitespaceConfig, ast::Expr as Tree};

use super::ir::{Args, Expr, Filter, For, LoopFilter, Macro, Program, Scope, Stmt, Target};
use super::source::prepared;
use super::symbols::{Frames, parts};
use super::value::{Refused, Result, refuse};

/// So many expressions and statements may stand within each other.
const MAX_DEPTH: usize = 150;
/// Names that have a meaning of their own inside a macro, or anywhere.
pub(super) const SPECIAL_NAMES: [&str; 4] = ["caller", "kwargs", "varargs", "self"];

/// The program of a template.
pub(super) fn program(source: &str) -> Result<Program> {
    let source = prepared(source)?;
    let spaces = WhitespaceConfig {
        keep_trailing_newline: false,
        lstrip_blocks: true,
        trim_blocks: true,
    };
    let tree = minijinja::machinery::parse(&source, "chat", Default::default(), spaces)
        .map_err(|error| Refused(error.to_string()))?;
    let Node::Template(template) = tree else {
        return refuse("no template");
    };
    let mut frames = Frames::root();
    frames.enter();
    frames.visit_all(&template.children)?;
    let mut lower = Lower {
        source: &source,
        frames,
        macros: Vec::new(),
        depth: 0,
        is_macro: false,
    };
    let body = lower.body(&template.children)?;
    let loads = lower.frames.leave();
    Ok(Program {
        root: Scope { loads, body },
        macros: lower.macros,
        num_slots: lower.frames.num_slots,
    })
}

pub(super) struct Lower<'a> {
    source: &'a str,
    pub(super) frames: Frames,
    macros: Vec<Macro>,
    depth: usize,
    is_macro: bool,
}

impl Lower<'_> {
    pub(super) fn text(&self, span: Span) -> &str {
        let place = |offset: u32| usize::try_from(offset).unwrap_or(usize::MAX);
        self.source
            .get(place(span.start_offset)..place(span.end_offset))
            .unwrap_or("")
    }

    // ------------------------------------------------------------------------------------------------- statements

    fn body(&mut self, body: &[Node<'_>]) -> Result<Vec<Stmt>> {
        self.deeper(|lower| body.iter().map(|node| lower.stmt(node)).collect())
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

    fn stmt(&mut self, node: &Node<'_>) -> Result<Stmt> {
        Ok(match node {
            Node::EmitRaw(raw) => Stmt::Text(raw.raw.into()),
            Node::EmitExpr(emit) => Stmt::Emit(self.emitted(&emit.expr)?),
            Node::IfCond(one) => Stmt::If(
                self.expr(&one.expr)?,
                self.body(&one.true_body)?,
                self.body(&one.false_body)?,
            ),
            Node::ForLoop(one) => Stmt::For(Box::new(self.for_loop(one)?)),
            Node::Set(one) => Stmt::Set(self.target(&one.target)?, self.expr(&one.expr)?),
            Node::SetBlock(one) => {
                if one.filter.is_some() {
                    return refuse("a set block with a filter");
                }
                let target = self.target(&one.target)?;
                Stmt::SetBlock(target, self.scope(&one.body, |_| Ok(()))?.1)
            }
            Node::WithBlock(one) => self.with_block(one)?,
            Node::Macro(one) => self.macro_of(one)?,
            Node::Continue(_) => Stmt::Continue,
            Node::Break(_) => Stmt::Break,
            _ => return refuse("a statement beyond chat templates"),
        })
    }

    /// What is shown or joined by `~`. `safe` marks a text that is not to be escaped. Nothing ever is but what is added to
    /// such a text.
    pub(super) fn emitted(&mut self, tree: &Tree<'_>) -> Result<Expr> {
        match tree {
            Tree::Filter(filter) if filter.name == "safe" && filter.args.is_empty() => {
                let inner = filter
                    .expr
                    .as_ref()
                    .ok_or_else(|| Refused("a filter of nothing".into()))?;
                Ok(Expr::Filter(Filter::Safe, Box::new(self.expr(inner)?), Args::default()))
            }
            _ => self.expr(tree),
        }
    }

    /// A body in a frame of its own, for which `declare` sets parameters.
    fn scope<T>(&mut self, body: &[Node<'_>], declare: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, Scope)> {
        self.frames.enter();
        let declared = declare(self)?;
        self.frames.visit_all(body)?;
        let body = self.body(body)?;
        let loads = self.frames.leave();
        Ok((declared, Scope { loads, body }))
    }

    fn with_block(&mut self, one: &ast::WithBlock<'_>) -> Result<Stmt> {
        let values = one
            .assignments
            .iter()
            .map(|(_, value)| self.expr(value))
            .collect::<Result<Vec<_>>>()?;
        let (targets, scope) = self.scope(&one.body, |lower| {
            one.assignments
                .iter()
                .map(|(target, _)| lower.parameter(target))
                .collect::<Result<Vec<_>>>()
        })?;
        Ok(Stmt::With(targets.into_iter().zip(values).collect(), scope))
    }

    fn for_loop(&mut self, one: &ast::ForLoop<'_>) -> Result<For> {
        if one.recursive {
            return refuse("a recursive loop");
        }
        if names(&one.target).contains(&"loop") {
            return refuse("a loop over loop");
        }
        let iter = self.expr(&one.iter)?;
        let filter = one
            .filter_expr
            .as_ref()
            .map(|filter| self.loop_filter(&one.target, filter))
            .transpose()?;
        let ((this, target), body) = self.scope(&one.body, |lower| {
            let this = lower.frames.parameter("loop");
            Ok((this, lower.parameter(&one.target)?))
        })?;
        let ((), other) = self.scope(&one.else_body, |_| Ok(()))?;
        Ok(For {
            iter,
            filter,
            target,
            this,
            body,
            other,
        })
    }

    /// Jinja asks it between the rounds of the loop: it must not see what they do.
    fn loop_filter(&mut self, target: &Tree<'_>, filter: &Tree<'_>) -> Result<LoopFilter> {
        if !is_calm(filter) {
            return refuse("a loop's condition that calls something");
        }
        self.frames.enter();
        let target = self.parameter(target)?;
        self.frames.visit_expr(filter)?;
        let test = self.expr(filter)?;
        Ok(LoopFilter {
            target,
            loads: self.frames.leave(),
            test,
        })
    }

    fn macro_of(&mut self, one: &ast::Macro<'_>) -> Result<Stmt> {
        if self.is_macro || self.frames.depth() != 1 {
            return refuse("a macro within a loop or a macro");
        }
        let slot = self.frames.slot(one.name)?;
        let frames = self.frames.of_macro();
        let outer = std::mem::replace(&mut self.frames, frames);
        self.is_macro = true;
        let ((args, defaults), body) = self.scope(&one.body, |lower| {
            let mut args = Vec::new();
            for arg in &one.args {
                let Tree::Var(var) = arg else {
                    return refuse("an unusual parameter");
                };
                args.push((Arc::from(var.id), lower.frames.parameter(var.id)));
            }
            one.defaults
                .iter()
                .try_for_each(|default| lower.frames.visit_expr(default))?;
            lower.frames.visit_all(&one.body)?;
            let defaults = one
                .defaults
                .iter()
                .map(|default| lower.expr(default))
                .collect::<Result<Vec<_>>>()?;
            Ok((args, defaults))
        })?;
        self.is_macro = false;
        let num_slots = std::mem::replace(&mut self.frames, outer).num_slots;
        self.macros.push(Macro {
            args,
            defaults,
            body,
            num_slots,
        });
        Ok(Stmt::Macro(slot, self.macros.len() - 1))
    }

    /// A target that is set in a frame of its own.
    fn parameter(&mut self, target: &Tree<'_>) -> Result<Target> {
        if matches!(target, Tree::GetAttr(_)) {
            return refuse("an unusual target");
        }
        self.frames.visit_target(target, true)?;
        self.target(target)
    }

    fn target(&mut self, target: &Tree<'_>) -> Result<Target> {
        match target {
            Tree::Var(var) if SPECIAL_NAMES.contains(&var.id) => refuse(format!("{} is set", var.id)),
            Tree::Var(var) => Ok(Target::Var(self.frames.slot(var.id)?)),
            Tree::List(list) => Ok(Target::Tuple(
                list.items.iter().map(|item| self.target(item)).collect::<Result<_>>()?,
            )),
            Tree::GetAttr(attr) => match &attr.expr {
                Tree::Var(var) => Ok(Target::Attr(self.frames.slot(var.id)?, attr.name.into())),
                _ => refuse("an unusual target"),
            },
            _ => refuse("an unusual target"),
        }
    }
}

fn names<'a>(target: &Tree<'a>) -> Vec<&'a str> {
    match target {
        Tree::Var(var) => vec![var.id],
        Tree::List(list) => list.items.iter().flat_map(names).collect(),
        _ => Vec::new(),
    }
}

/// Whether it asks only for attributes and items, and changes nothing.
fn is_calm(tree: &Tree<'_>) -> bool {
    let may_be = match tree {
        Tree::Test(one) => one.args.is_empty(),
        Tree::Slice(_) | Tree::IfExpr(_) | Tree::Filter(_) | Tree::Call(_) | Tree::Map(_) => false,
        _ => true,
    };
    may_be && parts(tree).is_ok_and(|parts| parts.into_iter().all(is_calm))
}
