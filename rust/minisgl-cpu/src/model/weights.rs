//! Weights of a decoder, packed in the operations that use them, and the LM head.

use minisgl_kernels::Kind;
use minisgl_kernels::attention::Distances;
use minisgl_kernels::panels::Matrix;

use crate::model::held::Norm;
use crate::model::operation::Operation;

/// All weights of a model, as lists of operations.
pub struct Weights {
    /// Operations before the layers.
    pub before: Vec<Operation>,
    /// Operations of each layer.
    pub layers: Vec<Vec<Operation>>,
    /// Operations after the layers.
    pub after: Vec<Operation>,
    /// MTP layer, which runs after the forward pass.
    pub mtp: Option<Mtp>,
    /// Final norm.
    pub norm: Option<Norm>,
    /// LM head, [vocabulary, hidden]; also the token embedding if that has no table of its own.
    pub head: Matrix,
    /// Bias of the LM head, [vocabulary], padded.
    pub head_bias: Option<Vec<f32>>,
    /// Attention bias by distance.
    pub distances: Option<Distances>,
}

/// Layer that predicts the token after the next (multi-token prediction). It shares the embedding and the LM head.
pub struct Mtp {
    /// Operations from the hidden states of the forward pass to those of this layer.
    pub operations: Vec<Operation>,
    /// Norm before the LM head.
    pub norm: Norm,
}

impl Weights {
    /// Returns all operations, in order: of a forward pass, then of the MTP layer.
    pub fn operations(&self) -> impl Iterator<Item = &Operation> {
        let layers = self.layers.iter().flatten();
        let mtp = self.mtp.iter().flat_map(|mtp| &mtp.operations);
        self.before.iter().chain(layers).chain(&self.after).chain(mtp)
    }

    /// Returns the number of operations of a forward pass; those of the MTP layer follow.
    pub fn forward_len(&self) -> usize {
        self.operations().count() - self.mtp.as_ref().map_or(0, |mtp| mtp.operations.len())
    }

    /// Returns the embedding table of token ids, and the scale of embeddings.
    pub fn embedding(&self) -> (&Matrix, f32) {
        let embed = self.before.iter().find_map(|one| match one {
            Operation::Embed(embed) => Some((embed.table.as_ref().unwrap_or(&self.head), embed.scale)),
            _ => None,
        });
        embed.unwrap_or((&self.head, 1.0))
    }

    /// Returns the bytes of all matrices.
    pub fn bytes(&self) -> usize {
        let all = self.operations().flat_map(Operation::matrices);
        self.head.bytes() + all.map(|(matrix, _)| matrix.bytes()).sum::<usize>()
    }

    /// Returns a decoded token's weight bytes and multiply-adds. Only chosen experts count, and no embedding rows.
    pub fn of_a_token(&self) -> (usize, usize) {
        let head = (&self.head, (1, 1));
        let all = self.operations().flat_map(Operation::matrices).chain([head]);
        all.fold((0, 0), |(bytes, products), (matrix, (of, all))| {
            let size = matrix.n() * matrix.k();
            (bytes + matrix.bytes() * of / all, products + size * of / all)
        })
    }

    /// Returns the element types of all matrices but routers, with their bytes, largest first.
    pub fn kinds(&self) -> Vec<(Kind, usize)> {
        let mut kinds: Vec<(Kind, usize)> = vec![(self.head.kind(), self.head.bytes())];
        let operations = self.operations().filter(|one| !matches!(one, Operation::Route(_)));
        for (matrix, _) in operations.flat_map(Operation::matrices) {
            match kinds.iter_mut().find(|(kind, _)| *kind == matrix.kind()) {
                Some((_, bytes)) => *bytes += matrix.bytes(),
                None => kinds.push((matrix.kind(), matrix.bytes())),
            }
        }
        kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        kinds
    }
}
