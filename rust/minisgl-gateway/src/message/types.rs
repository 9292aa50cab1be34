//! The messages: those of `minisgl.message` that a front end needs, with arrays instead of their bytes.

use std::fmt;

use serde::ser::SerializeMap as _;
use serde::{Deserialize, Serialize};

use super::packed::{Pairs, bytes};

/// Both sides must agree on it.
pub const SCHEMA_VERSION: u16 = 16;
/// Request ids are a front end's own, from 0 to below this.
pub const ID_LIMIT: i64 = 1 << 40;
/// In front of each frame: its length, little-endian.
pub const LENGTH_BYTES: usize = 4;
/// Far above any frame: a length beyond it is none.
pub const MAX_FRAME_BYTES: usize = 1 << 30;
/// Set in the version of a frame that says when it was sent.
pub(super) const STAMPED: u16 = 0x8000;

/// A frame that this version cannot read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// It has another schema version.
    Version(u16),
    /// It does not fit the types.
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

/// The length of the next frame, if its front is here. The frame follows after [`LENGTH_BYTES`].
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

/// From the engine process, or from a pool of engines, which speaks to front ends as one.
#[derive(Clone, Debug, PartialEq)]
pub enum FromEngine {
    /// What the engine process is doing before it is ready.
    LoadProgress(LoadProgress),
    /// It takes requests now.
    EngineReady(Box<EngineReady>),
    /// A snapshot, at most every 100 ms while busy and once when idle.
    EngineStats(Box<EngineStats>),
    /// Every half second.
    Heartbeat(Heartbeat),
    /// All tokens and ends of one step.
    StepTokens(StepTokens),
    /// Lines about a step for the log, at level debug.
    Narration(Vec<String>),
    /// What became of a prefix of the cache: for the Python server.
    PrefixChanged {
        /// The number that its [`ToEngine::AddPrefix`] gave it.
        prefix_id: i64,
        /// `warming`, `ready`, `refused`, `removed` or `unknown`.
        state: String,
    },
    /// The cache was emptied: for the Python server.
    CacheCleared,
    /// What became of an adapter: for the Python server.
    AdapterChanged {
        /// The number that its [`ToEngine::LoadAdapter`] gave it.
        adapter: i64,
        /// `loaded`, `refused` or `unloaded`.
        state: String,
    },
    /// What the last steps did: for the Python server.
    Watched,
    /// From a pool: what one of its engines said, a list of messages in msgpack.
    EngineSays {
        /// Its number.
        engine: i64,
        /// As the engine wrote them.
        messages: Vec<u8>,
    },
    /// From a pool: what became of one of its engines.
    EngineState {
        /// Its number.
        engine: i64,
        /// `starting`, `ready`, `silent` or `dead`.
        state: String,
        /// Why.
        reason: String,
    },
    /// The engine process cannot go on, or not with this front end: what happened. The last message.
    EngineFailed(String),
}

/// A line, or with `total` how far the step `text` is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    /// The line.
    pub text: String,
    /// How much of `total` is done.
    #[serde(default)]
    pub done: i64,
    /// 0: only a line.
    #[serde(default)]
    pub total: i64,
}

/// What the engine is. See `minisgl.message.EngineReady`.
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
}

/// The load of an engine. What else `minisgl.message.EngineStats` has is for the Python server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct EngineStats {
    pub num_waiting: i64,
    pub num_running: i64,
}

/// What the step loop of a process is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Nothing, or nothing that could hang.
    Idle,
    /// It computes a step.
    Working,
    /// It waits for the forward of a step.
    Forward,
}

/// What the step loop is doing, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Heartbeat {
    /// What.
    pub phase: Phase,
    /// Since when, in seconds.
    pub age_s: f64,
    /// The step of a forward, else -1.
    #[serde(default = "none")]
    pub step: i64,
}

fn none() -> i64 {
    -1
}

/// All tokens and ends of one step. The first three arrays belong together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTokens {
    /// Its number.
    pub step: i64,
    /// Requests with a token or an end.
    pub req_ids: Vec<i64>,
    /// The token of each; -1: none, only the end.
    pub tokens: Vec<i32>,
    /// How each ended, `minisgl.step.FinishReason`; 0: it goes on.
    pub reasons: Vec<i32>,
    /// Requests admitted for the first time since the last message, and how many of their prompt tokens were cached.
    pub admitted: Vec<(i64, i32)>,
    /// Why requests ended with an error.
    pub errors: Pairs<i64, String>,
    /// Log probabilities of the tokens whose requests ask for them.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log probabilities of prompts whose requests ask for them.
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Embeddings of prompts of which nothing else is wanted.
    pub embeddings: Vec<Embedding>,
}

/// What a prompt is for the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    /// Whose prompt.
    pub req_id: i64,
    /// Its numbers, float32 as bytes.
    #[serde(with = "bytes")]
    pub numbers: Vec<u8>,
}

/// Log probabilities of one token and the most likely ones in its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Where its token stands in [`StepTokens::tokens`].
    pub index: usize,
    /// Its own.
    pub logprob: f64,
    /// The most likely ones.
    pub top_ids: Vec<i32>,
    /// And theirs.
    pub top_logprobs: Vec<f64>,
}

/// Log probabilities of the prompt tokens from position `first` on; they may come again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    /// Whose prompt.
    pub req_id: i64,
    /// The first position.
    pub first: i64,
    /// By position, as the next two.
    pub logprobs: Vec<f64>,
    /// The most likely ones.
    pub top_ids: Vec<Vec<i32>>,
    /// And theirs.
    pub top_logprobs: Vec<Vec<f64>>,
}

/// To the engine process.
#[derive(Clone, Debug, PartialEq)]
pub enum ToEngine {
    /// The first message of a connection: who speaks, for the engine's log.
    Hello {
        /// Such as "gateway".
        name: String,
    },
    /// A new request.
    AddRequest(NewRequest),
    /// Nobody waits for it any more.
    AbortRequest(i64),
    /// A stop string was found in its text.
    FinishRequest(i64),
    /// Compute these tokens when nobody waits, and keep them in the prefix cache.
    AddPrefix {
        /// The sender's, and of the engine, not of the connection.
        prefix_id: i64,
        /// The prefix.
        tokens: Vec<i32>,
        /// Keep them until [`ToEngine::RemovePrefix`], else as long as others are kept.
        pin: bool,
    },
    /// Forget this prefix.
    RemovePrefix(i64),
    /// Empty the prefix cache.
    ClearCache,
    /// Read an adapter, so that requests may name its number.
    LoadAdapter {
        /// The sender's, never used again; above 0.
        adapter: i64,
        /// What clients call it.
        name: String,
        /// Its folder.
        path: String,
    },
    /// No request will name it any more.
    UnloadAdapter(i64),
    /// Tell what steps do, or the tree, for a few seconds.
    Watch {
        /// The batches of steps.
        steps: bool,
        /// The radix tree, once.
        tree: bool,
    },
    /// Abort what lives, close the engine, exit with 0.
    Shutdown,
}

/// A request as its front end gives it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewRequest {
    /// The front end's own, below [`ID_LIMIT`], above all before it on its connection.
    pub req_id: i64,
    /// The prompt.
    pub tokens: Vec<i32>,
    /// Resolved: `seed` and `max_tokens` are set, `n` is 1.
    pub sampling: Box<SamplingParams>,
    /// Lower comes first.
    pub priority: i64,
    /// The last tokens, which an engine that was lost has generated.
    pub num_generated: i64,
    /// Number of the caller's API key in the key file; 0: none.
    pub key: i64,
    /// It gets only what nobody else could.
    pub background: bool,
}

macro_rules! sampling_params {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = $default:expr,)*) => {
        /// How one request samples and when it ends: the fields and defaults of
        /// `minisgl.sampling_params.SamplingParams`.
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

        /// A map of what is not its default.
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
    /// By token id, in the order of the request; no id twice.
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
    /// 0: none.
    adapter: i64 = 0,
}

/// Whether a field is its default, which a sender leaves out.
trait Same: PartialEq {
    fn is_same(&self, other: &Self) -> bool {
        self == other
    }
}

/// `-0.0` is not the same number as `0.0`.
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
