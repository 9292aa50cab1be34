//! What the Python server tells the gateway once, as JSON, when the engine is ready (`server/gateway_config.py`).

use std::collections::BTreeMap;
use std::sync::Arc;

use minisgl_text::ChatTemplateSource;
use serde::Deserialize;

use crate::answer::errors::Errors;
use crate::answer::fields::Pooling;
use crate::engine::WatchTimes;
use crate::message::SamplingParams;
use crate::metrics::MetricsConfig;

/// What is told has it. Another one is refused.
pub const VERSION: u32 = 5;

/// Everything that an answer depends on beside its request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// See [`VERSION`].
    pub version: u32,
    /// The name that clients ask for.
    pub model_name: String,
    /// Other names of the same model.
    pub aliases: Vec<String>,
    /// Requests may name any model.
    pub any_model_name: bool,
    /// Body of `GET /v1/models`, as the Python server answers it.
    pub models: String,
    /// The longest prompt with its answer, in tokens.
    pub max_seq_len: usize,
    /// Token ids lie below.
    pub vocab_size: u32,
    /// A simulated engine computes no probabilities.
    pub simulated: bool,
    /// By name; `default` and perhaps others.
    pub chat_templates: BTreeMap<String, ChatTemplateSource>,
    /// Arguments of the `default` one that fields of requests set.
    pub template_variables: Vec<String>,
    /// Arguments that a request's own fields set, and `chat_template_kwargs` may not.
    pub template_names: Vec<String>,
    /// The format has it in which what the model thinks is told from the content.
    pub thinking: Option<String>,
    /// The token that ends what it thinks, if one does: not told, but found in the tokenizer.
    #[serde(skip)]
    pub thinking_end: Option<i32>,
    /// How the model calls tools; None: conversations with tools have a chat template of their own.
    pub tools: Option<ToolsConfig>,
    /// Named special tokens, variables of the templates.
    pub special_tokens: BTreeMap<String, String>,
    /// Fields of `SamplingParams` for requests that leave them out.
    pub defaults: serde_json::Map<String, serde_json::Value>,
    /// Fields of bodies that the Python server knows, by kind of body: the values that ask for nothing, if it refuses
    /// others; None: it does what they ask for.
    pub fields: BTreeMap<String, BTreeMap<String, Option<Vec<serde_json::Value>>>>,
    /// What the HTTP side takes on.
    pub limits: Limits,
    /// What numbers of a request may be.
    pub ranges: Ranges,
    /// How much one request may name.
    pub bounds: Bounds,
    /// Answers that clients may come back to, of all keys, until the Python server takes them.
    pub max_kept_answers: usize,
    /// Their bytes.
    pub max_kept_bytes: usize,
    /// How far from 0 a priority may be, where no key says less.
    pub max_priority: i64,
    /// Without it nothing but `/livez` and `/readyz` is answered.
    pub api_key: Option<String>,
    /// Those of a file, beside it.
    pub api_keys: Vec<ApiKey>,
    /// Names that the server answers to, in lower case and without ports; loopback addresses are among them always.
    /// None: to any.
    pub hosts: Option<Vec<String>>,
    /// What keeps an answer from being taken for something else by a foreign page that includes it.
    #[serde(deserialize_with = "headers")]
    pub harmless_headers: Vec<(&'static str, String)>,
    /// The headers of answers that pages of other origins may read.
    pub exposed_headers: String,
    /// Origins of web pages that may use the server.
    pub cors_origins: Vec<String>,
    /// What is said where a request fails that was accepted.
    pub errors: Arc<Errors>,
    /// The engine gives embeddings.
    pub embeds: bool,
    /// And text: else the Python server says why not.
    pub writes: bool,
    /// Requests that leave it out have the model's own. None: the Python server says why not.
    pub pooling: Option<Pooling>,
    /// How answered requests are logged.
    pub log: LogConfig,
    /// How what happens is measured.
    pub metrics: MetricsConfig,
    /// When the engine process is in trouble.
    pub watch: WatchTimes,
}

/// How a model calls tools.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsConfig {
    /// The format has it; auto: the one that the model has.
    pub name: String,
    /// The template does not show them: conversations are written anew, and say in their texts what the tools are.
    pub explained: bool,
}

impl GatewayConfig {
    /// Reads it; the version first, so that another one is not taken for a mistake.
    pub fn read(json: &str) -> Result<GatewayConfig, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_str(json).map_err(|error| error.to_string())?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}, the extension reads {VERSION}: build the extension again"
            ));
        }
        serde_json::from_str(json).map_err(|error| error.to_string())
    }
}

/// Their names stay as long as the process: they are told once.
fn headers<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<(&'static str, String)>, D::Error> {
    let found = Vec::<(String, String)>::deserialize(from)?;
    Ok(found.into_iter().map(|(name, value)| (&*name.leak(), value)).collect())
}

/// See `minisgl.sampling_params.Range`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    pub least: f64,
    pub most: Option<f64>,
    pub off: Option<f64>,
    pub is_open: bool,
}

impl Range {
    /// Whether a value is one of them.
    pub fn has(&self, value: f64) -> bool {
        let above = if self.is_open {
            value > self.least
        } else {
            value >= self.least
        };
        (above && self.most.is_none_or(|most| value <= most)) || self.off == Some(value)
    }
}

/// See `minisgl.sampling_params.RANGES`; and of what is added to logits.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ranges {
    pub max_tokens: Range,
    pub min_tokens: Range,
    pub temperature: Range,
    pub top_k: Range,
    pub top_p: Range,
    pub n: Range,
    pub logprobs: Range,
    pub prompt_logprobs: Range,
    pub min_p: Range,
    pub frequency_penalty: Range,
    pub presence_penalty: Range,
    pub repetition_penalty: Range,
    pub logit_bias: Range,
}

impl Ranges {
    /// Whether the numbers of `params` are in their ranges: the first part of `SamplingParams.check`.
    pub fn have(&self, params: &SamplingParams) -> bool {
        let whole = |value: i64| value as f64;
        let has = |range: &Range, value: Option<i64>| value.is_none_or(|one| range.has(whole(one)));
        has(&self.max_tokens, params.max_tokens)
            && has(&self.min_tokens, Some(params.min_tokens))
            && has(&self.top_k, Some(params.top_k))
            && has(&self.n, Some(params.n))
            && has(&self.logprobs, params.logprobs)
            && has(&self.prompt_logprobs, params.prompt_logprobs)
            && self.temperature.has(params.temperature)
            && self.top_p.has(params.top_p)
            && self.min_p.has(params.min_p)
            && self.frequency_penalty.has(params.frequency_penalty)
            && self.presence_penalty.has(params.presence_penalty)
            && self.repetition_penalty.has(params.repetition_penalty)
            && params.logit_bias.0.iter().all(|(_, value)| self.logit_bias.has(*value))
            && params.max_tokens.is_none_or(|most| params.min_tokens <= most)
    }
}

/// See `minisgl.sampling_params.Bounds`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    pub max_stop_strings: usize,
    pub max_stop_chars: usize,
    pub max_stop_token_ids: usize,
    pub max_logit_bias: usize,
    pub max_bad_words: usize,
    pub max_bad_word_chars: usize,
    pub max_allowed_token_ids: usize,
    pub max_values: usize,
    pub more_values: usize,
    pub max_containers: usize,
    pub max_messages: usize,
    pub max_parts: usize,
    pub max_prompts: usize,
    pub max_metadata: usize,
    pub max_inputs: usize,
    pub max_choices: usize,
    pub max_logprob_entries: i64,
    pub completion_tokens: i64,
    pub generate_tokens: i64,
}

/// See `minisgl.config.ApiKey`, which has more; 0 is no limit.
#[derive(Clone, Deserialize)]
pub struct ApiKey {
    pub name: String,
    pub key: String,
    pub max_queued_requests: usize,
    pub tokens_per_minute: u64,
    pub max_priority: i64,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ApiKey({})", self.name) // whoever shows a configuration does not show keys
    }
}

/// See `minisgl.config.AdaptiveMaxTokens`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveMaxTokens {
    pub threshold: usize,
    pub millionths: u32,
}

/// See `minisgl.config.Limits`; times in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub max_queued_requests: usize,
    pub max_queued_tokens: usize,
    pub max_body_bytes: usize,
    pub max_encoding_bytes: usize,
    pub request_timeout: Option<f64>,
    pub slow_client_timeout: f64,
    pub keep_alive_timeout: u64,
    pub step_timeout: f64,
    pub drain_timeout: f64,
    pub adaptive_max_tokens: Option<AdaptiveMaxTokens>,
    pub context_margin: i64,
}

/// How answered requests are logged.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// One JSON object a line instead of plain text.
    pub json: bool,
    /// A line for each request.
    pub access: bool,
    /// Lines for probes too.
    pub probes: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_of_another_version_is_refused_by_its_number() {
        let error = |json| GatewayConfig::read(json).err().unwrap_or_default();
        let other = error(r#"{"version": 0, "no_such_field": 1}"#);
        assert!(other.starts_with("it has version 0, the extension reads 5"), "{other}");
        assert!(error(r#"{"version": 5}"#).contains("missing field"));
        assert!(error("{}").contains("version"));
    }
}
