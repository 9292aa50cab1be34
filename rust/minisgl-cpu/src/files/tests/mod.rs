//! Helpers of the file tests: they write small GGUF and safetensors files.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::error::{Error, Fault};

mod cache;
mod folder;
mod gguf;

/// Temporary folder that is removed when the test ends.
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

pub(crate) fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

pub(crate) fn key(out: &mut Vec<u8>, name: &str, kind: u32, value: &[u8]) {
    text(out, name);
    out.extend(kind.to_le_bytes());
    out.extend(value);
}

pub(crate) fn tensor(out: &mut Vec<u8>, name: &str, dims: &[u64], kind: u32, offset: u64) {
    text(out, name);
    out.extend((dims.len() as u32).to_le_bytes());
    for dim in dims {
        out.extend(dim.to_le_bytes());
    }
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
}

/// Returns a GGUF file with keys of every kind and three tensors.
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

/// Returns a safetensors file with tensors given as (name, dtype, shape, data).
fn tiny_safetensors(tensors: &[(&str, &str, &str, &[u8])]) -> Vec<u8> {
    let (mut head, mut data) = (String::from("{"), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        let comma = if start > 0 { "," } else { "" };
        head += &format!(r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#);
        data.extend_from_slice(bytes);
    }
    head.push('}');
    let mut out = (head.len() as u64).to_le_bytes().to_vec();
    out.extend(head.as_bytes());
    out.extend(data);
    out
}

const BF16_ONE_TWO: &[u8] = &[0x80, 0x3f, 0, 0x40];
