//! Bodies of requests, as far as the gateway is sure what they mean: the fields of `server/bodies.py` that it takes.
//!
//! Invariants: what does not parse into these types is none of ours, whatever is wrong or new about it; a field that is
//! given twice is not sure either.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A JSON object: serde alone would take a list of the fields' values for one, too.
#[derive(Debug, PartialEq, serde::Serialize)]
#[serde(transparent)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        from.deserialize_map(Fields(PhantomData))
    }
}

/// A text, or a list.
#[derive(Debug, PartialEq, serde::Deserialize)]
#[serde(untagged)]
pub enum Given<T> {
    /// A text.
    Text(String),
    /// A list.
    List(Vec<T>),
}

/// One prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// To be encoded.
    Text(String),
    /// Token ids.
    Ids(Vec<i32>),
}

/// A text, token ids, several texts, or several lists of ids.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged)]
pub enum Prompts {
    Text(String),
    Ids(Vec<i32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<i32>>),
}

impl Prompts {
    /// In order; no ids count as one prompt of none.
    pub fn all(self) -> Vec<Prompt> {
        match self {
            Prompts::Text(text) => vec![Prompt::Text(text)],
            Prompts::Ids(ids) => vec![Prompt::Ids(ids)],
            Prompts::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Prompts::Lists(lists) => lists.into_iter().map(Prompt::Ids).collect(),
        }
    }
}

/// `stream_options`.
#[derive(Debug, Default, PartialEq, serde::Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
}

/// A part of a message: a text, or what the assistant says instead of one.
#[derive(Debug, serde::Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Part {
    Text { text: String },
    Refusal { refusal: String },
}

impl Part {
    /// Its text.
    pub fn into_text(self) -> String {
        match self {
            Part::Text { text } => text,
            Part::Refusal { refusal } => refusal,
        }
    }
}

/// The content of a message: a text, or parts.
pub type Content = Given<Object<Part>>;

/// Words that fields have, in lower case.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident: $($word:ident)*;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
            #[serde(rename_all = "snake_case")]
            pub enum $name { $($word,)* }
        )*
    };
}

words! {
    /// A chat's answer is to have it: only the middle one is done.
    Verbosity: Low Medium High;
    Custom: Custom;
    ChoiceKind: Auto Any Tool None;
    ThinkingKind: Enabled Disabled Adaptive;
    ItemPartKind: InputText OutputText Text Refusal ReasoningText SummaryText;
    ItemKind: Message FunctionCall FunctionCallOutput Reasoning;
    FunctionKind: Function;
    ResponseChoiceKind: Function AllowedTools;
    ResponseMode: Auto Required;
    ResponseFormatKind: Text JsonObject JsonSchema;
    MediumKind: Medium;
    AutoKind: Auto;
    Truncation: Auto Disabled;
    /// How the numbers of an embedding are written: as a list, or as the text of their bytes.
    Encoding: Float Base64;
    /// What an embedding is made of: all tokens of its text, the last one or the first one.
    Pooling: Mean Last Cls;
}

/// Whose message it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    Developer,
    #[default]
    User,
    Assistant,
    Tool,
}

/// A message; fields that the server does not know are ignored, as there.
#[derive(Debug, Default, serde::Deserialize)]
pub struct Message {
    pub role: Role,
    pub content: Option<Content>,
    pub name: Option<String>,
    pub tool_call_id: Option<String>,
    pub tool_calls: Option<Vec<Map<String, Value>>>,
    pub refusal: Option<String>,
    pub reasoning_content: Option<String>,
    pub reasoning: Option<String>,
}

/// What the Python server reads.
pub type Raw = Option<Box<RawValue>>;

/// A body by its fields. `FIELDS`: their names, but for those that all share; `TABLE`: of all that the Python server
/// knows, see [`GatewayConfig::fields`](crate::config::GatewayConfig::fields).
pub trait Body: serde::de::DeserializeOwned {
    const FIELDS: &'static [&'static str];
    const TABLE: &'static str;

    /// The fields that bodies share, if it has them.
    fn common(&mut self) -> Option<&mut Common> {
        None
    }
}

/// Fields that ask for a form of the answer, which the Python server reads.
pub const FORMS: [&str; 12] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "guided_decoding_backend",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
];

macro_rules! common {
    ($($field:ident: $kind:ty,)*) => {
        /// The fields that bodies share.
        #[derive(Debug, Default, PartialEq, serde::Deserialize)]
        pub struct Common {
            $(pub $field: $kind,)*
            #[serde(skip)]
            pub logprobs: Option<i64>,
            #[serde(skip)]
            pub receipt: bool,
            /// What asks for a form of the answer, with what was written.
            #[serde(skip)]
            pub form: Vec<(&'static str, String)>,
        }

        impl Common {
            /// The names of those that are given.
            pub const FIELDS: &'static [&'static str] = &[$(stringify!($field),)*];
        }
    };
}

common! {
    model: Option<String>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    n: Option<i64>,
    max_tokens: Option<i64>,
    min_tokens: Option<i64>,
    stop: Option<Given<String>>,
    stop_token_ids: Option<Vec<i32>>,
    ignore_eos: Option<bool>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    logit_bias: Option<Map<String, Value>>,
    stream: Option<bool>,
    stream_options: Option<Object<StreamOptions>>,
    priority: Option<i32>,
    user: Option<String>,
    metadata: Option<Map<String, Value>>,
    store: Option<bool>,
}

impl Common {
    /// Takes out what asks for nothing of sampling.
    pub fn take_envelope(&mut self) -> Common {
        Common {
            model: self.model.take(),
            stream: self.stream.take(),
            stream_options: self.stream_options.take(),
            priority: self.priority.take(),
            user: self.user.take(),
            metadata: self.metadata.take(),
            store: self.store.take(),
            ..Common::default()
        }
    }
}

macro_rules! body {
    ($(#[$doc:meta])* $name:ident $table:literal $($common:ident)? { $($field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, serde::Deserialize)]
        pub struct $name {
            $(#[serde(flatten)] pub $common: Common,)?
            $(pub $field: $kind,)*
        }

        impl Body for $name {
            const FIELDS: &'static [&'static str] = &[$(stringify!($field),)*];
            const TABLE: &'static str = $table;
            $(
                fn common(&mut self) -> Option<&mut Common> {
                    Some(&mut self.$common)
                }
            )?
        }
    };
}

body! {
    /// POST /v1/chat/completions.
    ChatBody "chat" common {
        messages: Vec<Object<Message>>,
        add_generation_prompt: Option<bool>,
        chat_template_kwargs: Option<Map<String, Value>>,
        enable_thinking: Option<bool>,
        thinking_budget: Option<i64>,
        include_reasoning: Option<bool>,
        separate_reasoning: Option<bool>,
        reasoning_effort: Option<String>,
        verbosity: Option<Verbosity>,
        max_completion_tokens: Option<i64>,
        logprobs: Option<bool>,
        top_logprobs: Option<i64>,
        receipt: Option<bool>,
        tools: Raw,
        tool_choice: Raw,
        parallel_tool_calls: Raw,
    }
}

/// A text, as blocks have it.
#[derive(Debug, serde::Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum TextBlock {
    Text { text: String },
}

/// A block of a message.
#[derive(Debug, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
    },
    /// Says nothing to this model.
    RedactedThinking {},
    ToolUse {
        id: String,
        name: String,
        input: Map<String, Value>,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<Given<Object<TextBlock>>>,
        is_error: Option<bool>,
    },
}

/// A message.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicMessage {
    pub role: Role,
    pub content: Given<Object<Block>>,
}

/// A tool.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicTool {
    pub r#type: Option<Custom>,
    pub name: String,
    pub description: Option<String>,
    pub input_schema: Map<String, Value>,
    pub strict: Option<bool>,
}

/// `tool_choice`.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicToolChoice {
    pub r#type: ChoiceKind,
    pub name: Option<String>,
    pub disable_parallel_tool_use: Option<bool>,
}

/// `thinking`.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicThinking {
    pub r#type: ThinkingKind,
    pub budget_tokens: Option<i64>,
}

/// `output_format`.
#[derive(Debug, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AnthropicFormat {
    JsonSchema { schema: Map<String, Value> },
}

/// `output_config`.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicOutputConfig {
    pub format: Option<Object<AnthropicFormat>>,
    pub effort: Option<String>,
}

body! {
    /// POST /v1/messages.
    MessagesBody "messages" common {
        system: Option<Given<Object<TextBlock>>>,
        messages: Vec<Object<AnthropicMessage>>,
        stop_sequences: Option<Vec<String>>,
        tools: Option<Vec<Object<AnthropicTool>>>,
        tool_choice: Option<Object<AnthropicToolChoice>>,
        thinking: Option<Object<AnthropicThinking>>,
        output_config: Option<Object<AnthropicOutputConfig>>,
        output_format: Option<Object<AnthropicFormat>>,
        receipt: Option<bool>,
        chat_template_kwargs: Option<Map<String, Value>>,
    }
}

/// A part of an item.
#[derive(Debug, serde::Deserialize)]
pub struct ItemPart {
    pub r#type: ItemPartKind,
    pub text: Option<String>,
    pub refusal: Option<String>,
}

/// An item of a conversation, of any kind but references.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseItem {
    pub r#type: Option<ItemKind>,
    pub id: Option<String>,
    pub role: Option<Role>,
    pub content: Option<Given<Object<ItemPart>>>,
    pub call_id: Option<String>,
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub arguments: Option<String>,
    pub output: Option<Given<Object<ItemPart>>>,
    pub summary: Option<Vec<Object<ItemPart>>>,
}

/// A tool.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseTool {
    pub r#type: FunctionKind,
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Map<String, Value>>,
    pub strict: Option<bool>,
}

/// One of those that are allowed.
#[derive(Debug, serde::Deserialize, serde::Serialize)]
pub struct ResponseToolName {
    pub r#type: FunctionKind,
    pub name: String,
}

/// `tool_choice`, if it is an object. Written, it is as the answer has it.
#[derive(Debug, serde::Deserialize, serde::Serialize)]
pub struct ResponseChoice {
    pub r#type: ResponseChoiceKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<ResponseMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<Object<ResponseToolName>>>,
}

/// `text.format`.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseFormat {
    pub r#type: ResponseFormatKind,
    pub name: Option<String>,
    pub schema: Option<Map<String, Value>>,
    pub strict: Option<bool>,
    pub description: Option<String>,
}

/// `text`.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseText {
    pub format: Option<Map<String, Value>>,
    pub verbosity: Option<MediumKind>,
}

/// `reasoning`.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseReasoning {
    pub effort: Option<String>,
    pub summary: Option<AutoKind>,
    pub generate_summary: Option<AutoKind>,
}

body! {
    /// POST /v1/responses.
    ResponsesBody "responses" common {
        input: Option<Given<Object<ResponseItem>>>,
        instructions: Option<String>,
        previous_response_id: Option<String>,
        tools: Option<Vec<Object<ResponseTool>>>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
        text: Option<Object<ResponseText>>,
        reasoning: Option<Object<ResponseReasoning>>,
        max_output_tokens: Option<i64>,
        max_tool_calls: Option<i64>,
        top_logprobs: Option<i64>,
        include: Option<Vec<String>>,
        truncation: Option<Truncation>,
        safety_identifier: Option<String>,
        prompt_cache_key: Option<String>,
        receipt: Option<bool>,
        chat_template_kwargs: Option<Map<String, Value>>,
    }
}

body! {
    /// POST /v1/completions.
    CompletionBody "completion" common {
        prompt: Prompts,
        logprobs: Option<i64>,
        echo: Option<bool>,
        best_of: Option<i64>,
        receipt: Option<bool>,
    }
}

body! {
    /// POST /v1/embeddings.
    EmbeddingBody "embedding" {
        model: Option<String>,
        input: Prompts,
        encoding_format: Option<Encoding>,
        dimensions: Option<usize>,
        pooling: Option<Pooling>,
        priority: Option<i64>,
        user: Option<String>,
    }
}

body! {
    /// POST /generate: what stands beside `sampling_params`. `text` and `input_ids` are SGLang's: the Python server
    /// answers as SGLang does.
    GenerateBody "generate" common {
        prompt: Option<String>,
        sampling_params: Raw,
        max_new_tokens: Option<i64>,
        min_new_tokens: Option<i64>,
        sampling_seed: Option<i64>,
    }
}

body! {
    /// `sampling_params` of POST /generate.
    GenerateSampling "generate_sampling" common {
        max_new_tokens: Option<i64>,
        min_new_tokens: Option<i64>,
        sampling_seed: Option<i64>,
    }
}
