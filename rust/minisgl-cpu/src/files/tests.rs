//! Files that the tests write themselves, sound and damaged.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::error::Fault;

/// A file or folder that goes when the test ends.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        let unique = format!("minisgl-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(unique);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn key(out: &mut Vec<u8>, name: &str, kind: u32, value: &[u8]) {
    text(out, name);
    out.extend(kind.to_le_bytes());
    out.extend(value);
}

fn tensor(out: &mut Vec<u8>, name: &str, dims: &[u64], kind: u32, offset: u64) {
    text(out, name);
    out.extend((dims.len() as u32).to_le_bytes());
    for dim in dims {
        out.extend(dim.to_le_bytes());
    }
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
}

/// Keys of every sort, three tensors.
fn tiny_gguf() -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(3u64.to_le_bytes());
    out.extend(5u64.to_le_bytes());
    let mut value = Vec::new();
    text(&mut value, "llama");
    key(&mut out, "general.architecture", 8, &value);
    key(&mut out, "llama.block_count", 4, &2u32.to_le_bytes());
    key(&mut out, "llama.eps", 6, &1e-5f32.to_le_bytes());
    key(&mut out, "tokenizer.add_bos", 7, &[1]);
    let mut list = 8u32.to_le_bytes().to_vec();
    list.extend(2u64.to_le_bytes());
    text(&mut list, "a");
    text(&mut list, "é");
    key(&mut out, "tokenizer.tokens", 9, &list);
    tensor(&mut out, "norm.weight", &[4], 0, 0);
    tensor(&mut out, "table.weight", &[32, 2], 8, 32); // 68 bytes
    tensor(&mut out, "experts.weight", &[2, 3, 2], 1, 128); // 24 bytes
    out.resize(out.len().next_multiple_of(32), 0);
    let data = out.len();
    for value in [1.0f32, -2.0, 0.5, 4.0] {
        out.extend(value.to_le_bytes());
    }
    out.resize(data + 32, 0);
    for row in 0..2u16 {
        out.extend((0x3c00 + row * 0x400).to_le_bytes()); // 1, then 2
        out.extend((0..32).map(|i| (i as i8 - 16) as u8));
    }
    out.resize(data + 128, 0);
    out.extend((0..12u16).flat_map(|i| (0x3c00 + i).to_le_bytes()));
    out
}

#[test]
fn a_gguf_header_is_read() {
    let bytes = tiny_gguf();
    let header = gguf::Header::parse(&bytes).unwrap();
    let get = |key: &str| header.get(key).cloned().unwrap();
    assert_eq!(get("general.architecture"), gguf::Value::Text("llama"));
    assert_eq!(get("llama.block_count"), gguf::Value::Unsigned(2));
    assert_eq!(get("llama.eps"), gguf::Value::Float(f64::from(1e-5f32)));
    assert_eq!(get("tokenizer.add_bos"), gguf::Value::Bool(true));
    let gguf::Value::List(tokens) = get("tokenizer.tokens") else {
        panic!()
    };
    let tokens: Vec<_> = tokens.iter().collect();
    assert_eq!(tokens, [gguf::Value::Text("a"), gguf::Value::Text("é")]);
    assert_eq!(header.tensors[2].shape(), [2, 3, 2]);
    assert_eq!(header.tensors[1].type_name, "Q8_0");
    assert_eq!(header.head_bytes % 32, 0);
}

#[test]
fn a_gguf_file_is_a_source() {
    let folder = Temporary::new("source");
    let path = folder.file("tiny.gguf", &tiny_gguf());
    let source = open(&path).unwrap();
    assert_eq!(
        source.names(),
        ["norm.weight", "table.weight", "experts.weight"]
    );
    assert_eq!(source.bytes(), 16 + 68 + 24);
    let norm = source.tensor("norm.weight").unwrap();
    assert_eq!((norm.rows(), norm.k()), (1, 4));
    assert_eq!(norm.decode(), [1.0, -2.0, 0.5, 4.0]);
    let table = source.tensor("table.weight").unwrap();
    assert_eq!((table.rows(), table.k(), table.row_bytes()), (2, 32, 34));
    let mut row = [0.0; 32];
    table.decode_row(1, &mut row);
    assert_eq!((row[0], row[31]), (-32.0, 30.0));
    let experts = source.tensor("experts.weight").unwrap();
    let expert = experts.slice(1).unwrap();
    assert_eq!((expert.shape(), expert.rows()), ([3, 2].as_slice(), 3));
    assert_eq!(expert.decode(), experts.decode()[6..]);
    assert!(experts.slice(2).is_err() && norm.slice(0).is_err());
    assert!(source.tensor("other").is_none());
}

/// What is wrong with `bytes`.
fn fault(bytes: &[u8]) -> String {
    gguf::Header::parse(bytes).unwrap_err().to_string()
}

/// `tiny_gguf` with the bytes after the first `find` (and `skip` more) replaced.
fn changed(find: &str, skip: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = tiny_gguf();
    let at = bytes
        .windows(find.len())
        .position(|window| window == find.as_bytes());
    let at = at.unwrap() + find.len() + skip;
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

#[test]
fn what_is_wrong_with_a_gguf_file_is_named() {
    let huge = u64::MAX.to_le_bytes();
    for (bytes, expected) in [
        (vec![], "not a GGUF file"),
        (b"GGML and more".to_vec(), "not a GGUF file"),
        (b"GGUF\x01\0\0\0".to_vec(), "GGUF version 1"),
        (b"GGUF\0\0\0\x03".to_vec(), "big-endian"),
        (
            changed("GGUF", 4, &huge),
            "it claims 18446744073709551615 tensors",
        ),
        (
            changed("GGUF", 12, &huge),
            "it claims 18446744073709551615 keys",
        ),
        (
            changed("general.architecture", 4, &huge),
            "the file ends in key general.architecture: a text of 18446744073709551615 bytes",
        ),
        (
            changed("general.architecture", 12, b"\xff"),
            "key general.architecture is not UTF-8",
        ),
        (
            changed("llama.block_count", 0, &[99]),
            "key llama.block_count: type 99 is not known",
        ),
        (
            changed("tokenizer.add_bos", 4, &[2]),
            "key tokenizer.add_bos: 2 is not a bool",
        ),
        (
            changed("tokenizer.tokens", 8, &huge),
            "key tokenizer.tokens: it claims 18446744073709551615 values",
        ),
        (
            changed("tokenizer.tokens", 4, &[9]),
            "key tokenizer.tokens: a list of lists",
        ),
        (
            changed("norm.weight", 0, &[0]),
            "tensor norm.weight: 0 dimensions",
        ),
        (
            changed("norm.weight", 4, &[0]),
            "tensor norm.weight: its shape [0]",
        ),
        (
            changed("table.weight", 4, &huge),
            "tensor table.weight: its shape",
        ),
        (
            changed("table.weight", 4, &[31]),
            "tensor table.weight: its shape [2, 31] cannot be in Q8_0, blocks of 32",
        ),
        (
            changed("table.weight", 20, &[4]),
            "tensor table.weight: type 4 is not known",
        ),
        (
            changed("table.weight", 24, &[33]),
            "tensor table.weight: its bytes 33 to 101 of the data do not begin at a multiple of 32",
        ),
        (
            changed("table.weight", 24, &huge),
            "tensor table.weight: offset 18446744073709551615: beyond the file",
        ),
        (
            changed("table.weight", 24, &[160]),
            "tensor table.weight: its bytes 160 to 228 of the data are not all there",
        ),
        (
            changed("experts.weight", 32, &[64]),
            "tensors table.weight and experts.weight overlap",
        ),
    ] {
        let found = fault(&bytes);
        assert!(found.contains(expected), "{found:?}, not {expected:?}");
    }
}

#[test]
fn what_is_there_twice_is_named() {
    let mut bytes = b"GGUF\x02\0\0\0".to_vec();
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(2u64.to_le_bytes());
    for _ in 0..2 {
        key(&mut bytes, "same", 0, &[1]);
    }
    assert_eq!(fault(&bytes), "key same: there twice");
    let mut bytes = b"GGUF\x02\0\0\0".to_vec();
    bytes.extend(2u64.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    for _ in 0..2 {
        tensor(&mut bytes, "same", &[1], 0, 0);
    }
    assert_eq!(fault(&bytes), "tensor same: there twice");
}

#[test]
fn types_and_parts_that_are_not_read_are_refused() {
    let folder = Temporary::new("refused");
    let path = folder.file("m.gguf", &changed("norm.weight", 12, &[24]));
    let error = gguf::File::open(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        "m.gguf: tensor norm.weight: no decoder for I8"
    );
    assert_eq!(error.fault, Fault::Unsupported);
    let error = gguf::File::open(&folder.0.join("absent.gguf")).unwrap_err();
    assert!(error.to_string().starts_with("absent.gguf: "));
    assert!(gguf::File::open(&folder.0).is_err()); // a folder
}

#[test]
fn every_half_becomes_a_single_and_comes_back() {
    for bits in 0..=u16::MAX {
        let value = blocks::f16_to_f32(bits);
        if value.is_nan() {
            assert!(bits & 0x7fff > 0x7c00, "{bits:#x}");
            assert!(blocks::f16_to_f32(blocks::f32_to_f16(value)).is_nan());
        } else {
            assert_eq!(blocks::f32_to_f16(value), bits);
        }
        let value = blocks::bf16_to_f32(bits);
        assert!(value.is_nan() || blocks::f32_to_bf16(value) == bits);
    }
}

#[test]
fn halves_are_rounded_to_nearest_ties_to_even() {
    for bits in 0..0x7bffu16 {
        let (below, above) = (blocks::f16_to_f32(bits), blocks::f16_to_f32(bits + 1));
        let middle = f32::midpoint(below, above); // a single has the bits for it
        let even = if bits % 2 == 0 { bits } else { bits + 1 };
        assert_eq!(blocks::f32_to_f16(middle), even);
        assert_eq!(blocks::f32_to_f16(middle.next_down()), bits);
        assert_eq!(blocks::f32_to_f16(-middle.next_up()), (bits + 1) | 0x8000);
    }
    assert_eq!(blocks::f32_to_f16(65519.0), 0x7bff);
    assert_eq!(blocks::f32_to_f16(65520.0), 0x7c00);
    assert_eq!(blocks::f32_to_f16(f32::MAX), 0x7c00);
    assert_eq!(blocks::f32_to_f16(f32::MIN_POSITIVE), 0);
}

/// A safetensors file: (name, dtype, shape, data).
fn tiny_safetensors(tensors: &[(&str, &str, &str, &[u8])]) -> Vec<u8> {
    let (mut head, mut data) = (String::from("{"), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        let comma = if start > 0 { "," } else { "" };
        head += &format!(
            r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#
        );
        data.extend_from_slice(bytes);
    }
    head.push('}');
    let mut out = (head.len() as u64).to_le_bytes().to_vec();
    out.extend(head.as_bytes());
    out.extend(data);
    out
}

const BF16_ONE_TWO: &[u8] = &[0x80, 0x3f, 0, 0x40];

#[test]
fn a_folder_of_safetensors_is_a_source() {
    let folder = Temporary::new("folder");
    let one = tiny_safetensors(&[
        ("b", "BF16", "[1,2]", BF16_ONE_TWO),
        ("a", "F16", "[]", &[0, 0x3c]),
    ]);
    folder.file("x-1.safetensors", &one);
    folder.file(
        "x-2.safetensors",
        &tiny_safetensors(&[("c", "F32", "[1]", &[0, 0, 0x80, 0x3f])]),
    );
    folder.file("notes.txt", b"");
    let source = open(&folder.0).unwrap();
    assert_eq!(source.names(), ["b", "a", "c"]);
    assert_eq!(source.tensor("b").unwrap().decode(), [1.0, 2.0]);
    assert_eq!(source.tensor("a").unwrap().decode(), [1.0]);
    assert_eq!(source.tensor("c").unwrap().decode(), [1.0]);
    folder.file(
        "model.safetensors.index.json",
        br#"{"weight_map":{"c":"x-2.safetensors"}}"#,
    );
    assert_eq!(open(&folder.0).unwrap().names(), ["c"]);
}

#[cfg(unix)]
#[test]
fn links_are_followed_as_in_the_cache_of_a_hub() {
    let folder = Temporary::new("hub");
    let (blobs, snapshot) = (folder.0.join("blobs"), folder.0.join("snapshot"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir(&snapshot).unwrap();
    fs::write(
        blobs.join("0a1b"),
        tiny_safetensors(&[("b", "BF16", "[2]", BF16_ONE_TWO)]),
    )
    .unwrap();
    std::os::unix::fs::symlink("../blobs/0a1b", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(open(&snapshot).unwrap().tensor("b").unwrap().k(), 2);
}

#[test]
fn what_is_wrong_with_a_folder_is_named() {
    let folder = Temporary::new("bad-folder");
    let error = || open(&folder.0).err().unwrap().to_string();
    assert!(error().ends_with("no *.safetensors in it"), "{}", error());
    let b = ("b", "BF16", "[2]", BF16_ONE_TWO);
    folder.file("1.safetensors", &tiny_safetensors(&[b]));
    folder.file("2.safetensors", &tiny_safetensors(&[b]));
    assert_eq!(error(), "2.safetensors: tensor b: in 1.safetensors, too");
    folder.file(
        "2.safetensors",
        &tiny_safetensors(&[("q", "I32", "[1]", BF16_ONE_TWO)]),
    );
    assert_eq!(
        error(),
        "2.safetensors: tensor q: I32: only F32, F16 and BF16 can be computed with"
    );
    for index in [
        "{}",
        "[",
        r#"{"weight_map":{"c":1}}"#,
        r#"{"weight_map":{"c":"../1.safetensors"}}"#,
    ] {
        folder.file("model.safetensors.index.json", index.as_bytes());
        assert!(error().contains("not a safetensors index"), "{}", error());
    }
}
