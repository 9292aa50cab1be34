//! View of a tensor's bytes.

use std::borrow::Cow;

use crate::blocks::{self, Kind};
use crate::{Error, Result};

/// Bytes of an MXFP4 block without its exponent.
const HALF: usize = 16;

/// View of a tensor's bytes. Blocks run along the last dimension: a matrix is `[n, k]`, n rows of k.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    name: &'a str,
    kind: Kind,
    shape: &'a [usize],
    data: &'a [u8],
    /// Exponents of MXFP4, one for each 16 bytes of `data` (32 elements); `None`: they are within the blocks.
    scales: Option<&'a [u8]>,
    rows: usize,
    row_bytes: usize,
}

impl<'a> TensorView<'a> {
    /// Returns the view with another name.
    #[must_use]
    pub fn renamed(self, name: &'a str) -> Self {
        Self { name, ..self }
    }

    /// Creates a view of `data`. Fails unless it has exactly the bytes that `kind` and `shape` (outermost first) need.
    pub fn new(name: &'a str, kind: Kind, shape: &'a [usize], data: &'a [u8]) -> Result<Self> {
        let bad = |what: String| Error::file(format!("tensor {name}: {what}"));
        let Some((&k, outer)) = shape.split_last() else {
            return Err(bad("its shape must have at least one dimension".into()));
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
                scales: None,
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

    /// Creates a view of MXFP4 with separate exponents, one for each 16 bytes. Fails if the sizes do not match.
    pub fn apart(name: &'a str, shape: &'a [usize], data: &'a [u8], scales: &'a [u8]) -> Result<Self> {
        let count = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let fits = |blocks: usize| blocks == scales.len() && blocks.checked_mul(HALF) == Some(data.len());
        match (count, shape.last()) {
            (Some(count), Some(&k)) if k > 0 && k.is_multiple_of(2 * HALF) && fits(count / (2 * HALF)) => Ok(Self {
                name,
                kind: Kind::MXFP4,
                shape,
                data,
                scales: Some(scales),
                rows: count / k,
                row_bytes: k / 2,
            }),
            _ => Err(Error::file(format!(
                "tensor {name}: {} bytes and {} scales do not fit its shape {shape:?}",
                data.len(),
                scales.len()
            ))),
        }
    }

    /// Returns the name in the file.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the storage kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the bytes, row after row, without separate scales.
    #[must_use]
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Returns the number of rows, over all dimensions but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the elements in a row.
    #[must_use]
    pub fn k(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Returns the bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Returns the stored blocks of row `r`. Panics if there is no such row.
    #[must_use]
    pub fn row(&self, r: usize) -> Cow<'a, [u8]> {
        let data = &self.data[r * self.row_bytes..(r + 1) * self.row_bytes];
        let Some(scales) = self.scales else {
            return Cow::Borrowed(data);
        };
        let (blocks, _) = data.as_chunks::<HALF>();
        let scales = &scales[r * blocks.len()..];
        let mut row = Vec::with_capacity(blocks.len() * Kind::MXFP4.block_bytes());
        for (block, scale) in blocks.iter().zip(scales) {
            let number = |i: usize| block[i / 2] >> (4 * (i % 2)) & 15;
            row.push(*scale);
            row.extend((0..HALF).map(|i| number(i) | number(HALF + i) << 4));
        }
        Cow::Owned(row)
    }

    /// Decodes row `r` into `out`, which must have `k` elements. Panics if there is no such row.
    pub fn decode_row(&self, r: usize, out: &mut [f32]) {
        blocks::decode(self.kind, &self.row(r), out);
    }

    /// Decodes all rows, one after the other.
    #[must_use]
    pub fn decode(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.k()];
        if self.scales.is_none() {
            blocks::decode(self.kind, self.data, &mut out);
            return out;
        }
        let rows = out.chunks_exact_mut(self.k()).enumerate();
        rows.for_each(|(r, row)| self.decode_row(r, row));
        out
    }

    /// Returns part `i` along the outermost dimension, such as one expert. Fails if there is no part `i`.
    pub fn slice(&self, i: usize) -> Result<Self> {
        let (n, inner) = match self.shape.split_first() {
            Some((&n, inner)) if !inner.is_empty() && i < n => (n, inner),
            _ => {
                return Err(Error::file(format!(
                    "tensor {}: index {i} is outside its shape {:?}",
                    self.name, self.shape
                )));
            }
        };
        let part = |data: &'a [u8]| &data[i * (data.len() / n)..(i + 1) * (data.len() / n)];
        match self.scales {
            None => Self::new(self.name, self.kind, inner, part(self.data)),
            Some(scales) => Self::apart(self.name, inner, part(self.data), part(scales)),
        }
    }
}
