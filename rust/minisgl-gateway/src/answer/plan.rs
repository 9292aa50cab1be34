//! From the bytes of a body to what is to be generated and how that is shown: `server/bodies.py`, `chat.py`,
//! `completions.py` and `sglang.py` for what they accept.
//!
//! Invariants: a body that any check there could refuse is none of ours ([`Reason`]): the Python server finds the words.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::config::{Bounds, GatewayConfig};
use crate::message::{Pairs, SamplingParams};
use crate::metrics::Reason;

use super::embedding::Vectors;
use super::fields::{
    Body, ChatBody, Common, CompletionBody, Content, EmbeddingBody, Encoding, FORMS, GenerateBody, GenerateSampling,
    Given, Message, MessagesBody, Object, Part, Prompt, ResponsesBody, Role, Verbosity,
};
use super::messages::{self, Turn, there};
use super::parsed::Parsing;
use super::responses;

/// The endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Endpoint {
    /// /v1/chat/completions
    #[default]
    Chat,
    /// /v1/completions
    Completion,
    /// /generate
    Generate,
    /// /v1/embeddings
    Embedding,
    /// /v1/messages
    Messages,
    /// /v1/responses
    Responses,
}

impl Endpoint {
    /// In order: the path as it is counted, and another one, if there is one.
    const PATHS: [(Endpoint, &str, &str); 6] = [
        (Endpoint::Chat, "/v1/chat/completions", "/chat/completions"),
        (Endpoint::Completion, "/v1/completions", "/completions"),
        (Endpoint::Generate, "/generate", ""),
        (Endpoint::Embedding, "/v1/embeddings", "/embeddings"),
        (Endpoint::Messages, "/v1/messages", ""),
        (Endpoint::Responses, "/v1/responses", ""),
    ];

    /// By its path, with that as it is counted.
    pub fn of(path: &str) -> Option<(Endpoint, &'static str)> {
        let mut paths = Self::PATHS
            .iter()
            .filter(|(_, route, other)| [*route, other].contains(&path));
        paths.next().map(|(endpoint, route, _)| (*endpoint, *route))
    }
}

/// What is to be encoded.
#[derive(Debug)]
pub enum Input {
    /// Texts and ids.
    Prompts(Vec<Prompt>),
    /// A conversation for the chat template.
    Conversation {
        /// As templates expect them.
        messages: Vec<Value>,
        /// Further variables.
        variables: Map<String, Value>,
        /// Whether the prompt ends with the beginning of an answer.
        add_generation_prompt: bool,
    },
}

impl Default for Input {
    fn default() -> Self {
        Input::Prompts(Vec::new())
    }
}

/// A checked body.
#[derive(Debug, Default)]
pub struct Plan {
    /// Where it came to.
    pub endpoint: Endpoint,
    /// The one that it names, if that is not the configuration's.
    pub model: Option<String>,
    /// Smaller numbers go first.
    pub priority: i64,
    /// How answers are taken apart; None: they are plain text.
    pub parsing: Option<Parsing>,
    /// What the model thinks is told from the content, and is sent.
    pub reasoning: (bool, bool),
    /// What asks for tools or for a form of the answer, as JSON; it may ask for nothing.
    pub form: Option<String>,
    /// Fields that have no effect on this model, for a header.
    pub ignored: Vec<&'static str>,
    /// Checked; `seed` and `max_tokens` may be open, `n` is that of the body.
    pub sampling: SamplingParams,
    /// Log probabilities are part of the answer.
    pub shows_logprobs: bool,
    /// Each answer is to have a receipt, which needs them, too.
    pub receipt: bool,
    /// `max_tokens` is the client's, no default.
    pub names_length: bool,
    /// Answers per prompt.
    pub n: usize,
    /// What is to be encoded.
    pub input: Input,
    /// The answer is wanted as it grows.
    pub stream: bool,
    /// One more event with the usage.
    pub include_usage: bool,
    /// How embeddings are shown.
    pub vectors: Vectors,
    /// What the answer of [`Endpoint::Responses`] says from its beginning on.
    pub head: Option<Map<String, Value>>,
    /// Its answer is kept, with this input.
    pub kept_input: Option<String>,
}

/// The limit of a client that wants all that fits.
const TO_THE_END: i64 = -1;

impl Plan {
    /// Its answer is to have the form of this grammar.
    pub fn bind(&mut self, grammar: Option<&String>) -> Result<(), Reason> {
        sure(!self.sampling.ignore_eos && self.sampling.min_tokens == 0)?; // which cannot stand beside one
        self.sampling.grammar = grammar.cloned();
        Ok(())
    }
}

/// Checks a body.
pub fn plan(endpoint: Endpoint, body: &[u8], config: &GatewayConfig) -> Result<Plan, Reason> {
    sure(has_sure_shape(body, config) && (config.writes || endpoint == Endpoint::Embedding))?;
    let found = match endpoint {
        Endpoint::Chat => chat(parsed(body, config)?, config),
        Endpoint::Completion => completion(parsed(body, config)?, config),
        Endpoint::Generate => generate(parsed(body, config)?, config),
        Endpoint::Embedding => embedding(parsed(body, config)?, config),
        Endpoint::Messages => messages(parsed(body, config)?, config),
        Endpoint::Responses => responses(parsed(body, config)?, body, config),
    }?;
    let most = match endpoint {
        Endpoint::Embedding => config.bounds.max_inputs,
        _ => config.bounds.max_prompts,
    };
    let prompts = match &found.input {
        Input::Prompts(prompts) => prompts.len(),
        Input::Conversation { .. } => 1,
    };
    if prompts == 0 || prompts > most || prompts * found.n > config.bounds.max_choices {
        return Err(Reason::Error);
    }
    Ok(found)
}

fn parsed<T: Body>(body: &[u8], config: &GatewayConfig) -> Result<T, Reason> {
    let Object(mut found) = serde_json::from_slice::<Object<T>>(body).map_err(|_| Reason::Error)?;
    let fields: Pairs<String, &RawValue> = serde_json::from_slice(body).map_err(|_| Reason::Error)?;
    let named = |name: &str| -> Vec<&str> {
        let values = fields.0.iter().filter(|(other, _)| other == name);
        values.map(|(_, value)| value.get()).collect()
    };
    let mut shared: [&[&str]; 2] = [&[], &[]];
    if let Some(common) = found.common() {
        shared = [Common::FIELDS, &FORMS];
        for name in FORMS {
            let given = named(name);
            sure(given.len() <= 1)?;
            let given = given.into_iter().filter(|text| *text != "null");
            common.form.extend(given.map(|text| (name, text.to_owned())));
        }
    }
    let table = config.fields.get(T::TABLE);
    let is_known = |name: &&str| T::FIELDS.contains(name) || shared.iter().any(|names| names.contains(name));
    for (name, value) in fields.0.iter().filter(|(name, _)| !is_known(&&**name)) {
        let Some(nothing) = table.and_then(|one| one.get(name)) else {
            continue; // nobody knows it
        };
        sure(named(name).len() == 1)?;
        let value: Value = serde_json::from_str(value.get()).map_err(|_| Reason::Error)?;
        match nothing {
            Some(nothing) => sure(value.is_null() || nothing.contains(&value))?,
            None => does(value.is_null())?,
        }
    }
    Ok(found)
}

/// Whether a body, what is skipped of it, too, has no more values than the Python server takes (`check_shape` of
/// `server/request.py` counts alike), is nested less deeply than any parser refuses, and spells no half of a pair of
/// surrogates.
fn has_sure_shape(body: &[u8], config: &GatewayConfig) -> bool {
    const SURE_DEPTH: usize = 100;
    let bounds = &config.bounds;
    let most = bounds.max_values.max(config.max_seq_len + bounds.more_values);
    let (mut depth, mut values, mut containers) = (0_usize, 0_usize, 0_usize);
    let (mut at, mut in_text) = (0, false);
    while let Some(byte) = body.get(at) {
        at += 1;
        match byte {
            b'\\' if in_text => match escape_end(body, at) {
                Some(end) => at = end,
                None => return false,
            },
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b',' => values += 1,
            b':' => (values, containers) = (values + 1, containers + 1),
            b'[' | b'{' => (values, containers, depth) = (values + 1, containers + 1, depth + 1),
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > SURE_DEPTH {
            return false;
        }
    }
    values <= most && containers <= bounds.max_containers
}

/// Behind an escape whose backslash is before `at`; None: half of a pair of surrogates.
fn escape_end(body: &[u8], at: usize) -> Option<usize> {
    let unit = |at: usize| {
        let digits = body.get(at..at + 5).filter(|one| one[0] == b'u')?;
        u16::from_str_radix(std::str::from_utf8(&digits[1..]).ok()?, 16).ok()
    };
    match unit(at) {
        None => Some(at + 1), // any other; what is none of JSON's is the parser's to refuse
        Some(0xd800..=0xdbff) => {
            (body.get(at + 5) == Some(&b'\\') && matches!(unit(at + 6), Some(0xdc00..=0xdfff))).then_some(at + 11)
        }
        Some(0xdc00..=0xdfff) => None,
        Some(_) => Some(at + 5),
    }
}

/// Else it may be wrong.
fn sure(condition: bool) -> Result<(), Reason> {
    if condition { Ok(()) } else { Err(Reason::Error) }
}

/// Else it asks for what only the Python server does.
fn does(condition: bool) -> Result<(), Reason> {
    if condition { Ok(()) } else { Err(Reason::Field) }
}

fn chat(mut body: ChatBody, config: &GatewayConfig) -> Result<Plan, Reason> {
    let mut common = std::mem::take(&mut body.common);
    common.logprobs = chat_logprobs(&body)?;
    common.receipt = body.receipt == Some(true);
    common.form.append(&mut tools(&body)?);
    common.max_tokens = body.max_completion_tokens.or(common.max_tokens);
    let budget = body.thinking_budget;
    sure(budget.is_none_or(|most| (1..1 << 31).contains(&most)))?;
    let is_ended = config.thinking_end.is_some();
    if let Some(most) = budget.filter(|_| is_ended) {
        common.form.push(("thinking_budget", most.to_string()));
    }
    let turn = Turn {
        messages: body.messages.into_iter().map(|Object(message)| message).collect(),
        kwargs: body.chat_template_kwargs,
        effort: body.reasoning_effort,
        enable_thinking: body.enable_thinking,
        verbosity: body.verbosity,
        is_bare: body.add_generation_prompt == Some(false),
        joins_thoughts: body.separate_reasoning == Some(false),
        hides_thoughts: body.include_reasoning == Some(false),
        form: Vec::new(),
    };
    let mut found = conversation(Endpoint::Chat, common, turn, config)?;
    if budget.is_some() && !is_ended {
        let at = usize::from(found.ignored.first() == Some(&"reasoning_effort"));
        found.ignored.insert(at, "thinking_budget");
    }
    Ok(found)
}

fn messages(mut body: MessagesBody, config: &GatewayConfig) -> Result<Plan, Reason> {
    let mut common = std::mem::take(&mut body.common);
    common.receipt = body.receipt == Some(true);
    sure(common.max_tokens.is_some())?;
    let mut stop = body.stop_sequences.take().unwrap_or_default();
    stop.append(&mut texts(common.stop.take()));
    common.stop = Some(Given::List(stop));
    let asked = messages::to_chat(&mut body, config.bounds.max_parts).ok_or(Reason::Error)?;
    one_answer(Endpoint::Messages, common, asked, config)
}

/// What an answer that is kept was asked.
#[derive(serde::Deserialize)]
struct Asking<'a> {
    #[serde(borrow)]
    input: &'a RawValue,
}

fn responses(mut body: ResponsesBody, written: &[u8], config: &GatewayConfig) -> Result<Plan, Reason> {
    does(!responses::is_for_python(&body))?;
    let (asked, mut head) = responses::to_chat(&mut body, &config.bounds).ok_or(Reason::Error)?;
    let mut common = std::mem::take(&mut body.common);
    common.receipt = body.receipt == Some(true);
    sure(common.max_tokens.is_none())?;
    common.max_tokens = body.max_output_tokens;
    let is_kept = common.store != Some(false);
    let mut found = one_answer(Endpoint::Responses, common, asked, config)?;
    head.insert("temperature".into(), found.sampling.temperature.into());
    head.insert("top_p".into(), found.sampling.top_p.into());
    found.head = Some(head);
    if is_kept {
        let Asking { input } = serde_json::from_slice(written).map_err(|_| Reason::Error)?;
        found.kept_input = Some(input.get().to_owned());
    }
    Ok(found)
}

/// It plans for an API whose fields are others than those of chats.
fn one_answer(endpoint: Endpoint, mut common: Common, mut turn: Turn, config: &GatewayConfig) -> Result<Plan, Reason> {
    sure(common.n.is_none_or(|n| n == 1))?;
    sure(common.form.iter().all(|(name, _)| *name != "response_format"))?;
    (common.n, common.stream_options) = (None, None); // which have no meaning here
    let form = turn.form.drain(..).map(|(name, value)| (name, value.to_string()));
    common.form.extend(form);
    let found = conversation(endpoint, common, turn, config)?;
    sure(found.n == 1)?;
    Ok(found)
}

fn conversation(endpoint: Endpoint, common: Common, mut turn: Turn, config: &GatewayConfig) -> Result<Plan, Reason> {
    config.chat_templates.get("default").ok_or(Reason::Template)?;
    let limit = default(config, "max_tokens", Value::as_i64);
    let (variables, ignored) = variables(&mut turn, config)?;
    sure(!turn.messages.is_empty() && turn.messages.len() <= config.bounds.max_messages)?;
    let messages = turn
        .messages
        .into_iter()
        .map(|message| for_template(message, &config.bounds))
        .collect::<Result<_, _>>()?;
    let input = Input::Conversation {
        messages,
        variables,
        add_generation_prompt: !turn.is_bare,
    };
    let mut found = finished(endpoint, common, limit, input, config)?;
    found.ignored = ignored;
    found.reasoning = (!turn.joins_thoughts, !turn.hides_thoughts);
    Ok(found)
}

/// The tools and how they are to be used; nothing if there are none.
fn tools(body: &ChatBody) -> Result<Vec<(&'static str, String)>, Reason> {
    let [tools, choice, parallel] =
        [&body.tools, &body.tool_choice, &body.parallel_tool_calls].map(|one| one.as_ref().map(|one| one.get()));
    if tools.is_none_or(|one| one == "[]") {
        let fits = choice.is_none_or(|one| [r#""none""#, r#""auto""#].contains(&one));
        sure(fits && parallel.is_none_or(|one| ["true", "false"].contains(&one)))?;
        return Ok(Vec::new());
    }
    let given = [
        ("tools", tools),
        ("tool_choice", choice),
        ("parallel_tool_calls", parallel),
    ];
    let given = given
        .into_iter()
        .filter_map(|(name, one)| Some((name, one?.to_owned())));
    Ok(given.collect())
}

/// An object of them.
fn question(fields: &[(&'static str, String)]) -> Option<String> {
    let fields: Vec<_> = fields
        .iter()
        .map(|(name, value)| format!("\"{name}\":{value}"))
        .collect();
    (!fields.is_empty()).then(|| format!("{{{}}}", fields.join(",")))
}

/// `ChatRequest.num_logprobs`.
fn chat_logprobs(body: &ChatBody) -> Result<Option<i64>, Reason> {
    let asks = body.logprobs == Some(true);
    sure(asks || body.top_logprobs.is_none_or(|count| count == 0))?;
    Ok(asks.then(|| body.top_logprobs.unwrap_or(0)))
}

/// `ChatRequest.template_variables`, and the fields that ask for what the model does not know.
fn variables(turn: &mut Turn, config: &GatewayConfig) -> Result<(Map<String, Value>, Vec<&'static str>), Reason> {
    let knows = |name| config.template_variables.iter().any(|one| one == name);
    sure(turn.enable_thinking != Some(true) || knows("enable_thinking"))?;
    let (mut found, mut ignored) = (Map::new(), Vec::new());
    if let Some(effort) = turn.effort.take() {
        found.insert("enable_thinking".into(), (effort != "none").into());
        if effort != "none" {
            found.insert("reasoning_effort".into(), effort.into());
            if config.template_variables.is_empty() {
                ignored.push("reasoning_effort");
            }
        }
    }
    if let Some(thinks) = turn.enable_thinking {
        found.insert("enable_thinking".into(), thinks.into());
    }
    found.extend(turn.kwargs.take().unwrap_or_default());
    sure(found.keys().all(|name| !config.template_names.contains(name)))?;
    if !matches!(turn.verbosity, None | Some(Verbosity::Medium)) {
        ignored.push("verbosity");
    }
    Ok((found, ignored))
}

/// `ChatMessage.for_template`.
fn for_template(message: Message, bounds: &Bounds) -> Result<Value, Reason> {
    let is_assistant = message.role == Role::Assistant;
    let has_refusal = matches!(&message.content, Some(Content::List(parts))
        if parts.iter().any(|part| matches!(part, Object(Part::Refusal { .. }))));
    sure(is_assistant || (message.content.is_some() && message.refusal.is_none() && !has_refusal))?;
    let role = match message.role {
        Role::System | Role::Developer => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let refusal = message.refusal.unwrap_or_default();
    let content = match message.content {
        Some(Content::List(parts)) => {
            sure(parts.len() <= bounds.max_parts)?;
            let texts = parts.into_iter().map(|Object(part)| part.into_text());
            let texts = texts.chain((!refusal.is_empty()).then_some(refusal));
            texts.map(|text| json!({"type": "text", "text": text})).collect()
        }
        Some(Content::Text(text)) => Value::String(text + &refusal),
        None => Value::String(refusal),
    };
    let thoughts = [message.reasoning_content, message.reasoning].into_iter().flatten();
    let thought = thoughts.into_iter().find(|text| !text.is_empty());
    Ok(Value::Object(there([
        ("role", Some(role.into())),
        ("content", Some(content)),
        ("name", message.name.map(Value::from)),
        ("tool_calls", message.tool_calls.map(Value::from)),
        ("tool_call_id", message.tool_call_id.map(Value::from)),
        ("reasoning_content", thought.map(Value::from)),
    ])))
}

fn completion(mut body: CompletionBody, config: &GatewayConfig) -> Result<Plan, Reason> {
    let mut common = std::mem::take(&mut body.common);
    common.logprobs = body.logprobs;
    common.receipt = body.receipt == Some(true);
    does(body.echo != Some(true))?;
    does(body.best_of.is_none_or(|best_of| best_of == common.n.unwrap_or(1)))?;
    let (limit, input) = (config.bounds.completion_tokens, Input::Prompts(body.prompt.all()));
    finished(Endpoint::Completion, common, Some(limit), input, config)
}

fn generate(mut body: GenerateBody, config: &GatewayConfig) -> Result<Plan, Reason> {
    let mut common = std::mem::take(&mut body.common);
    let mut others = (body.max_new_tokens, body.min_new_tokens, body.sampling_seed);
    if let Some(inner) = &body.sampling_params {
        let mut inner: GenerateSampling = parsed(inner.get().as_bytes(), config)?;
        // a field on both sides is a question that the Python server answers
        let envelope = common.take_envelope();
        sure(others == (None, None, None) && common == Common::default())?;
        common = std::mem::take(&mut inner.common);
        sure(common.take_envelope() == Common::default())?;
        others = (inner.max_new_tokens, inner.min_new_tokens, inner.sampling_seed);
        common.stream = envelope.stream;
        common.stream_options = envelope.stream_options;
        common.priority = envelope.priority;
        common.model = envelope.model;
    }
    for (field, other) in [
        (&mut common.max_tokens, others.0),
        (&mut common.min_tokens, others.1),
        (&mut common.seed, others.2),
    ] {
        sure(field.is_none() || other.is_none())?;
        *field = field.or(other);
    }
    sure(common.n.is_none_or(|n| n == 1))?;
    let prompt = body.prompt.ok_or(Reason::Error)?;
    let (limit, input) = (
        config.bounds.generate_tokens,
        Input::Prompts(vec![Prompt::Text(prompt)]),
    );
    finished(Endpoint::Generate, common, Some(limit), input, config)
}

/// `server/encoding.py`.
fn embedding(body: EmbeddingBody, config: &GatewayConfig) -> Result<Plan, Reason> {
    sure(config.embeds && body.dimensions.is_none_or(|count| count >= 1))?;
    let pooling = body.pooling.or(config.pooling).ok_or(Reason::Error)?;
    let sampling = SamplingParams {
        max_tokens: Some(1),
        temperature: 0.0,
        seed: Some(0),
        embedding: json!(pooling).as_str().map(str::to_owned),
        ..SamplingParams::default()
    };
    Ok(Plan {
        endpoint: Endpoint::Embedding,
        model: other_model(body.model, config),
        priority: body.priority.unwrap_or(0),
        sampling,
        names_length: true,
        n: 1,
        input: Input::Prompts(body.input.all()),
        vectors: Vectors {
            is_base64: body.encoding_format == Some(Encoding::Base64),
            dimensions: body.dimensions,
        },
        ..Plan::default()
    })
}

/// The name, unless it is the model's own.
fn other_model(name: Option<String>, config: &GatewayConfig) -> Option<String> {
    name.filter(|name| *name != config.model_name && !config.aliases.contains(name))
}

/// `limit`: of an answer whose client names none.
fn finished(
    endpoint: Endpoint,
    common: Common,
    limit: Option<i64>,
    input: Input,
    config: &GatewayConfig,
) -> Result<Plan, Reason> {
    let form = question(&common.form);
    let options = common.stream_options.as_ref().map(|Object(options)| options);
    let stream = common.stream.unwrap_or(false);
    sure(options.is_none() || stream)?;
    does(options.is_none_or(|options| options.continuous_usage_stats != Some(true)))?;
    let model = other_model(common.model.clone(), config);
    let priority = i64::from(common.priority.unwrap_or(0));
    let n = common.n.or_else(|| default(config, "n", Value::as_i64)).unwrap_or(1);
    let include_usage = options.is_some_and(|options| options.include_usage == Some(true));
    let (limit, names_length) = (common.max_tokens.or(limit), common.max_tokens.is_some());
    does(limit != Some(0))?; // only the prompt is computed
    let limit = limit.filter(|&limit| limit != TO_THE_END);
    let (shows_logprobs, receipt) = (common.logprobs.is_some(), common.receipt);
    let mut sampling = sampling(common, limit, n, config)?;
    if receipt && !config.simulated {
        sampling.logprobs = sampling.logprobs.or(Some(0));
    }
    let n = usize::try_from(n).map_err(|_| Reason::Error)?;
    Ok(Plan {
        endpoint,
        model,
        priority,
        form,
        sampling,
        shows_logprobs,
        receipt,
        names_length,
        n,
        input,
        stream,
        include_usage,
        ..Plan::default()
    })
}

fn default<T>(config: &GatewayConfig, name: &str, take: impl Fn(&Value) -> Option<T>) -> Option<T> {
    config.defaults.get(name).and_then(take)
}

/// `Sampling.to_sampling` with its checks.
fn sampling(common: Common, limit: Option<i64>, n: i64, config: &GatewayConfig) -> Result<SamplingParams, Reason> {
    const KNOWN: [&str; 7] = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_tokens",
        "n",
    ];
    sure(config.defaults.keys().all(|name| KNOWN.contains(&name.as_str())))?;
    let plain = SamplingParams::default();
    let number = |given: Option<f64>, name: &str, otherwise: f64| {
        given
            .or_else(|| default(config, name, Value::as_f64))
            .unwrap_or(otherwise)
    };
    let top_k = match common.top_k {
        Some(0) => Some(-1),
        given => given,
    };
    let found = SamplingParams {
        max_tokens: limit,
        min_tokens: common.min_tokens.unwrap_or(0),
        temperature: number(common.temperature, "temperature", plain.temperature),
        top_k: top_k
            .or_else(|| default(config, "top_k", Value::as_i64))
            .unwrap_or(plain.top_k),
        top_p: number(common.top_p, "top_p", plain.top_p),
        min_p: number(common.min_p, "min_p", plain.min_p),
        frequency_penalty: common.frequency_penalty.unwrap_or(0.0),
        presence_penalty: common.presence_penalty.unwrap_or(0.0),
        repetition_penalty: number(
            common.repetition_penalty,
            "repetition_penalty",
            plain.repetition_penalty,
        ),
        logit_bias: logit_bias(common.logit_bias.unwrap_or_default(), config)?,
        seed: common.seed,
        stop: texts(common.stop),
        stop_token_ids: common.stop_token_ids.into_iter().flatten().map(i64::from).collect(),
        ignore_eos: common.ignore_eos.unwrap_or(false),
        logprobs: common.logprobs,
        ..plain
    };
    sure(!config.simulated || found.logprobs.is_none())?;
    // every choice is a request of its own
    let asked = SamplingParams { n, ..found };
    sure(config.ranges.have(&asked) && has_fitting_lists(&asked, config))?;
    Ok(SamplingParams { n: plain.n, ..asked })
}

fn texts(given: Option<Given<String>>) -> Vec<String> {
    match given {
        None => Vec::new(),
        Some(Given::Text(text)) => vec![text],
        Some(Given::List(texts)) => texts,
    }
}

fn logit_bias(given: Map<String, Value>, config: &GatewayConfig) -> Result<Pairs<i64, f64>, Reason> {
    sure(given.len() <= config.bounds.max_logit_bias)?;
    let mut found = Vec::with_capacity(given.len());
    for (key, value) in given {
        sure(key == "0" || !key.starts_with('0'))?; // "7" and "07" would be the same id
        sure(!key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit()))?;
        let id: u32 = key.parse().map_err(|_| Reason::Error)?;
        let value = value.as_f64().ok_or(Reason::Error)?;
        sure(id < config.vocab_size)?;
        found.push((i64::from(id), value));
    }
    Ok(Pairs(found))
}

/// What else `SamplingParams.check` and the model ask.
fn has_fitting_lists(params: &SamplingParams, config: &GatewayConfig) -> bool {
    let (bounds, ids) = (&config.bounds, 0..i64::from(config.vocab_size));
    let fits = |text: &String| !text.is_empty() && text.chars().count() <= bounds.max_stop_chars;
    params.stop.len() <= bounds.max_stop_strings
        && params.stop.iter().all(fits)
        && params.stop_token_ids.len() <= bounds.max_stop_token_ids
        && params.stop_token_ids.iter().all(|id| ids.contains(id))
}
