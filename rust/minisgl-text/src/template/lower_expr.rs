//! Expressions of minijinja's syntax tree as those of a program.
//!
//! Invariants: a literal means what its source means to Python; where a sign or a test binds otherwise than in jinja, it
//! is refused.

use minijinja::machinery::Span;
use minijinja::machinery::ast::{self, CallArg, Expr as Tree, UnaryOpKind};
use minijinja::value::ValueKind;

use super::ir::{Args, Comparison, Const, Expr, Filter, Math, Test};
use super::lower::{Lower, SPECIAL_NAMES};
use super::source::unescaped;
use super::value::{Result, refuse};

impl Lower<'_> {
    fn boxed(&mut self, tree: &Tree<'_>) -> Result<Box<Expr>> {
        Ok(Box::new(self.expr(tree)?))
    }

    fn all(&mut self, trees: &[Tree<'_>]) -> Result<Vec<Expr>> {
        trees.iter().map(|tree| self.expr(tree)).collect()
    }

    pub(super) fn expr(&mut self, tree: &Tree<'_>) -> Result<Expr> {
        self.deeper(|lower| lower.expr_of(tree))
    }

    fn expr_of(&mut self, tree: &Tree<'_>) -> Result<Expr> {
        Ok(match tree {
            Tree::Var(var) if SPECIAL_NAMES.contains(&var.id) => return refuse(format!("the name {}", var.id)),
            Tree::Var(var) => Expr::Var(self.frames.slot(var.id)?),
            Tree::Const(one) => Expr::Const(self.constant(&one.value, tree.span())?),
            Tree::List(list) => self.list(list, tree.span())?,
            Tree::Map(map) => {
                let keys = self.all(&map.keys)?;
                Expr::Dict(keys.into_iter().zip(self.all(&map.values)?).collect())
            }
            Tree::UnaryOp(one) => match one.op {
                UnaryOpKind::Not => Expr::Not(self.boxed(&one.expr)?),
                UnaryOpKind::Neg => Expr::Neg(self.boxed(&one.expr)?),
            },
            Tree::BinOp(one) => self.binary(one)?,
            Tree::Compare(one) => {
                let ops = one.ops.iter().map(|op| Ok((op.op, self.expr(&op.expr)?)));
                let ops = ops.collect::<Result<_>>()?;
                Expr::Compare(self.boxed(&one.expr)?, ops)
            }
            Tree::IfExpr(one) => Expr::If {
                test: self.boxed(&one.test_expr)?,
                yes: self.boxed(&one.true_expr)?,
                no: one.false_expr.as_ref().map(|other| self.boxed(other)).transpose()?,
            },
            Tree::GetAttr(one) => Expr::Attr(self.operand(&one.expr)?, one.name.into()),
            Tree::GetItem(one) => Expr::Item(self.operand(&one.expr)?, self.boxed(&one.subscript_expr)?),
            Tree::Slice(one) => {
                let mut bound = |part: &Option<Tree<'_>>| part.as_ref().map(|part| self.boxed(part)).transpose();
                let bounds = [bound(&one.start)?, bound(&one.stop)?, bound(&one.step)?];
                Expr::Slice(self.operand(&one.expr)?, bounds)
            }
            Tree::Call(one) => Expr::Call(self.operand(&one.expr)?, self.args(&one.args)?),
            Tree::Filter(one) => self.filter(one)?,
            Tree::Test(one) => self.test(one)?,
        })
    }

    /// What an attribute, an item or a call is of. To jinja a sign before it belongs to the whole, here to it alone.
    fn operand(&mut self, tree: &Tree<'_>) -> Result<Box<Expr>> {
        match tree {
            Tree::UnaryOp(_) => refuse("a sign before an attribute"),
            _ => self.boxed(tree),
        }
    }

    fn constant(&self, value: &minijinja::Value, span: Span) -> Result<Const> {
        let text = self.text(span);
        match value.kind() {
            ValueKind::None => Ok(Const::None),
            ValueKind::Bool => Ok(Const::Bool(value.is_true())),
            ValueKind::String if text.contains('\\') => Ok(Const::Str(unescaped(text)?.into())),
            ValueKind::String => Ok(Const::Str(value.as_str().unwrap_or("").into())),
            ValueKind::Number => number(text),
            kind => refuse(format!("a constant {kind}")),
        }
    }

    fn list(&mut self, list: &ast::List<'_>, span: Span) -> Result<Expr> {
        let is_bare = list
            .items
            .first()
            .is_some_and(|first| first.span().start_offset < span.start_offset);
        let items = self.all(&list.items)?;
        Ok(if self.text(span).starts_with('[') && !is_bare {
            Expr::List(items)
        } else {
            Expr::Tuple(items)
        })
    }

    fn binary(&mut self, one: &ast::BinOp<'_>) -> Result<Expr> {
        if matches!(one.op, Math::Concat) {
            return Ok(Expr::Concat(
                Box::new(self.emitted(&one.left)?),
                Box::new(self.emitted(&one.right)?),
            ));
        }
        let (left, right) = (self.boxed(&one.left)?, self.boxed(&one.right)?);
        let compare = |op, left, right: Box<Expr>| Expr::Compare(left, vec![(op, *right)]);
        Ok(match one.op {
            Math::ScAnd => Expr::And(left, right),
            Math::ScOr => Expr::Or(left, right),
            Math::Add | Math::Sub | Math::Mul | Math::Div | Math::FloorDiv | Math::Rem => {
                Expr::Math(one.op, left, right)
            }
            Math::Pow | Math::Concat => return refuse("a power"),
            Math::Eq => compare(Comparison::Eq, left, right),
            Math::Ne => compare(Comparison::Ne, left, right),
            Math::Lt => compare(Comparison::Lt, left, right),
            Math::Lte => compare(Comparison::Lte, left, right),
            Math::Gt => compare(Comparison::Gt, left, right),
            Math::Gte => compare(Comparison::Gte, left, right),
            Math::In => compare(Comparison::In, left, right),
        })
    }

    fn filter(&mut self, one: &ast::Filter<'_>) -> Result<Expr> {
        let Some(inner) = &one.expr else {
            return refuse("a filter of nothing");
        };
        match Filter::of(one.name) {
            None | Some(Filter::Safe) => refuse(format!("the filter {}", one.name)),
            Some(filter) => Ok(Expr::Filter(filter, self.boxed(inner)?, self.args(&one.args)?)),
        }
    }

    fn test(&mut self, one: &ast::Test<'_>) -> Result<Expr> {
        let is_chained = match &one.expr {
            Tree::Test(_) => true,
            Tree::UnaryOp(inner) => matches!(inner.op, UnaryOpKind::Not),
            _ => false,
        };
        let is_signed = one.args.iter().any(|arg| matches!(arg, CallArg::Pos(Tree::UnaryOp(_))));
        if is_chained || is_signed {
            return refuse("a test of a test, or with a signed argument");
        }
        match Test::of(one.name) {
            None => refuse(format!("the test {}", one.name)),
            Some(test) => Ok(Expr::Test(test, self.boxed(&one.expr)?, self.args(&one.args)?)),
        }
    }

    fn args(&mut self, given: &[CallArg<'_>]) -> Result<Args> {
        let mut args = Args::default();
        for arg in given {
            match arg {
                CallArg::Pos(tree) => args.by_place.push(self.expr(tree)?),
                CallArg::Kwarg(name, tree) => {
                    if args.by_name.iter().any(|(known, _)| **known == **name) {
                        return refuse("a keyword twice");
                    }
                    args.by_name.push(((*name).into(), self.expr(tree)?));
                }
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => return refuse("arguments from a list or dict"),
            }
        }
        Ok(args)
    }
}

/// A plain decimal number, as its source spells it.
fn number(text: &str) -> Result<Const> {
    let (int, fraction) = text
        .split_once('.')
        .map_or((text, None), |(int, fraction)| (int, Some(fraction)));
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_plain = is_digits(int) && (int == "0" || !int.starts_with('0')) && fraction.is_none_or(is_digits);
    let found = match fraction {
        None => int.parse().map(Const::Int).ok(),
        Some(_) => text.parse().map(Const::Float).ok(),
    };
    match found {
        Some(found) if is_plain => Ok(found),
        _ => refuse(format!("the number {text}")),
    }
}
