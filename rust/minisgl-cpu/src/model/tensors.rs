//! Finds the tensors of a decoder in a file, whatever the file calls them, or makes them up.
//!
//! Invariants: a tensor is handed out only with the shape that the model's config demands; whatever is missing or
//! misshapen is an error that names it; each tensor of the file is asked for or named as unknown.

use std::collections::BTreeSet;
use std::sync::Mutex;

use minisgl_kernels::{Kind, TensorView};

use crate::error::{Error, Result};
use crate::files::Source;
use crate::model::names::{At, Files, Part};

/// Rows that are transposed together: what is read of them stays in the cache.
const TILE: usize = 32;

/// Where the weights come from.
pub enum Origin {
    /// A file or a folder of files.
    Files(Box<dyn Source>),
    /// Seeded noise of a kind, for measurements.
    Dummy {
        /// Other seeds, other noise.
        seed: u64,
        /// The kind of the matrices, vectors are f32; MXFP4: that of experts, the others are bf16.
        kind: Kind,
    },
}

/// A tensor, from a file or of its own.
pub enum Found<'a> {
    /// In the file.
    Borrowed(TensorView<'a>),
    /// Made.
    Owned {
        /// Its name.
        name: String,
        /// The kind of its numbers.
        kind: Kind,
        /// Outermost first.
        shape: Vec<usize>,
        /// As in a file.
        data: Vec<u8>,
    },
}

impl<'a> Found<'a> {
    /// `view` as it is, or with what it has in rows in columns.
    pub fn turned(view: TensorView<'a>, turned: bool) -> Result<Self> {
        let size = view.kind().block_bytes();
        let (&[rows, columns], 1) = (view.shape(), view.kind().block_len()) else {
            let text = || format!("tensor {}: blocks cannot be transposed", view.name());
            return if turned {
                Err(Error::unsupported(text()))
            } else {
                Ok(Self::Borrowed(view))
            };
        };
        if !turned {
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

    /// The matrix that rows of `view` make.
    pub fn of_rows(view: &TensorView<'_>, rows: impl Iterator<Item = usize>) -> Self {
        let rows: Vec<usize> = rows.collect();
        let parts: Vec<_> = rows.iter().map(|row| view.row(*row)).collect();
        let which = format!("rows {:?} to {:?}", rows.first(), rows.last());
        Self::owned(view, &which, [parts.len(), view.k()], parts.concat())
    }

    /// Its name says what it is made of, and in which way: files of panels tell tensors apart by that.
    fn owned(view: &TensorView<'_>, how: &str, shape: [usize; 2], data: Vec<u8>) -> Self {
        Self::Owned {
            name: format!("{}, {how}", view.name()),
            kind: view.kind(),
            shape: shape.to_vec(),
            data,
        }
    }

    /// How it looks in either case.
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

/// The tensors of one model.
pub struct Tensors {
    origin: Origin,
    /// What the file calls the parts.
    pub files: Files,
    asked: Mutex<BTreeSet<String>>,
}

impl Tensors {
    /// The tensors of a file, or made-up ones.
    pub fn new(origin: Origin, files: Files) -> Self {
        Self {
            origin,
            files,
            asked: Mutex::new(BTreeSet::new()),
        }
    }

    /// Whether the numbers are those of a checkpoint, not of what a converter made of it.
    pub fn is_checkpoint(&self) -> bool {
        match &self.origin {
            Origin::Files(source) => source.architecture().is_none(),
            Origin::Dummy { .. } => true,
        }
    }

    /// The files, if there are any.
    pub fn source(&self) -> Option<&dyn Source> {
        match &self.origin {
            Origin::Files(source) => Some(&**source),
            Origin::Dummy { .. } => None,
        }
    }

    /// Lets go of the memory of what was read so far.
    pub fn release(&self) {
        self.source().into_iter().for_each(Source::release);
    }

    /// Whether the file has such a part.
    pub fn has(&self, part: Part, at: At, what: &str) -> bool {
        match &self.origin {
            Origin::Files(source) => self
                .files
                .candidates(part, at, what)
                .any(|name| source.tensor(&name).is_some()),
            // as packed checkpoints have them
            Origin::Dummy { kind, .. } => *kind == Kind::MXFP4 && self.files.candidates(part, at, what).any(is_blocks),
        }
    }

    /// The name of a part: of several the first that the file has, or that it lacks.
    fn name(&self, part: Part, at: At, what: &str) -> Result<String> {
        let mut names = self.files.candidates(part, at, what);
        let found = match &self.origin {
            Origin::Files(source) => {
                let mut names: Vec<String> = names.collect();
                let there = names.iter().position(|name| source.tensor(name).is_some());
                (!names.is_empty()).then(|| names.swap_remove(there.unwrap_or(0)))
            }
            Origin::Dummy { .. } => names.next(),
        };
        found.ok_or_else(|| Error::unsupported(format!("files of this architecture have no {part:?}")))
    }

    /// A part of `shape`, outermost dimension first.
    pub fn part(&self, part: Part, at: At, shape: &[usize]) -> Result<Found<'_>> {
        let name = self.name(part, at, "weight")?;
        if let [rows, columns] = *shape
            && self.files.transposed
            && part.is_linear()
        {
            return turned(self.get(&name, &[columns, rows])?.view()?);
        }
        self.get(&name, shape)
    }

    /// [size] of a part; `what` is weight or bias.
    pub fn part_vector(&self, part: Part, at: At, what: &str, size: usize) -> Result<Vec<f32>> {
        self.vector(&self.name(part, at, what)?, &[size])
    }

    /// The numbers of a part that is a vector for each of some heads, in one tensor or in one of each.
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

    /// The tensor `name` of `shape`, outermost dimension first.
    fn get(&self, name: &str, shape: &[usize]) -> Result<Found<'_>> {
        self.asked
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(name.to_owned());
        match &self.origin {
            Origin::Files(source) => {
                let view = source
                    .tensor(name)
                    .ok_or_else(|| Error::file(format!("the weights lack the tensor {name}")))?;
                if view.shape() != shape {
                    // a row of its own or a vector, a matrix of all experts' rows: files differ
                    if lie_alike(view.shape(), shape) {
                        return Ok(Found::Owned {
                            name: name.to_owned(),
                            kind: view.kind(),
                            shape: shape.to_vec(),
                            data: view.data().to_vec(),
                        });
                    }
                    return Err(Error::file(format!(
                        "the tensor {name} is {:?}, the model's config wants {shape:?}",
                        view.shape()
                    )));
                }
                Ok(Found::Borrowed(view))
            }
            Origin::Dummy { seed, kind } => Ok(noise(name, shape, *seed, *kind)),
        }
    }

    /// Numbers of `shape` as f32.
    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(self.get(name, shape)?.view()?.decode())
    }

    /// Raises if the file has tensors that nobody asked for, `known` and biases of zeros aside: a model that leaves
    /// weights out computes something else than its author meant.
    pub fn all_used(&self, known: impl Fn(&str) -> bool) -> Result<()> {
        let Origin::Files(source) = &self.origin else {
            return Ok(());
        };
        let asked = self.asked.lock().unwrap_or_else(|e| e.into_inner());
        let left: Vec<String> = source
            .names()
            .into_iter()
            .map(str::to_owned)
            .filter(|name| !asked.contains(name) && !known(name))
            .filter(|name| !(name.ends_with(".bias") && is_zero(&**source, name)))
            .collect();
        if left.is_empty() {
            return Ok(());
        }
        let shown = left.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
        Err(Error::unsupported(format!(
            "{} tensors that the architecture has no place for: {shown}{}",
            left.len(),
            if left.len() > 8 { ", ..." } else { "" }
        )))
    }
}

/// Whether numbers lie alike in both shapes, which dimensions of one do not change, nor that of `one` all rows of a stack
/// of matrices are those of one.
fn lie_alike(one: &[usize], other: &[usize]) -> bool {
    if let (&[rows, columns], &[count, each, width]) = (one, other)
        && count.checked_mul(each) == Some(rows)
        && columns == width
    {
        return true;
    }
    let of = |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|size| *size != 1).collect() };
    of(one) == of(other)
}

/// A matrix with its rows as columns.
fn turned(matrix: TensorView<'_>) -> Result<Found<'static>> {
    let (name, kind) = (matrix.name(), matrix.kind());
    let &[rows, columns] = matrix.shape() else {
        return Err(Error::file(format!("the tensor {name} is no matrix")));
    };
    let size = match kind {
        Kind::F32 => 4,
        Kind::F16 | Kind::BF16 => 2,
        _ => {
            let why = "lies with its inputs first, and blocks cannot be turned: use full weights";
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
    Ok(Found::owned(&matrix, "turned", [columns, rows], data))
}

/// GPTQ's tools write biases that no model asks for.
fn is_zero(source: &dyn Source, name: &str) -> bool {
    source
        .tensor(name)
        .is_some_and(|tensor| tensor.data().iter().all(|&byte| byte == 0))
}

/// Whether it is MXFP4 as safetensors have it.
fn is_blocks(name: impl AsRef<str>) -> bool {
    name.as_ref().ends_with("_blocks")
}

/// Uniform noise of standard deviation 0.02, which keeps activations finite; norms are 1.
fn noise(name: &str, shape: &[usize], seed: u64, kind: Kind) -> Found<'static> {
    let count: usize = shape.iter().product();
    let name = name.to_owned();
    if name.ends_with("norm.weight") || (shape.len() == 1 && !name.ends_with("bias")) {
        let data = std::iter::repeat_n(1.0_f32.to_le_bytes(), count).flatten().collect();
        return Found::Owned {
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
    if kind == Kind::MXFP4 && is_blocks(&name) {
        // of 4-bit numbers from -6 to 6, whose scale is 2^-7
        let (blocks, mut data) = (count / kind.block_len(), Vec::with_capacity(count / 32 * 17));
        for _ in 0..blocks {
            data.push(120);
            data.extend((0..16).map(|_| (next().to_bits() >> 8) as u8));
        }
        return Found::Owned {
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
    Found::Owned {
        name,
        kind,
        shape: shape.to_vec(),
        data,
    }
}
