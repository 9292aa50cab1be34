//! Bodies of POST /v1/messages: Anthropic's become chats (`server/messages`).

use minisgl_text::without_billing_header;
use serde_json::{Map, Value, json};

use super::fields::{
    AnthropicFormat, AnthropicMessage, AnthropicTool, Block, ChoiceKind, Content, Given, Message, MessagesBody, Object,
    Part as TextPart, Role, TextBlock, ThinkingKind, Verbosity,
};

/// A call of the model with a conversation, whichever API asks for it (`server/chat.py`).
#[derive(Debug, Default)]
pub struct Turn {
    /// The conversation.
    pub messages: Vec<Message>,
    /// As `ChatRequest` has them: tools, how they are to be used, the form of the answer.
    pub form: Vec<(&'static str, Value)>,
    /// `reasoning_effort`.
    pub effort: Option<String>,
    /// `chat_template_kwargs`.
    pub kwargs: Option<Map<String, Value>>,
    /// The same.
    pub enable_thinking: Option<bool>,
    /// The same.
    pub verbosity: Option<Verbosity>,
    /// The prompt does not end with the beginning of an answer.
    pub is_bare: bool,
    /// What the model thinks stays in the content.
    pub joins_thoughts: bool,
    /// What the model thinks is not sent.
    pub hides_thoughts: bool,
}

/// None: there is something wrong with it, or the answer is to continue its last message.
pub fn to_chat(body: &mut MessagesBody, most_parts: usize) -> Option<Turn> {
    let mut found = Turn {
        kwargs: body.chat_template_kwargs.take(),
        ..Turn::default()
    };
    if let Some(system) = body.system.take() {
        let given = joined(system, "\n", most_parts)?;
        let text = without_billing_header(&given);
        if !text.is_empty() || given.is_empty() {
            found
                .messages
                .push(message(Role::System, Some(Content::Text(text.to_owned()))));
        }
    }
    let given = std::mem::take(&mut body.messages);
    let last = given.last()?.0.role;
    for Object(one) in given {
        add_messages(one, most_parts, &mut found.messages)?;
    }
    (last != Role::Assistant).then_some(())?;
    let (format, effort) = match body.output_config.take() {
        Some(Object(config)) => (config.format, config.effort),
        None => (None, None),
    };
    if let Some(Object(AnthropicFormat::JsonSchema { schema })) = format.or(body.output_format.take()) {
        are_exact(&schema).then_some(())?;
        let schema = json!({"name": "answer", "schema": schema, "strict": true});
        let format = json!({"type": "json_schema", "json_schema": schema});
        found.form.push(("response_format", format));
    }
    tools(body, &mut found.form)?;
    if let Some(Object(thinking)) = &body.thinking
        && let (Some(budget), true) = (thinking.budget_tokens, thinking.r#type != ThinkingKind::Disabled)
    {
        found.form.push(("thinking_budget", budget.into()));
    }
    let is_off = matches!(&body.thinking, Some(Object(one)) if one.r#type == ThinkingKind::Disabled);
    found.effort = if is_off { Some("none".to_owned()) } else { effort };
    Some(found)
}

/// A message with nothing but its content.
pub fn message(role: Role, content: Option<Content>) -> Message {
    Message {
        role,
        content,
        ..Message::default()
    }
}

fn joined(texts: Given<Object<TextBlock>>, between: &str, most: usize) -> Option<String> {
    match texts {
        Given::Text(text) => Some(text),
        Given::List(blocks) => {
            let texts: Vec<_> = blocks
                .into_iter()
                .map(|Object(TextBlock::Text { text })| text)
                .collect();
            (texts.len() <= most).then(|| texts.join(between))
        }
    }
}

/// A message of the assistant is one; one of a user is one for each result of a tool, and one for the rest.
fn add_messages(given: AnthropicMessage, most_parts: usize, out: &mut Vec<Message>) -> Option<()> {
    let role = given.role;
    (!matches!(role, Role::Developer | Role::Tool)).then_some(())?;
    let blocks = match given.content {
        Given::Text(text) => {
            out.push(message(role, Some(Content::Text(text))));
            return Some(());
        }
        Given::List(blocks) => blocks,
    };
    (blocks.len() <= most_parts).then_some(())?;
    let (mut texts, mut thoughts, mut calls, mut num_results) = (Vec::new(), None::<String>, None::<Vec<_>>, 0);
    for Object(block) in blocks {
        match block {
            Block::Text { text } => texts.push(Object(TextPart::Text { text })),
            Block::RedactedThinking {} => {}
            Block::Thinking { thinking } if role == Role::Assistant => {
                thoughts.get_or_insert_default().push_str(&thinking);
            }
            Block::ToolUse { id, name, input } if role == Role::Assistant && are_exact(&input) => {
                let call = json!({"name": name, "arguments": Value::Object(input).to_string()});
                let call = json!({"id": id, "type": "function", "function": call});
                calls.get_or_insert_default().extend(call.as_object().cloned());
            }
            Block::ToolResult {
                tool_use_id,
                content,
                is_error,
            } if role != Role::Assistant => {
                let text = content.map_or(Some(String::new()), |content| joined(content, "", most_parts))?;
                let text = if is_error == Some(true) {
                    format!("Error: {text}")
                } else {
                    text
                };
                num_results += 1;
                out.push(Message {
                    tool_call_id: Some(tool_use_id),
                    ..message(Role::Tool, Some(Content::Text(text)))
                });
            }
            _ => return None, // such a block stands in messages of the other
        }
    }
    if role == Role::Assistant || !texts.is_empty() || num_results == 0 {
        let content = match texts.len() {
            0 => None,
            1 => texts.pop().map(|Object(one)| Content::Text(one.into_text())),
            _ => Some(Content::List(texts)),
        };
        out.push(Message {
            reasoning_content: thoughts,
            tool_calls: calls,
            ..message(role, content)
        });
    }
    Some(())
}

fn tools(body: &mut MessagesBody, form: &mut Vec<(&'static str, Value)>) -> Option<()> {
    let tools = body.tools.take().unwrap_or_default().into_iter().map(shown_tool);
    let tools = tools.collect::<Option<Vec<_>>>()?;
    let has_tools = !tools.is_empty();
    if has_tools {
        form.push(("tools", tools.into()));
    }
    let Some(Object(choice)) = body.tool_choice.take() else {
        return Some(());
    };
    match choice.r#type {
        ChoiceKind::Tool => {
            has_tools.then_some(())?;
            let function = json!({"name": choice.name?});
            form.push(("tool_choice", json!({"type": "function", "function": function})));
        }
        ChoiceKind::Any => form.push(("tool_choice", has_tools.then_some("required")?.into())),
        ChoiceKind::Auto if has_tools => form.push(("tool_choice", "auto".into())),
        ChoiceKind::None if has_tools => form.push(("tool_choice", "none".into())),
        ChoiceKind::Auto | ChoiceKind::None => {}
    }
    if has_tools && choice.disable_parallel_tool_use == Some(true) {
        form.push(("parallel_tool_calls", false.into()));
    }
    Some(())
}

fn shown_tool(Object(tool): Object<AnthropicTool>) -> Option<Value> {
    are_exact(&tool.input_schema).then_some(())?;
    Some(function([
        ("name", Some(tool.name.into())),
        ("description", tool.description.map(Value::from)),
        ("strict", tool.strict.map(Value::from)),
        ("parameters", Some(tool.input_schema.into())),
    ]))
}

/// A function that is a tool, with these of its fields that there are.
pub fn function<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    json!({"type": "function", "function": there(fields)})
}

/// Those that there are.
pub fn there<const N: usize>(fields: [(&str, Option<Value>); N]) -> Map<String, Value> {
    let there = fields
        .into_iter()
        .filter_map(|(name, one)| Some((name.to_owned(), one?)));
    there.collect()
}

/// Whether all numbers are what was written: a whole number beyond 64 bits becomes another one here.
pub fn are_exact(values: &Map<String, Value>) -> bool {
    fn is_exact(value: &Value) -> bool {
        match value {
            Value::Number(one) => !one.is_f64() || one.as_f64().is_some_and(|one| one.abs() < 9e18),
            Value::Array(items) => items.iter().all(is_exact),
            Value::Object(values) => are_exact(values),
            _ => true,
        }
    }
    values.values().all(is_exact)
}
