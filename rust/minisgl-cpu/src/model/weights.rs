//! A decoder's weights as they are held: in the operations that multiply by them, and beside them the head.

use minisgl_kernels::Kind;
use minisgl_kernels::attention::Distances;
use minisgl_kernels::panels::Matrix;

use crate::model::held::Norm;
use crate::model::operation::Operation;

/// All of a model.
pub struct Weights {
    /// Before the layers.
    pub before: Vec<Operation>,
    /// The layers, in order.
    pub layers: Vec<Vec<Operation>>,
    /// Behind them.
    pub after: Vec<Operation>,
    /// After the last layer.
    pub norm: Option<Norm>,
    /// [vocabulary, hidden]; rows of it are the embeddings unless these have a table of their own.
    pub head: Matrix,
    /// [vocabulary], padded.
    pub head_bias: Option<Vec<f32>>,
    /// Added to scores.
    pub distances: Option<Distances>,
}

impl Weights {
    /// All operations of a forward, in order.
    pub fn operations(&self) -> impl Iterator<Item = &Operation> {
        let layers = self.layers.iter().flatten();
        self.before.iter().chain(layers).chain(&self.after)
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        let all = self.operations().flat_map(Operation::matrices);
        self.head.bytes() + all.map(|(matrix, _)| matrix.bytes()).sum::<usize>()
    }

    /// What one token that is decoded goes through: bytes that are read of matrices, and multiply-adds. Of experts as many as
    /// a token chooses; of tables of tokens a row, which counts for nothing.
    pub fn of_a_token(&self) -> (usize, usize) {
        let head = (&self.head, (1, 1));
        let all = self.operations().flat_map(Operation::matrices).chain([head]);
        all.fold((0, 0), |(bytes, products), (matrix, (of, all))| {
            let size = matrix.n() * matrix.k();
            (bytes + matrix.bytes() * of / all, products + size * of / all)
        })
    }

    /// How the matrices are held, routers aside, by bytes, the most first.
    pub fn kinds(&self) -> Vec<(Kind, usize)> {
        let mut found: Vec<(Kind, usize)> = vec![(self.head.kind(), self.head.bytes())];
        let operations = self.operations().filter(|one| !matches!(one, Operation::Route(_)));
        for (matrix, _) in operations.flat_map(Operation::matrices) {
            match found.iter_mut().find(|(kind, _)| *kind == matrix.kind()) {
                Some((_, bytes)) => *bytes += matrix.bytes(),
                None => found.push((matrix.kind(), matrix.bytes())),
            }
        }
        found.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        found
    }
}
