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
    /// Final norm.
    pub norm: Option<Norm>,
    /// LM head, [vocabulary, hidden]; also the token embedding if that has no table of its own.
    pub head: Matrix,
    /// Bias of the LM head, [vocabulary], padded.
    pub head_bias: Option<Vec<f32>>,
    /// Attention bias by distance.
    pub distances: Option<Distances>,
}

impl Weights {
    /// Returns all operations of a forward pass, in order.
    pub fn operations(&self) -> impl Iterator<Item = &Operation> {
        let layers = self.layers.iter().flatten();
        self.before.iter().chain(layers).chain(&self.after)
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
