//! What the Python server tells the gateway once, as JSON, when the engine is ready (`server/gateway_config.py`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

/// Everything that an answer depends on beside its request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// The name that clients ask for.
    pub model_name: String,
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
    /// Answers to conversations are taken apart: what the model thinks is told from the content.
    #[serde(default)]
    pub parses_chats: bool,
    /// Named special tokens, variables of the templates.
    pub special_tokens: BTreeMap<String, String>,
    /// Fields of `SamplingParams` for requests that leave them out.
    pub defaults: serde_json::Map<String, serde_json::Value>,
    /// What the HTTP side takes on.
    pub limits: Limits,
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

/// Where the tokenizer comes from.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerSource {
    /// A tokenizer.json.
    File(PathBuf),
    /// The text of one.
    Text(String),
}

/// A chat template and the shape in which it takes a message's content (`tokenizer/chat_template.py`).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatTemplateSource {
    /// The jinja source.
    pub source: String,
    /// What it does with a message's content.
    pub content: ContentShape,
}

/// In what shape a chat template takes a message's content.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ContentShape {
    /// One string.
    String,
    /// A list of parts.
    Parts,
    /// Both.
    Either,
}

/// See `minisgl.config.ApiKey`, which has more; 0 is no limit.
#[derive(Clone, Deserialize)]
#[allow(missing_docs)]
pub struct ApiKey {
    pub name: String,
    pub key: String,
    pub max_queued_requests: usize,
    pub tokens_per_minute: u64,
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
