//! Bodies of requests, as far as the gateway is sure what they mean: the fields of `server/bodies.py` that it takes.
//!
//! Invariants: what does not parse into these types is none of ours, whatever is wrong or new about it; a field that is
//! given twice is not sure either.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A JSON object: serde alone would take a list of the fields' values for one, too.
#[derive(Debug)]
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

/// What is a text, or a list of items.
trait TextOrList<'de>: Sized {
    type Item: Deserialize<'de>;
    const EXPECTED: &'static str;
    fn of_text(text: String) -> Self;
    fn of_list(items: Vec<Self::Item>) -> Result<Self, &'static str>;

    fn read<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any<T>(PhantomData<T>);
        impl<'de, T: TextOrList<'de>> Visitor<'de> for Any<T> {
            type Value = T;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(T::EXPECTED)
            }
            fn visit_str<E>(self, text: &str) -> Result<T, E> {
                Ok(T::of_text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<T, A::Error> {
                let mut found = Vec::new();
                while let Some(item) = items.next_element()? {
                    found.push(item);
                }
                T::of_list(found).map_err(serde::de::Error::custom)
            }
        }
        from.deserialize_any(Any(PhantomData))
    }
}

/// One text or several.
#[derive(Debug)]
pub struct Texts(pub Vec<String>);

impl<'de> TextOrList<'de> for Texts {
    type Item = String;
    const EXPECTED: &'static str = "a text or a list of texts";
    fn of_text(text: String) -> Self {
        Texts(vec![text])
    }
    fn of_list(items: Vec<String>) -> Result<Self, &'static str> {
        Ok(Texts(items))
    }
}

/// One prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// To be encoded.
    Text(String),
    /// Token ids.
    Ids(Vec<i32>),
}

/// A text, several texts, token ids, or several lists of them.
#[derive(Debug)]
pub struct Prompts(pub Vec<Prompt>);

#[derive(Debug)]
enum Item {
    Text(String),
    Id(i32),
    Ids(Vec<i32>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Item;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a text, a token id or a list of them")
            }
            fn visit_str<E>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }
            fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<Item, E> {
                i32::try_from(id).map(Item::Id).map_err(E::custom)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
                let mut found = Vec::new();
                while let Some(id) = items.next_element::<i32>()? {
                    found.push(id);
                }
                Ok(Item::Ids(found))
            }
        }
        from.deserialize_any(Any)
    }
}

impl<'de> TextOrList<'de> for Prompts {
    type Item = Item;
    const EXPECTED: &'static str = "a text, texts, token ids or lists of them";
    fn of_text(text: String) -> Self {
        Prompts(vec![Prompt::Text(text)])
    }
    fn of_list(items: Vec<Item>) -> Result<Self, &'static str> {
        let (mut ids, mut found) = (Vec::new(), Vec::new());
        for item in items {
            match item {
                Item::Text(text) => found.push(Prompt::Text(text)),
                Item::Ids(ids) => found.push(Prompt::Ids(ids)),
                Item::Id(id) => ids.push(id),
            }
        }
        let num_texts = found.iter().filter(|one| matches!(one, Prompt::Text(_))).count();
        if (!ids.is_empty() && !found.is_empty()) || (num_texts != 0 && num_texts != found.len()) {
            return Err("prompts of different kinds");
        }
        if !ids.is_empty() {
            found.push(Prompt::Ids(ids));
        }
        Ok(Prompts(found))
    }
}

/// `stream_options`.
#[derive(Debug, Default, serde::Deserialize)]
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

/// A text, or a list of objects.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged, bound = "T: Deserialize<'de>")]
pub enum Given<T> {
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Object<T>>),
}

/// The content of a message: a text, or parts.
#[derive(Debug)]
pub enum Content {
    Text(String),
    Parts(Vec<Part>),
}

impl<'de> TextOrList<'de> for Content {
    type Item = Object<Part>;
    const EXPECTED: &'static str = "a text or text parts";
    fn of_text(text: String) -> Self {
        Content::Text(text)
    }
    fn of_list(items: Vec<Object<Part>>) -> Result<Self, &'static str> {
        Ok(Content::Parts(items.into_iter().map(|Object(part)| part).collect()))
    }
}

macro_rules! text_or_list {
    ($($name:ident)*) => {
        $(impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                TextOrList::read(from)
            }
        })*
    };
}
text_or_list!(Texts Prompts Content);

/// Of a chat's answer: only the middle one is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verbosity {
    Low,
    Medium,
    High,
}

/// Whose message it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

/// A message; fields that the server does not know are ignored, as there.
#[derive(Debug, serde::Deserialize)]
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

/// A body by its fields. `FIELDS`: their names; `TABLE`: of all that the Python server knows, see
/// [`GatewayConfig::fields`](crate::config::GatewayConfig::fields).
pub trait Body: serde::de::DeserializeOwned {
    const FIELDS: &'static [&'static str];
    const TABLE: &'static str;
}

/// The fields of an object, as they are written.
#[derive(Debug)]
pub struct Written<'a>(pub Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Written<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Written<'de>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Written<'de>, A::Error> {
                let mut found = Vec::new();
                while let Some(one) = map.next_entry::<Cow<'de, str>, &'de RawValue>()? {
                    found.push(one);
                }
                Ok(Written(found))
            }
        }
        from.deserialize_map(Fields)
    }
}

macro_rules! body {
    ($(#[$doc:meta])* $name:ident $table:literal { $($field:ident: $kind:ty,)* }) => {
        body! {
            $(#[$doc])* $name $table {
                model: Option<String>,
                temperature: Option<f64>,
                top_p: Option<f64>,
                top_k: Option<i64>,
                min_p: Option<f64>,
                seed: Option<i64>,
                n: Option<i64>,
                max_tokens: Option<i64>,
                min_tokens: Option<i64>,
                stop: Option<Texts>,
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
                $($field: $kind,)*
            } {
                // the form of the answer, as the Python server reads it
                response_format, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar,
                guided_whitespace_pattern, guided_decoding_backend, json_schema, regex, ebnf, grammar,
            }
        }
    };
    ($(#[$doc:meta])* $name:ident $table:literal { $($field:ident: $kind:ty,)* } { $($form:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, serde::Deserialize)]
        pub struct $name {
            $(pub $field: $kind,)*
            $(pub $form: Raw,)*
        }

        impl Body for $name {
            const FIELDS: &'static [&'static str] = &[$(stringify!($field),)* $(stringify!($form),)*];
            const TABLE: &'static str = $table;
        }

        impl $name {
            /// The fields that all bodies share.
            pub fn common(&mut self) -> Common {
                Common {
                    model: self.model.take(),
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    seed: self.seed,
                    n: self.n,
                    max_tokens: self.max_tokens,
                    min_tokens: self.min_tokens,
                    stop: self.stop.take().map(|texts| texts.0).unwrap_or_default(),
                    stop_token_ids: self.stop_token_ids.take().unwrap_or_default(),
                    ignore_eos: self.ignore_eos,
                    frequency_penalty: self.frequency_penalty,
                    presence_penalty: self.presence_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.take(),
                    logprobs: None,
                    receipt: false,
                    stream: self.stream.unwrap_or(false),
                    stream_options: self.stream_options.take().map(|found| found.0),
                    priority: i64::from(self.priority.unwrap_or(0)),
                    form: given([$((stringify!($form), self.$form.take()),)*]),
                }
            }
        }
    };
}

/// The fields that all bodies share.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Common {
    pub model: Option<String>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub seed: Option<i64>,
    pub n: Option<i64>,
    pub max_tokens: Option<i64>,
    pub min_tokens: Option<i64>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<i32>,
    pub ignore_eos: Option<bool>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub logit_bias: Option<Map<String, Value>>,
    pub logprobs: Option<i64>,
    pub receipt: bool,
    pub stream: bool,
    pub stream_options: Option<StreamOptions>,
    pub priority: i64,
    /// What asks for a form of the answer, with what was written.
    pub form: Vec<(&'static str, Box<RawValue>)>,
}

/// Those that are not null.
pub fn given<const N: usize>(fields: [(&'static str, Raw); N]) -> Vec<(&'static str, Box<RawValue>)> {
    let there = fields.into_iter().filter_map(|(name, value)| Some((name, value?)));
    there.collect()
}

body! {
    /// POST /v1/chat/completions.
    ChatBody "chat" {
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
#[allow(missing_docs)]
pub enum TextBlock {
    Text { text: String },
}

/// A block of a message.
#[derive(Debug, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(missing_docs)]
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
        content: Option<Given<TextBlock>>,
        is_error: Option<bool>,
    },
}

/// A message.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicMessage {
    pub role: AnthropicRole,
    pub content: Given<Block>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AnthropicRole {
    User,
    Assistant,
    System,
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

#[derive(Debug, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Custom {
    Custom,
}

/// `tool_choice`.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicToolChoice {
    pub r#type: ChoiceKind,
    pub name: Option<String>,
    pub disable_parallel_tool_use: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

/// `thinking`.
#[derive(Debug, serde::Deserialize)]
pub struct AnthropicThinking {
    pub r#type: ThinkingKind,
    pub budget_tokens: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ThinkingKind {
    Enabled,
    Disabled,
    Adaptive,
}

/// `output_format`.
#[derive(Debug, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(missing_docs)]
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
    MessagesBody "messages" {
        system: Option<Given<TextBlock>>,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemPartKind {
    InputText,
    OutputText,
    Text,
    Refusal,
    ReasoningText,
    SummaryText,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemKind {
    Message,
    FunctionCall,
    FunctionCallOutput,
    Reasoning,
}

/// An item of a conversation, of any kind but references.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseItem {
    pub r#type: Option<ItemKind>,
    pub id: Option<String>,
    pub role: Option<Role>,
    pub content: Option<Given<ItemPart>>,
    pub call_id: Option<String>,
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub arguments: Option<String>,
    pub output: Option<Given<ItemPart>>,
    pub summary: Option<Vec<Object<ItemPart>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionKind {
    Function,
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
#[derive(Debug, serde::Deserialize)]
pub struct ResponseToolName {
    pub r#type: FunctionKind,
    pub name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum ResponseChoiceKind {
    Function,
    AllowedTools,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum ResponseMode {
    Auto,
    Required,
}

/// `tool_choice`, if it is an object.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseChoice {
    r#type: ResponseChoiceKind,
    pub name: Option<String>,
    mode: Option<ResponseMode>,
    tools: Option<Vec<Object<ResponseToolName>>>,
}

impl ResponseChoice {
    pub fn is_allowed_tools(&self) -> bool {
        self.r#type == ResponseChoiceKind::AllowedTools
    }

    pub fn tool_names(&self) -> Vec<&str> {
        let tools = self.tools.iter().flatten();
        tools.map(|Object(tool)| tool.name.as_str()).collect()
    }

    pub fn mode(&self) -> Option<&'static str> {
        self.mode.map(|mode| match mode {
            ResponseMode::Auto => "auto",
            ResponseMode::Required => "required",
        })
    }

    /// As the answer has it.
    pub fn shown(&self) -> Value {
        let kind = if self.is_allowed_tools() {
            "allowed_tools"
        } else {
            "function"
        };
        let mut found = Map::new();
        found.insert("type".into(), kind.into());
        found.extend(self.name.as_ref().map(|name| ("name".to_owned(), name.as_str().into())));
        found.extend(self.mode().map(|mode| ("mode".to_owned(), mode.into())));
        if self.tools.is_some() {
            let names = self.tool_names().into_iter();
            let tools: Vec<_> = names
                .map(|name| serde_json::json!({"type": "function", "name": name}))
                .collect();
            found.insert("tools".into(), tools.into());
        }
        found.into()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseFormatKind {
    Text,
    JsonObject,
    JsonSchema,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediumKind {
    Medium,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AutoKind {
    Auto,
}

/// `reasoning`.
#[derive(Debug, serde::Deserialize)]
pub struct ResponseReasoning {
    pub effort: Option<String>,
    pub summary: Option<AutoKind>,
    pub generate_summary: Option<AutoKind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    Auto,
    Disabled,
}

impl Truncation {
    pub fn name(self) -> &'static str {
        match self {
            Truncation::Auto => "auto",
            Truncation::Disabled => "disabled",
        }
    }
}

body! {
    /// POST /v1/responses.
    ResponsesBody "responses" {
        input: Option<Given<ResponseItem>>,
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
    CompletionBody "completion" {
        prompt: Prompts,
        logprobs: Option<i64>,
        echo: Option<bool>,
        best_of: Option<i64>,
        receipt: Option<bool>,
    }
}

/// POST /v1/embeddings.
#[derive(Debug, serde::Deserialize)]
pub struct EmbeddingBody {
    pub model: Option<String>,
    pub input: Prompts,
    pub encoding_format: Option<Encoding>,
    pub dimensions: Option<usize>,
    pub pooling: Option<Pooling>,
    pub priority: Option<i64>,
    pub user: Option<String>,
}

impl Body for EmbeddingBody {
    const FIELDS: &'static [&'static str] = &[
        "model",
        "input",
        "encoding_format",
        "dimensions",
        "pooling",
        "priority",
        "user",
    ];
    const TABLE: &'static str = "embedding";
}

/// How the numbers of an embedding are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// As a list.
    #[default]
    Float,
    /// As the text of their bytes.
    Base64,
}

/// What an embedding is made of.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// All tokens of its text.
    Mean,
    /// The last one.
    Last,
    /// The first one.
    Cls,
}

impl Pooling {
    /// As the engine has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Last => "last",
            Self::Cls => "cls",
        }
    }
}

body! {
    /// POST /generate: what stands beside `sampling_params`. `text` and `input_ids` are SGLang's: the Python server
    /// answers as SGLang does.
    GenerateBody "generate" {
        prompt: Option<String>,
        sampling_params: Raw,
        max_new_tokens: Option<i64>,
        min_new_tokens: Option<i64>,
        sampling_seed: Option<i64>,
    }
}

body! {
    /// `sampling_params` of POST /generate.
    GenerateSampling "generate_sampling" {
        max_new_tokens: Option<i64>,
        min_new_tokens: Option<i64>,
        sampling_seed: Option<i64>,
    }
}
