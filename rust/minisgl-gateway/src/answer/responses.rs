//! Bodies of POST /v1/responses become chats (`server/responses`). What refers to answers that are kept is the Python server's.

use serde_json::{Map, Value, json};

use super::fields::{
    Content, Given, ItemKind, ItemPart, ItemPartKind, Message, Object, Part, ResponseChoice, ResponseChoiceKind,
    ResponseFormat, ResponseFormatKind, ResponseItem, ResponseTool, ResponsesBody, Role, Truncation,
};
use super::messages::{Turn, are_exact, function, message, there};
use crate::config::Bounds;

const LOGPROBS: &str = "message.output_text.logprobs";

/// Whether it asks for what only the Python server does.
pub fn is_for_python(body: &ResponsesBody) -> bool {
    let asks_logprobs = body.top_logprobs.is_some() || body.include.iter().flatten().any(|one| one == LOGPROBS);
    body.previous_response_id.is_some() || asks_logprobs
}

/// What it asks of the model, and what the answer says from its beginning on, but for what depends on the model. None:
/// there is something wrong with it.
pub fn to_chat(body: &mut ResponsesBody, bounds: &Bounds) -> Option<(Turn, Map<String, Value>)> {
    let mut found = Turn {
        kwargs: body.chat_template_kwargs.take(),
        ..Turn::default()
    };
    let tools = body.tools.take().unwrap_or_default();
    let head = head(body, &tools, bounds)?;
    if let Some(text) = body.instructions.take() {
        found.messages.push(message(Role::System, Some(Content::Text(text))));
    }
    match body.input.take()? {
        Given::Text(text) => found.messages.push(message(Role::User, Some(Content::Text(text)))),
        Given::List(items) => {
            (items.len() <= bounds.max_messages).then_some(())?;
            add_items(items, bounds, &mut found.messages)?;
        }
    }
    if let Some(format) = format(body)? {
        found.form.push(("response_format", format));
    }
    add_tools(body, tools, &mut found.form)?;
    found.effort = body.reasoning.take().and_then(|Object(reasoning)| reasoning.effort);
    Some((found, head))
}

/// Reasoning, text and calls that follow each other are one message of the assistant.
fn add_items(items: Vec<Object<ResponseItem>>, bounds: &Bounds, out: &mut Vec<Message>) -> Option<()> {
    let mut goes_on = false; // the last one is the assistant's, and may have more to say
    for Object(item) in items {
        match item.r#type {
            Some(ItemKind::Reasoning) => {
                let content = match item.content {
                    Some(Given::List(parts)) => parts,
                    Some(Given::Text(_)) => return None,
                    None => Vec::new(),
                };
                let summary = thoughts(item.summary.unwrap_or_default(), bounds)?;
                let content = thoughts(content, bounds)?;
                let text = if content.is_empty() { summary } else { content }.concat();
                if !text.is_empty() {
                    let last = go_on(out, &mut goes_on, |last| {
                        last.reasoning_content.is_none() && last.content.is_none() && last.tool_calls.is_none()
                    })?;
                    last.reasoning_content = Some(text);
                }
            }
            Some(ItemKind::FunctionCall) => {
                item.namespace.is_none().then_some(())?; // the Python server has the names in namespaces
                let call = json!({"name": item.name?, "arguments": item.arguments?});
                let call = json!({"id": item.call_id?, "type": "function", "function": call});
                let last = go_on(out, &mut goes_on, |_| true)?;
                last.tool_calls
                    .get_or_insert_default()
                    .extend(call.as_object().cloned());
            }
            Some(ItemKind::FunctionCallOutput) => {
                goes_on = false;
                let text = match item.output? {
                    Given::Text(text) => text,
                    Given::List(parts) => texts(parts, bounds)?.map(Part::into_text).collect(),
                };
                out.push(Message {
                    tool_call_id: Some(item.call_id?),
                    ..message(Role::Tool, Some(Content::Text(text)))
                });
            }
            None | Some(ItemKind::Message) => {
                let (role, content) = (item.role?, content(item.content?, bounds)?);
                if role == Role::Tool {
                    return None;
                }
                if role == Role::Assistant {
                    let last = go_on(out, &mut goes_on, |last| {
                        last.content.is_none() && last.tool_calls.is_none()
                    })?;
                    last.content = Some(content);
                } else {
                    goes_on = false;
                    out.push(message(role, Some(content)));
                }
            }
        }
    }
    Some(())
}

/// The assistant's message, a new one unless the last one `may` have more.
fn go_on<'a>(out: &'a mut Vec<Message>, goes_on: &mut bool, may: impl Fn(&Message) -> bool) -> Option<&'a mut Message> {
    if !std::mem::replace(goes_on, true) || !out.last().is_some_and(may) {
        out.push(message(Role::Assistant, None));
    }
    out.last_mut()
}

fn thoughts(parts: Vec<Object<ItemPart>>, bounds: &Bounds) -> Option<Vec<String>> {
    let fits = |kind| matches!(kind, ItemPartKind::ReasoningText | ItemPartKind::SummaryText);
    (parts.len() <= bounds.max_parts).then_some(())?;
    let texts = parts
        .into_iter()
        .map(|Object(part)| part.text.filter(|_| fits(part.r#type)));
    texts.collect()
}

fn texts(parts: Vec<Object<ItemPart>>, bounds: &Bounds) -> Option<impl Iterator<Item = Part>> {
    (parts.len() <= bounds.max_parts).then_some(())?;
    let texts = parts.into_iter().map(|Object(part)| match part.r#type {
        ItemPartKind::Refusal => Some(Part::Refusal {
            refusal: part.refusal.unwrap_or_default(),
        }),
        ItemPartKind::InputText | ItemPartKind::OutputText | ItemPartKind::Text => Some(Part::Text {
            text: part.text.unwrap_or_default(),
        }),
        ItemPartKind::ReasoningText | ItemPartKind::SummaryText => None,
    });
    Some(texts.collect::<Option<Vec<_>>>()?.into_iter())
}

fn content(given: Given<Object<ItemPart>>, bounds: &Bounds) -> Option<Content> {
    let mut parts: Vec<_> = match given {
        Given::Text(text) => return Some(Content::Text(text)),
        Given::List(parts) => texts(parts, bounds)?.map(Object).collect(),
    };
    Some(match parts.pop() {
        Some(Object(Part::Text { text })) if parts.is_empty() => Content::Text(text),
        last => Content::List(parts.into_iter().chain(last).collect()),
    })
}

fn format(body: &ResponsesBody) -> Option<Option<Value>> {
    let Some(given) = body.text.as_ref().and_then(|Object(text)| text.format.as_ref()) else {
        return Some(None);
    };
    are_exact(given).then_some(())?;
    let format: ResponseFormat = serde_json::from_value(given.clone().into()).ok()?;
    Some(match format.r#type {
        ResponseFormatKind::Text => None,
        ResponseFormatKind::JsonObject => Some(json!({"type": "json_object"})),
        ResponseFormatKind::JsonSchema => {
            let schema = there([
                ("name", Some(format.name.unwrap_or_else(|| "answer".to_owned()).into())),
                ("strict", format.strict.map(Value::from)),
                ("description", format.description.map(Value::from)),
                ("schema", Some(format.schema?.into())),
            ]);
            Some(json!({"type": "json_schema", "json_schema": schema}))
        }
    })
}

fn add_tools(
    body: &ResponsesBody,
    mut tools: Vec<Object<ResponseTool>>,
    form: &mut Vec<(&'static str, Value)>,
) -> Option<()> {
    let choice = match &body.tool_choice {
        Some(Value::Object(given)) => {
            let given: ResponseChoice = serde_json::from_value(given.clone().into()).ok()?;
            if given.r#type == ResponseChoiceKind::AllowedTools {
                let names: Vec<_> = given.tools.iter().flatten().map(|Object(tool)| &*tool.name).collect();
                let is_there = |name: &&str| tools.iter().any(|Object(tool)| tool.name == *name);
                names.iter().all(is_there).then_some(())?;
                tools.retain(|Object(tool)| names.contains(&&*tool.name));
                Some(given.mode.map_or("auto".into(), |mode| json!(mode)))
            } else {
                let function = json!({"name": given.name.as_ref()?});
                Some(json!({"type": "function", "function": function}))
            }
        }
        Some(Value::String(text)) => {
            ["none", "auto", "required"].contains(&text.as_str()).then_some(())?;
            Some(text.as_str().into())
        }
        Some(_) => return None,
        None => None,
    };
    if tools.is_empty() {
        return choice.is_none_or(|one| one == "none" || one == "auto").then_some(());
    }
    form.push((
        "tools",
        tools.into_iter().map(chat_tool).collect::<Option<Vec<_>>>()?.into(),
    ));
    form.extend(choice.map(|choice| ("tool_choice", choice)));
    form.extend(body.parallel_tool_calls.map(|one| ("parallel_tool_calls", one.into())));
    Some(())
}

fn chat_tool(Object(tool): Object<ResponseTool>) -> Option<Value> {
    tool.parameters.as_ref().is_none_or(are_exact).then_some(())?;
    Some(function([
        ("name", Some(tool.name.into())),
        ("description", tool.description.map(Value::from)),
        ("parameters", tool.parameters.map(Value::from)),
        ("strict", tool.strict.map(Value::from)),
    ]))
}

fn head(body: &ResponsesBody, tools: &[Object<ResponseTool>], bounds: &Bounds) -> Option<Map<String, Value>> {
    let metadata = body.common.metadata.clone().unwrap_or_default();
    (metadata.len() <= bounds.max_metadata && metadata.values().all(Value::is_string)).then_some(())?;
    let format = match body.text.as_ref().and_then(|Object(text)| text.format.as_ref()) {
        None => json!({"type": "text"}),
        Some(given) => {
            let names = ["type", "name", "schema", "strict", "description"];
            there(names.map(|name| (name, given.get(name).cloned()))).into()
        }
    };
    let choice = match &body.tool_choice {
        None => "auto".into(),
        Some(Value::Object(given)) => json!(serde_json::from_value::<ResponseChoice>(given.clone().into()).ok()?),
        Some(other) => other.clone(),
    };
    let shown_tool = |Object(tool): &Object<ResponseTool>| {
        json!({"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
            "strict": tool.strict.unwrap_or(false)})
    };
    let effort = body.reasoning.as_ref().and_then(|Object(one)| one.effort.as_ref());
    let found = json!({
        "id": null,
        "object": "response",
        "created_at": null,
        "status": "in_progress",
        "background": false,
        "completed_at": null,
        "error": null,
        "incomplete_details": null,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": metadata,
        "model": null,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls != Some(false),
        "previous_response_id": null,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": null},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.common.store != Some(false),
        "temperature": null,
        "text": {"format": format},
        "tool_choice": choice,
        "tools": tools.iter().map(shown_tool).collect::<Vec<_>>(),
        "top_logprobs": 0,
        "top_p": null,
        "truncation": body.truncation.unwrap_or(Truncation::Disabled),
        "usage": null,
        "user": body.common.user,
    });
    found.as_object().cloned()
}
