//! Table of the formats in which models write tool calls and reasoning, one row each. Rows are data for the parser
//! (`run`), the grammars and the tool instructions in prompts (`tools`).

/// A tool-call format. White space at the ends of literals is what models write; the parser accepts any other.
#[derive(Debug)]
pub struct ToolFormat {
    /// Name of the format, a value of `--tool-call-parser`.
    pub name: &'static str,
    /// Names of this format in vLLM and SGLang.
    pub aliases: &'static [&'static str],
    /// Strings that identify a chat template of this format: all of one list must be in it.
    pub detected_by: &'static [&'static [&'static str]],
    /// Whether a tokenizer that has `begin` as a token implies this format.
    pub by_token: bool,
    /// Token that the tokenizer must have; without it, the next format of the same name applies.
    pub needs: Option<&'static str>,
    /// Marker before tool calls. If empty, calls have no marker and begin the output.
    pub begin: &'static str,
    /// Other markers with which calls may begin.
    pub also: &'static [&'static str],
    /// Marker after tool calls.
    pub end: &'static str,
    /// Syntax of a call, between the markers.
    pub call: Call,
    /// Syntax of several tool calls in one output.
    pub many: Many,
    /// Whether a list of Python calls is accepted, too.
    pub python: bool,
    /// Format of tool-call ids.
    pub id: CallId,
}

/// Syntax of one call. Objects with `name` and `arguments` are accepted in every format.
#[derive(Debug)]
pub enum Call {
    /// JSON object `{"name": ..., "arguments": {...}}`, with these two keys.
    Object(&'static str, &'static str),
    /// Python call: `[name(argument=value)]`.
    Python,
    /// Pattern of literals, the tool's name and its arguments, in this order.
    Pattern(&'static [Piece]),
    /// Message to the tool in gpt-oss's Harmony format.
    Harmony,
}

/// Element of a call's pattern.
#[derive(Debug)]
pub enum Piece {
    /// Literal text.
    Lit(&'static str),
    /// Literal text that models sometimes omit.
    Opt(&'static str),
    /// Name of the tool.
    Name,
    /// Index of the call in the output.
    Index,
    /// Optional literal and a word after it; both are ignored.
    Skip(&'static str),
    /// JSON object of arguments.
    Arguments,
    /// Arguments one after the other, each with its own markers.
    Parameters(Parameter),
    /// Object with unquoted keys, and with this quote mark around strings.
    Unquoted(&'static str),
}

/// Syntax of one argument: markers around its name and its value.
#[derive(Debug)]
pub struct Parameter {
    /// Marker before an argument's name.
    pub begin: &'static str,
    /// Marker after an argument's name.
    pub named: &'static str,
    /// Marker before an argument's value.
    pub value: &'static str,
    /// Marker after an argument's value.
    pub end: &'static str,
    /// Whether a line break belongs to the markers around a value.
    pub in_lines: bool,
}

/// Syntax of several tool calls in one output.
#[derive(Debug, PartialEq, Eq)]
pub enum Many {
    /// Each call with its own markers, and this separator.
    Apart(&'static str),
    /// All calls in one pair of markers, with this separator.
    Together(&'static str),
    /// All calls as a list in one pair of markers.
    Listed,
}

/// Format of tool-call ids.
#[derive(Debug, PartialEq, Eq)]
pub enum CallId {
    /// `call_` and 24 hexadecimal digits.
    Hex,
    /// Nine letters and digits. Chat templates of Mistral reject other ids.
    Nine,
    /// `functions.NAME:INDEX`, as in chat templates of Kimi.
    Counted,
}

/// Plain JSON calls, for models without a format of their own.
const PLAIN: ToolFormat = ToolFormat {
    name: "json",
    aliases: &[],
    detected_by: &[],
    by_token: false,
    needs: None,
    begin: "",
    also: &[],
    end: "",
    call: Call::Object("name", "arguments"),
    many: Many::Listed,
    python: false,
    id: CallId::Hex,
};

/// Markers around and in the headers of gpt-oss messages.
pub const HARMONY: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

/// All tool-call formats. The first that matches a chat template applies; the last is plain JSON.
pub static TOOL_FORMATS: &[ToolFormat] = &[
    ToolFormat {
        name: "harmony",
        aliases: &["openai", "gpt-oss"],
        detected_by: &[&["<|channel|>", "<|message|>"]],
        also: HARMONY,
        call: Call::Harmony,
        many: Many::Apart(""),
        ..PLAIN
    },
    ToolFormat {
        name: "qwen3_coder",
        aliases: &["qwen3_xml"],
        detected_by: &[&["<function=", "<parameter="]],
        begin: "<tool_call>\n",
        also: &["<function="],
        end: "\n</tool_call>",
        call: Call::Pattern(&[
            Piece::Lit("<function="),
            Piece::Name,
            Piece::Lit(">\n"),
            Piece::Parameters(Parameter {
                begin: "<parameter=",
                named: ">",
                value: "",
                end: "</parameter>",
                in_lines: true,
            }),
            Piece::Lit("</function>"),
        ]),
        many: Many::Apart("\n"),
        ..PLAIN
    },
    ToolFormat {
        name: "glm45",
        aliases: &["glm", "glm47"],
        detected_by: &[&["<arg_key>"]],
        begin: "<tool_call>",
        end: "\n</tool_call>",
        call: Call::Pattern(&[
            Piece::Name,
            Piece::Parameters(Parameter {
                begin: "\n<arg_key>",
                named: "</arg_key>",
                value: "\n<arg_value>",
                end: "</arg_value>",
                in_lines: false,
            }),
        ]),
        many: Many::Apart("\n"),
        ..PLAIN
    },
    ToolFormat {
        name: "minimax_m2",
        aliases: &["minimax-m2"],
        detected_by: &[&["<minimax:tool_call>"]],
        begin: "<minimax:tool_call>\n",
        end: "\n</minimax:tool_call>",
        call: Call::Pattern(&[
            Piece::Lit("<invoke name=\""),
            Piece::Name,
            Piece::Lit("\">\n"),
            Piece::Parameters(Parameter {
                begin: "<parameter name=\"",
                named: "\">",
                value: "",
                end: "</parameter>\n",
                in_lines: false,
            }),
            Piece::Lit("</invoke>"),
        ]),
        many: Many::Together("\n"),
        ..PLAIN
    },
    ToolFormat {
        name: "kimi_k2",
        detected_by: &[&["<|tool_calls_section_begin|>"]],
        begin: "<|tool_calls_section_begin|>",
        also: &["<|tool_call_begin|>"],
        end: "<|tool_calls_section_end|>",
        call: Call::Pattern(&[
            Piece::Lit("<|tool_call_begin|>"),
            Piece::Opt("functions."),
            Piece::Name,
            Piece::Opt(":"),
            Piece::Index,
            Piece::Lit("<|tool_call_argument_begin|>"),
            Piece::Arguments,
            Piece::Lit("<|tool_call_end|>"),
        ]),
        many: Many::Together(""),
        id: CallId::Counted,
        ..PLAIN
    },
    ToolFormat {
        name: "deepseek_v3",
        aliases: &["deepseekv3", "deepseek_r1"],
        detected_by: &[&["<｜tool▁calls▁begin｜>", "```json"]],
        begin: "<｜tool▁calls▁begin｜>",
        also: &["<｜tool▁call▁begin｜>"],
        end: "<｜tool▁calls▁end｜>",
        call: Call::Pattern(&[
            Piece::Lit("<｜tool▁call▁begin｜>"),
            Piece::Lit("function"),
            Piece::Lit("<｜tool▁sep｜>"),
            Piece::Name,
            Piece::Lit("\n```json\n"),
            Piece::Arguments,
            Piece::Lit("\n```"),
            Piece::Lit("<｜tool▁call▁end｜>"),
        ]),
        many: Many::Together("\n"),
        ..PLAIN
    },
    ToolFormat {
        name: "deepseek_v31",
        aliases: &["deepseekv31"],
        detected_by: &[&["<｜tool▁calls▁begin｜>"]],
        begin: "<｜tool▁calls▁begin｜>",
        also: &["<｜tool▁call▁begin｜>"],
        end: "<｜tool▁calls▁end｜>",
        call: Call::Pattern(&[
            Piece::Lit("<｜tool▁call▁begin｜>"),
            Piece::Name,
            Piece::Lit("<｜tool▁sep｜>"),
            Piece::Arguments,
            Piece::Lit("<｜tool▁call▁end｜>"),
        ]),
        many: Many::Together(""),
        ..PLAIN
    },
    ToolFormat {
        name: "gemma4",
        detected_by: &[&["<|tool_call>"]],
        begin: "<|tool_call>",
        end: "<tool_call|>",
        call: Call::Pattern(&[Piece::Lit("call:"), Piece::Name, Piece::Unquoted("<|\"|>")]),
        many: Many::Apart(""),
        ..PLAIN
    },
    ToolFormat {
        name: "functiongemma",
        detected_by: &[&["<start_function_call>"]],
        begin: "<start_function_call>",
        end: "<end_function_call>",
        call: Call::Pattern(&[Piece::Lit("call:"), Piece::Name, Piece::Unquoted("<escape>")]),
        many: Many::Apart(""),
        ..PLAIN
    },
    ToolFormat {
        name: "command",
        detected_by: &[&["<|START_ACTION|>"]],
        begin: "<|START_ACTION|>",
        end: "<|END_ACTION|>",
        call: Call::Object("tool_name", "parameters"),
        ..PLAIN
    },
    ToolFormat {
        name: "lfm2",
        detected_by: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"]],
        begin: "<|tool_call_start|>",
        end: "<|tool_call_end|>",
        call: Call::Python,
        python: true,
        ..PLAIN
    },
    ToolFormat {
        name: "llama4_pythonic",
        detected_by: &[&["<|python_start|>"]],
        begin: "<|python_start|>",
        end: "<|python_end|>",
        call: Call::Python,
        python: true,
        ..PLAIN
    },
    ToolFormat {
        name: "phi4_mini",
        aliases: &["phi4_mini_json"],
        detected_by: &[&["<|/tool|>"]],
        begin: "<|tool_call|>",
        also: &["functools"],
        end: "<|/tool_call|>",
        ..PLAIN
    },
    ToolFormat {
        name: "granite",
        detected_by: &[&["<|tool_call|>"]],
        begin: "<|tool_call|>",
        ..PLAIN
    },
    ToolFormat {
        name: "hermes",
        aliases: &["qwen", "qwen25", "granite4"],
        detected_by: &[&["<tool_call>"]],
        begin: "<tool_call>\n",
        end: "\n</tool_call>",
        many: Many::Apart("\n"),
        ..PLAIN
    },
    ToolFormat {
        name: "mistral",
        detected_by: &[&["[TOOL_CALLS]"]],
        by_token: true,
        needs: Some("[ARGS]"),
        begin: "[TOOL_CALLS]",
        call: Call::Pattern(&[
            Piece::Name,
            Piece::Skip("[CALL_ID]"),
            Piece::Lit("[ARGS]"),
            Piece::Arguments,
        ]),
        many: Many::Apart(""),
        id: CallId::Nine,
        ..PLAIN
    },
    ToolFormat {
        name: "mistral",
        detected_by: &[&["[TOOL_CALLS]"]],
        by_token: true,
        begin: "[TOOL_CALLS]",
        id: CallId::Nine,
        ..PLAIN
    },
    ToolFormat {
        name: "llama3_json",
        aliases: &["llama3", "llama4_json"],
        detected_by: &[&["<|python_tag|>"], &["Environment: ipython"]],
        also: &["<|python_tag|>"],
        call: Call::Object("name", "parameters"),
        many: Many::Together("; "),
        ..PLAIN
    },
    ToolFormat {
        name: "pythonic",
        also: &["<|python_tag|>"],
        call: Call::Python,
        python: true,
        ..PLAIN
    },
    PLAIN,
];

/// Format of a model's reasoning: the markers around it.
#[derive(Debug)]
pub struct Thinking {
    /// Name of the format, a value of `--reasoning-parser`.
    pub name: &'static str,
    /// Names of this format in vLLM and SGLang.
    pub aliases: &'static [&'static str],
    /// Marker before the reasoning.
    pub begin: &'static str,
    /// Marker after the reasoning.
    pub end: &'static str,
    /// String that identifies a chat template of this format.
    pub detected_by: &'static str,
    /// Parts of the markers that may be special tokens.
    pub tokens: &'static [&'static str],
    /// Whether the output begins inside the reasoning, even if the prompt does not open it.
    pub is_open: bool,
}

/// All reasoning formats. The first that matches a chat template applies.
pub static THINKING: &[Thinking] = &[
    Thinking {
        name: "harmony",
        aliases: &["openai_gptoss", "gpt-oss"],
        begin: "<|channel|>analysis<|message|>",
        end: "<|end|>",
        detected_by: "<|channel|>analysis",
        tokens: HARMONY,
        is_open: false,
    },
    Thinking {
        name: "qwen3",
        aliases: &["glm45", "deepseek_v3", "deepseek-v3", "kimi_k2"],
        begin: "<think>",
        end: "</think>",
        detected_by: "</think>",
        tokens: &["<think>", "</think>"],
        is_open: false,
    },
    Thinking {
        name: "deepseek_r1",
        aliases: &["deepseek-r1", "qwen3-thinking", "minimax_m2", "minimax"],
        begin: "<think>",
        end: "</think>",
        detected_by: "</think>",
        tokens: &["<think>", "</think>"],
        is_open: true,
    },
    Thinking {
        name: "mistral",
        aliases: &[],
        begin: "[THINK]",
        end: "[/THINK]",
        detected_by: "[/THINK]",
        tokens: &["[THINK]", "[/THINK]"],
        is_open: false,
    },
    Thinking {
        name: "gemma4",
        aliases: &[],
        begin: "<|channel>thought",
        end: "<channel|>",
        detected_by: "<channel|>",
        tokens: &["<|channel>", "<channel|>"],
        is_open: false,
    },
    Thinking {
        name: "command",
        aliases: &[],
        begin: "<|START_THINKING|>",
        end: "<|END_THINKING|>",
        detected_by: "<|END_THINKING|>",
        tokens: &["<|START_THINKING|>", "<|END_THINKING|>"],
        is_open: false,
    },
];

impl ToolFormat {
    /// Returns the format with this name or alias that fits a tokenizer with these tokens.
    pub fn named(name: &str, has_token: impl Fn(&str) -> bool) -> Option<&'static Self> {
        (TOOL_FORMATS.iter()).find(|one| (one.name == name || one.aliases.contains(&name)) && one.fits(&has_token))
    }

    /// Returns the format `name`, or, for "auto", the one detected from the chat template and the tokens.
    pub fn find(name: &str, template: &str, has_token: impl Fn(&str) -> bool) -> Option<&'static Self> {
        match name {
            "auto" => Some(Self::detect(template, has_token)),
            name => Self::named(name, has_token),
        }
    }

    /// Detects the format from the chat template and the tokens. Returns plain JSON if none matches.
    pub fn detect(template: &str, has_token: impl Fn(&str) -> bool) -> &'static Self {
        let has = |all: &&[&str]| all.iter().all(|one| template.contains(one));
        let index = TOOL_FORMATS.iter().position(|one| {
            let is_its = one.detected_by.iter().any(has) || (one.by_token && has_token(one.begin.trim()));
            is_its && one.fits(&has_token)
        });
        &TOOL_FORMATS[index.unwrap_or(TOOL_FORMATS.len() - 1)] // the last one is plain JSON
    }

    /// Returns the markers with which calls begin.
    pub(super) fn openings(&self) -> Vec<&'static str> {
        let all = [self.begin.trim()].into_iter().chain(self.also.iter().copied());
        all.filter(|one| !one.is_empty()).collect()
    }

    /// Returns true if `marker` is part of a call, not a marker before calls.
    pub(super) fn begins_call(&self, marker: &str) -> bool {
        matches!(&self.call, Call::Pattern([Piece::Lit(first), ..]) if first.trim() == marker)
    }

    /// Returns the markers after calls and their arguments.
    pub(super) fn closers(&self) -> Vec<&'static str> {
        let mut all = vec![self.end];
        if let Call::Pattern(pieces) = &self.call {
            let is_value = |one: &Piece| matches!(one, Piece::Arguments | Piece::Parameters(_) | Piece::Unquoted(_));
            let after = pieces.iter().position(is_value).map_or(pieces.len(), |at| at);
            for piece in &pieces[after..] {
                match piece {
                    Piece::Lit(text) => all.push(text),
                    Piece::Parameters(one) => all.push(one.end),
                    _ => {}
                }
            }
        }
        let all = all.into_iter().map(str::trim);
        all.filter(|one| one.starts_with('<')).collect()
    }

    fn fits(&self, has_token: impl Fn(&str) -> bool) -> bool {
        self.needs.is_none_or(has_token)
    }

    /// Returns all markers that the parser looks for.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut all = vec![self.begin, self.end];
        all.extend(self.also);
        if let Call::Pattern(pieces) = &self.call {
            for piece in *pieces {
                match piece {
                    Piece::Lit(text) | Piece::Opt(text) | Piece::Skip(text) | Piece::Unquoted(text) => {
                        all.push(text);
                    }
                    Piece::Parameters(one) => all.extend([one.begin, one.named, one.value, one.end]),
                    Piece::Name | Piece::Index | Piece::Arguments => {}
                }
            }
        }
        let mut all: Vec<&str> = all.into_iter().map(str::trim).filter(|one| !one.is_empty()).collect();
        all.dedup();
        all
    }
}

impl Thinking {
    /// Returns the reasoning format with this name or alias.
    pub fn named(name: &str) -> Option<&'static Self> {
        THINKING
            .iter()
            .find(|one| one.name == name || one.aliases.contains(&name))
    }

    /// Detects the reasoning format from the chat template. `None` if the model does not reason in a known format.
    pub fn detect(template: &str) -> Option<&'static Self> {
        THINKING.iter().find(|one| template.contains(one.detected_by))
    }
}
