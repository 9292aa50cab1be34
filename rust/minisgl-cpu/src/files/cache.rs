//! Cache file of quantized weights: written once, then mapped by later starts.
//!
//! Invariants: the file appears whole or not at all; it is used only if its header, checksum, version and the
//! fingerprint of its source match, and is rebuilt otherwise.
//!
//! The file is GGUF, with the tensor names and the architecture of its source.

use std::fs;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread;

use minisgl_kernels::{Kind, TensorView};

use super::Source;
use super::gguf::{ARCHITECTURE, File, Header, Value};
use super::kept::{Checksum, Partial, at, checksum};
use super::quantize::{Quantization, encode};
use crate::{Error, Result};

const VERSION: u32 = 2;
const ALIGNMENT: usize = 64;
const MAX_DIMS: usize = 4;
/// Samples of a tensor's bytes that enter its fingerprint.
const FINGERPRINT_SAMPLES: usize = 16;
/// Elements that one thread quantizes per work item.
const ITEM_ELEMENTS: usize = 1 << 20;
const VERSION_KEY: &str = "minisgl.version";
const SOURCE_KEY: &str = "minisgl.source";
const CHECKSUM_KEY: &str = "minisgl.checksum";

/// Returns `source` quantized, from the cache `file` if that is valid; otherwise quantizes now and writes `file`.
/// `progress(done, total)` counts bytes and may abort with an error. `None` if no tensor needs quantizing.
pub fn quantized(
    source: &dyn Source,
    quantization: Quantization,
    file: &Path,
    progress: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<Option<File>> {
    let plan = Plan::new(source, quantization);
    let is_unchanged = |planned: &Planned<'_>| planned.kind == planned.tensor.kind();
    if plan.tensors.iter().all(is_unchanged) {
        return Ok(None);
    }
    if let Ok(cached) = File::open(file)
        && is_valid(&cached, plan.fingerprint)
    {
        return Ok(Some(cached));
    }
    let partial = Partial::for_file(file)?;
    plan.write(partial.path(), progress)?;
    partial.persist(file)?;
    File::open(file).map(Some)
}

fn is_valid(file: &File, fingerprint: u64) -> bool {
    let bytes = file.mapping().bytes();
    let Ok(header) = Header::parse(bytes) else {
        return false;
    };
    let is = |key: &str, value: u64| header.get(key) == Some(&Value::Unsigned(value));
    is(VERSION_KEY, VERSION.into())
        && is(SOURCE_KEY, fingerprint)
        && is(CHECKSUM_KEY, checksum(&bytes[header.head_bytes..]))
}

/// Layout of a cache file: its tensors with their formats and offsets, and the fingerprint of the source.
struct Plan<'a> {
    architecture: Option<&'a str>,
    tensors: Vec<Planned<'a>>,
    fingerprint: u64,
    bytes: usize,
}

struct Planned<'a> {
    tensor: TensorView<'a>,
    kind: Kind,
    offset: usize,
}

impl<'a> Plan<'a> {
    /// Plans the file. Leaves out empty tensors and those with more dimensions than GGUF allows (of images).
    fn new(source: &'a dyn Source, quantization: Quantization) -> Self {
        let mut fingerprint = Checksum::new();
        fingerprint.add(source.architecture().unwrap_or_default().as_bytes());
        let (mut tensors, mut bytes) = (Vec::new(), 0usize);
        for tensor in source.names().into_iter().filter_map(|n| source.tensor(n)) {
            if tensor.data().is_empty() || tensor.shape().len() > MAX_DIMS {
                continue;
            }
            let kind = quantization.kind_of(&tensor);
            let size = tensor.rows() * kind.bytes_of(tensor.k()).unwrap_or(0);
            fingerprint.sample(&tensor, kind.name(), FINGERPRINT_SAMPLES);
            tensors.push(Planned {
                tensor,
                kind,
                offset: bytes,
            });
            bytes = (bytes + size).next_multiple_of(ALIGNMENT);
        }
        Self {
            architecture: source.architecture(),
            tensors,
            fingerprint: fingerprint.end(),
            bytes,
        }
    }

    fn header_bytes(&self, checksum: u64) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        let text = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((4 + u64::from(self.architecture.is_some())).to_le_bytes());
        if let Some(name) = self.architecture {
            text(&mut out, ARCHITECTURE);
            out.extend(8u32.to_le_bytes()); // type id of a string
            text(&mut out, name);
        }
        for (key, value) in [("general.alignment", ALIGNMENT as u32), (VERSION_KEY, VERSION)] {
            text(&mut out, key);
            out.extend(4u32.to_le_bytes()); // type id of u32
            out.extend(value.to_le_bytes());
        }
        for (key, value) in [(SOURCE_KEY, self.fingerprint), (CHECKSUM_KEY, checksum)] {
            text(&mut out, key);
            out.extend(10u32.to_le_bytes()); // type id of u64
            out.extend(value.to_le_bytes());
        }
        for planned in &self.tensors {
            text(&mut out, planned.tensor.name());
            let shape = planned.tensor.shape();
            out.extend((shape.len() as u32).to_le_bytes());
            for &dim in shape.iter().rev() {
                out.extend((dim as u64).to_le_bytes());
            }
            out.extend(planned.kind.id().to_le_bytes());
            out.extend((planned.offset as u64).to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }

    fn write(&self, path: &Path, progress: &mut dyn FnMut(usize, usize) -> Result<()>) -> Result<()> {
        let file = fs::File::create(path).map_err(|error| at(path, &error))?;
        let mut out = CacheWriter {
            file: BufWriter::with_capacity(1 << 20, file),
            checksum: Checksum::new(),
            data: 0,
            path,
        };
        out.write_bytes(&self.header_bytes(0))?;
        for planned in &self.tensors {
            out.pad_to(planned.offset)?;
            planned.write(&mut out, &mut |done| progress(done, self.bytes))?;
        }
        out.pad_to(self.bytes)?;
        progress(self.bytes, self.bytes)?;
        let header_bytes = self.header_bytes(out.checksum.end());
        out.finish(&header_bytes)
    }
}

impl Planned<'_> {
    fn write(&self, out: &mut CacheWriter<'_>, progress: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        if self.kind == self.tensor.kind() {
            progress(out.data)?;
            return (0..self.tensor.rows()).try_for_each(|r| out.data(&self.tensor.row(r)));
        }
        let (tensor, kind) = (&self.tensor, self.kind);
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let rows = (ITEM_ELEMENTS / tensor.k()).clamp(1, tensor.rows());
        let row_bytes = kind.bytes_of(tensor.k()).unwrap_or(0);
        let mut pieces = vec![vec![0u8; rows * row_bytes]; threads];
        for first in (0..tensor.rows()).step_by(rows * threads) {
            progress(out.data)?;
            let mut sound = vec![true; threads];
            let starts = (first..tensor.rows()).step_by(rows);
            thread::scope(|scope| {
                for ((start, piece), sound) in starts.zip(&mut pieces).zip(&mut sound) {
                    let count = rows.min(tensor.rows() - start);
                    piece.truncate(count * row_bytes);
                    scope.spawn(move || *sound = quantize_rows(tensor, kind, start, piece));
                }
            });
            if sound.contains(&false) {
                return Err(Error::file(format!(
                    "tensor {}: an element is not finite or is too large to quantize",
                    tensor.name()
                )));
            }
            let used = (tensor.rows() - first).div_ceil(rows).min(threads);
            pieces[..used].iter().try_for_each(|piece| out.data(piece))?;
        }
        Ok(())
    }
}

/// Quantizes the rows from `start` on that fit `out`. Returns false for elements that are not finite or too large.
fn quantize_rows(tensor: &TensorView<'_>, kind: Kind, start: usize, out: &mut [u8]) -> bool {
    let mut row = vec![0.0; tensor.k()];
    let row_bytes = kind.bytes_of(tensor.k()).unwrap_or(0);
    let mut sound = true;
    for (i, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        tensor.decode_row(start + i, &mut row);
        sound &= encode(kind, &row, out);
    }
    sound
}

/// Writer of a cache file. The checksum covers the data, not the header.
struct CacheWriter<'a> {
    file: BufWriter<fs::File>,
    checksum: Checksum,
    data: usize,
    path: &'a Path,
}

impl CacheWriter<'_> {
    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        written.map_err(|error| at(self.path, &error))
    }

    fn data(&mut self, bytes: &[u8]) -> Result<()> {
        self.data += bytes.len();
        self.checksum.add(bytes);
        self.write_bytes(bytes)
    }

    fn pad_to(&mut self, offset: usize) -> Result<()> {
        self.data(&[0; ALIGNMENT][..offset - self.data])
    }

    /// Writes the final header and syncs the file to disk, since the rename that follows makes it visible.
    fn finish(mut self, header_bytes: &[u8]) -> Result<()> {
        let placed = self.file.seek(SeekFrom::Start(0));
        placed.map_err(|error| at(self.path, &error))?;
        self.write_bytes(header_bytes)?;
        let file = self.file.into_inner().map_err(std::io::Error::from);
        let synced = file.and_then(|file| file.sync_all());
        synced.map_err(|error| at(self.path, &error))
    }
}
