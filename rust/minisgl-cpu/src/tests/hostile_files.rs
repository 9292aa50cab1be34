//! Fuzz tests of damaged and malicious files: an error or a valid file, never a panic, and bounded memory.
//!
//! Each case changes some bytes of a valid file. `PROPTEST_CASES` sets their number; `make slow-test` runs 100,000.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::files::gguf::{File, Header, Value};
use crate::files::safetensors::Folder;
use crate::files::tests::{key, tensor, text};
use crate::files::{Kind, Source, blocks};
use proptest::prelude::*;
use proptest::sample::Index;

/// Allocator that tracks this thread's allocated bytes and their peak.
struct Counting;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    NOW.with(|now| {
        now.set(now.get() + change);
        MOST.with(|most| most.set(most.get().max(now.get())));
    });
}

// SAFETY: every call goes to `System` unchanged; counting touches thread-local cells that need no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's guarantee is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's guarantee is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize); // old and new block may exist at once
        count(-(layout.size() as isize));
        // SAFETY: the caller's guarantee is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the peak of bytes that `work` allocates.
fn memory_of(work: impl FnOnce()) -> usize {
    let before = NOW.with(Cell::get);
    MOST.with(|most| most.set(before));
    work();
    (MOST.with(Cell::get) - before).unsigned_abs()
}

/// Single change of a file.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Byte(Index, u8),
    /// Overwrite of 64 bits, like a count or an offset.
    Number(Index, u64),
    Short(Index, u32),
    Truncate(Index),
    /// Copy of a part to another position, overwriting or inserted.
    Splice(Index, Index, u8, bool),
    Extend(u8),
}

fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(u64::MAX),
        Just(1 << 63),
        Just(u64::MAX / 2 + 1),
        Just(1 << 61),
        Just(u64::MAX - 31),
        (0u32..64).prop_map(|bits| 1 << bits),
        0u64..600,
        any::<u64>(),
    ]
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let at = any::<Index>;
    let change = prop_oneof![
        (at(), 0u8..8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        (at(), numbers()).prop_map(|(at, number)| Change::Number(at, number)),
        (at(), 0u32..50).prop_map(|(at, number)| Change::Short(at, number)),
        at().prop_map(Change::Truncate),
        (at(), at(), any::<u8>(), any::<bool>()).prop_map(|(from, to, len, over)| Change::Splice(from, to, len, over)),
        any::<u8>().prop_map(Change::Extend),
    ];
    prop::collection::vec(change, 1..5)
}

fn put(bytes: &mut [u8], at: usize, with: &[u8]) {
    for (to, from) in bytes[at..].iter_mut().zip(with) {
        *to = *from;
    }
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if bytes.is_empty() {
            break;
        }
        let len = bytes.len();
        match change {
            Change::Flip(at, bit) => bytes[at.index(len)] ^= 1 << bit,
            Change::Byte(at, byte) => bytes[at.index(len)] = *byte,
            Change::Number(at, number) => put(&mut bytes, at.index(len), &number.to_le_bytes()),
            Change::Short(at, number) => put(&mut bytes, at.index(len), &number.to_le_bytes()),
            Change::Truncate(at) => bytes.truncate(at.index(len)),
            Change::Splice(from, to, count, over) => {
                let (from, to) = (from.index(len), to.index(len));
                let part = bytes[from..len.min(from + usize::from(*count))].to_vec();
                if *over {
                    put(&mut bytes, to, &part);
                } else {
                    bytes.splice(to..to, part);
                }
            }
            Change::Extend(count) => bytes.extend(std::iter::repeat_n(0, usize::from(*count))),
        }
    }
    bytes
}

/// Returns a GGUF file with keys of every type and tensors of all kinds.
fn gguf() -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((2 + Kind::ALL.len() as u64).to_le_bytes());
    out.extend(7u64.to_le_bytes());
    let (mut name, mut list, mut words) = (Vec::new(), 5u32.to_le_bytes().to_vec(), Vec::new());
    text(&mut name, "llama");
    list.extend(3u64.to_le_bytes());
    list.extend([1u8; 12]);
    words.extend(8u32.to_le_bytes());
    words.extend(3u64.to_le_bytes());
    ["a", "", "é"].iter().for_each(|word| text(&mut words, word));
    key(&mut out, "general.architecture", 8, &name);
    key(&mut out, "general.alignment", 4, &32u32.to_le_bytes());
    key(&mut out, "a.bool", 7, &[1]);
    key(&mut out, "a.float", 6, &1e-5f32.to_le_bytes());
    key(&mut out, "a.long", 11, &(-5i64).to_le_bytes());
    key(&mut out, "a.list", 9, &list);
    key(&mut out, "a.words", 9, &words);
    let each = Kind::ALL.map(|kind| (kind.name(), kind, vec![kind.block_len(), 2]));
    let others = [("norm", Kind::F32, vec![4]), ("experts", Kind::F16, vec![2, 3, 2])];
    let mut end = 0usize;
    for (name, kind, dims) in others.into_iter().chain(each) {
        let wide: Vec<u64> = dims.iter().map(|&dim| dim as u64).collect();
        tensor(&mut out, name, &wide, kind.id(), end as u64);
        end = (end + kind.bytes_of(dims.iter().product()).unwrap()).next_multiple_of(32);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend((0..end).map(|i| (i * 37 % 251) as u8));
    out
}

fn safetensors() -> Vec<u8> {
    let head = concat!(
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""b.weight":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"#,
        r#""c":{"dtype":"F16","shape":[2,1,2],"data_offsets":[32,40]}}   "#
    );
    let mut out = (head.len() as u64).to_le_bytes().to_vec();
    out.extend(head.as_bytes());
    out.extend([0x3c; 40]);
    out
}

/// Reads all tensors.
fn read_all(source: &dyn Source) {
    for name in source.names() {
        let tensor = source.tensor(name).unwrap(); // every listed name exists
        assert_eq!(tensor.decode().len(), tensor.rows() * tensor.k());
        if let Ok(part) = tensor.slice(0) {
            assert_eq!(part.row_bytes() * part.rows(), part.data().len());
        }
    }
}

/// Parses a header that may be damaged, and reads all of it if it is accepted.
fn read_header(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else {
        return;
    };
    for (_, value) in &header.metadata {
        if let Value::List(list) = value {
            assert_eq!(list.iter().count(), list.len());
        }
    }
    for tensor in &header.tensors {
        assert!(tensor.bytes.start >= header.head_bytes && tensor.bytes.end <= bytes.len());
        assert!(!tensor.bytes.is_empty() && !tensor.shape().contains(&0));
    }
}

/// Writes `bytes` to `file` and opens it; decodes all tensors if that succeeds.
fn opened(file: &Path, bytes: &[u8], open: impl FnOnce() -> Result<Box<dyn Source>>) {
    fs::write(file, bytes).unwrap();
    match open() {
        Ok(source) => read_all(source.as_ref()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn folder(name: &str) -> PathBuf {
    let fast = PathBuf::from("/dev/shm");
    let base = if fast.is_dir() { fast } else { std::env::temp_dir() };
    let folder = base.join(format!("minisgl-hostile-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: cases.and_then(|cases| cases.parse().ok()).unwrap_or(600),
        max_shrink_iters: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Limit of memory: a multiple of the file size, plus a constant for errors and short lists.
const TIMES: usize = 12;
const BESIDE: usize = 16 << 10;
/// Multiple of the file size for decoded values: 18 bytes of `Q1_0` are 128 elements.
const DECODED: usize = 4 * 128 / 18 + 1;

#[test]
fn damaged_gguf_files_are_errors() {
    let folder = folder("gguf");
    let file = folder.join("m.gguf");
    let (valid, open) = (gguf(), || Ok(Box::new(File::open(&file)?) as Box<dyn Source>));
    assert_eq!(open_names(&file, &valid, open).len(), 2 + Kind::ALL.len());
    proptest!(config(), |(changes in changes())| {
        let bytes = changed(valid.clone(), &changes);
        let most = memory_of(|| read_header(&bytes));
        prop_assert!(most <= TIMES * bytes.len() + BESIDE, "{most} bytes of memory for {}", bytes.len());
        let most = memory_of(|| opened(&file, &bytes, open));
        let limit = (TIMES + DECODED) * bytes.len() + BESIDE;
        prop_assert!(most <= limit, "{most} bytes of memory for {}", bytes.len());
    });
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn damaged_safetensors_are_errors() {
    let folder = folder("safetensors");
    let file = folder.join("model.safetensors");
    let (valid, open) = (
        safetensors(),
        || Ok(Box::new(Folder::open(&folder)?) as Box<dyn Source>),
    );
    assert_eq!(open_names(&file, &valid, open), ["a", "b.weight", "c"]);
    proptest!(config(), |(changes in changes())| {
        let bytes = changed(valid.clone(), &changes);
        let most = memory_of(|| opened(&file, &bytes, open));
        prop_assert!(most <= 4 * TIMES * bytes.len() + BESIDE, "{most} bytes of memory for {}", bytes.len());
    });
    fs::remove_dir_all(folder).unwrap();
}

/// Returns the tensor names, to check that the unchanged file is valid.
fn open_names(file: &Path, bytes: &[u8], open: impl FnOnce() -> Result<Box<dyn Source>>) -> Vec<String> {
    fs::write(file, bytes).unwrap();
    let source = open().unwrap();
    source.names().into_iter().map(str::to_owned).collect()
}

#[test]
fn any_bytes_decode() {
    proptest!(config(), |(seed in prop::collection::vec(any::<u8>(), 1..300))| {
        for kind in Kind::ALL {
            let size = 2 * kind.block_bytes();
            let data: Vec<u8> = seed.iter().copied().cycle().take(size).collect();
            blocks::decode(kind, &data, &mut vec![0.0; 2 * kind.block_len()]);
        }
    });
}

/// Parses many short keys, or tensors: the headers that cost the most memory per byte.
#[test]
fn parsing_a_long_header_takes_bounded_memory() {
    for tensors in [false, true] {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        let count = 50_000u64;
        bytes.extend(
            [count * u64::from(tensors), count * u64::from(!tensors)]
                .map(u64::to_le_bytes)
                .concat(),
        );
        for i in 0..count {
            let name = format!("{i:x}");
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            if tensors {
                bytes.extend(1u32.to_le_bytes());
                bytes.extend(1u64.to_le_bytes());
                bytes.extend(24u32.to_le_bytes());
                bytes.extend((32 * i).to_le_bytes());
            } else {
                bytes.extend(7u32.to_le_bytes());
                bytes.push(1);
            }
        }
        if tensors {
            bytes.resize(bytes.len() + 33 * count as usize, 0);
        }
        let most = memory_of(|| {
            Header::parse(&bytes).unwrap();
        });
        assert!(most <= TIMES * bytes.len(), "{most} for {}", bytes.len());
    }
}
