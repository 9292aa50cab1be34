//! Tests of the cache file of quantized weights.

use super::*;
use crate::files::cache::quantized;
use crate::files::gguf::File;
use crate::files::quantize::Quantization;

/// Returns [rows, k] bfloat16 elements that look like weights.
fn weights(rows: usize, k: usize) -> Vec<u8> {
    let value = |i: usize| ((i * 7919 % 2003) as f32 / 1001.5 - 1.0) * 0.1;
    let halves = (0..rows * k).map(|i| blocks::f32_to_bf16(value(i)));
    halves.flat_map(u16::to_le_bytes).collect()
}

fn folder_of_weights(folder: &Temporary) -> PathBuf {
    let (matrix, wide) = (weights(5000, 64), weights(2, 40));
    let bytes = tiny_safetensors(&[
        ("a.weight", "BF16", "[5000,64]", &matrix),
        ("odd.weight", "BF16", "[2,40]", &wide),
        ("a.mlp.gate.weight", "BF16", "[32,64]", &weights(32, 64)),
        ("input_layernorm.weight", "BF16", "[64]", &weights(1, 64)),
        ("image.weight", "BF16", "[1,1,1,2,32]", &weights(2, 32)),
    ]);
    folder.file("model.safetensors", &bytes);
    folder.0.clone()
}

fn make(source: &dyn Source, quantization: Quantization, file: &Path) -> (File, usize) {
    let mut steps = 0;
    let made = quantized(source, quantization, file, &mut |done, all| {
        assert!(done <= all);
        steps += 1;
        Ok(())
    });
    (made.unwrap().unwrap(), steps)
}

#[test]
fn weights_are_quantized_once() {
    let folder = Temporary::new("quantized");
    let source = open(&folder_of_weights(&folder)).unwrap();
    for (quantization, within) in [(Quantization::Q8, 0.1 / 250.0), (Quantization::Q4, 0.2 / 29.0)] {
        let file = folder.0.join(format!("cache/{quantization:?}.gguf"));
        let (made, steps) = make(source.as_ref(), quantization, &file);
        assert!(steps > 0);
        assert_eq!(
            made.names(),
            ["a.weight", "odd.weight", "a.mlp.gate.weight", "input_layernorm.weight"]
        );
        let tensor = |name| (source.tensor(name).unwrap(), made.tensor(name).unwrap());
        for name in ["odd.weight", "a.mlp.gate.weight", "input_layernorm.weight"] {
            let (exact, kept) = tensor(name);
            assert_eq!((exact.kind(), exact.data()), (kept.kind(), kept.data()), "{name}");
        }
        let (exact, kept) = tensor("a.weight");
        assert_eq!((kept.kind(), kept.shape()), (quantization.kind(), exact.shape()));
        for (exact, kept) in exact.decode().iter().zip(kept.decode()) {
            assert!((exact - kept).abs() <= within, "{exact} {kept}");
        }
        assert_eq!(make(source.as_ref(), quantization, &file).1, 0); // read from the cache
    }
    assert_eq!(fs::read_dir(folder.0.join("cache")).unwrap().count(), 2); // no temporary file is left
}

#[test]
fn damaged_or_foreign_cache_is_rebuilt() {
    let folder = Temporary::new("damaged");
    let source = open(&folder_of_weights(&folder)).unwrap();
    let file = folder.0.join("weights.gguf");
    make(source.as_ref(), Quantization::Q8, &file);
    let good = fs::read(&file).unwrap();
    let mut damages = vec![Vec::new(), good[..good.len() - 1].to_vec(), b"GGUF".to_vec()];
    for at in [8, 60, good.len() / 2, good.len() - 65] {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        damages.push(bytes);
    }
    for damaged in damages {
        fs::write(&file, damaged).unwrap();
        assert!(make(source.as_ref(), Quantization::Q8, &file).1 > 0);
        assert_eq!(fs::read(&file).unwrap(), good);
    }
    assert!(make(source.as_ref(), Quantization::Q4, &file).1 > 0); // the file was Q8
}

#[test]
fn quantized_source_is_not_cached() {
    let folder = Temporary::new("nothing");
    let path = folder.file("m.gguf", &gguf_of_blocks());
    let (source, file) = (open(&path).unwrap(), folder.0.join("cache/x.gguf"));
    let made = quantized(source.as_ref(), Quantization::Q8, &file, &mut |_, _| Ok(()));
    assert!(made.unwrap().is_none());
    assert!(!file.exists());
}

/// Returns a GGUF file with a Q8_0 matrix and an F32 vector.
fn gguf_of_blocks() -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(2u64.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    tensor(&mut out, "norm.weight", &[4], 0, 0);
    tensor(&mut out, "table.weight", &[32, 2], 8, 32);
    out.resize(out.len().next_multiple_of(32) + 32 + 68, 0);
    out
}

#[test]
fn failed_quantization_names_the_tensor_and_leaves_no_file() {
    let folder = Temporary::new("infinite");
    let mut matrix = weights(3, 32);
    matrix[100..102].copy_from_slice(&blocks::f32_to_bf16(f32::NAN).to_le_bytes());
    let bytes = tiny_safetensors(&[("bad.weight", "BF16", "[3,32]", &matrix)]);
    folder.file("model.safetensors", &bytes);
    let source = open(&folder.0).unwrap();
    for quantization in [Quantization::Q8, Quantization::Q4] {
        let file = folder.0.join("made/weights.gguf");
        let error = quantized(source.as_ref(), quantization, &file, &mut |_, _| Ok(()));
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("tensor bad.weight: an element is not finite"));
        assert_eq!(fs::read_dir(folder.0.join("made")).unwrap().count(), 0);
    }
    let stopped = |_, _| Err(Error::step("no more"));
    let error = quantized(source.as_ref(), Quantization::Q8, &folder.0.join("x.gguf"), &mut {
        stopped
    });
    assert_eq!(error.unwrap_err(), Error::step("no more"));
}
