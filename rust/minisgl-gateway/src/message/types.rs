//! Message types: those of `minisgl.message` that a front end needs, with decoded arrays.

use std::fmt;

use ::bytes::Bytes;
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Serialize};

use super::packed::{Pairs, bytes};

/// Version of the message schema, which both sides must share.
pub const SCHEMA_VERSION: u16 = 17;
/// Exclusive upper bound of request ids. A front end counts its own ids from 0.
pub const ID_LIMIT: i64 = 1 << 40;
/// Size of the length prefix of a frame, a little-endian integer, in bytes.
pub const LENGTH_BYTES: usize = 4;
/// Largest valid frame in bytes, far above any real one.
pub const MAX_FRAME_BYTES: usize = 1 << 30;
/// Flag in the version of a frame that has a send timestamp.
pub(super) const STAMPED: u16 = 0x8000;

/// Error for a frame that cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// The frame has this other schema version.
    Version(u16),
    /// The frame does not fit the message types; the text says where.
    Malformed(String),
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(got) => {
                write!(f, "schema version {got}, this side speaks {SCHEMA_VERSION}")
            }
            Self::Malformed(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for MessageError {}

/// Returns the length of the next frame, which follows after [`LENGTH_BYTES`]. `None` if the length prefix is
/// incomplete; an error if it exceeds [`MAX_FRAME_BYTES`].
pub fn frame_length(bytes: &[u8]) -> Result<Option<usize>, MessageError> {
    let Some(front) = bytes.first_chunk::<LENGTH_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*front) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(MessageError::Malformed(format!(
            "a frame of {length} bytes is too long: the limit is {MAX_FRAME_BYTES}"
        )));
    }
    Ok(Some(length))
}

/// Message from an engine process, or from a pool of engines, which front ends see as one engine.
#[derive(Clone, Debug, PartialEq)]
pub enum FromEngine {
    /// Progress of the engine's start.
    LoadProgress(LoadProgress),
    /// The engine accepts requests now.
    EngineReady(Box<EngineReady>),
    /// Load statistics, at most every 100 ms while busy and once when idle.
    EngineStats(Box<EngineStats>),
    /// Heartbeat, every half second.
    Heartbeat(Heartbeat),
    /// All tokens and ends of one step.
    StepTokens(StepTokens),
    /// Log lines about a step, at level debug.
    Narration(Vec<String>),
    /// New state of a cached prefix; only the Python server uses it.
    PrefixChanged {
        /// Id of the prefix, from its [`ToEngine::AddPrefix`].
        prefix_id: i64,
        /// State: `warming`, `ready`, `refused`, `removed` or `unknown`.
        state: String,
    },
    /// The prefix cache was cleared; only the Python server uses it.
    CacheCleared,
    /// New state of a LoRA adapter; only the Python server uses it.
    AdapterChanged {
        /// Id of the adapter, from its [`ToEngine::LoadAdapter`].
        adapter: i64,
        /// New state of the adapter: `loaded`, `refused` or `unloaded`.
        state: String,
    },
    /// Details of the last steps; only the Python server uses them.
    Watched,
    /// Messages of one engine that a pool forwards.
    EngineSays {
        /// Index of the engine.
        engine: i64,
        /// List of messages in msgpack, with the engine's own bytes.
        messages: Vec<u8>,
    },
    /// New state of one engine of a pool.
    EngineState {
        /// Index of the engine.
        engine: i64,
        /// New state of the engine: `starting`, `ready`, `silent` or `dead`.
        state: String,
        /// Reason for which the engine was lost, else empty.
        reason: String,
    },
    /// Fatal error of the engine process, or why it disconnects this front end. Always the last message.
    EngineFailed(String),
}

/// A log line of the engine's start, or with `total` the progress of the step `text`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    /// Log line, or name of the step whose progress it is.
    pub text: String,
    /// Completed part of `total`.
    #[serde(default)]
    pub done: i64,
    /// Size of the step; 0 for a log line.
    #[serde(default)]
    pub total: i64,
}

/// Properties of the engine and its model, as in `minisgl.message.EngineReady`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct EngineReady {
    pub engine: String,
    pub model_dir: Option<String>,
    pub vocab_size: i64,
    pub max_seq_len: i64,
    pub eos_ids: Vec<i32>,
    pub num_pages: i64,
    pub page_size: i64,
    pub device: String,
    pub dtype: String,
    pub cpu_backend: String,
    #[serde(default)]
    pub cpu_backend_fallback: String,
    #[serde(default)]
    pub simulated: String,
    #[serde(default)]
    pub engine_details: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub sees: bool,
}

/// Load of an engine. The other fields of `minisgl.message.EngineStats` are not decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct EngineStats {
    pub num_waiting: i64,
    pub num_running: i64,
}

/// Activity of a process's step loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The step loop is idle, or doing work that cannot hang.
    Idle,
    /// The step loop is working on a step.
    Working,
    /// The step loop is waiting for the forward pass of a step.
    Forward,
}

/// Heartbeat of an engine: activity of its step loop, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Heartbeat {
    /// Activity of the step loop.
    pub phase: Phase,
    /// Time since that activity began, in seconds.
    pub age_s: f64,
    /// Step count of the forward pass in progress, or -1.
    #[serde(default = "none")]
    pub step: i64,
}

fn none() -> i64 {
    -1
}

/// All tokens and ends of one step. `req_ids`, `tokens` and `reasons` are parallel arrays.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTokens {
    /// Step count of the engine.
    pub step: i64,
    /// Ids of the requests with a token or an end in this step.
    pub req_ids: Vec<i64>,
    /// Token id of each request; -1: only its end.
    pub tokens: Vec<i32>,
    /// Finish reason of each request, as in `minisgl.step.FinishReason`; 0: it continues.
    pub reasons: Vec<i32>,
    /// Ids of requests admitted for the first time since the last message, with their numbers of cached prompt tokens.
    pub admitted: Vec<(i64, i32)>,
    /// Error texts by request id, for requests that ended with an error.
    pub errors: Pairs<i64, String>,
    /// Log probabilities of tokens, for the requests that ask for them.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log probabilities of prompt tokens, for the requests that ask for them.
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Embeddings of prompts, for embedding requests.
    pub embeddings: Vec<Embedding>,
}

/// Embedding of one prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    /// Id of the request whose prompt this is the embedding of.
    pub req_id: i64,
    /// Embedding values as little-endian float32 bytes.
    #[serde(with = "bytes")]
    pub numbers: Vec<u8>,
}

/// Log probabilities of one generated token and of the most likely tokens at its position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Index of the token in [`StepTokens::tokens`].
    pub index: usize,
    /// Log probability of the token.
    pub logprob: f64,
    /// Ids of the most likely tokens.
    pub top_ids: Vec<i32>,
    /// Log probabilities of the most likely tokens.
    pub top_logprobs: Vec<f64>,
}

/// Log probabilities of the prompt tokens from position `first` on. They may be sent again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    /// Id of the request whose prompt this is.
    pub req_id: i64,
    /// Prompt position of the first entry.
    pub first: i64,
    /// Log probability of each prompt token.
    pub logprobs: Vec<f64>,
    /// Ids of the most likely tokens at each position.
    pub top_ids: Vec<Vec<i32>>,
    /// Log probabilities of the most likely tokens at each position.
    pub top_logprobs: Vec<Vec<f64>>,
}

/// Message to an engine process.
#[derive(Clone, Debug, PartialEq)]
pub enum ToEngine {
    /// First message of a connection: the front end's name, for the engine's log.
    Hello {
        /// Name of the front end, such as "gateway".
        name: String,
    },
    /// Adds a request to the engine.
    AddRequest(NewRequest),
    /// Aborts a request of this id: no client waits for it.
    AbortRequest(i64),
    /// Finishes a request of this id: a stop string was found in its text.
    FinishRequest(i64),
    /// Computes the KV of a prefix when the engine is idle, and stores it in the prefix cache.
    AddPrefix {
        /// Id that the sender chose. It belongs to the engine, not to the connection.
        prefix_id: i64,
        /// Token ids of the prefix.
        tokens: Vec<i32>,
        /// Pin the pages until [`ToEngine::RemovePrefix`]; otherwise they are evicted like others.
        pin: bool,
    },
    /// Removes the prefix of this id.
    RemovePrefix(i64),
    /// Clears the prefix cache.
    ClearCache,
    /// Loads a LoRA adapter, so that requests may use its id.
    LoadAdapter {
        /// Id that the sender chose, above 0 and never reused.
        adapter: i64,
        /// Model name that clients use.
        name: String,
        /// Folder of the adapter.
        path: String,
    },
    /// Unloads the adapter of this id: no further request will use it.
    UnloadAdapter(i64),
    /// Requests details of steps, or of the radix tree, for a few seconds.
    Watch {
        /// Whether to send the batches of steps.
        steps: bool,
        /// Whether to send the radix tree, once.
        tree: bool,
    },
    /// Aborts all requests, closes the engine, and exits with status 0.
    Shutdown,
}

/// A request as its front end sends it to an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewRequest {
    /// Id that the front end chose: below [`ID_LIMIT`] and above all earlier ids on its connection.
    pub req_id: i64,
    /// Token ids of the prompt, followed by `num_generated` generated ones.
    pub tokens: Vec<i32>,
    /// Sampling parameters with `seed` and `max_tokens` set and `n` = 1.
    pub sampling: Box<SamplingParams>,
    /// Priority; lower values are scheduled first.
    pub priority: i64,
    /// Count of the last `tokens` that were generated by an engine that was lost.
    pub num_generated: i64,
    /// Index of the caller's API key in the key file; 0: none.
    pub key: i64,
    /// Run the request only on capacity that no other request can use.
    pub background: bool,
    /// Images of the prompt, in order of their positions.
    pub images: Vec<PromptImage>,
}

/// An image of a prompt, as in `minisgl.prompt_image.PromptImage`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct PromptImage {
    /// Digest of the kind of model, the grid and the pixels.
    #[serde(with = "bytes")]
    pub digest: Vec<u8>,
    /// Prompt position of the first virtual id.
    pub start: i64,
    /// Number of virtual ids.
    pub num_tokens: i64,
    /// Number of patches: rows and columns.
    pub grid: (i64, i64),
    /// Patches as bytes; clones share them.
    #[serde(with = "bytes")]
    pub pixels: Bytes,
}

macro_rules! sampling_params {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = $default:expr,)*) => {
        /// Sampling parameters and stop conditions of a request, as in `minisgl.sampling_params.SamplingParams`.
        #[derive(Clone, Debug, PartialEq, Deserialize)]
        #[serde(default)]
        #[allow(missing_docs)]
        pub struct SamplingParams {
            $($(#[$doc])* pub $name: $kind,)*
        }

        impl Default for SamplingParams {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        /// Encodes a map of the fields that differ from their defaults.
        impl Serialize for SamplingParams {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let plain = Self::default();
                let number = 0 $(+ usize::from(!self.$name.is_same(&plain.$name)))*;
                let mut map = serializer.serialize_map(Some(number))?;
                $(if !self.$name.is_same(&plain.$name) {
                    map.serialize_entry(stringify!($name), &self.$name)?;
                })*
                map.end()
            }
        }
    };
}

sampling_params! {
    max_tokens: Option<i64> = None,
    min_tokens: i64 = 0,
    temperature: f64 = 1.0,
    top_k: i64 = -1,
    top_p: f64 = 1.0,
    min_p: f64 = 0.0,
    frequency_penalty: f64 = 0.0,
    presence_penalty: f64 = 0.0,
    repetition_penalty: f64 = 1.0,
    /// Bias added to logits, by token id, in the order of the request; no id twice.
    logit_bias: Pairs<i64, f64> = Pairs::default(),
    allowed_token_ids: Vec<i64> = Vec::new(),
    bad_words: Vec<String> = Vec::new(),
    bad_token_ids: Vec<Vec<i64>> = Vec::new(),
    seed: Option<i64> = None,
    n: i64 = 1,
    stop: Vec<String> = Vec::new(),
    stop_token_ids: Vec<i64> = Vec::new(),
    ignore_eos: bool = false,
    logprobs: Option<i64> = None,
    prompt_logprobs: Option<i64> = None,
    grammar: Option<String> = None,
    embedding: Option<String> = None,
    /// Id of the LoRA adapter; 0: none.
    adapter: i64 = 0,
}

/// Comparison of a field with its default, which a sender omits.
trait Same: PartialEq {
    fn is_same(&self, other: &Self) -> bool {
        self == other
    }
}

/// Compares bits: `-0.0` differs from `0.0`.
impl Same for f64 {
    fn is_same(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl Same for i64 {}
impl Same for bool {}
impl<T: PartialEq> Same for Option<T> {}
impl<T: PartialEq> Same for Vec<T> {}
impl<K: PartialEq, V: PartialEq> Same for Pairs<K, V> {}
