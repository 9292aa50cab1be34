//! Embeddings as they are shown: `server/encoding.py`.
//!
//! Invariants: a vector has length 1, whatever `dimensions`; its sums go from the first number to the last, as there.

use std::io::Write as _;

use super::choice::Choice;
use super::errors::Failure;

/// How they are shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Vectors {
    /// Their numbers are written as the text of their bytes, not as a list.
    pub is_base64: bool,
    /// Only so many of the first; None: all.
    pub dimensions: Option<usize>,
}

impl Vectors {
    /// The embeddings of the choices: items of a list in JSON.
    pub fn write(self, choices: &[Choice], out: &mut Vec<u8>) -> Result<(), Failure> {
        for (index, choice) in choices.iter().enumerate() {
            let pooled = choice.embedding.as_deref().ok_or(Failure::NoEmbedding)?;
            out.extend_from_slice(if index > 0 { b"," } else { b"" });
            let _ = write!(out, r#"{{"object":"embedding","index":{index},"embedding":"#);
            let numbers = self.scaled(pooled)?;
            if self.is_base64 {
                let bytes: Vec<u8> = numbers.into_iter().flat_map(f32::to_le_bytes).collect();
                let _ = write!(out, "\"{}\"", base64::encode(bytes));
            } else {
                let wide: Vec<f64> = numbers.into_iter().map(f64::from).collect();
                let _ = serde_json::to_writer(&mut *out, &wide);
            }
            out.push(b'}');
        }
        Ok(())
    }

    /// The numbers that are asked for, as a vector of length 1. `pooled`: float32 as bytes.
    fn scaled(self, pooled: &[u8]) -> Result<Vec<f32>, Failure> {
        let whole = pooled.chunks_exact(4).filter_map(|four| four.first_chunk());
        let mut numbers: Vec<f64> = whole.map(|four| f64::from(f32::from_le_bytes(*four))).collect();
        if let Some(asked) = self.dimensions.filter(|&asked| asked > numbers.len()) {
            return Err(Failure::Dimensions {
                asked,
                has: numbers.len(),
            });
        }
        numbers.truncate(self.dimensions.unwrap_or(numbers.len()));
        let length = numbers.iter().map(|one| one * one).sum::<f64>().sqrt();
        let length = if length == 0.0 { 1.0 } else { length };
        Ok(numbers.into_iter().map(|one| (one / length) as f32).collect())
    }
}
