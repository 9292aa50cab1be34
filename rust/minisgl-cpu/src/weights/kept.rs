//! Cache file of packed weights (panels): written once in the background after a start, then mapped by later starts and
//! shared by all servers.
//!
//! Invariants: the file appears whole or not at all, and is never modified; a matrix is used only if its source, shape
//! and checksum match, otherwise it is packed anew and the file rebuilt; the folder stays within its limit, and the
//! least recently used file is deleted first (processes that have it mapped keep it); a cache that cannot be written is
//! an error for the log, and the model still loads.
//!
//! Format: a header, a row of integers for each matrix, their checksum; then the matrices at the offsets in the rows,
//! ordered by model part, so that a thread loading a part reads sequentially.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use minisgl_kernels::Kind;
use minisgl_kernels::memory::{ALIGN, Zeroed};
use minisgl_kernels::panels::{Matrix, Panels, Part, Shape, packed, shape_of};
use serde::Deserialize;

use crate::files::kept::{Checksum, PARTIAL, Partial, at, checksum};
use crate::files::{Mapping, Source};
use crate::{Error, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"mspanels");
/// Format version. Raise it when the layout of panels, the composition of parts or the file format changes.
const VERSION: u64 = 1;
const ENDING: &str = "panels";
const HEAD: usize = 4;
const ROW: usize = 9;
/// Bytes per write, aligned so that the system can use a huge page for each.
const CHUNK: usize = 2 << 20;
/// Maximum bytes not yet on disk; a stop waits for at most these.
const UNSYNCED: usize = 16 * CHUNK;
const BETWEEN_TRIES: Duration = Duration::from_millis(100);

/// Settings of the panel cache.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Folder of the cache. It need not exist.
    pub folder: PathBuf,
    /// Maximum bytes of all files in the folder.
    pub limit: u64,
    /// Minimum bytes of a model to be cached; a smaller one is packed at each start.
    pub least: u64,
}

/// Position of a matrix in a model: part, and index within the part.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct MatrixPosition {
    part: usize,
    at: usize,
}

/// Entry of a matrix in the file.
#[derive(Clone, Copy)]
struct MatrixEntry {
    position: MatrixPosition,
    /// Fingerprint of the tensors that it is packed from.
    key: u64,
    shape: Shape,
    offset: usize,
    checksum: u64,
}

impl MatrixEntry {
    fn numbers(&self) -> [u64; ROW] {
        let Shape { kind, n, panels, k } = self.shape;
        let sizes = [self.position.part, self.position.at, n, panels, k, self.offset].map(|size| size as u64);
        let [part, at, n, panels, k, offset] = sizes;
        [
            part,
            at,
            self.key,
            kind.id().into(),
            n,
            panels,
            k,
            offset,
            self.checksum,
        ]
    }

    fn parse(numbers: &[u64]) -> Option<Self> {
        let &[part, at, key, kind, n, panels, k, offset, checksum] = numbers else {
            return None;
        };
        let size = |number: u64| usize::try_from(number).ok();
        Some(Self {
            position: MatrixPosition {
                part: size(part)?,
                at: size(at)?,
            },
            key,
            shape: Shape {
                kind: Kind::ALL.into_iter().find(|one| u64::from(one.id()) == kind)?,
                n: size(n)?,
                panels: size(panels)?,
                k: size(k)?,
            },
            offset: size(offset)?,
            checksum,
        })
    }
}

/// Mapped cache file of a model, with a valid header.
struct CacheFile {
    mapping: Arc<Mapping>,
    rows: HashMap<MatrixPosition, MatrixEntry>,
}

impl CacheFile {
    fn open(path: &Path, fingerprint: u64) -> Option<Self> {
        let mapping = Mapping::open(path).ok()?.with_huge_pages();
        let bytes = mapping.bytes();
        let number = |i: usize| Some(u64::from_le_bytes(bytes.get(8 * i..8 * i + 8)?.try_into().ok()?));
        let head = [number(0)?, number(1)?, number(2)?];
        let count = usize::try_from(number(3)?).ok()?;
        let end = count.checked_mul(ROW)?.checked_add(HEAD)?;
        let is_right = head == [MAGIC, VERSION, fingerprint] && end <= bytes.len() / 8;
        if !is_right || number(end)? != checksum(&bytes[..8 * end]) {
            return None;
        }
        let rows = (0..count).map(|row| {
            let numbers: Option<Vec<u64>> = (0..ROW).map(|i| number(HEAD + row * ROW + i)).collect();
            MatrixEntry::parse(&numbers?).map(|row| (row.position, row))
        });
        let rows: HashMap<MatrixPosition, MatrixEntry> = rows.collect::<Option<_>>()?;
        Some(Self {
            mapping: Arc::new(mapping),
            rows,
        })
    }

    /// Reads and returns the panels of a matrix, `None` if source, shape or checksum do not match.
    fn checked_panels(&self, position: MatrixPosition, key: u64, shape: Shape) -> Option<Panels> {
        let row = self.rows.get(&position)?;
        let bytes = row.offset..row.offset.checked_add(shape.bytes())?;
        let is_right = row.key == key
            && row.shape == shape
            && row.offset.is_multiple_of(ALIGN)
            && checksum(self.mapping.bytes().get(bytes.clone())?) == row.checksum;
        is_right.then(|| Panels::Mapped(self.mapping.clone(), bytes))
    }
}

/// Source of a model's packed matrices: the cache file if valid, else packing.
pub struct Packer {
    cache: Option<(Cache, u64)>,
    file: Option<CacheFile>,
    matrices: Mutex<Vec<PackedMatrix>>,
    /// Number of parts of the models that came before.
    parts_before: usize,
    sketches: bool,
}

/// Matrix that was returned to the loader.
struct PackedMatrix {
    position: MatrixPosition,
    key: u64,
    shape: Shape,
    panels: Panels,
}

impl Packer {
    /// Opens the cache for the tensors of `sources`. Without a cache or a source everything is packed.
    #[must_use]
    pub fn new(sources: &[&dyn Source], cache: Option<&Cache>) -> Self {
        let cache = cache.filter(|_| !sources.is_empty());
        let cache = cache.map(|cache| (cache.clone(), fingerprint(sources)));
        let file = cache
            .as_ref()
            .and_then(|(cache, fingerprint)| CacheFile::open(&file_of(cache, *fingerprint), *fingerprint));
        Self {
            cache,
            file,
            matrices: Mutex::new(Vec::new()),
            parts_before: 0,
            sketches: false,
        }
    }

    /// Creates a packer of matrices that have shapes but no data, for printing a model.
    #[must_use]
    pub fn sketch() -> Self {
        Self {
            sketches: true,
            ..Self::new(&[], None)
        }
    }

    /// Starts a part of the model. One thread must request its matrices, always in the same order.
    #[must_use]
    pub fn part(&self, part: usize) -> Packing<'_> {
        Packing {
            packer: self,
            part: self.parts_before + part,
            next: AtomicUsize::new(0),
        }
    }

    /// Ends a model of `parts` parts. The parts of another one follow, such as a vision tower.
    pub fn end_model(&mut self, parts: usize) {
        self.parts_before += parts;
    }

    /// Ends loading. Returns what to write to the cache, if anything, and whether all matrices came from the file.
    #[must_use]
    pub fn end(self) -> (Option<Keeping>, bool) {
        let mut matrices = self.matrices.into_inner().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = matrices.iter().map(|matrix| matrix.shape.bytes()).sum();
        let is_mapped = |matrix: &PackedMatrix| matches!(matrix.panels, Panels::Mapped(..));
        let whole = matrices.iter().all(is_mapped);
        let Some((cache, fingerprint)) = self.cache else {
            return (None, false);
        };
        let file = file_of(&cache, fingerprint);
        if whole {
            // marks the use for `evict`; a failure is harmless, since a read-only folder is never evicted
            let _ = File::open(&file).and_then(|file| file.set_modified(SystemTime::now()));
            return (None, !matrices.is_empty());
        }
        matrices.sort_by_key(|matrix| matrix.position);
        let keeping = (bytes as u64 >= cache.least).then_some(Keeping {
            cache,
            fingerprint,
            file,
            damaged: self.file.is_some(),
            matrices,
        });
        (keeping, false)
    }
}

/// Packer of the matrices in one part of a model.
pub struct Packing<'a> {
    packer: &'a Packer,
    part: usize,
    next: AtomicUsize,
}

impl Packing<'_> {
    /// Returns the matrix that `Matrix::pack` would make of the same arguments.
    pub fn pack(&self, parts: &[Part<'_>], interleave: bool, held: Option<Kind>) -> Result<Matrix> {
        let Packer {
            cache,
            file,
            matrices,
            sketches,
            ..
        } = self.packer;
        if *sketches {
            let shape = shape_of(parts, interleave, held)?;
            return Ok(Matrix::new(shape, Panels::Own(Arc::new(Zeroed::new(0)))));
        }
        if cache.is_none() {
            return Matrix::pack(parts, interleave, held);
        }
        let position = MatrixPosition {
            part: self.part,
            at: self.next.fetch_add(1, Relaxed),
        };
        let (key, shape) = (key_of(parts, interleave), shape_of(parts, interleave, held)?);
        let panels = match file.as_ref().and_then(|file| file.checked_panels(position, key, shape)) {
            Some(panels) => panels,
            None => packed(shape, parts, interleave)?,
        };
        let matrix = PackedMatrix {
            position,
            key,
            shape,
            panels: panels.clone(),
        };
        matrices.lock().unwrap_or_else(PoisonError::into_inner).push(matrix);
        Ok(Matrix::new(shape, panels))
    }
}

/// Returns the fingerprint of a matrix's sources: names, types, shapes and order of rows.
fn key_of(parts: &[Part<'_>], interleave: bool) -> u64 {
    let mut sum = Checksum::new();
    let number = |number: usize, sum: &mut Checksum| sum.add(&(number as u64).to_le_bytes());
    number(usize::from(interleave), &mut sum);
    for part in parts {
        sum.add(part.tensor.name().as_bytes());
        sum.add(part.tensor.kind().name().as_bytes());
        part.tensor.shape().iter().for_each(|&dim| number(dim, &mut sum));
        if let Some(order) = part.order {
            (0..part.tensor.rows()).for_each(|row| number(order(row), &mut sum));
        }
    }
    sum.end()
}

/// Returns a fingerprint of models without reading all of them: times of change, sizes, and bytes of each tensor.
/// Small tensors are read whole: they are needed anyway, and here the system does not read ahead around them.
fn fingerprint(sources: &[&dyn Source]) -> u64 {
    const SMALL: usize = 1 << 16;
    let mut sum = Checksum::new();
    for source in sources {
        for mapping in source.mappings() {
            mapping.set_random_access(true);
            sum.add(&mapping.changed().to_le_bytes());
            sum.add(&(mapping.bytes().len() as u64).to_le_bytes());
        }
        for tensor in source.names().into_iter().filter_map(|name| source.tensor(name)) {
            sum.sample(&tensor, "", 1);
            if tensor.data().len() <= SMALL {
                sum.add(tensor.data());
            }
        }
        source
            .mappings()
            .iter()
            .for_each(|mapping| mapping.set_random_access(false));
    }
    sum.end()
}

fn file_of(cache: &Cache, fingerprint: u64) -> PathBuf {
    cache.folder.join(format!("{fingerprint:016x}.{ENDING}"))
}

/// Returns true for names as of `file_of`, and of `Partial` with it: 16 hexadecimal digits and the ending.
fn is_named_here(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (digits, rest) = name.split_at_checked(16).unwrap_or_default();
    let ended = rest.strip_prefix('.').and_then(|rest| rest.strip_prefix(ENDING));
    digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        && ended.is_some_and(|end| end.is_empty() || end.ends_with(PARTIAL))
}

/// Packed matrices that are to be written to the cache.
pub struct Keeping {
    cache: Cache,
    fingerprint: u64,
    file: PathBuf,
    /// True if a cache file exists but is not valid for this model.
    damaged: bool,
    matrices: Vec<PackedMatrix>,
}

impl Keeping {
    /// Writes the cache file, unless another process has done so, and deletes old ones. Returns its bytes, `None` if
    /// `stop` was set, which leaves no file. Errors if it exceeds the limit or cannot be written.
    pub fn write(self, stop: &AtomicBool) -> Result<Option<u64>> {
        let rows = self.rows();
        let size = rows.last().map_or(0, |row| row.offset + row.shape.bytes()) as u64;
        if size > self.cache.limit {
            let limit = self.cache.limit;
            return Err(Error::file(format!("needs {size} bytes; the cache limit is {limit}")));
        }
        let Some(_lock) = self.lock(stop)? else {
            return Ok(None);
        };
        // only with the lock: other writers of this process use the same name
        let partial = Partial::for_file(&self.file)?;
        if !self.damaged && CacheFile::open(&self.file, self.fingerprint).is_some() {
            return Ok(Some(size));
        }
        self.evict(self.cache.limit - size)?;
        let mut out = ChunkedWriter::create(partial.path())?;
        let Some(rows) = self.write_to(&mut out, rows, stop)? else {
            return Ok(None);
        };
        let (fingerprint, file) = (self.fingerprint, self.file);
        drop(self.matrices); // frees the model if it was closed meanwhile: syncing may take long
        out.finish(&head(fingerprint, &rows))?;
        partial.persist(&file)?;
        Ok(Some(size))
    }

    /// Returns the layout of the file; checksums are still 0.
    fn rows(&self) -> Vec<MatrixEntry> {
        let mut offset = (8 * (HEAD + ROW * self.matrices.len() + 1)).next_multiple_of(ALIGN);
        let mut row = |matrix: &PackedMatrix| {
            let row = MatrixEntry {
                position: matrix.position,
                key: matrix.key,
                shape: matrix.shape,
                offset,
                checksum: 0,
            };
            offset = (offset + matrix.shape.bytes()).next_multiple_of(ALIGN);
            row
        };
        self.matrices.iter().map(&mut row).collect()
    }

    fn write_to(
        &self,
        out: &mut ChunkedWriter<'_>,
        mut rows: Vec<MatrixEntry>,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<MatrixEntry>>> {
        for (row, matrix) in rows.iter_mut().zip(&self.matrices) {
            out.pad_to(row.offset)?;
            let mut sum = Checksum::new();
            for piece in matrix.panels.as_slice().chunks(CHUNK) {
                if stop.load(Relaxed) {
                    return Ok(None);
                }
                sum.add(piece);
                out.add(piece)?;
            }
            row.checksum = sum.end();
        }
        Ok(Some(rows))
    }

    /// Creates and locks the folder, in which one process at a time may write. `None` if `stop` was set.
    fn lock(&self, stop: &AtomicBool) -> Result<Option<Lock>> {
        let folder = &self.cache.folder;
        fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
        let path = folder.join("lock");
        let file = File::create(&path).map_err(|error| at(&path, &error))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Lock(file))),
                Err(TryLockError::Error(error)) => return Err(at(&path, &error)),
                Err(TryLockError::WouldBlock) if stop.load(Relaxed) => return Ok(None),
                Err(TryLockError::WouldBlock) => sleep(BETWEEN_TRIES),
            }
        }
    }

    /// Deletes the least recently used files beyond `left` bytes, and incomplete ones, but not this model's file.
    fn evict(&self, left: u64) -> Result<()> {
        let folder = &self.cache.folder;
        let bad = |error: std::io::Error| at(folder, &error);
        let (mut files, mut sum) = (Vec::new(), 0);
        for entry in fs::read_dir(folder).map_err(bad)? {
            let entry = entry.map_err(bad)?;
            let (path, metadata) = (entry.path(), entry.metadata().map_err(bad)?);
            if !metadata.is_file() || !is_named_here(&path) {
                continue; // a link, or somebody else's file
            }
            if path.to_string_lossy().ends_with(PARTIAL) {
                let _gone = fs::remove_file(path);
            } else if path != self.file {
                sum += metadata.len();
                files.push((metadata.modified().map_err(bad)?, metadata.len(), path));
            }
        }
        files.sort();
        for (_, size, path) in files {
            if sum <= left {
                break;
            }
            fs::remove_file(&path).map_err(|error| at(&path, &error))?;
            sum -= size;
        }
        Ok(())
    }
}

/// Lock of the folder, released explicitly: a process that was forked meanwhile has the file open, too.
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ended = self.0.unlock();
    }
}

/// Returns the bytes before the matrices: header, rows and their checksum.
fn head(fingerprint: u64, rows: &[MatrixEntry]) -> Vec<u8> {
    let numbers = [MAGIC, VERSION, fingerprint, rows.len() as u64];
    let rows = rows.iter().flat_map(MatrixEntry::numbers);
    let mut bytes: Vec<u8> = numbers.into_iter().chain(rows).flat_map(u64::to_le_bytes).collect();
    bytes.extend(checksum(&bytes).to_le_bytes());
    bytes
}

/// Writer of the cache file, in chunks.
pub(super) struct ChunkedWriter<'a> {
    file: File,
    path: &'a Path,
    chunk: Vec<u8>,
    written: usize,
}

impl<'a> ChunkedWriter<'a> {
    pub fn create(path: &'a Path) -> Result<Self> {
        let file = File::create(path).map_err(|error| at(path, &error))?;
        Ok(Self {
            file,
            path,
            chunk: Vec::with_capacity(CHUNK),
            written: 0,
        })
    }

    pub fn add(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            bytes = later;
            if self.chunk.len() == CHUNK {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn pad_to(&mut self, offset: usize) -> Result<()> {
        let zeros = vec![0; offset - self.written - self.chunk.len()];
        self.add(&zeros)
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.file.write_all(&self.chunk);
        written.map_err(|error| at(self.path, &error))?;
        self.written += self.chunk.len();
        self.chunk.clear();
        if self.written.is_multiple_of(UNSYNCED) {
            self.file.sync_data().map_err(|error| at(self.path, &error))?;
        }
        Ok(())
    }

    /// Writes the final header and syncs the file to disk, since the rename that follows makes it visible.
    fn finish(mut self, head: &[u8]) -> Result<()> {
        self.flush()?;
        let placed = self.file.seek(SeekFrom::Start(0));
        let ended = placed.and_then(|_| self.file.write_all(head));
        let synced = ended.and_then(|()| self.file.sync_all());
        synced.map_err(|error| at(self.path, &error))
    }
}
