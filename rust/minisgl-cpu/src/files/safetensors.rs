//! A folder of safetensors files, as hubs and training write them.
//!
//! Invariants: the same files are read that the Python side reads: those of the index, else `model.safetensors`, else
//! all; every tensor is there once and of a type that can be computed with, lists of ids aside, which are left out.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use minisgl_kernels::{Kind, TensorView};
use safetensors::{Dtype, SafeTensors};

use super::{Entry, Mapping, Source};
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// What MXFP4 is in: bytes of two numbers each, and an exponent for 16 of them.
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
const SUFFIX: &str = "safetensors";

/// The folder's files, mapped.
#[derive(Debug)]
pub struct Folder {
    mappings: Vec<Mapping>,
    entries: Vec<Entry>,
    /// By entry: the scales of MXFP4, which have a tensor of their own.
    scales: HashMap<usize, Entry>,
    by_name: HashMap<String, usize>,
}

impl Folder {
    /// Maps the files of `folder` and checks their headers.
    pub fn open(folder: &Path) -> Result<Self> {
        let name = folder.file_name().unwrap_or(folder.as_os_str());
        let paths = paths(folder).map_err(|error| error.within(&name.to_string_lossy()))?;
        let mut read = Self {
            mappings: Vec::new(),
            entries: Vec::new(),
            scales: HashMap::new(),
            by_name: HashMap::new(),
        };
        for path in &paths {
            read.add(Mapping::open(path)?)?;
        }
        read.join()?;
        Ok(read)
    }

    /// MXFP4 as OpenAI writes it: `*_blocks` gets the shape of its numbers, `*_scales` belongs to it.
    fn join(&mut self) -> Result<()> {
        let is_scales = |entry: &Entry| entry.kind == Kind::MXFP4 && entry.name.ends_with(SCALES);
        let (scales, entries): (Vec<_>, Vec<_>) = std::mem::take(&mut self.entries).into_iter().partition(is_scales);
        let stem = |name: &str| name[..name.len() - SCALES.len()].to_owned();
        let mut scales: HashMap<String, Entry> = scales.into_iter().map(|entry| (stem(&entry.name), entry)).collect();
        self.entries = entries;
        for (at, entry) in self.entries.iter_mut().enumerate() {
            if entry.kind != Kind::MXFP4 {
                continue;
            }
            let own = scales.remove(&stem(&entry.name));
            let fits = |own: &Entry| matches!(entry.shape.split_last(), Some((16, outer)) if own.shape == outer);
            let Some(own) = own.filter(fits) else {
                let (name, shape) = (&entry.name, &entry.shape);
                return Err(Error::file(format!(
                    "tensor {name}: {shape:?}: MXFP4 has 16 bytes a block, and a tensor *{SCALES} with a number for each"
                )));
            };
            entry.shape.pop();
            if let Some(k) = entry.shape.last_mut() {
                *k = k.saturating_mul(32);
            }
            self.scales.insert(at, own);
        }
        if let Some(entry) = scales.values().next() {
            return Err(Error::file(format!("tensor {}: no *{BLOCKS} beside it", entry.name)));
        }
        let names = self.entries.iter().map(|entry| entry.name.clone());
        self.by_name = names.zip(0..).collect();
        Ok(())
    }

    fn add(&mut self, mapping: Mapping) -> Result<()> {
        let file = self.mappings.len();
        for entry in mapping.named(|bytes| entries(bytes, file))? {
            let name = entry.name.clone();
            if let Some(before) = self.by_name.insert(name, self.entries.len()) {
                let other = match self.entries.get(before) {
                    Some(before) if before.file != file => self.mappings[before.file].name(),
                    _ => "the same file",
                };
                return Err(Error::file(format!(
                    "{}: tensor {}: in {other}, too",
                    mapping.name(),
                    entry.name
                )));
            }
            self.entries.push(entry);
        }
        self.mappings.push(mapping);
        Ok(())
    }
}

/// The files to read.
fn paths(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if index.is_file() {
        let mapping = Mapping::open(&index)?;
        let names = mapping.named(indexed)?;
        return Ok(names.iter().map(|name| folder.join(name)).collect());
    }
    let single = folder.join(SINGLE);
    if single.is_file() {
        return Ok(vec![single]);
    }
    let listed = folder.read_dir().and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let listed = listed.map_err(|error| Error::file(error.to_string()))?;
    let mut paths: Vec<PathBuf> = listed.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == SUFFIX));
    if paths.is_empty() {
        return Err(Error::file("no *.safetensors in it"));
    }
    paths.sort();
    Ok(paths)
}

/// The files that an index names, which have to be below its folder.
fn indexed(bytes: &[u8]) -> Result<Vec<String>> {
    let bad = |what: &str| Error::file(format!("not a safetensors index: {what}"));
    let index: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| bad(&error.to_string()))?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| bad("no weight_map"))?;
    let mut names = Vec::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| bad(&format!("the file of {tensor}")))?;
        let mut parts = Path::new(file).components();
        if file.is_empty() || !parts.all(|part| matches!(part, Component::Normal(_))) {
            return Err(bad(&format!("{file:?} is not a name of a file beside it")));
        }
        names.push(file.to_owned());
    }
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return Err(bad("it names no files"));
    }
    Ok(names)
}

/// The tensors of one file, in the order of its data.
fn entries(bytes: &[u8], file: usize) -> Result<Vec<Entry>> {
    let read = SafeTensors::read_metadata(bytes);
    let (header, metadata) =
        read.map_err(|error| Error::file(diagnosis(bytes).unwrap_or_else(|| error.to_string())))?;
    let start = header + size_of::<u64>();
    let mut entries = Vec::new();
    for (name, info) in metadata.tensors() {
        let kind = match info.dtype {
            Dtype::F32 => Kind::F32,
            Dtype::F16 => Kind::F16,
            Dtype::BF16 => Kind::BF16,
            Dtype::U8 if name.ends_with(BLOCKS) || name.ends_with(SCALES) => Kind::MXFP4, // see `join`
            Dtype::I64 if name.ends_with("_ids") => continue, // a list of positions, which encoders' files have beside weights
            other => {
                return Err(Error::unsupported(format!(
                    "tensor {name}: {other:?}: only F32, F16 and BF16 can be computed with"
                )));
            }
        };
        let shape = if info.shape.is_empty() {
            vec![1] // a single number
        } else {
            info.shape.clone()
        };
        let (begin, end) = info.data_offsets;
        let range = begin.checked_add(start).zip(end.checked_add(start));
        let bytes_of = |(begin, end): (usize, usize)| (begin <= end).then_some(begin..end);
        let entry = Entry {
            bytes: range
                .and_then(bytes_of)
                .ok_or_else(|| Error::file(format!("tensor {name}: beyond the file")))?,
            name,
            kind,
            shape,
            file,
        };
        if kind != Kind::MXFP4 {
            entry.view(bytes)?;
        }
        entries.push(entry);
    }
    entries.sort_by(|a, b| (a.bytes.start, &a.name).cmp(&(b.bytes.start, &b.name)));
    Ok(entries)
}

/// Which tensor it is that a file was refused for, if its head can be read that far.
fn diagnosis(bytes: &[u8]) -> Option<String> {
    let (size, rest) = bytes.split_first_chunk::<8>()?;
    let size = usize::try_from(u64::from_le_bytes(*size)).ok()?;
    let (head, data) = rest.split_at_checked(size)?;
    let head: serde_json::Value = serde_json::from_slice(head).ok()?;
    let tensors = head.as_object()?.iter();
    let mut tensors = tensors.filter(|(name, _)| *name != "__metadata__");
    tensors.find_map(|(name, info)| wrong(info, data.len()).map(|what| format!("tensor {name}: {what}")))
}

/// What is wrong with one tensor's entry; `len` bytes of data are there.
fn wrong(info: &serde_json::Value, len: usize) -> Option<String> {
    let dtype = info.get("dtype").and_then(serde_json::Value::as_str);
    let numbers = |value: &serde_json::Value| -> Option<Vec<u64>> {
        let list = value.as_array()?.iter();
        list.map(serde_json::Value::as_u64).collect()
    };
    let shape = info.get("shape").and_then(numbers);
    let offsets = info.get("data_offsets").and_then(numbers);
    let (Some(dtype), Some(shape), Some([start, end])) = (dtype, shape, offsets.as_deref()) else {
        return Some("its entry has no dtype, shape and data_offsets".into());
    };
    if *end > len as u64 {
        return Some(format!(
            "its bytes {start} to {end} of the data are not all there: the file has {len}"
        ));
    }
    let Ok(known) = serde_json::from_value::<Dtype>(dtype.into()) else {
        return Some(format!("dtype {dtype} is not known"));
    };
    let count = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    let bits = count.and_then(|n| n.checked_mul(known.bitsize() as u64));
    let fits = bits.is_some() && bits == end.checked_sub(*start).and_then(|n| n.checked_mul(8));
    (!fits).then(|| format!("its bytes {start} to {end} do not fit its shape {shape:?} in {dtype}"))
}

impl Source for Folder {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let at = *self.by_name.get(name)?;
        let bytes_of = |entry: &Entry| self.mappings[entry.file].bytes().get(entry.bytes.clone());
        let entry = &self.entries[at];
        match self.scales.get(&at) {
            None => entry.view(self.mappings[entry.file].bytes()).ok(),
            Some(scales) => TensorView::apart(&entry.name, &entry.shape, bytes_of(entry)?, bytes_of(scales)?).ok(),
        }
    }

    fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    fn names(&self) -> Vec<&str> {
        let names = self.entries.iter().map(|entry| entry.name.as_str());
        names.collect()
    }
}
