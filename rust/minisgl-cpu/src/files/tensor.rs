//! A tensor where it lies, and where tensors come from.

use super::blocks::{self, Kind};
use crate::{Error, Result};

/// A tensor where it lies. The last dimension is the one along which blocks lie: a matrix is `[n, k]`, n rows of k.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    name: &'a str,
    kind: Kind,
    shape: &'a [usize],
    data: &'a [u8],
    rows: usize,
    row_bytes: usize,
}

impl<'a> TensorView<'a> {
    /// The same by another name.
    #[must_use]
    pub fn renamed(self, name: &'a str) -> Self {
        Self { name, ..self }
    }

    /// A view of `data`, which has to be just what `kind` and `shape` (outermost first) need.
    pub fn new(name: &'a str, kind: Kind, shape: &'a [usize], data: &'a [u8]) -> Result<Self> {
        let bad = |what: String| Error::file(format!("tensor {name}: {what}"));
        let Some((&k, outer)) = shape.split_last() else {
            return Err(bad("it has no dimensions".into()));
        };
        let rows = outer.iter().try_fold(1usize, |rows, &n| rows.checked_mul(n));
        let row_bytes = kind.bytes_of(k).ok_or_else(|| {
            bad(format!(
                "rows of {k} do not fill blocks of {} ({})",
                kind.block_len(),
                kind.name()
            ))
        })?;
        let bytes = rows.and_then(|rows| rows.checked_mul(row_bytes));
        match (rows, bytes) {
            (Some(rows), Some(bytes)) if bytes == data.len() => Ok(Self {
                name,
                kind,
                shape,
                data,
                rows,
                row_bytes,
            }),
            _ => Err(bad(format!(
                "{} bytes of data do not fit its shape {shape:?} in {}",
                data.len(),
                kind.name()
            ))),
        }
    }

    /// What the file calls it.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// How its numbers are stored.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Outermost dimension first.
    #[must_use]
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// All its bytes, row after row.
    #[must_use]
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// How many rows there are, over all dimensions but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers in a row.
    #[must_use]
    pub fn k(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The bytes of row `r`, which has to be there.
    #[must_use]
    pub fn row(&self, r: usize) -> &'a [u8] {
        &self.data[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Row `r`, which has to be there, as numbers; `out` holds `k` of them.
    pub fn decode_row(&self, r: usize, out: &mut [f32]) {
        blocks::decode(self.kind, self.row(r), out);
    }

    /// All numbers, row after row.
    #[must_use]
    pub fn decode(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.k()];
        blocks::decode(self.kind, self.data, &mut out);
        out
    }

    /// Part `i` along the outermost dimension, such as one expert; without it or that dimension an error.
    pub fn slice(&self, i: usize) -> Result<Self> {
        let (n, inner) = match self.shape.split_first() {
            Some((&n, inner)) if !inner.is_empty() && i < n => (n, inner),
            _ => {
                return Err(Error::file(format!(
                    "tensor {}: no part {i} in its shape {:?}",
                    self.name, self.shape
                )));
            }
        };
        let bytes = self.data.len() / n;
        Self::new(self.name, self.kind, inner, &self.data[i * bytes..(i + 1) * bytes])
    }
}

/// Tensors by name, wherever they come from.
pub trait Source: Send + Sync {
    /// The tensor of that name.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// All names, in the order of the data.
    fn names(&self) -> Vec<&str>;

    /// ggml's name of the architecture, whose names and order of rows the tensors have; none: those of checkpoints.
    fn architecture(&self) -> Option<&str> {
        None
    }

    /// Bytes of all tensors.
    fn bytes(&self) -> usize {
        let sizes = self.names().into_iter().filter_map(|name| self.tensor(name));
        sizes.map(|tensor| tensor.data().len()).sum()
    }
}

/// A tensor's place in a mapped file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub kind: Kind,
    pub shape: Vec<usize>,
    /// Which of several files.
    pub file: usize,
    pub bytes: std::ops::Range<usize>,
}

impl Entry {
    pub fn view<'a>(&'a self, file: &'a [u8]) -> Result<TensorView<'a>> {
        let data = file
            .get(self.bytes.clone())
            .ok_or_else(|| Error::file(format!("tensor {}: beyond its file", self.name)))?;
        TensorView::new(&self.name, self.kind, &self.shape, data)
    }
}
