//! Display of operations: a line each, with the shapes and element types of their matrices.

use std::fmt::{Display, Formatter, Result};
use std::sync::Arc;

use minisgl_kernels::panels::Matrix;

use crate::model::delta::Delta;
use crate::model::held::Norm;
use crate::model::operation::{Add, Attend, Embed, Halves, Heads, Mamba, Operation, PerHead, Project, Rows, TokenStep};
use crate::model::weights::Weights;

/// Prints the operations of the model. Equal adjacent layers are printed once.
impl Display for Weights {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let text = |operations: &[Operation]| operations.iter().map(|one| format!("  {one}\n")).collect::<String>();
        write!(f, "before the layers\n{}", text(&self.before))?;
        let layers: Vec<String> = self.layers.iter().map(|layer| text(layer)).collect();
        let mut first = 0;
        for alike in layers.chunk_by(|one, other| one == other) {
            let last = first + alike.len() - 1;
            let name = if last > first {
                format!("layers {first} to {last}")
            } else {
                format!("layer {first}")
            };
            write!(f, "{name}\n{}", alike[0])?;
            first = last + 1;
        }
        write!(f, "after the layers\n{}", text(&self.after))?;
        let hidden = if self.norm.is_some() { "norm(hidden)" } else { "hidden" };
        let (head, bias) = (Sizes(&self.head), of_bias(self.head_bias.as_ref()));
        write!(f, "  head         logits = [{head}] {hidden}{bias}")
    }
}

impl Display for Operation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let hidden = |norm: Option<&Arc<Norm>>| normed(norm, Rows::Hidden);
        match self {
            Self::Embed(embed) => write!(f, "embed        hidden = {embed}"),
            Self::Patches(one) => {
                let (values, side) = (one.patches.values(), one.patches.side);
                write!(
                    f,
                    "patches      inner = {values} pixel values; hidden = positions of {side} x {side}"
                )
            }
            Self::Tap(index) => write!(f, "tap          output {} = hidden", index + 2),
            Self::AddFeatures(_) => f.write_str("add          hidden += features of images"),
            Self::Project(project) => write!(f, "project      {project}"),
            Self::EachToken(steps) => write!(f, "each token   {}", joined(steps, "; ")),
            Self::PerHead(per_head) => write!(f, "per head     {per_head}"),
            Self::Attend(attend) => write!(f, "attend       {attend}"),
            Self::Gate(count) => write!(f, "gate         attended *= sigmoid(projected 0..{count})"),
            Self::Convolve(one) => write!(f, "convolve     attended = {} channels between two gates", one.size),
            Self::Delta(Delta { net, .. }) => {
                let (heads, key, value) = (net.value_heads, net.key_dim, net.value_dim);
                write!(f, "delta net    attended = {heads} heads of {key} x {value}")
            }
            Self::Mamba(Mamba { sizes, .. }) => {
                let (heads, size, head_dim) = (sizes.heads, sizes.size, sizes.head_dim);
                write!(f, "mamba        attended = {heads} heads of {size} x {head_dim}")
            }
            Self::GateUp(mlp) => write!(f, "gate, up     inner = {} {}", mlp.halves, hidden(mlp.norm.as_ref())),
            Self::Route(route) => {
                let (of, all, score) = (route.by.experts_per_token, route.by.num_experts, route.by.score);
                let (router, from) = (Sizes(&route.router), hidden(route.norm.as_ref()));
                write!(f, "route        {of} of {all} by {score:?} of [{router}] {from}")
            }
            Self::Experts(all) => {
                let (count, from) = (all.experts.len(), hidden(all.norm.as_ref()));
                let Some(one) = all.experts.first() else { return Ok(()) };
                write!(
                    f,
                    "experts      {count} x [{}] {} {from}",
                    Sizes(&one.down.weight),
                    one.halves
                )
            }
            Self::Combine(combine) => {
                let aside = combine
                    .aside
                    .map_or("", |gate| gate.map_or(" + aside", |_| " + gated aside"));
                let over = if combine.over { ", of the sum of both" } else { "" };
                let sum = format!("{} experts{aside}", combine.per_token);
                write!(f, "combine      {}{over}", combine.add.describe(&sum))
            }
            Self::Add(add) => write!(f, "add          {}", add.describe("aside")),
            Self::Norm(_) => f.write_str("norm         hidden = norm(hidden)"),
            Self::JoinNext(..) => {
                f.write_str("join         inner = norm(embedding of the next token), norm(norm(hidden))")
            }
            Self::SumPerLayer(sum) => {
                let table = Sizes(&sum.embedding);
                write!(f, "per layer    perlayer = norm(perlayer) + rows of {table}")
            }
            Self::GatePerLayer(activation, size, _) => {
                write!(
                    f,
                    "gate         inner = {activation:?}(inner) * the layer's {size} of perlayer"
                )
            }
            Self::AddToStreams(_) => f.write_str("add          other streams += norm(aside)"),
            Self::ScaleStreams => f.write_str("streams      each scaled to the RMS of hidden"),
            Self::Predict(_) => f.write_str("streams      each predicted from all"),
            Self::Laurel { before, .. } => {
                write!(f, "add          beside = norm(beside) + {}", hidden(before.as_ref()))
            }
            Self::AddLaurel => f.write_str("add          hidden = (hidden + beside) / sqrt 2"),
            Self::Correct(_) => f.write_str("streams      each corrected by the layer's change of hidden"),
            Self::SumStreams(stream, count) => write!(f, "streams      the sum of {} of {}", stream + 2, count + 1),
            Self::Check => f.write_str("check        hidden"),
        }
    }
}

/// Displays the shape and element type of a matrix.
struct Sizes<'a>(&'a Matrix);

impl Display for Sizes<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{} x {} {}", self.0.n(), self.0.k(), self.0.kind().name())
    }
}

fn of_bias(bias: Option<&Vec<f32>>) -> &'static str {
    bias.map_or("", |_| " + bias")
}

fn normed(norm: Option<&Arc<Norm>>, rows: Rows) -> String {
    norm.map_or_else(|| rows.to_string(), |_| format!("norm({rows})"))
}

fn joined(all: impl IntoIterator<Item = impl Display>, by: &str) -> String {
    let all: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    all.join(by)
}

impl Display for Rows {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Stream(stream) => write!(f, "stream {}", stream + 2),
            _ => f.write_str(&format!("{self:?}").to_lowercase()),
        }
    }
}

impl Display for Embed {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match &self.table {
            Some(table) => write!(f, "rows of {}", Sizes(table))?,
            None => f.write_str("rows of the head")?,
        }
        if self.scale != 1.0 {
            write!(f, " * {}", self.scale)?;
        }
        for (what, table) in [("positions", &self.positions), ("token types", &self.token_types)] {
            table
                .iter()
                .try_for_each(|table| write!(f, " + {what} {}", Sizes(table)))?;
        }
        f.write_str(if self.norm.is_some() { ", normalized" } else { "" })?;
        let angles = self.angles.tables.iter().map(|(table, _)| table.len());
        write!(f, "; angles [{}]", joined(angles, ", "))
    }
}

impl Display for Project {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let sign = if self.adds { "+=" } else { "=" };
        let sizes = joined(self.matrices().map(Sizes), ", ");
        let (from, bias) = (normed(self.norm.as_ref(), self.from), of_bias(self.bias.as_ref()));
        write!(f, "{} {sign} [{sizes}] {from}{bias}", self.to)
    }
}

impl Display for Heads {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{} x {} at {}", self.count, self.size, self.at)
    }
}

impl Display for TokenStep {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Copy(heads, to) => write!(f, "copy {heads} to {to}"),
            Self::Norm(_, heads, _) => write!(f, "norm {heads}"),
            Self::Rotate(heads, by) => write!(f, "rotate {} of {heads} by angles at {}", 2 * by.half, by.at),
            Self::Scale(heads, by) => write!(f, "scale {heads} by {by}"),
            Self::Grow(heads, by) => write!(f, "grow {heads} by {} every {} positions", by.beta, by.every),
            Self::Store { keys, values, .. } => write!(f, "store keys at {keys}, values at {values}"),
        }
    }
}

impl Display for PerHead {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (to, from, count) = (self.to.0, self.from.0, self.matrices.len());
        let sizes = joined(self.matrices.first().map(Sizes), "");
        write!(f, "{to} = {count} x [{sizes}] {from}")?;
        match self.beside {
            (0, _) => Ok(()),
            (beside, rotation) => write!(f, ", {beside} copied{}", rotation.map_or("", |_| " rotated")),
        }
    }
}

impl Display for Attend {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let [queries, keys, size] = self.heads;
        write!(f, "{} = {queries} heads over {keys} of {size}", self.to)?;
        if self.kv_of.0 != self.layer {
            write!(f, " of layer {}", self.kv_of.0)?;
        }
        if let Some(window) = self.window {
            write!(f, ", window {window}")?;
        }
        f.write_str(if self.sinks.is_some() { ", sinks" } else { "" })
    }
}

impl Display for Halves {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (sizes, bias) = (
            joined(self.matrices().map(Sizes), ", "),
            of_bias(self.gate_up.bias.as_ref()),
        );
        let form = if self.gated { "(gate) * up" } else { "(up)" };
        write!(f, "{:?}{form} of [{sizes}]{bias}", self.activation)?;
        self.cut.map_or(Ok(()), |cut| {
            write!(f, ", gates sparsified at {cut} standard deviations")
        })
    }
}

impl Add {
    /// Describes the addition of `what` to the hidden states.
    fn describe(&self, what: &str) -> String {
        let form = if self.norm.is_some() {
            format!("norm({what})")
        } else {
            what.to_owned()
        };
        let scale = if self.scale == 1.0 {
            String::new()
        } else {
            format!(" * {}", self.scale)
        };
        let last = if self.last == 1.0 {
            String::new()
        } else {
            format!(", hidden *= {}", self.last)
        };
        format!("hidden += {form}{scale}{last}")
    }
}
