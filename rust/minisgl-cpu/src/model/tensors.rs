//! Lookup of a decoder's tensors by part, in files with any naming, or as dummy weights.
//!
//! Invariants: a tensor is returned only with the shape that the configuration demands; a missing or misshapen tensor
//! is an error that names it; every tensor of the file is either requested or reported as unknown.

use std::collections::BTreeSet;
use std::sync::Mutex;

use minisgl_kernels::{Kind, TensorView};

use crate::error::{Error, Result};
use crate::files::Source;
use crate::model::names::{At, Files, Part};

/// Rows that are transposed together, so that their cache lines are reused.
const TILE: usize = 32;

/// Origin of a model's weights: files, or dummy values.
pub enum Origin {
    /// A file or a folder of files.
    Files(Box<dyn Source>),
    /// Dummy weights: seeded noise, for benchmarks.
    Dummy {
        /// Random seed of the dummy weights.
        seed: u64,
        /// Element type of matrices; vectors are f32. With MXFP4 only experts have it, other matrices are bf16.
        kind: Kind,
    },
}

/// A tensor, borrowed from a file or owned.
pub enum ModelTensor<'a> {
    /// Tensor in a mapped file.
    Borrowed(TensorView<'a>),
    /// Tensor that was computed or copied.
    Owned {
        /// Name of the tensor.
        name: String,
        /// Element type of the tensor.
        kind: Kind,
        /// Shape, outermost dimension first.
        shape: Vec<usize>,
        /// Elements in the file format's layout.
        data: Vec<u8>,
    },
}

impl<'a> ModelTensor<'a> {
    /// Returns `view`, or its transpose if `transpose` is true. Errors for the transpose of a quantized tensor.
    pub fn transposed(view: TensorView<'a>, transpose: bool) -> Result<Self> {
        let size = view.kind().block_bytes();
        let (&[rows, columns], 1) = (view.shape(), view.kind().block_len()) else {
            let text = || format!("tensor {}: quantized blocks cannot be transposed", view.name());
            return if transpose {
                Err(Error::unsupported(text()))
            } else {
                Ok(Self::Borrowed(view))
            };
        };
        if !transpose {
            return Ok(Self::Borrowed(view));
        }
        let (from, mut data) = (view.data(), vec![0; view.data().len()]);
        for tile in (0..rows).step_by(TILE) {
            for (column, to) in data.chunks_exact_mut(rows * size).enumerate() {
                for row in tile..(tile + TILE).min(rows) {
                    let at = (row * columns + column) * size;
                    to[row * size..][..size].copy_from_slice(&from[at..at + size]);
                }
            }
        }
        Ok(Self::owned(&view, "turned", [columns, rows], data))
    }

    /// Copies some rows of `view` into a matrix.
    pub fn select_rows(view: &TensorView<'_>, rows: impl Iterator<Item = usize>) -> Self {
        let rows: Vec<usize> = rows.collect();
        let parts: Vec<_> = rows.iter().map(|row| view.row(*row)).collect();
        let which = format!("rows {:?} to {:?}", rows.first(), rows.last());
        Self::owned(view, &which, [parts.len(), view.k()], parts.concat())
    }

    /// Creates a tensor named after its source and the operation `how`, by which the panel cache identifies it.
    fn owned(view: &TensorView<'_>, how: &str, shape: [usize; 2], data: Vec<u8>) -> Self {
        Self::Owned {
            name: format!("{}, {how}", view.name()),
            kind: view.kind(),
            shape: shape.to_vec(),
            data,
        }
    }

    /// Returns a view of the tensor.
    pub fn view(&self) -> Result<TensorView<'_>> {
        match self {
            Self::Borrowed(view) => Ok(*view),
            Self::Owned {
                name,
                kind,
                shape,
                data,
            } => TensorView::new(name, *kind, shape, data),
        }
    }
}

/// All tensors of one model, by part.
pub struct Tensors {
    origin: Origin,
    /// Tensor names and layouts of the file format.
    pub files: Files,
    requested: Mutex<BTreeSet<String>>,
}

impl Tensors {
    /// Creates the lookup for the weights of `origin`, with the names `files`.
    pub fn new(origin: Origin, files: Files) -> Self {
        Self {
            origin,
            files,
            requested: Mutex::new(BTreeSet::new()),
        }
    }

    /// Returns true if values are those of a checkpoint, false if a converter may have changed them (GGUF).
    pub fn is_checkpoint(&self) -> bool {
        match &self.origin {
            Origin::Files(source) => source.architecture().is_none(),
            Origin::Dummy { .. } => true,
        }
    }

    /// Returns the tensor source; `None` for dummy weights.
    pub fn source(&self) -> Option<&dyn Source> {
        match &self.origin {
            Origin::Files(source) => Some(&**source),
            Origin::Dummy { .. } => None,
        }
    }

    /// Drops mapped pages that were read so far from the process's memory.
    pub fn release(&self) {
        self.source().into_iter().for_each(Source::release);
    }

    /// Returns true if the file has the part's tensor.
    pub fn has(&self, part: Part, at: At, what: &str) -> bool {
        match &self.origin {
            Origin::Files(source) => self
                .files
                .candidates(part, at, what)
                .any(|name| source.tensor(&name).is_some()),
            // dummy MXFP4 weights look like packed checkpoints
            Origin::Dummy { kind, .. } => *kind == Kind::MXFP4 && self.files.candidates(part, at, what).any(is_mxfp4),
        }
    }

    /// Returns the first name of a part that the file has, else the first at all. Errors if the format lacks the part.
    fn name(&self, part: Part, at: At, what: &str) -> Result<String> {
        let mut names = self.files.candidates(part, at, what);
        let name = match &self.origin {
            Origin::Files(source) => {
                let mut names: Vec<String> = names.collect();
                let there = names.iter().position(|name| source.tensor(name).is_some());
                (!names.is_empty()).then(|| names.swap_remove(there.unwrap_or(0)))
            }
            Origin::Dummy { .. } => names.next(),
        };
        name.ok_or_else(|| Error::unsupported(format!("files of this architecture have no {part:?}")))
    }

    /// Returns the weight of a part with `shape`, outermost dimension first.
    pub fn part(&self, part: Part, at: At, shape: &[usize]) -> Result<ModelTensor<'_>> {
        let name = self.name(part, at, "weight")?;
        if let [rows, columns] = *shape
            && self.files.transposed
            && part.is_linear()
        {
            return transposed(self.get(&name, &[columns, rows])?.view()?);
        }
        self.get(&name, shape)
    }

    /// Returns a vector of `size` elements; `what` is "weight" or "bias".
    pub fn part_vector(&self, part: Part, at: At, what: &str, size: usize) -> Result<Vec<f32>> {
        self.part_values(part, at, what, &[size])
    }

    /// Returns the values of a part's tensor with `shape`, outermost dimension first; `what` follows the part's name.
    pub fn part_values(&self, part: Part, at: At, what: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.vector(&self.name(part, at, what)?, shape)
    }

    /// Returns [heads, size] values of a part that is stored in one tensor or in one per head.
    pub fn by_head(&self, part: Part, layer: usize, what: &str, (heads, size): (usize, usize)) -> Result<Vec<f32>> {
        let at = |head| At {
            layer,
            head,
            ..At::default()
        };
        if !self.files.by_head(part) {
            return self.vector(&self.name(part, at(0), what)?, &[heads, size]);
        }
        let mut all = Vec::with_capacity(heads * size);
        for head in 0..heads {
            all.extend(self.part_vector(part, at(head), what, size)?);
        }
        Ok(all)
    }

    /// Returns the tensor `name` and marks it as used. Its shape may differ in dimensions of 1 and in stacking only.
    fn get(&self, name: &str, shape: &[usize]) -> Result<ModelTensor<'_>> {
        self.requested
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(name.to_owned());
        match &self.origin {
            Origin::Files(source) => {
                let view = source
                    .tensor(name)
                    .ok_or_else(|| Error::file(format!("the weights lack the tensor {name}")))?;
                if view.shape() != shape {
                    // files differ: [1, n] or [n], a stack of matrices or one matrix with all rows
                    if have_same_layout(view.shape(), shape) {
                        return Ok(ModelTensor::Owned {
                            name: name.to_owned(),
                            kind: view.kind(),
                            shape: shape.to_vec(),
                            data: view.data().to_vec(),
                        });
                    }
                    return Err(Error::file(format!(
                        "the tensor {name} has shape {:?}; the configuration needs {shape:?}",
                        view.shape()
                    )));
                }
                Ok(ModelTensor::Borrowed(view))
            }
            Origin::Dummy { seed, kind } => Ok(noise(name, shape, *seed, *kind)),
        }
    }

    /// Returns the values of a tensor with `shape` as f32.
    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(self.get(name, shape)?.view()?.decode())
    }

    /// Errors if tensors of the file were never requested, unless `is_known` accepts them or they are zero biases.
    pub fn check_all_used(&self, is_known: impl Fn(&str) -> bool) -> Result<()> {
        let Origin::Files(source) = &self.origin else {
            return Ok(());
        };
        let requested = self.requested.lock().unwrap_or_else(|e| e.into_inner());
        let unused: Vec<String> = source
            .names()
            .into_iter()
            .map(str::to_owned)
            .filter(|name| !requested.contains(name) && !is_known(name))
            .filter(|name| !(name.ends_with(".bias") && is_zero(&**source, name)))
            .collect();
        if unused.is_empty() {
            return Ok(());
        }
        let shown = unused.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
        Err(Error::unsupported(format!(
            "{} tensors that the architecture has no place for: {shown}{}",
            unused.len(),
            if unused.len() > 8 { ", ..." } else { "" }
        )))
    }
}

/// Returns true if the shapes differ only in dimensions of 1, or if `one` is the stack `other` as a single matrix.
fn have_same_layout(one: &[usize], other: &[usize]) -> bool {
    if let (&[rows, columns], &[count, each, width]) = (one, other)
        && count.checked_mul(each) == Some(rows)
        && columns == width
    {
        return true;
    }
    let without_ones = |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|size| *size != 1).collect() };
    without_ones(one) == without_ones(other)
}

/// Returns the transposed matrix. Errors for quantized blocks.
fn transposed(matrix: TensorView<'_>) -> Result<ModelTensor<'static>> {
    let (name, kind) = (matrix.name(), matrix.kind());
    let &[rows, columns] = matrix.shape() else {
        return Err(Error::file(format!("the tensor {name} is not a matrix")));
    };
    let size = match kind {
        Kind::F32 => 4,
        Kind::F16 | Kind::BF16 => 2,
        _ => {
            let why =
                "is stored as [inputs, outputs], and quantized blocks cannot be transposed: use unquantized weights";
            return Err(Error::unsupported(format!("the tensor {name} {why}")));
        }
    };
    let mut data = Vec::with_capacity(matrix.data().len());
    for column in 0..columns {
        for row in 0..rows {
            let at = (row * columns + column) * size;
            data.extend_from_slice(&matrix.data()[at..at + size]);
        }
    }
    Ok(ModelTensor::owned(&matrix, "turned", [columns, rows], data))
}

/// Returns true if all bytes of the tensor are zero (GPTQ tools write such unused biases).
fn is_zero(source: &dyn Source, name: &str) -> bool {
    source
        .tensor(name)
        .is_some_and(|tensor| tensor.data().iter().all(|&byte| byte == 0))
}

/// Returns true for the name of an MXFP4 tensor in safetensors.
fn is_mxfp4(name: impl AsRef<str>) -> bool {
    name.as_ref().ends_with("_blocks")
}

/// Returns uniform noise with standard deviation 0.02, which keeps activations finite. Norm weights are 1.
fn noise(name: &str, shape: &[usize], seed: u64, kind: Kind) -> ModelTensor<'static> {
    let count: usize = shape.iter().product();
    let name = name.to_owned();
    if name.ends_with("norm.weight") || (shape.len() == 1 && !name.ends_with("bias")) {
        let data = std::iter::repeat_n(1.0_f32.to_le_bytes(), count).flatten().collect();
        return ModelTensor::Owned {
            name,
            kind: Kind::F32,
            shape: shape.to_vec(),
            data,
        };
    }
    let mut state = name.bytes().fold(seed ^ 0x9E37_79B9_7F4A_7C15, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let mut next = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let unit = (state >> 40) as f32 / (1_u32 << 24) as f32;
        (unit - 0.5) * 0.02 * 12.0_f32.sqrt()
    };
    if kind == Kind::MXFP4 && is_mxfp4(&name) {
        // 4-bit values from -6 to 6 with the scale 2^-7
        let (blocks, mut data) = (count / kind.block_len(), Vec::with_capacity(count / 32 * 17));
        for _ in 0..blocks {
            data.push(120);
            data.extend((0..16).map(|_| (next().to_bits() >> 8) as u8));
        }
        return ModelTensor::Owned {
            name,
            kind,
            shape: shape.to_vec(),
            data,
        };
    }
    let half = matches!(kind, Kind::BF16 | Kind::MXFP4) && shape.len() > 1;
    let data = if half {
        (0..count)
            .flat_map(|_| ((next().to_bits() >> 16) as u16).to_le_bytes())
            .collect()
    } else {
        (0..count).flat_map(|_| next().to_le_bytes()).collect()
    };
    let kind = if half { Kind::BF16 } else { Kind::F32 };
    ModelTensor::Owned {
        name,
        kind,
        shape: shape.to_vec(),
        data,
    }
}
