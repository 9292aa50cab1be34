//! Messages to bytes, by the rules of msgspec: numbers in their shortest form, floats in eight bytes, a map that leaves
//! out defaults has a long header.

use rmp::encode as put;

use super::{LENGTH_BYTES, SCHEMA_VERSION, SamplingParams, ToEngine};

/// One frame of `messages`, with its length in front.
#[must_use]
pub fn encode(messages: &[ToEngine]) -> Vec<u8> {
    let mut out = Bytes::frame(messages.len(), messages.iter().map(estimate).sum());
    for message in messages {
        out.message(message);
    }
    out.framed()
}

/// About as many bytes as `message` takes.
pub(crate) fn estimate(message: &ToEngine) -> usize {
    match message {
        ToEngine::AddRequest { tokens, .. } | ToEngine::AddPrefix { tokens, .. } => 4 * tokens.len() + 128,
        _ => 24,
    }
}

pub(super) struct Bytes(Vec<u8>);

/// Writing into memory does not fail: what `rmp` returns is left alone.
impl Bytes {
    /// The front of a frame of so many messages, with room for about so many bytes.
    pub(super) fn frame(number: usize, room: usize) -> Self {
        let mut out = Self(Vec::with_capacity(room + 16));
        out.0.extend([0; LENGTH_BYTES]);
        out.0.extend(SCHEMA_VERSION.to_le_bytes());
        out.array(number);
        out
    }

    /// The header of an array of so many.
    pub(super) fn list_head(number: usize) -> Vec<u8> {
        let mut out = Self(Vec::new());
        out.array(number);
        out.0
    }

    /// With its length in front.
    pub(super) fn framed(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
        self.0[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        self.0
    }

    pub(super) fn array(&mut self, length: usize) {
        let _ = put::write_array_len(&mut self.0, count(length));
    }

    pub(super) fn str(&mut self, text: &str) {
        let _ = put::write_str(&mut self.0, text);
    }

    pub(super) fn int(&mut self, value: i64) {
        let _ = put::write_sint(&mut self.0, value);
    }

    pub(super) fn float(&mut self, value: f64) {
        let _ = put::write_f64(&mut self.0, value);
    }

    pub(super) fn ints(&mut self, values: &[i64]) {
        self.array(values.len());
        for &value in values {
            self.int(value);
        }
    }

    fn strs(&mut self, values: &[String]) {
        self.array(values.len());
        for value in values {
            self.str(value);
        }
    }

    pub(super) fn int32s(&mut self, values: &[i32]) {
        let _ = put::write_bin_len(&mut self.0, count(4 * values.len()));
        for value in values {
            self.0.extend(value.to_le_bytes());
        }
    }

    pub(super) fn int64s(&mut self, values: impl ExactSizeIterator<Item = i64>) {
        let _ = put::write_bin_len(&mut self.0, count(8 * values.len()));
        for value in values {
            self.0.extend(value.to_le_bytes());
        }
    }

    pub(super) fn bytes(&mut self, parts: &[&[u8]]) {
        let _ = put::write_bin_len(&mut self.0, count(parts.iter().map(|part| part.len()).sum()));
        parts.iter().for_each(|part| self.0.extend_from_slice(part));
    }

    pub(super) fn map(&mut self, length: usize) {
        let _ = put::write_map_len(&mut self.0, count(length));
    }

    pub(super) fn none(&mut self) {
        let _ = put::write_nil(&mut self.0);
    }

    fn message(&mut self, message: &ToEngine) {
        match message {
            ToEngine::Hello { name } => {
                self.tagged("hello", 1);
                self.str(name);
            }
            ToEngine::AddRequest {
                req_id,
                tokens,
                sampling,
                priority,
                num_generated,
                key,
            } => {
                self.tagged("add", 6);
                self.int(*req_id);
                self.int32s(tokens);
                self.sampling(sampling);
                self.int(*priority);
                self.int(*num_generated);
                self.int(*key);
            }
            ToEngine::AbortRequest(req_id) => {
                self.tagged("abort", 1);
                self.int(*req_id);
            }
            ToEngine::FinishRequest(req_id) => {
                self.tagged("finish", 1);
                self.int(*req_id);
            }
            ToEngine::AddPrefix { prefix_id, tokens, pin } => {
                self.tagged("add_prefix", 3);
                self.int(*prefix_id);
                self.int32s(tokens);
                let _ = put::write_bool(&mut self.0, *pin);
            }
            ToEngine::RemovePrefix(prefix_id) => {
                self.tagged("remove_prefix", 1);
                self.int(*prefix_id);
            }
            ToEngine::ClearCache => self.tagged("clear_cache", 0),
            ToEngine::LoadAdapter { adapter, name, path } => {
                self.tagged("load_adapter", 3);
                self.int(*adapter);
                self.str(name);
                self.str(path);
            }
            ToEngine::UnloadAdapter(adapter) => {
                self.tagged("unload_adapter", 1);
                self.int(*adapter);
            }
            ToEngine::Watch { steps, tree } => {
                self.tagged("watch", 2);
                let _ = put::write_bool(&mut self.0, *steps);
                let _ = put::write_bool(&mut self.0, *tree);
            }
            ToEngine::Shutdown => self.tagged("shutdown", 0),
        }
    }

    pub(super) fn tagged(&mut self, tag: &str, num_fields: usize) {
        self.array(1 + num_fields);
        self.str(tag);
    }

    /// A map of what is not its default. Its header is that of a long map, because the sender sees its length last.
    fn sampling(&mut self, params: &SamplingParams) {
        let header = self.0.len();
        self.0.extend([0xde, 0, 0]);
        let mut fields = Fields { out: self, number: 0 };
        fields.all(params);
        let number = fields.number;
        self.0[header + 1..header + 3].copy_from_slice(&number.to_be_bytes());
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

struct Fields<'a> {
    out: &'a mut Bytes,
    number: u16,
}

impl Fields<'_> {
    fn all(&mut self, params: &SamplingParams) {
        let p = params;
        self.option("max_tokens", p.max_tokens);
        self.int("min_tokens", p.min_tokens, 0);
        self.float("temperature", p.temperature, 1.0);
        self.int("top_k", p.top_k, -1);
        self.float("top_p", p.top_p, 1.0);
        self.float("min_p", p.min_p, 0.0);
        self.float("frequency_penalty", p.frequency_penalty, 0.0);
        self.float("presence_penalty", p.presence_penalty, 0.0);
        self.float("repetition_penalty", p.repetition_penalty, 1.0);
        if !p.logit_bias.is_empty() {
            self.name("logit_bias");
            let _ = put::write_map_len(&mut self.out.0, count(p.logit_bias.len()));
            for &(token, bias) in &p.logit_bias {
                self.out.int(token);
                self.out.float(bias);
            }
        }
        self.ints("allowed_token_ids", &p.allowed_token_ids);
        self.strs("bad_words", &p.bad_words);
        if !p.bad_token_ids.is_empty() {
            self.name("bad_token_ids");
            self.out.array(p.bad_token_ids.len());
            for ids in &p.bad_token_ids {
                self.out.ints(ids);
            }
        }
        self.option("seed", p.seed);
        self.int("n", p.n, 1);
        self.strs("stop", &p.stop);
        self.ints("stop_token_ids", &p.stop_token_ids);
        if p.ignore_eos {
            self.name("ignore_eos");
            let _ = put::write_bool(&mut self.out.0, true);
        }
        self.option("logprobs", p.logprobs);
        self.option("prompt_logprobs", p.prompt_logprobs);
        if let Some(grammar) = &p.grammar {
            self.name("grammar");
            self.out.str(grammar);
        }
        if let Some(pooling) = &p.embedding {
            self.name("embedding");
            self.out.str(pooling);
        }
        self.int("adapter", p.adapter, 0);
    }

    fn name(&mut self, name: &str) {
        self.number += 1;
        self.out.str(name);
    }

    fn option(&mut self, name: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.name(name);
            self.out.int(value);
        }
    }

    fn int(&mut self, name: &str, value: i64, default: i64) {
        if value != default {
            self.name(name);
            self.out.int(value);
        }
    }

    fn float(&mut self, name: &str, value: f64, default: f64) {
        if value.to_bits() != default.to_bits() {
            self.name(name);
            self.out.float(value);
        }
    }

    fn ints(&mut self, name: &str, values: &[i64]) {
        if !values.is_empty() {
            self.name(name);
            self.out.ints(values);
        }
    }

    fn strs(&mut self, name: &str, values: &[String]) {
        if !values.is_empty() {
            self.name(name);
            self.out.strs(values);
        }
    }
}
