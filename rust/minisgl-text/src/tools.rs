//! Tool calls in grammars and prompts: the grammar of an output that must call tools, or may not break a call once it
//! begins; and the instructions for models whose chat template knows no tools.
//!
//! Rules are in llguidance's dialect of Lark. They are derived from the format table of `answer`, so that the parser
//! accepts what a grammar allows.
//!
//! Invariants: a marker that is a token of the tokenizer becomes that token, else text; no text of a client ends the
//! literal that contains it.

use serde_json::{Map, Value};

use crate::answer::{Call, Many, Parameter, Piece, Thinking, ToolFormat};

const ANY: &str = "/(.|\\n)*/";
const SPACE: &str = "/\\s{0,4}/";
const WORD: &str = "/[A-Za-z0-9_.-]+/";
/// Pattern of text that resembles a call. An output that is no call must not begin like it.
const LIKE_A_CALL: &str = r"\s*(```\w*\s*)?\[?\s*\{\s*(\{\s*)?\x22(name|function|type|id|arguments|parameters|tool_name|tool_call_id)\x22(.|\n)*";

/// A tool that may be called.
pub struct Callable {
    /// Name of the tool.
    pub name: String,
    /// Body of the grammar rule for the JSON text of the arguments.
    pub arguments: String,
    /// JSON schema of the arguments, if they must follow it.
    pub schema: Option<Value>,
}

/// Outputs that a grammar allows.
pub struct OutputGrammar<'a> {
    /// Tool-call format of the model.
    pub format: Option<&'static ToolFormat>,
    /// Reasoning format, and whether the output begins inside it.
    pub thinking: Option<(&'static Thinking, Option<bool>)>,
    /// Lookup of a token's id by its text.
    pub token_id: &'a dyn Fn(&str) -> Option<u32>,
    /// Grammar body of an output that is no call. `None` if it is not constrained.
    pub body: Option<&'a str>,
    /// Tools that may be called; `None` if no call is allowed.
    pub tools: Option<&'a [Callable]>,
    /// Whether the model must call a tool.
    pub required: bool,
    /// Whether the model may make several calls.
    pub many: bool,
    /// Token limit of the reasoning, enforced if it ends with a special token.
    pub budget: Option<u32>,
}

/// Escapes `text` for a regular expression.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |all, one| match one {
        'a'..='z' | 'A'..='Z' | '0'..='9' => format!("{all}{one}"),
        one => format!("{all}\\x{{{:x}}}", u32::from(one)),
    })
}

/// Joins the non-empty parts with spaces.
fn spaced(parts: impl IntoIterator<Item = String>) -> String {
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(" ")
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

impl OutputGrammar<'_> {
    /// Returns the grammar's rules. The first one is `start`.
    pub fn rules(&self) -> String {
        let mut rules = Vec::new();
        match (self.tools, self.format) {
            (Some(tools), Some(format)) => self.calling(format, tools, &mut rules),
            _ => {
                let free = if self.budget.is_some() { ANY } else { "" };
                rules.push(format!("answer: {}{}", self.final_head(), self.body.unwrap_or(free)));
            }
        }
        self.thought(&mut rules);
        rules.join("\n")
    }

    /// Returns `text` as grammar terms, with markers that are tokens as such. Empty for an empty text.
    fn spelled(&self, text: &str, tokens: &[&str]) -> String {
        let markers = tokens
            .iter()
            .filter(|token| token.starts_with(['<', '[']))
            .filter_map(|token| {
                let at = text.find(token)?;
                Some((at, std::cmp::Reverse(token.len()), *token, (self.token_id)(token)?))
            });
        let Some((at, _, token, id)) = markers.min() else {
            return if text.is_empty() { String::new() } else { literal(text) };
        };
        let parts = [
            self.spelled(&text[..at], tokens),
            format!("<[{id}]>"),
            self.spelled(&text[at + token.len()..], tokens),
        ];
        spaced(parts)
    }

    fn is_harmony(&self) -> bool {
        self.thinking.is_some_and(|(thinking, _)| thinking.name == "harmony")
            || self.format.is_some_and(|format| matches!(format.call, Call::Harmony))
    }

    /// Returns the header before content, for a format that has one (Harmony); else an empty string.
    fn final_head(&self) -> String {
        if !self.is_harmony() {
            return String::new();
        }
        self.spelled("<|channel|>final<|message|>", crate::answer::HARMONY) + " "
    }

    fn thought(&self, rules: &mut Vec<String>) {
        let open = match self.thinking {
            None | Some((_, Some(false))) => {
                rules.push("start: answer".to_owned());
                return;
            }
            Some((_, is_open)) => is_open == Some(true),
        };
        let Some((thinking, _)) = self.thinking else { return };
        let begin = self.spelled(thinking.begin, thinking.tokens);
        let end = self.spelled(thinking.end, thinking.tokens);
        let most = self
            .budget
            .map_or_else(String::new, |most| format!("[max_tokens={most}]"));
        rules.push(format!("thought{most}: {ANY}"));
        let mut thought = format!("thought {end}");
        if end.starts_with('"') {
            rules.push(format!("thought_end[stop={end}]: {ANY}"));
            "thought_end".clone_into(&mut thought);
        }
        let mut space = "space".to_owned();
        if self.is_harmony() {
            space = self.spelled("<|start|>assistant", crate::answer::HARMONY);
        }
        rules.push(if open {
            format!("start: {thought} {space} answer")
        } else {
            format!("start: ({begin} {thought} {space})? answer")
        });
        rules.push(format!("space: {SPACE}"));
    }

    // -------------------------------------------------------------------------------------------------------- calls

    fn calling(&self, format: &'static ToolFormat, tools: &[Callable], rules: &mut Vec<String>) {
        // a model trained on a marker, but too small to write it, writes an object in a code block
        let is_bare = matches!(format.call, Call::Object(..)) && !format.begin.is_empty() && self.body.is_none();
        let bare = if is_bare { " | bare" } else { "" };
        if self.required {
            rules.push(format!("answer: calls{bare}"));
        } else if let Some(body) = self.body {
            rules.push(format!("answer: calls{bare} | {}{body}", self.final_head()));
        } else {
            self.free(format, bare, rules);
        }
        if is_bare {
            rules.push("bare: object | fenced \"\\n```\"".to_owned());
        }
        self.calls(format, rules);
        // the prefix of an object is one literal with it, because the grammar prefers longer literals
        let mut helpers = Helpers::default();
        self.objects(format, tools, ("object", ""), &mut helpers, rules);
        if is_bare {
            self.objects(format, tools, ("fenced", "```json\n"), &mut helpers, rules);
        }
        if format.begin.is_empty() && format.many == Many::Listed {
            self.objects(format, tools, ("listed", "["), &mut helpers, rules);
        }
        rules.append(&mut helpers.rules);
    }

    /// Adds the rules for free text that may contain calls, each from its marker on. A marker that is no token ends the
    /// text by itself, because the grammar would prefer a longer text.
    fn free(&self, format: &ToolFormat, bare: &str, rules: &mut Vec<String>) {
        let mut text = format!("{ANY} & ~/{LIKE_A_CALL}/");
        if format.python {
            let names: Vec<String> = self
                .tools
                .into_iter()
                .flatten()
                .map(|tool| escaped(&tool.name))
                .collect();
            text += &format!(" & ~/\\s*\\[\\s*({})\\((.|\\n)*/", names.join("|"));
        }
        if self.is_harmony() {
            rules.push(format!("TEXT: {ANY}"));
            rules.push(format!("answer: calls | {}TEXT", self.final_head()));
            return;
        }
        let begin = format.begin.trim();
        if begin.is_empty() {
            rules.push(format!("TEXT: {text}"));
            rules.push("answer: calls | TEXT".to_owned());
        } else if (self.token_id)(begin).is_some() {
            rules.push(format!("TEXT: {ANY}"));
            rules.push(format!("FIRST: {text}"));
            let times = if self.many { "*" } else { "?" };
            rules.push(format!("answer: FIRST (unit TEXT){times}{bare}"));
        } else {
            let marker = escaped(begin);
            rules.push(format!("TEXT: {text} & ~/(.|\\n)*{marker}(.|\\n)*/"));
            rules.push(format!("BEFORE: {text}"));
            rules.push(format!("before[stop={}]: BEFORE", literal(begin)));
            let again = if self.many { " answer" } else { "" };
            rules.push(format!("answer: TEXT | before inside{again}{bare}"));
        }
    }

    /// Adds the rules `calls`, `unit` (a call with its markers) and `inside`.
    fn calls(&self, format: &ToolFormat, rules: &mut Vec<String>) {
        let markers = format.markers();
        let spelled = |text: &str| self.spelled(text, &markers);
        let begin = format.begin.trim_end();
        let (space, end) = (spelled(&format.begin[begin.len()..]), spelled(format.end));
        let times = |separator: &str, rule: &str| {
            if self.many {
                format!(" ({} {rule})*", spelled(separator))
            } else {
                String::new()
            }
        };
        let (mut apart, mut together) = (String::new(), String::new());
        match format.many {
            Many::Apart(separator) if !matches!(format.call, Call::Harmony) => apart = times(separator, "unit"),
            Many::Apart(_) => {}
            Many::Together(separator) => together = times(separator, "object"),
            Many::Listed => together = times(", ", "object"),
        }
        let objects = match (&format.many, begin.is_empty()) {
            (Many::Listed, false) => format!("\"[\" object{together} \"]\""),
            (Many::Listed, true) if matches!(format.call, Call::Python) => format!("listed{together} \"]\""),
            (Many::Listed, true) if self.many => "object | listed (\", \" object)+ \"]\"".to_owned(),
            _ => format!("object{together}"),
        };
        rules.push(format!("calls: unit{apart}"));
        rules.push(format!("unit: {} inside", spelled(begin)));
        rules.push(format!("inside: {space} ({objects}) {end}"));
    }

    /// Adds the rule `rule` for a call of any tool, with `before` in front, and one rule for each tool.
    fn objects(
        &self,
        format: &ToolFormat,
        tools: &[Callable],
        (rule, before): (&str, &str),
        helpers: &mut Helpers,
        rules: &mut Vec<String>,
    ) {
        let numbers: Vec<String> = (0..tools.len()).map(|number| format!("{rule}_{number}")).collect();
        rules.push(format!("{rule}: {}", numbers.join(" | ")));
        let markers = format.markers();
        for (number, tool) in tools.iter().enumerate() {
            let name = Value::from(tool.name.as_str());
            let body = match &format.call {
                Call::Object(named, arguments) => {
                    let begin = literal(&format!("{before}{{\"{named}\": {name}, \"{arguments}\": "));
                    format!("{begin} {} \"}}\"", tool.arguments)
                }
                Call::Python => {
                    let fields = helpers.listed(tool);
                    format!("{} {fields} \")\"", literal(&format!("{before}{}(", tool.name)))
                }
                Call::Harmony => {
                    let head = format!(
                        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
                        tool.name
                    );
                    format!("{} {}", self.spelled(&head, crate::answer::HARMONY), tool.arguments)
                }
                Call::Pattern(pieces) => {
                    let parts = pieces.iter().map(|piece| match piece {
                        Piece::Lit(text) | Piece::Opt(text) => self.spelled(text, &markers),
                        Piece::Skip(_) => String::new(),
                        Piece::Name => literal(&tool.name),
                        Piece::Index => "/[0-9]+/".to_owned(),
                        Piece::Arguments => tool.arguments.clone(),
                        Piece::Parameters(one) => {
                            helpers.parameters(tool, one, &|text: &str| self.spelled(text, &markers))
                        }
                        Piece::Unquoted(quote) => {
                            let quote = self.spelled(quote, &markers);
                            let fields = helpers.unquoted(tool, &quote);
                            format!("\"{{\" {fields} \"}}\"")
                        }
                    });
                    spaced(parts)
                }
            };
            rules.push(format!("{rule}_{number}: {body}"));
        }
    }
}

/// Rules that several tools may share.
#[derive(Default)]
struct Helpers {
    rules: Vec<String>,
}

/// Returns a tool's parameters: name, schema with shared definitions, is required. `None` without properties.
fn properties(tool: &Callable) -> Option<Vec<(&str, Value, bool)>> {
    let schema = tool.schema.as_ref()?;
    let all = schema.get("properties")?.as_object()?;
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let with_definitions = |one: &Value| {
        let mut one = one.as_object().cloned().unwrap_or_else(Map::new);
        for name in ["$defs", "definitions"] {
            if let Some(found) = schema.get(name) {
                one.insert(name.to_owned(), found.clone());
            }
        }
        Value::Object(one)
    };
    let found = all
        .iter()
        .map(|(name, one)| (name.as_str(), with_definitions(one), required.contains(&name.as_str())));
    Some(found.collect())
}

/// Returns the grammar term for JSON of `schema`, with white space bounded as in `grammar/pieces.py`.
fn json(schema: &Value) -> String {
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.insert(
        "x-guidance".to_owned(),
        serde_json::json!({"whitespace_pattern": "[ \\n\\t]{1,32}"}),
    );
    format!("%json {}", Value::Object(schema))
}

fn is_text(schema: &Value) -> bool {
    schema.get("type").and_then(Value::as_str) == Some("string") && schema.get("enum").is_none()
}

/// Returns the alternatives of a schema with an enum of strings, as grammar terms. `None` for other schemas.
fn options(schema: &Value) -> Option<String> {
    let texts = schema
        .get("enum")?
        .as_array()?
        .iter()
        .map(|one| one.as_str().map(literal));
    Some(texts.collect::<Option<Vec<_>>>()?.join(" | "))
}

impl Helpers {
    fn add(&mut self, rule: &str) {
        if !self.rules.iter().any(|one| one == rule) {
            self.rules.push(rule.to_owned());
        }
    }

    /// Returns the grammar of comma-separated arguments, required ones first. `None` if the schema lists no properties.
    fn comma_separated(tool: &Callable, field: impl Fn(&str, &Value) -> String) -> Option<String> {
        let all = properties(tool)?.into_iter();
        let fields: Vec<_> = all
            .map(|(name, schema, required)| (field(name, &schema), required))
            .collect();
        let (must, may): (Vec<_>, Vec<_>) = fields.iter().partition(|(_, required)| *required);
        let after = |some: &[&(String, bool)]| {
            some.iter()
                .map(|(one, _)| format!(" (\",\" /\\s?/ {one})?"))
                .collect::<String>()
        };
        if must.is_empty() {
            let starts = (0..may.len()).map(|first| format!("{}{}", may[first].0, after(&may[first + 1..])));
            let starts: Vec<String> = starts.collect();
            return Some(if starts.is_empty() {
                String::new()
            } else {
                format!("({})?", starts.join(" | "))
            });
        }
        let must: Vec<&str> = must.iter().map(|(one, _)| one.as_str()).collect();
        Some(format!("{}{}", must.join(" \",\" /\\s?/ "), after(&may)))
    }

    /// Returns the grammar of Python arguments, `name=value`, with JSON values.
    fn listed(&mut self, tool: &Callable) -> String {
        let field = |name: &str, schema: &Value| format!("{} {}", literal(&format!("{name}=")), json(schema));
        Self::comma_separated(tool, field).unwrap_or_else(|| {
            self.add("any_field: /[A-Za-z_][A-Za-z0-9_]*/ \"=\" %json {}");
            "(any_field (\", \" any_field)*)?".to_owned()
        })
    }

    /// Returns the grammar of arguments that each have their own markers.
    fn parameters(&mut self, tool: &Callable, one: &Parameter, spelled: &dyn Fn(&str) -> String) -> String {
        let line = if one.in_lines { "\n" } else { "" };
        let end = spelled(&format!("{line}{}", one.end));
        let ending = if end.starts_with('"') {
            end.clone()
        } else {
            format!("any_text {end}")
        };
        if ending.starts_with('"') {
            // the first end marker ends a string
            self.add(&format!("text[stop={end}]: {ANY}"));
        } else {
            self.add(&format!("any_text: {ANY}"));
            self.add(&format!("text: {ending}"));
        }
        let next = if one.in_lines { "\"\\n\"" } else { "" };
        let begun = |name: &str| {
            let parts = [
                spelled(one.begin),
                name.to_owned(),
                spelled(one.named),
                spelled(one.value),
                spelled(line),
            ];
            spaced(parts)
        };
        let Some(all) = properties(tool) else {
            return format!("({} text {next})*", begun(WORD));
        };
        let fields = all.iter().map(|(name, schema, required)| {
            let begin = begun(&literal(name));
            let value = if let Some(some) = options(schema) {
                format!("({some}) {end}")
            } else if is_text(schema) {
                "text".to_owned()
            } else {
                format!("{} {end}", json(schema))
            };
            let times = if *required { "" } else { "?" };
            format!("({begin} {value} {next}){times}")
        });
        fields.collect::<Vec<_>>().join(" ")
    }

    /// Returns the grammar of `name:value` arguments, with `quote` around strings.
    fn unquoted(&mut self, tool: &Callable, quote: &str) -> String {
        if quote.starts_with('"') {
            self.add(&format!("quoted_end[stop={quote}]: {ANY}"));
            self.add(&format!("quoted: {quote} quoted_end"));
        } else {
            self.add(&format!("quoted_text: {ANY}"));
            self.add(&format!("quoted: {quote} quoted_text {quote}"));
        }
        self.add("unquoted: quoted | %json {\"type\": [\"number\", \"boolean\", \"null\"]} | unquoted_list | unquoted_object");
        self.add("unquoted_list: \"[\" (unquoted (\",\" unquoted)*)? \"]\"");
        self.add("unquoted_object: \"{\" (unquoted_field (\",\" unquoted_field)*)? \"}\"");
        self.add(&format!("unquoted_field: {WORD} \":\" unquoted"));
        let field = |name: &str, schema: &Value| {
            let value = match (options(schema), schema.get("type").and_then(Value::as_str)) {
                (Some(some), _) => format!("{quote} ({some}) {quote}"),
                (None, Some("string")) => "quoted".to_owned(),
                (None, Some("number" | "integer" | "boolean" | "null")) => json(schema),
                (None, Some("array")) => "unquoted_list".to_owned(),
                (None, Some("object")) => "unquoted_object".to_owned(),
                _ => "unquoted".to_owned(),
            };
            format!("{} {value}", literal(&format!("{name}:")))
        };
        Self::comma_separated(tool, field).unwrap_or_else(|| "(unquoted_field (\",\" unquoted_field)*)?".to_owned())
    }
}

// ------------------------------------------------------------------------------------ templates that know no tools

impl ToolFormat {
    /// Returns the instruction how to call a tool, for a model whose chat template has none.
    pub fn explained(&self) -> String {
        let example = match &self.call {
            Call::Python => "[name(argument=value)]".to_owned(),
            Call::Object(name, arguments) => self.in_list(format!("{{\"{name}\": ..., \"{arguments}\": {{...}}}}")),
            _ => return format!("answer with {}", self.written("name", "{\"argument\": \"value\"}")),
        };
        if !self.begin.is_empty() {
            return format!("answer with {}{example}{}", self.begin.trim(), self.end.trim());
        }
        let (what, several) = match (&self.call, &self.many) {
            (Call::Python, _) => ("a list of Python calls", ""),
            (_, Many::Listed) => ("an object", "; for several calls, with a list of such objects"),
            _ => ("an object", ""),
        };
        format!(
            "answer with {what} and nothing else: {example}{}{several}",
            self.end.trim()
        )
    }

    fn in_list(&self, object: String) -> String {
        if self.many == Many::Listed && !self.begin.is_empty() {
            format!("[{object}]")
        } else {
            object
        }
    }

    /// Returns a call in this format, as in the instruction. `arguments`: JSON text.
    pub fn written(&self, name: &str, arguments: &str) -> String {
        let fields: Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
        let call = match &self.call {
            Call::Object(named, argued) => self.in_list(format!(
                "{{\"{named}\": {}, \"{argued}\": {arguments}}}",
                Value::from(name)
            )),
            Call::Python => {
                let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key}={value}")).collect();
                format!("[{name}({})]", fields.join(", "))
            }
            Call::Harmony => {
                format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>")
            }
            Call::Pattern(pieces) => pieces
                .iter()
                .map(|piece| match piece {
                    Piece::Lit(text) | Piece::Opt(text) => (*text).to_owned(),
                    Piece::Skip(_) => String::new(),
                    Piece::Name => name.to_owned(),
                    Piece::Index => "0".to_owned(),
                    Piece::Arguments => arguments.to_owned(),
                    Piece::Parameters(one) => {
                        let line = if one.in_lines { "\n" } else { "" };
                        let fields = fields.iter().map(|(key, value)| {
                            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                            let (begin, named, before, end) = (one.begin, one.named, one.value, one.end);
                            format!("{begin}{key}{named}{before}{line}{value}{line}{end}{line}")
                        });
                        fields.collect()
                    }
                    Piece::Unquoted(quote) => unquoted(&Value::Object(fields.clone()), quote),
                })
                .collect(),
        };
        format!("{}{call}{}", self.begin, self.end)
    }
}

fn unquoted(value: &Value, quote: &str) -> String {
    match value {
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(items) => {
            format!(
                "[{}]",
                items
                    .iter()
                    .map(|one| unquoted(one, quote))
                    .collect::<Vec<_>>()
                    .join(",")
            )
        }
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, one)| format!("{key}:{}", unquoted(one, quote)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}
