//! What the Python server tells the gateway once, as JSON, when the engine is ready (`server/gateway_config.py`).

use std::collections::BTreeMap;

use minisgl_text::{ChatTemplateSource, TokenizerSource};
use serde::Deserialize;

/// Everything that an answer depends on beside its request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
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
    /// tokenizer.json: its file, or its text.
    pub tokenizer: TokenizerSource,
    /// By name; `default` and perhaps others.
    pub chat_templates: BTreeMap<String, ChatTemplateSource>,
    /// Arguments of the `default` one that fields of requests set.
    pub template_variables: Vec<String>,
    /// Answers to conversations are taken apart: what the model thinks is told from the content.
    #[serde(default)]
    pub parses_chats: bool,
    /// Named special tokens, variables of the templates.
    pub special_tokens: BTreeMap<String, String>,
    /// Fields of `SamplingParams` for requests that leave them out.
    pub defaults: serde_json::Map<String, serde_json::Value>,
    /// What the HTTP side takes on.
    pub limits: Limits,
    /// The most likely tokens that are reported at one position.
    pub max_logprobs: i64,
    /// Log probabilities of one request.
    pub max_logprob_entries: i64,
    /// How far from 0 a priority may be, where no key says less.
    pub max_priority: i64,
    /// Without it nothing but `/livez` and `/readyz` is answered.
    pub api_key: Option<String>,
    /// Those of a file, beside it.
    pub api_keys: Vec<ApiKey>,
    /// Names that the server answers to, in lower case and without ports; loopback addresses are among them always.
    /// None: to any.
    pub hosts: Option<Vec<String>>,
    /// Origins of web pages that may use the server.
    pub cors_origins: Vec<String>,
    /// How answered requests are logged.
    pub log: LogConfig,
}

/// See `minisgl.config.ApiKey`, which has more; 0 is no limit.
#[derive(Clone, Deserialize)]
#[allow(missing_docs)]
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
#[allow(missing_docs)]
pub struct AdaptiveMaxTokens {
    pub threshold: usize,
    pub millionths: u32,
}

/// See `minisgl.config.Limits`; times in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
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
