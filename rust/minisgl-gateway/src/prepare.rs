//! From a body to token ids: what of a request's work needs no connection, so that it can be done on any thread.

use std::sync::Arc;

use minisgl_text::answer::{Thinking, ToolFormat};
use minisgl_text::{ChatTemplate, Tokenizer};
use serde_json::Value;

use crate::answer::fields::Prompt;
use crate::answer::parsed::Parsing;
use crate::answer::plan::{Endpoint, Input, Plan, plan};
use crate::config::GatewayConfig;
use crate::forms::{Form, Forms};
use crate::keys::KeyCounts;
use crate::metrics::Reason;
use crate::python::{Ask, Python};
use crate::receipts::Receipts;

/// What the answers of a model need.
pub struct Loaded {
    /// As Python gave it.
    pub config: GatewayConfig,
    /// The model's.
    pub tokenizer: Arc<Tokenizer>,
    /// The `default` one; None: there is none that the gateway can take.
    pub template: Option<ChatTemplate>,
    /// How what the model thinks is told from the content.
    pub thinking: Option<&'static Thinking>,
    /// How it calls tools.
    pub tools: Option<&'static ToolFormat>,
    /// What Python makes of tools and forms of answers.
    pub forms: Forms,
    /// Who makes receipts.
    pub receipts: Receipts,
    /// Who is asked of both.
    pub python: Python,
    /// What API keys of a file use, by number.
    pub keys: Vec<Arc<KeyCounts>>,
}

const DEFAULT_KEY: &str = "default"; // name of number 0 where there is a file of keys

impl Loaded {
    /// Loads the template; the lines say what is passed on and why.
    pub fn new(
        mut config: GatewayConfig,
        tokenizer: Arc<Tokenizer>,
        ask: Ask,
    ) -> Result<(Loaded, Vec<String>), String> {
        let mut lines = Vec::new();
        let template = config.chat_templates.get("default");
        let template = template.map(|source| ChatTemplate::new(source, &config.special_tokens));
        if let Some(Err(error)) = &template {
            lines.push(format!(
                "chats are passed on to the Python server: the chat template: {error}"
            ));
        }
        let keys = KeyCounts::of(&config.api_keys);
        let thinking = config.thinking.as_ref().map(|name| {
            let found = Thinking::named(name);
            found.ok_or_else(|| format!("what the model thinks: no format has the name {name}"))
        });
        let thinking = thinking.transpose()?;
        config.thinking_end = thinking.and_then(|one| tokenizer.token_id(one.end));
        let source = config.chat_templates.get("default").map_or("", |one| &one.source);
        let tools = config.tools.as_ref().and_then(|one| {
            let found = ToolFormat::find(&one.name, source, |text| tokenizer.token_id(text).is_some());
            if found.is_none() {
                lines.push(format!(
                    "chats with tools are passed on to the Python server: no format has the name {}",
                    one.name
                ));
            }
            found
        });
        let python = Python::new(ask);
        Ok((
            Loaded {
                thinking,
                tools,
                forms: Forms::new(python.clone()),
                receipts: Receipts::new(python.clone()),
                python,
                keys,
                config,
                tokenizer,
                template: template.and_then(Result::ok),
            },
            lines,
        ))
    }

    /// The name of a key's number; None: there is no file of them.
    pub fn key_name(&self, number: usize) -> Option<&str> {
        let keys = &self.config.api_keys;
        let of_file = number.checked_sub(1).and_then(|at| keys.get(at));
        (!keys.is_empty()).then(|| of_file.map_or(DEFAULT_KEY, |one| &one.name))
    }
}

/// A checked request with its prompts.
pub struct Prepared {
    /// What is to be generated.
    pub plan: Plan,
    /// Ids of each prompt: at least one, and fewer than the context has.
    pub prompts: Vec<Vec<i32>>,
}

/// Why a request is not prepared.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// The Python server is to answer it.
    PassOn(Reason),
    /// Once the answer to this question is known, it can be.
    Ask(String),
    /// The same, with the conversation that is the answer to this one.
    Explain(String),
}

impl From<Reason> for Stop {
    fn from(reason: Reason) -> Stop {
        Stop::PassOn(reason)
    }
}

/// Parses, renders and encodes. `explained`: the conversation, if Python has said how it is to be written; `most_steps`:
/// of the rendering.
pub fn prepare(
    loaded: &Loaded,
    endpoint: Endpoint,
    body: &[u8],
    explained: Option<Vec<Value>>,
    most_steps: u64,
) -> Result<Prepared, Stop> {
    let mut plan = plan(endpoint, body, &loaded.config)?;
    let fields = plan.form.take();
    let thinking = loaded
        .thinking
        .filter(|_| matches!(plan.input, Input::Conversation { .. }));
    let first = if thinking.is_some() { "later" } else { "none" };
    let form = fields.as_ref().map(|fields| known(loaded, fields, first)).transpose()?;
    let mut input = std::mem::take(&mut plan.input);
    if let (Some(form), Some(fields), Input::Conversation { messages, .. }) = (&form, &fields, &mut input)
        && !form.tools.is_empty()
    {
        let tools = loaded.config.tools.as_ref().filter(|_| loaded.tools.is_some());
        let tools = tools.ok_or(Reason::Tools)?;
        match explained {
            Some(explained) => *messages = explained,
            None if tools.explained => {
                let messages = Value::from(std::mem::take(messages));
                let question = format!(r#"{{"thinking":"none","fields":{fields},"messages":{messages}}}"#);
                return Err(Stop::Explain(question));
            }
            None => {}
        }
    }
    let prompts = encode(loaded, input, form.as_deref(), most_steps)?;
    for ids in &prompts {
        if ids.is_empty() || ids.len() >= loaded.config.max_seq_len {
            return Err(Reason::Error.into());
        }
    }
    let thinking = thinking.map(|thinking| (thinking, begins_within(loaded, thinking, &prompts[0])));
    if let (Some(form), Some(fields)) = (&form, &fields)
        && form.needs_grammar
    {
        match thinking {
            None => plan.bind(form.grammar.as_ref())?,
            Some((_, is_open)) => {
                let place = is_open.map_or("untold", |is_open| if is_open { "open" } else { "closed" });
                let found = known(loaded, fields, place)?;
                if found.needs_grammar {
                    plan.bind(found.grammar.as_ref())?;
                }
            }
        }
    }
    plan.parsing = parsing(loaded, &plan, thinking, form.as_deref());
    Ok(Prepared { plan, prompts })
}

fn encode(loaded: &Loaded, input: Input, form: Option<&Form>, most_steps: u64) -> Result<Vec<Vec<i32>>, Reason> {
    match input {
        Input::Conversation {
            messages,
            mut variables,
            add_generation_prompt,
        } => {
            let template = loaded.template.as_ref().ok_or(Reason::Template)?;
            if let Some(form) = form.filter(|form| !form.tools.is_empty()) {
                variables.insert("tools".into(), form.tools.clone().into());
            }
            let text = template
                .render(&messages, &variables, add_generation_prompt, most_steps)
                .map_err(|_| Reason::Template)?;
            Ok(vec![encoded(loaded, &text, false)?])
        }
        Input::Prompts(prompts) => prompts.into_iter().map(|one| ids_of(loaded, one)).collect(),
    }
}

/// Whether the answer to a prompt begins within what the model thinks, or behind it; None: it may think
/// (`Parsing.thinking_after`).
fn begins_within(loaded: &Loaded, thinking: &Thinking, prompt: &[i32]) -> Option<bool> {
    const NUM_LAST: usize = 16; // ids in which a marker is looked for
    let mut text = String::new();
    let mut decoder = loaded.tokenizer.decoder(false);
    decoder.push(&prompt[prompt.len().saturating_sub(NUM_LAST)..], &mut text);
    decoder.flush(&mut text);
    let text = text.trim_end();
    if text.ends_with(thinking.begin) {
        return Some(true);
    }
    if text.ends_with(thinking.end) {
        return Some(false);
    }
    thinking.is_open.then_some(true)
}

/// How the answers are taken apart, if they are.
fn parsing(
    loaded: &Loaded,
    plan: &Plan,
    thinking: Option<(&'static Thinking, Option<bool>)>,
    form: Option<&Form>,
) -> Option<Parsing> {
    let (separate, include) = plan.reasoning;
    let thinking = thinking.filter(|_| separate);
    let form = form.filter(|form| form.calls);
    let format = loaded.tools.filter(|_| form.is_some());
    if thinking.is_none() && format.is_none() {
        return None;
    }
    let of_thinking = thinking.iter().flat_map(|(one, _)| one.tokens).copied();
    let markers = of_thinking.chain(format.iter().flat_map(|one| one.markers()));
    Some(Parsing {
        format,
        thinking,
        tools: form.map_or_else(Arc::default, |form| Arc::clone(&form.schemas)),
        named_call: form.is_some_and(|form| form.named_call),
        shows_thoughts: include,
        think_end: loaded.config.thinking_end.filter(|_| thinking.is_some()),
        shown: markers.filter_map(|one| loaded.tokenizer.special_id(one)).collect(),
    })
}

/// What is known of these fields; `thinking`: where an answer begins that thinks first.
fn known(loaded: &Loaded, fields: &str, thinking: &str) -> Result<Arc<Form>, Stop> {
    let question = format!(r#"{{"thinking":"{thinking}","fields":{fields}}}"#);
    loaded.forms.find(&question).ok_or(Stop::Ask(question))
}

fn ids_of(loaded: &Loaded, prompt: Prompt) -> Result<Vec<i32>, Reason> {
    match prompt {
        Prompt::Text(text) => encoded(loaded, &text, true),
        Prompt::Ids(ids) => {
            let vocab_size = i32::try_from(loaded.config.vocab_size).unwrap_or(i32::MAX);
            if ids.iter().all(|id| (0..vocab_size).contains(id)) {
                Ok(ids)
            } else {
                Err(Reason::Error)
            }
        }
    }
}

fn encoded(loaded: &Loaded, text: &str, add_special_tokens: bool) -> Result<Vec<i32>, Reason> {
    let ids = loaded
        .tokenizer
        .encode(text, add_special_tokens, loaded.config.max_seq_len)
        .map_err(|_| Reason::Error)?;
    ids.into_iter()
        .map(|id| i32::try_from(id).map_err(|_| Reason::Error))
        .collect()
}

/// Seed of choice `index` of n: the seed itself for the first, then by golden-ratio steps modulo 2**64.
pub fn choice_seed(seed: i64, index: usize) -> i64 {
    seed.wrapping_add((index as i64).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64))
}
