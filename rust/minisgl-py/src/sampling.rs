//! Sampling parameters for the CPU engine, from Python objects; and the engine's sampler alone, for the tests that
//! compare it with the torch engine's.
//!
//! Invariants: a value outside the engine's range is clamped to it.

use minisgl_cpu::sampling::{Binding, Params, Pooling, Scratch, Slots};
use minisgl_cpu::{Isa, PromptImage};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{Int32s, words_of};
use crate::grammar_of::grammar_of;
use crate::page_store::staged_of;

/// Reads the attributes of a `minisgl.sampling_params.SamplingParams` with a seed.
pub(crate) fn params_from_python(sampling: &Bound<'_, PyAny>) -> PyResult<Params> {
    let float = |name: &str| -> PyResult<f32> { Ok(sampling.getattr(name)?.extract::<f64>()? as f32) };
    let bias = sampling.getattr("logit_bias")?.call_method0("items")?;
    let bias = bias.try_iter()?.map(|item| -> PyResult<(u32, f32)> {
        let (id, value): (Bound<'_, PyAny>, f64) = item?.extract()?;
        Ok((id_of(&id), value as f32))
    });
    let bad = sampling.getattr("bad_token_ids")?;
    let bad = bad.try_iter()?.map(|sequence| ids_of(&sequence?));
    Ok(Params {
        temperature: if sampling.getattr("is_greedy")?.is_truthy()? {
            0.0
        } else {
            float("temperature")?
        },
        top_k: sampling.getattr("top_k")?.extract().unwrap_or(i64::MAX),
        top_p: match float("top_p")? {
            // only `is_greedy` means greedy: argmax of the logits, not of probabilities, which may tie
            0.0 => f32::MIN_POSITIVE,
            top_p => top_p,
        },
        min_p: float("min_p")?,
        seed: sampling.getattr("seed")?.extract()?,
        repetition_penalty: float("repetition_penalty")?,
        frequency_penalty: float("frequency_penalty")?,
        presence_penalty: float("presence_penalty")?,
        logit_bias: bias.collect::<PyResult<_>>()?,
        allowed_token_ids: ids_of(&sampling.getattr("allowed_token_ids")?)?,
        bad_token_ids: bad.collect::<PyResult<_>>()?,
        min_tokens: sampling.getattr("min_tokens")?.extract().unwrap_or(usize::MAX),
        stop_token_ids: ids_of(&sampling.getattr("stop_token_ids")?)?,
        ignore_eos: sampling.getattr("ignore_eos")?.is_truthy()?,
        logprobs: sampling.getattr("logprobs")?.extract()?,
        prompt_logprobs: sampling.getattr("prompt_logprobs")?.extract()?,
        embedding: match sampling.getattr("embedding")?.extract::<Option<String>>()?.as_deref() {
            None => None,
            Some("last") => Some(Pooling::Last),
            Some("cls") => Some(Pooling::First),
            Some("score") => Some(Pooling::Score),
            Some(_) => Some(Pooling::Mean),
        },
    })
}

/// Reads a `minisgl.engine.api.SlotAssignment`. Returns the slot and the rest.
pub(crate) fn binding_from_python(binding: &Bound<'_, PyAny>) -> PyResult<(usize, Binding)> {
    let tokens = binding.getattr("tokens")?;
    let sampling = binding.getattr("sampling")?;
    let made = Binding {
        adapter: sampling.getattr("adapter")?.extract()?,
        req_id: binding.getattr("req_id")?.extract()?,
        params: params_from_python(&sampling)?,
        tokens: tokens.extract::<Int32s<'_>>()?.as_slice().to_vec(),
        num_prompt: binding.getattr("num_prompt")?.extract()?,
        grammar: grammar_of(&binding.getattr("grammar")?)?,
        space: binding.getattr("space")?.extract::<&[u8]>()?.to_vec(),
        staged: staged_of(&binding.getattr("stored")?)?,
        images: images_from_python(&binding.getattr("images")?)?,
    };
    Ok((binding.getattr("slot")?.extract()?, made))
}

/// Reads the `minisgl.prompt_image.PromptImage`s of a prompt.
pub(crate) fn images_from_python(images: &Bound<'_, PyAny>) -> PyResult<Vec<PromptImage>> {
    images.try_iter()?.map(|image| image_from_python(&image?)).collect()
}

/// Reads a `minisgl.prompt_image.PromptImage`.
pub(crate) fn image_from_python(image: &Bound<'_, PyAny>) -> PyResult<PromptImage> {
    let grid: (usize, usize) = image.getattr("grid")?.extract()?;
    Ok(PromptImage {
        digest: image.getattr("digest")?.extract::<&[u8]>()?.try_into()?,
        start: image.getattr("start")?.extract()?,
        num_tokens: image.getattr("num_tokens")?.extract()?,
        grid: grid.into(),
        pixels: image.getattr("pixels")?.extract::<&[u8]>()?.into(),
    })
}

fn ids_of(ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    ids.try_iter()?.map(|id| Ok(id_of(&id?))).collect()
}

/// Converts a token id. An invalid one becomes an id that no vocabulary has.
fn id_of(id: &Bound<'_, PyAny>) -> u32 {
    id.extract().unwrap_or(u32::MAX)
}

/// Log probability of the sampled token, the most likely ids, and their log probabilities.
type Logprobs = (f32, Vec<u32>, Vec<f32>);
/// Part of a prompt for log probabilities: request id, first position, tokens, number of alternatives.
type PromptPart = (i64, usize, Vec<i32>, usize);

/// Sampler of the CPU engine without the engine.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct CpuSampler {
    slots: Slots,
    num_slots: usize,
    vocab_size: usize,
    scratch: Scratch,
}

impl CpuSampler {
    fn check_slot(&self, slot: usize) -> PyResult<usize> {
        if slot < self.num_slots {
            return Ok(slot);
        }
        let text = format!("slot is {slot}; must be below {}", self.num_slots);
        Err(PyValueError::new_err(text))
    }
}

#[pymethods]
impl CpuSampler {
    #[new]
    fn new(num_slots: usize, vocab_size: usize, eos_ids: Vec<u32>) -> PyResult<Self> {
        if vocab_size == 0 {
            return Err(PyValueError::new_err("vocab_size is 0; must be at least 1"));
        }
        Ok(Self {
            slots: Slots::new(num_slots, vocab_size, &eos_ids),
            num_slots,
            vocab_size,
            scratch: Isa::detect(None).map(Scratch::new).unwrap_or_default(),
        })
    }

    fn bind(&mut self, binding: &Bound<'_, PyAny>) -> PyResult<()> {
        let (slot, binding) = binding_from_python(binding)?;
        let slot = self.check_slot(slot)?;
        self.slots.bind(slot, binding);
        Ok(())
    }

    #[pyo3(signature = (logits, slots, positions, masks=None))]
    fn step(
        &mut self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        slots: Vec<usize>,
        positions: Vec<u64>,
        masks: Option<Vec<Option<Int32s<'_>>>>,
    ) -> PyResult<(Vec<u32>, Vec<Option<Logprobs>>)> {
        let buffer = PyBuffer::<f32>::get(logits)?;
        let mut numbers = buffer.to_vec(py)?;
        if positions.len() != slots.len() || numbers.len() != slots.len() * self.vocab_size {
            return Err(PyValueError::new_err("logits, slots, positions: row counts differ"));
        }
        let mut masks: Vec<Option<Vec<u32>>> = masks
            .unwrap_or_default()
            .iter()
            .map(|mask| mask.as_ref().map(words_of))
            .collect();
        masks.resize(slots.len(), None);
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        let rows = numbers.chunks_exact_mut(self.vocab_size);
        for (((row, slot), position), mask) in rows.zip(slots).zip(positions).zip(masks) {
            let slot = self.check_slot(slot)?;
            let mask = mask.as_deref();
            let drawn = self.slots.draw(slot, position, row, mask, &mut self.scratch);
            self.slots.record(slot, drawn.token);
            tokens.push(drawn.token);
            logprobs.push(drawn.logprobs.map(|of| (of.own, of.top_ids, of.top)));
        }
        buffer.copy_from_slice(py, &numbers)?;
        Ok((tokens, logprobs))
    }

    fn record(&mut self, slot: usize, token: u32) -> PyResult<()> {
        let slot = self.check_slot(slot)?;
        self.slots.record(slot, token);
        Ok(())
    }

    fn prompt_part(&self, slot: usize, start: usize, count: usize) -> PyResult<Option<PromptPart>> {
        let part = self.slots.prompt_part(self.check_slot(slot)?, start, count);
        Ok(part.map(|part| (part.req_id, part.first, part.tokens.to_vec(), part.count)))
    }
}
