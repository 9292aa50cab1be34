//! Tensors in files: GGUF and safetensors by mmap, one way to ask for both.
//!
//! Invariants: what a `TensorView` says about itself is checked against its bytes, so reading rows of it cannot go
//! beyond them; a file that is damaged is an error that names the tensor or key, never a panic, and costs no memory
//! in proportion to what it claims.
//!
//! A mapped file that somebody shortens while it is mapped ends the process (SIGBUS), as in every program that maps.

pub mod blocks;
pub mod cache;
pub mod gguf;
#[allow(unsafe_code)]
mod mapping;
pub mod quantize;
pub mod safetensors;
mod text_half;

use std::path::Path;

use crate::{Error, Result};

pub use mapping::Mapping;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // ggml's names
pub enum Kind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    BF16,
    /// 32 numbers of 4 bits, less 8, times a scale.
    Q4_0,
    /// 32 numbers of 4 bits times a scale, plus a minimum.
    Q4_1,
    /// 32 numbers of 5 bits, less 16, times a scale.
    Q5_0,
    /// 32 numbers of 5 bits times a scale, plus a minimum.
    Q5_1,
    /// 32 numbers of 8 bits times a scale.
    Q8_0,
    /// 256 numbers of 4 bits; a scale and a minimum of 6 bits for 32 of them.
    Q4_K,
    /// 256 numbers of 5 bits; a scale and a minimum of 6 bits for 32 of them.
    Q5_K,
    /// 256 numbers of 6 bits, less 32; a scale of 8 bits for 16 of them.
    Q6_K,
}

impl Kind {
    /// All there are.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// As ggml spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.traits().0
    }

    /// Numbers in a block.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.traits().1
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.traits().2
    }

    /// The kind that ggml spells so.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Bytes of `len` numbers, or nothing if they do not fill blocks or do not fit into memory.
    #[must_use]
    pub fn bytes_of(self, len: usize) -> Option<usize> {
        let (_, block_len, block_bytes) = self.traits();
        if !len.is_multiple_of(block_len) {
            return None;
        }
        (len / block_len).checked_mul(block_bytes)
    }

    fn traits(self) -> (&'static str, usize, usize) {
        match self {
            Self::F32 => ("F32", 1, 4),
            Self::F16 => ("F16", 1, 2),
            Self::BF16 => ("BF16", 1, 2),
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q4_K => ("Q4_K", 256, 144),
            Self::Q5_K => ("Q5_K", 256, 176),
            Self::Q6_K => ("Q6_K", 256, 210),
        }
    }
}

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

/// A GGUF file, or a folder of safetensors; of models with two halves the text half.
pub fn open(path: &Path) -> Result<Box<dyn Source>> {
    let source: Box<dyn Source> = if path.is_dir() {
        Box::new(safetensors::Folder::open(path)?)
    } else {
        Box::new(gguf::File::open(path)?)
    };
    Ok(text_half::text_half_of(source))
}

/// A tensor's place in a mapped file.
#[derive(Debug)]
struct Entry {
    name: String,
    kind: Kind,
    shape: Vec<usize>,
    /// Which of several files.
    file: usize,
    bytes: std::ops::Range<usize>,
}

impl Entry {
    fn view<'a>(&'a self, file: &'a [u8]) -> Result<TensorView<'a>> {
        let data = file
            .get(self.bytes.clone())
            .ok_or_else(|| Error::file(format!("tensor {}: beyond its file", self.name)))?;
        TensorView::new(&self.name, self.kind, &self.shape, data)
    }
}

#[cfg(test)]
mod tests;
