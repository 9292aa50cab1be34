//! Tests of valid and damaged GGUF files.

use super::*;
use crate::files::gguf::{File, Header, Value};

#[test]
fn gguf_header_is_parsed() {
    let bytes = tiny_gguf();
    let header = Header::parse(&bytes).unwrap();
    let get = |key: &str| header.get(key).cloned().unwrap();
    assert_eq!(get("general.architecture"), Value::Text("llama"));
    assert_eq!(get("llama.block_count"), Value::Unsigned(2));
    assert_eq!(get("llama.eps"), Value::Float(f64::from(1e-5f32)));
    assert_eq!(get("tokenizer.add_bos"), Value::Bool(true));
    let Value::List(tokens) = get("tokenizer.tokens") else {
        panic!()
    };
    let tokens: Vec<_> = tokens.iter().collect();
    assert_eq!(tokens, [Value::Text("a"), Value::Text("é")]);
    assert_eq!(header.tensors[2].shape(), [2, 3, 2]);
    assert_eq!(header.tensors[1].type_name, "Q8_0");
    assert_eq!(header.head_bytes % 32, 0);
}

#[test]
fn gguf_file_lists_and_decodes_its_tensors() {
    let folder = Temporary::new("source");
    let path = folder.file("tiny.gguf", &tiny_gguf());
    let source = open(&path).unwrap();
    assert_eq!(source.names(), ["norm.weight", "table.weight", "experts.weight"]);
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

/// Returns the error text of parsing `bytes` as a GGUF file.
fn fault(bytes: &[u8]) -> String {
    Header::parse(bytes).unwrap_err().to_string()
}

/// Returns `tiny_gguf` with bytes overwritten by `with`, starting `skip` bytes after the first `find`.
fn changed(find: &str, skip: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = tiny_gguf();
    let at = bytes.windows(find.len()).position(|window| window == find.as_bytes());
    let at = at.unwrap() + find.len() + skip;
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

#[test]
fn errors_of_a_damaged_gguf_file_name_key_or_tensor() {
    let huge = u64::MAX.to_le_bytes();
    for (bytes, expected) in [
        (vec![], "not a GGUF file"),
        (b"GGML and more".to_vec(), "not a GGUF file"),
        (b"GGUF\x01\0\0\0".to_vec(), "GGUF version 1"),
        (b"GGUF\0\0\0\x03".to_vec(), "big-endian"),
        (changed("GGUF", 4, &huge), "it claims 18446744073709551615 tensors"),
        (changed("GGUF", 12, &huge), "it claims 18446744073709551615 keys"),
        (
            changed("general.architecture", 4, &huge),
            "the file ends in key general.architecture: a string of 18446744073709551615 bytes",
        ),
        (
            changed("general.architecture", 12, b"\xff"),
            "key general.architecture is not UTF-8",
        ),
        (
            changed("llama.block_count", 0, &[99]),
            "key llama.block_count: type 99 is unknown",
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
            "key tokenizer.tokens: nested lists are not supported",
        ),
        (changed("norm.weight", 0, &[0]), "tensor norm.weight: 0 dimensions"),
        (changed("norm.weight", 4, &[0]), "tensor norm.weight: its shape [0]"),
        (changed("table.weight", 4, &huge), "tensor table.weight: its shape"),
        (
            changed("table.weight", 4, &[31]),
            "tensor table.weight: its shape [2, 31] does not fit Q8_0, which has blocks of 32",
        ),
        (
            changed("table.weight", 20, &[4]),
            "tensor table.weight: type 4 is unknown",
        ),
        (
            changed("table.weight", 24, &[33]),
            "tensor table.weight: its bytes 33 to 101 of the data do not start at a multiple of 32",
        ),
        (
            changed("table.weight", 24, &huge),
            "tensor table.weight: offset 18446744073709551615: beyond the file",
        ),
        (
            changed("table.weight", 24, &[160]),
            "tensor table.weight: its bytes 160 to 228 of the data exceed the",
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
fn duplicate_key_or_tensor_is_rejected() {
    let mut bytes = b"GGUF\x02\0\0\0".to_vec();
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(2u64.to_le_bytes());
    for _ in 0..2 {
        key(&mut bytes, "same", 0, &[1]);
    }
    assert_eq!(fault(&bytes), "key same: occurs twice");
    let mut bytes = b"GGUF\x02\0\0\0".to_vec();
    bytes.extend(2u64.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    for _ in 0..2 {
        tensor(&mut bytes, "same", &[1], 0, 0);
    }
    assert_eq!(fault(&bytes), "tensor same: occurs twice");
}

#[test]
fn unsupported_type_and_missing_file_are_rejected() {
    let folder = Temporary::new("refused");
    let path = folder.file("m.gguf", &changed("norm.weight", 12, &[24]));
    let error = File::open(&path).unwrap_err();
    let advice = "choose another quantization of the same model, such as Q4_K_M, IQ4_XS or Q2_K";
    assert_eq!(
        error.to_string(),
        format!("m.gguf: tensor norm.weight: the CPU engine does not read I8: {advice}")
    );
    assert_eq!(error.fault, Fault::Unsupported);
    let error = File::open(&folder.0.join("absent.gguf")).unwrap_err();
    assert!(error.to_string().starts_with("absent.gguf: "));
    assert!(File::open(&folder.0).is_err()); // a folder
}
