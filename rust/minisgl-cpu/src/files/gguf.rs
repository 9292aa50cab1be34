//! GGUF files: a header that is checked once, and tensors that stay in the mapped file.
//!
//! Invariants: nothing is allocated in proportion to a count until the file is known to be long enough for it; tensors
//! lie within the file and do not overlap; a duplicate or invalid entry is an error that names the key or tensor.
//!
//! Supported are versions 2 and 3, little endian. Header: magic, version, count of tensors, count of keys; keys with
//! values; for each tensor its name, dimensions (innermost first), type, and offset from the start of the data, which
//! is the next multiple of the alignment after the header.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use minisgl_kernels::{Kind, TensorView};

use super::{Entry, Mapping, Source};
use crate::{Error, Result};

pub(super) const ARCHITECTURE: &str = "general.architecture";
const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: usize = 32;
/// Published files have up to 4. A converted checkpoint may have the patches of a vision tower, which have 5.
const MAX_DIMS: usize = 5;
/// Maximum number of keys. Real files have a few dozen keys and some thousand tensors.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
/// Minimum bytes of a key: length of the name, type, value.
const MIN_KEY_BYTES: usize = 8 + 4 + 1;
/// Minimum bytes of a tensor's entry: length of the name, one byte of name, rank, one dimension, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// ggml types that this crate has no `Kind` for: (id, name, elements per block, bytes per block).
const OTHER_TYPES: [(u32, &str, usize, usize); 14] = [
    (9, "Q8_1", 32, 40),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
];

/// Header entry of one tensor.
#[derive(Clone, Debug)]
pub struct TensorInfo<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Name of the tensor's type in ggml, such as "Q4_K".
    pub type_name: &'static str,
    /// Element type, `None` if this crate has no decoder for it.
    pub kind: Option<Kind>,
    /// Byte range of the tensor's data in the file.
    pub bytes: Range<usize>,
    dims: [usize; MAX_DIMS],
    num_dims: usize,
}

impl TensorInfo<'_> {
    /// Returns the dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.dims[MAX_DIMS - self.num_dims..]
    }
}

/// Header of a GGUF file: metadata and tensor entries, all checked.
#[derive(Debug)]
pub struct Header<'a> {
    /// Metadata as (key, value), in the file's order.
    pub metadata: Vec<(&'a str, Value<'a>)>,
    /// Tensor entries, in the file's order.
    pub tensors: Vec<TensorInfo<'a>>,
    /// Offset of the data in the file, in bytes.
    pub head_bytes: usize,
}

impl<'a> Header<'a> {
    /// Parses and checks the header of a file with the content `bytes`. Errors do not name the file.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes);
        let (num_tensors, num_keys) = preamble(&mut reader)?;
        let metadata = read_metadata(&mut reader, num_keys)?;
        let alignment = alignment(&metadata)?;
        let mut tensors = read_tensors(&mut reader, num_tensors)?;
        let end = reader.position();
        let head_bytes = if tensors.is_empty() {
            end
        } else {
            end.next_multiple_of(alignment)
        };
        locate_data(&mut tensors, head_bytes, alignment, bytes.len())?;
        Ok(Self {
            metadata,
            tensors,
            head_bytes,
        })
    }

    /// Returns the metadata value of `key`, `None` if the key is missing.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        let entry = self.metadata.iter().find(|(name, _)| *name == key);
        entry.map(|(_, value)| value)
    }
}

fn preamble(reader: &mut Reader<'_>) -> Result<(u64, u64)> {
    if reader.take(4, "").ok() != Some(MAGIC) {
        return Err(Error::file("not a GGUF file: it does not begin with GGUF"));
    }
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => {}
        _ if version.swap_bytes() < 1 << 16 && version >= 1 << 16 => {
            return Err(Error::unsupported("big-endian GGUF files are not supported"));
        }
        _ => {
            return Err(Error::unsupported(format!(
                "GGUF version {version}: only 2 and 3 are supported"
            )));
        }
    }
    let counts = (reader.u64("the counts")?, reader.u64("the counts")?);
    for (what, count, limit) in [("tensors", counts.0, MAX_TENSORS), ("keys", counts.1, MAX_KEYS)] {
        if count > limit {
            return Err(Error::file(format!("it claims {count} {what}; the limit is {limit}")));
        }
    }
    Ok(counts)
}

/// Returns `count`, or an error if the rest of the file cannot hold that many entries of `min_bytes` bytes.
fn checked_count(reader: &Reader<'_>, what: &str, count: u64, min_bytes: usize) -> Result<usize> {
    let limit = reader.left() / min_bytes;
    let checked = usize::try_from(count).ok().filter(|&count| count <= limit);
    checked.ok_or_else(|| Error::file(format!("it claims {count} {what}; the file can hold at most {limit}")))
}

fn read_metadata<'a>(reader: &mut Reader<'a>, count: u64) -> Result<Vec<(&'a str, Value<'a>)>> {
    let capacity = checked_count(reader, "keys", count, MIN_KEY_BYTES)?;
    let (mut metadata, mut seen) = (Vec::with_capacity(capacity), HashSet::with_capacity(capacity));
    for i in 0..count {
        let key = reader.text(&format!("the name of key {i}"))?;
        if !seen.insert(key) {
            return Err(Error::file(format!("key {key}: occurs twice")));
        }
        metadata.push((key, Value::read(reader, key)?));
    }
    Ok(metadata)
}

fn alignment(metadata: &[(&str, Value<'_>)]) -> Result<usize> {
    let key = "general.alignment";
    match metadata.iter().find(|(name, _)| *name == key) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some((_, Value::Unsigned(n))) if n.is_power_of_two() && *n <= 1 << 20 => Ok(*n as usize),
        Some((_, value)) => Err(Error::file(format!(
            "key {key}: {value:?} is not a power of two up to a million"
        ))),
    }
}

/// Reads the entries of `count` tensors. Their `bytes` are still relative to the start of the data.
fn read_tensors<'a>(reader: &mut Reader<'a>, count: u64) -> Result<Vec<TensorInfo<'a>>> {
    let capacity = checked_count(reader, "tensors", count, MIN_TENSOR_BYTES)?;
    let (mut tensors, mut seen) = (Vec::with_capacity(capacity), HashSet::with_capacity(capacity));
    for i in 0..count {
        let name = reader.text(&format!("the name of tensor {i}"))?;
        if name.is_empty() {
            return Err(Error::file(format!("tensor {i}: its name is empty")));
        }
        if !seen.insert(name) {
            return Err(Error::file(format!("tensor {name}: occurs twice")));
        }
        tensors.push(read_tensor(reader, name)?);
    }
    Ok(tensors)
}

fn read_tensor<'a>(reader: &mut Reader<'a>, name: &'a str) -> Result<TensorInfo<'a>> {
    let bad = |what: String| Error::file(format!("tensor {name}: {what}"));
    let what = format!("tensor {name}");
    let num_dims = reader.u32(&what)? as usize;
    if !(1..=MAX_DIMS).contains(&num_dims) {
        return Err(bad(format!("{num_dims} dimensions; must be 1 to {MAX_DIMS}")));
    }
    let mut dims = [1; MAX_DIMS];
    for dim in dims.iter_mut().rev().take(num_dims) {
        let n = reader.u64(&what)?;
        *dim = usize::try_from(n).map_err(|_| bad(format!("dimension {n} is too large")))?;
    }
    let shape = &dims[MAX_DIMS - num_dims..];
    let type_id = reader.u32(&what)?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.id() == type_id);
    let read = kind.map(|kind| (kind.name(), kind.block_len(), kind.block_bytes()));
    let other = OTHER_TYPES.iter().find(|other| other.0 == type_id);
    let Some((type_name, block_len, block_bytes)) = read.or(other.map(|other| (other.1, other.2, other.3))) else {
        return Err(bad(format!("type {type_id} is unknown")));
    };
    let count = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    let size = count.and_then(|n| (n / block_len).checked_mul(block_bytes));
    let Some(size) = size.filter(|&size| size > 0 && dims[MAX_DIMS - 1].is_multiple_of(block_len)) else {
        return Err(bad(format!(
            "its shape {shape:?} does not fit {type_name}, which has blocks of {block_len}"
        )));
    };
    let offset = reader.u64(&what)?;
    let end = usize::try_from(offset)
        .ok()
        .and_then(|start| Some(start..start.checked_add(size)?));
    Ok(TensorInfo {
        name,
        type_name,
        kind,
        bytes: end.ok_or_else(|| bad(format!("offset {offset}: beyond the file")))?,
        dims,
        num_dims,
    })
}

/// Makes the byte ranges absolute. Errors if one is misaligned, not within the file, or overlaps another.
fn locate_data(tensors: &mut [TensorInfo<'_>], data: usize, alignment: usize, len: usize) -> Result<()> {
    for tensor in tensors.iter_mut() {
        let bad = |what: &str| {
            let (name, Range { start, end }) = (tensor.name, &tensor.bytes);
            Error::file(format!("tensor {name}: its bytes {start} to {end} of the data {what}"))
        };
        if !tensor.bytes.start.is_multiple_of(alignment) {
            return Err(bad(&format!("do not start at a multiple of {alignment}")));
        }
        match tensor.bytes.end.checked_add(data) {
            Some(end) if end <= len => tensor.bytes = tensor.bytes.start + data..end,
            _ => {
                let have = len.saturating_sub(data);
                return Err(bad(&format!("exceed the {have} bytes in the file")));
            }
        }
    }
    let mut order: Vec<&TensorInfo<'_>> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.bytes.start);
    for pair in order.windows(2) {
        if pair[0].bytes.end > pair[1].bytes.start {
            return Err(Error::file(format!(
                "tensors {} and {} overlap",
                pair[0].name, pair[1].name
            )));
        }
    }
    Ok(())
}

/// Maps all files of the model whose first file is `path`: `NAME-00001-of-00003.gguf` and so on, if it has parts.
pub fn parts(path: &Path) -> Result<Vec<(PathBuf, Mapping)>> {
    let first = Mapping::open(path)?;
    let (number, count) = first.named(|bytes| Ok(part_number(&Header::parse(bytes)?)))?;
    if count <= 1 {
        return Ok(vec![(path.to_owned(), first)]);
    }
    let bad = |what: String| Error::file(what).within(first.name());
    let end = format!("-{:05}-of-{count:05}.gguf", number.saturating_add(1));
    let Some(stem) = first.name().strip_suffix(&end).filter(|_| count < 100_000) else {
        return Err(bad(format!(
            "part {number} (from 0) of {count}: its name must end in {end}"
        )));
    };
    let named = |i: u64| format!("{stem}-{:05}-of-{count:05}.gguf", i + 1);
    if number != 0 {
        return Err(bad(format!("a later part of a model: name the first, {}", named(0))));
    }
    let mut files = Vec::new();
    for i in 1..count {
        let path = path.with_file_name(named(i));
        if !path.exists() {
            return Err(bad(format!("one of {count} parts: {} is missing beside it", named(i))));
        }
        let part = Mapping::open(&path)?;
        let (number, parts) = part.named(|bytes| Ok(part_number(&Header::parse(bytes)?)))?;
        if (number, parts) != (i, count) {
            let text = format!("split.no {number} and split.count {parts}: its name says {i} and {count}");
            return Err(Error::file(text).within(part.name()));
        }
        files.push((path, part));
    }
    files.insert(0, (path.to_owned(), first));
    Ok(files)
}

/// Returns the index of this part (from 0) and the number of parts of the model: (0, 1) for a single file.
fn part_number(header: &Header<'_>) -> (u64, u64) {
    let whole = |key, default| match header.get(key) {
        Some(Value::Unsigned(n)) => *n,
        Some(Value::Signed(n)) => u64::try_from(*n).unwrap_or(default),
        _ => default,
    };
    (whole("split.no", 0), whole("split.count", 1))
}

/// Tensor source of a GGUF model, in one file or several parts. Every tensor has a type that can be decoded.
#[derive(Debug)]
pub struct File {
    mappings: Vec<Mapping>,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    architecture: Option<String>,
}

impl File {
    /// Maps the file at `path`, or all parts if it is the first of several, and checks their headers.
    pub fn open(path: &Path) -> Result<Self> {
        let mappings: Vec<Mapping> = parts(path)?.into_iter().map(|(_, mapping)| mapping).collect();
        let (mut all, mut by_name, mut architecture) = (Vec::new(), HashMap::new(), None);
        for (i, mapping) in mappings.iter().enumerate() {
            mapping.named(|bytes| {
                let header = Header::parse(bytes)?;
                if let (0, Some(Value::Text(name))) = (i, header.get(ARCHITECTURE)) {
                    architecture = Some((*name).to_owned());
                }
                for entry in entries(&header, i)? {
                    if by_name.insert(entry.name.clone(), all.len()).is_some() {
                        return Err(Error::file(format!("tensor {}: in another part, too", entry.name)));
                    }
                    all.push(entry);
                }
                Ok(())
            })?;
        }
        Ok(Self {
            mappings,
            entries: all,
            by_name,
            architecture,
        })
    }

    /// Returns the mapping of the first file. Its header can be parsed again for the metadata.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        &self.mappings[0]
    }
}

fn entries(header: &Header<'_>, file: usize) -> Result<Vec<Entry>> {
    let entry = |tensor: &TensorInfo<'_>| match tensor.kind {
        Some(kind) => Ok(Entry {
            name: tensor.name.into(),
            kind,
            shape: tensor.shape().into(),
            file,
            bytes: tensor.bytes.clone(),
        }),
        None => Err(Error::unsupported(format!(
            "tensor {}: the CPU engine does not read {}: choose another quantization of the same model, such as {}",
            tensor.name, tensor.type_name, "Q4_K_M, IQ4_XS or Q2_K"
        ))),
    };
    let mut entries = header.tensors.iter().map(entry).collect::<Result<Vec<_>>>()?;
    entries.sort_by_key(|entry| entry.bytes.start);
    Ok(entries)
}

impl Source for File {
    fn architecture(&self) -> Option<&str> {
        self.architecture.as_deref()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = &self.entries[*self.by_name.get(name)?];
        entry.view(self.mappings[entry.file].bytes()).ok()
    }

    fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    fn names(&self) -> Vec<&str> {
        let names = self.entries.iter().map(|entry| entry.name.as_str());
        names.collect()
    }
}

/// Metadata value of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// Unsigned integer of 8 to 64 bits.
    Unsigned(u64),
    /// Signed integer of 8 to 64 bits.
    Signed(i64),
    /// Float of 32 or 64 bits.
    Float(f64),
    /// Boolean metadata value.
    Bool(bool),
    /// UTF-8 string in the metadata.
    Text(&'a str),
    /// Array of values of one type (no nested arrays).
    List(List<'a>),
}

/// Array of a GGUF file's metadata, checked when it was parsed: iteration cannot fail.
#[derive(Clone, PartialEq)]
pub struct List<'a> {
    element: Type,
    len: usize,
    bytes: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Type {
    fn read(reader: &mut Reader<'_>, what: &str) -> Result<Self> {
        const ALL: [Type; 13] = [
            Type::U8,
            Type::I8,
            Type::U16,
            Type::I16,
            Type::U32,
            Type::I32,
            Type::F32,
            Type::Bool,
            Type::Text,
            Type::List,
            Type::U64,
            Type::I64,
            Type::F64,
        ];
        let number = reader.u32(what)?;
        let found = ALL.get(number as usize);
        found
            .copied()
            .ok_or_else(|| Error::file(format!("{what}: type {number} is unknown")))
    }

    /// Returns the minimum bytes of one value of this type.
    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Text => 8,
            Self::List => 12,
        }
    }
}

impl<'a> Value<'a> {
    /// Reads the type and the value of `key`.
    pub(super) fn read(reader: &mut Reader<'a>, key: &str) -> Result<Self> {
        let what = format!("key {key}");
        match Type::read(reader, &what)? {
            Type::List => Ok(Self::List(List::read(reader, &what)?)),
            one => Self::read_scalar(reader, one, &what),
        }
    }

    fn read_scalar(reader: &mut Reader<'a>, kind: Type, what: &str) -> Result<Self> {
        Ok(match kind {
            Type::U8 => Self::Unsigned(u8::from_le_bytes(reader.array(what)?).into()),
            Type::U16 => Self::Unsigned(u16::from_le_bytes(reader.array(what)?).into()),
            Type::U32 => Self::Unsigned(u32::from_le_bytes(reader.array(what)?).into()),
            Type::U64 => Self::Unsigned(u64::from_le_bytes(reader.array(what)?)),
            Type::I8 => Self::Signed(i8::from_le_bytes(reader.array(what)?).into()),
            Type::I16 => Self::Signed(i16::from_le_bytes(reader.array(what)?).into()),
            Type::I32 => Self::Signed(i32::from_le_bytes(reader.array(what)?).into()),
            Type::I64 => Self::Signed(i64::from_le_bytes(reader.array(what)?)),
            Type::F32 => Self::Float(f32::from_le_bytes(reader.array(what)?).into()),
            Type::F64 => Self::Float(f64::from_le_bytes(reader.array(what)?)),
            Type::Bool => match reader.array::<1>(what)?[0] {
                0 => Self::Bool(false),
                1 => Self::Bool(true),
                other => return Err(Error::file(format!("{what}: {other} is not a bool"))),
            },
            Type::Text => Self::Text(reader.text(what)?),
            Type::List => return Err(Error::file(format!("{what}: nested lists are not supported"))),
        })
    }
}

impl<'a> List<'a> {
    fn read(reader: &mut Reader<'a>, what: &str) -> Result<Self> {
        let element = Type::read(reader, what)?;
        if element == Type::List {
            return Err(Error::file(format!("{what}: nested lists are not supported")));
        }
        let count = reader.u64(what)?;
        let most = reader.left() / element.min_bytes();
        let Some(len) = usize::try_from(count).ok().filter(|&len| len <= most) else {
            return Err(Error::file(format!(
                "{what}: it claims {count} values; the file can hold at most {most}"
            )));
        };
        let rest = reader.rest();
        let start = reader.position();
        if matches!(element, Type::Text | Type::Bool) {
            for _ in 0..len {
                Value::read_scalar(reader, element, what)?;
            }
        } else {
            reader.take(len * element.min_bytes(), what)?;
        }
        let bytes = &rest[..reader.position() - start];
        Ok(Self { element, len, bytes })
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the array has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the values in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (mut reader, element) = (Reader::new(self.bytes), self.element);
        (0..self.len).map_while(move |_| Value::read_scalar(&mut reader, element, "a list").ok())
    }
}

/// Prints length and element type only, as arrays may have very many values.
impl std::fmt::Debug for List<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "a list of {} {:?}", self.len, self.element)
    }
}

/// Cursor over the bytes of a file, with checked reads.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns the unread bytes without consuming them.
    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    /// Consumes and returns the next `count` bytes. The error of a file that is too short names `what`.
    pub(super) fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8]> {
        if count > self.left() {
            return Err(Error::file(format!("the file ends in {what}")));
        }
        let bytes = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a string: its length in bytes (u64), then UTF-8.
    pub(super) fn text(&mut self, what: &str) -> Result<&'a str> {
        let len = self.u64(what)?;
        let left = self.left();
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= left) else {
            return Err(Error::file(format!(
                "the file ends in {what}: a string of {len} bytes with {left} bytes left"
            )));
        };
        std::str::from_utf8(self.take(len, what)?).map_err(|error| Error::file(format!("{what} is not UTF-8: {error}")))
    }
}
