//! Folders of safetensors files, as Hugging Face hubs and training frameworks write them.
//!
//! Invariants: reads the same files as the Python side: those in the index, else `model.safetensors`, else all; every
//! tensor exists once and has a floating-point type or MXFP4 (lists of ids are left out).

use std::collections::{BTreeMap, HashMap};
use std::fmt::Formatter;
use std::path::{Component, Path, PathBuf};

use minisgl_kernels::{Kind, TensorView};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::{Entry, Mapping, Source};
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Name endings of an MXFP4 matrix's two tensors: bytes with two elements each, and an exponent for 16 bytes.
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
const SUFFIX: &str = "safetensors";
const METADATA: &str = "__metadata__";
/// Maximum header size, as the safetensors format defines it.
const HEADER_BYTES: u64 = 100_000_000;

/// Tensor source of a folder with mapped safetensors files.
#[derive(Debug)]
pub struct Folder {
    mappings: Vec<Mapping>,
    entries: Vec<Entry>,
    /// Scales of MXFP4 tensors, by index in `entries`.
    scales: HashMap<usize, Entry>,
    by_name: HashMap<String, usize>,
}

impl Folder {
    /// Maps the safetensors files of `folder` and checks their headers.
    pub fn open(folder: &Path) -> Result<Self> {
        let name = folder.file_name().unwrap_or(folder.as_os_str());
        let model_files = model_files(folder).map_err(|error| error.within(&name.to_string_lossy()))?;
        let mut read = Self {
            mappings: Vec::new(),
            entries: Vec::new(),
            scales: HashMap::new(),
            by_name: HashMap::new(),
        };
        for path in &model_files {
            read.add(Mapping::open(path)?)?;
        }
        read.join_mxfp4()?;
        Ok(read)
    }

    /// Joins OpenAI's MXFP4 tensors `*_blocks` and `*_scales`. Errors if one is missing or has the wrong shape.
    fn join_mxfp4(&mut self) -> Result<()> {
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
                    "tensor {name}: {shape:?}: MXFP4 needs 16 bytes a block and a tensor *{SCALES} with a scale for each block"
                )));
            };
            entry.shape.pop();
            if let Some(k) = entry.shape.last_mut() {
                *k = k.saturating_mul(32);
            }
            self.scales.insert(at, own);
        }
        if let Some(entry) = scales.values().next() {
            return Err(Error::file(format!("tensor {}: has no matching *{BLOCKS}", entry.name)));
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
                    "{}: tensor {}: also in {other}",
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

/// Returns the safetensors files of the model: those in the index, else `model.safetensors`, else all, sorted.
fn model_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if index.is_file() {
        let mapping = Mapping::open(&index)?;
        let names = mapping.named(files_of_index)?;
        return Ok(names.iter().map(|name| folder.join(name)).collect());
    }
    let single = folder.join(SINGLE);
    if single.is_file() {
        return Ok(vec![single]);
    }
    let listed = folder.read_dir().and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let listed = listed.map_err(|error| Error::file(error.to_string()))?;
    let mut model_files: Vec<PathBuf> = listed.into_iter().map(|entry| entry.path()).collect();
    model_files.retain(|path| path.extension().is_some_and(|end| end == SUFFIX));
    if model_files.is_empty() {
        return Err(Error::file("the folder has no *.safetensors"));
    }
    model_files.sort();
    Ok(model_files)
}

/// Returns the file names in a safetensors index. Errors if one is not inside the index's folder.
fn files_of_index(bytes: &[u8]) -> Result<Vec<String>> {
    let bad = |what: &str| Error::file(format!("not a safetensors index: {what}"));
    let index: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| bad(&error.to_string()))?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| bad("no weight_map"))?;
    let mut names = Vec::new();
    for (tensor, file) in map {
        let file = file
            .as_str()
            .ok_or_else(|| bad(&format!("the file name of {tensor} is not a string")))?;
        let mut parts = Path::new(file).components();
        if file.is_empty() || !parts.all(|part| matches!(part, Component::Normal(_))) {
            return Err(bad(&format!("{file:?} is not a file name within the folder")));
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

/// Returns the tensors of one file, in the order of their data.
fn entries(bytes: &[u8], file: usize) -> Result<Vec<Entry>> {
    let (start, tensors) = parse_header(bytes)?;
    let mut entries = Vec::new();
    for (name, info) in tensors {
        let kind = match info.dtype.as_str() {
            "F32" => Kind::F32,
            "F16" => Kind::F16,
            "BF16" => Kind::BF16,
            "U8" if name.ends_with(BLOCKS) || name.ends_with(SCALES) => Kind::MXFP4, // see `join_mxfp4`
            "I64" if name.ends_with("_ids") => continue, // position ids, which encoder checkpoints store as a tensor
            other => {
                return Err(Error::unsupported(format!(
                    "tensor {name}: {other}: only F32, F16 and BF16 are supported"
                )));
            }
        };
        let (begin, end) = info.data_offsets;
        let entry = Entry {
            bytes: start + begin..start + end, // within the file, as `parse_header` has checked
            name,
            kind,
            shape: if info.shape.is_empty() { vec![1] } else { info.shape }, // a scalar
            file,
        };
        if kind != Kind::MXFP4 {
            entry.view(bytes)?;
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// Header entry of one tensor.
#[derive(Deserialize)]
struct TensorEntry {
    dtype: String,
    shape: Vec<usize>,
    /// Start and end of the tensor's data, in bytes after the header.
    data_offsets: (usize, usize),
}

/// Header of a safetensors file: tensor entries by name.
struct Header(BTreeMap<String, TensorEntry>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        from.deserialize_map(HeaderVisitor)
    }
}

/// Deserializer of a header that rejects duplicate names, which a derived map would accept.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, to: &mut Formatter<'_>) -> std::fmt::Result {
        to.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
        let (mut tensors, mut has_metadata) = (BTreeMap::new(), false);
        while let Some(name) = map.next_key::<String>()? {
            let is_second = if name == METADATA {
                map.next_value::<Option<HashMap<String, String>>>()?;
                std::mem::replace(&mut has_metadata, true)
            } else {
                let info = map.next_value::<TensorEntry>().map_err(|error| {
                    A::Error::custom(format!(
                        "tensor {name}: its entry has no dtype, shape and data_offsets: {error}"
                    ))
                })?;
                tensors.insert(name.clone(), info).is_some()
            };
            if is_second {
                return Err(A::Error::custom(format!("{name} occurs twice")));
            }
        }
        Ok(Header(tensors))
    }
}

/// Returns the data offset and the tensors in data order. Errors if they do not cover the data or fit their shapes.
fn parse_header(bytes: &[u8]) -> Result<(usize, Vec<(String, TensorEntry)>)> {
    let (size, rest) = bytes
        .split_first_chunk()
        .ok_or_else(|| Error::file("header too small: a safetensors file begins with 8 bytes"))?;
    let size = u64::from_le_bytes(*size);
    if size > HEADER_BYTES {
        return Err(Error::file(format!("header too large: {size} bytes")));
    }
    let (head, data) = usize::try_from(size)
        .ok()
        .and_then(|size| rest.split_at_checked(size))
        .ok_or_else(|| Error::file(format!("header of {size} bytes: the file has only {}", rest.len())))?;
    let header: Header =
        serde_json::from_slice(head).map_err(|error| Error::file(format!("invalid JSON in header: {error}")))?;
    let mut tensors: Vec<_> = header.0.into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut covered = 0;
    for (name, info) in &tensors {
        if let Some(what) = info.wrong(covered, data.len()) {
            return Err(Error::file(format!("tensor {name}: {what}")));
        }
        covered = info.data_offsets.1;
    }
    if covered < data.len() {
        let len = data.len();
        return Err(Error::file(format!(
            "bytes {covered} to {len} of the data belong to no tensor"
        )));
    }
    Ok((bytes.len() - data.len(), tensors))
}

impl TensorEntry {
    /// Returns why the entry is invalid, if it is. Preceding tensors cover the first `covered` of `len` data bytes.
    fn wrong(&self, covered: usize, len: usize) -> Option<String> {
        let (dtype, shape, (start, end)) = (&self.dtype, &self.shape, self.data_offsets);
        if end > len {
            return Some(format!(
                "its bytes {start} to {end} exceed the {len} bytes of data in the file"
            ));
        }
        let Some(bits) = bits(dtype) else {
            return Some(format!("dtype {dtype} is unknown"));
        };
        let count = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let num_bits = count.and_then(|n| n.checked_mul(bits));
        if num_bits.is_none() || num_bits != end.checked_sub(start).and_then(|n| n.checked_mul(8)) {
            return Some(format!(
                "its bytes {start} to {end} do not fit its shape {shape:?} in {dtype}"
            ));
        }
        (start != covered)
            .then(|| format!("its bytes {start} to {end} do not start where the previous tensor ends, at {covered}"))
    }
}

/// Returns the bits per element of a safetensors dtype, `None` if the dtype is unknown.
fn bits(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
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
