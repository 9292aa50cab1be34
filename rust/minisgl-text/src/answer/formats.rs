//! The formats in which models write tool calls and what they think: a row each. Rows are data for the parser (`run`),
//! the grammars and the texts about tools (`tools`).

/// A format of tool calls. White space at the ends of literals is what models write there; any other is read as well.
#[derive(Debug)]
pub struct ToolFormat {
    /// Its name for `--tool-call-parser`.
    pub name: &'static str,
    /// Names of the same in vLLM and SGLang.
    pub aliases: &'static [&'static str],
    /// It is a template's if all strings of one of these lists are in that.
    pub detected_by: &'static [&'static [&'static str]],
    /// It is a tokenizer's if `begin` is one of its tokens.
    pub by_token: bool,
    /// A token without which it is the next format of the name.
    pub needs: Option<&'static str>,
    /// Before calls; empty: calls have no marker, and stand at the beginning of an answer.
    pub begin: &'static str,
    /// Other texts that calls begin with.
    pub also: &'static [&'static str],
    /// Behind calls.
    pub end: &'static str,
    /// How a call is written in between.
    pub call: Call,
    /// Between calls.
    pub many: Many,
    /// Whether a list of Python calls is read, too.
    pub python: bool,
    /// How ids of calls look.
    pub id: CallId,
}

/// How a call is written. Objects with `name` and `arguments` are read everywhere.
#[derive(Debug)]
pub enum Call {
    /// `{"name": ..., "arguments": {...}}`, with these two keys.
    Object(&'static str, &'static str),
    /// `[name(argument=value)]`.
    Python,
    /// These one after the other.
    Pattern(&'static [Piece]),
    /// A message of gpt-oss to the tool.
    Harmony,
}

/// A part of a pattern.
#[derive(Debug)]
pub enum Piece {
    /// This text.
    Lit(&'static str),
    /// This text, which models leave out at times.
    Opt(&'static str),
    /// The tool's name.
    Name,
    /// The number of the call in the answer.
    Index,
    /// A text and a word that say nothing, or neither.
    Skip(&'static str),
    /// A JSON object.
    Arguments,
    /// One argument after the other.
    Parameters(Parameter),
    /// An object whose keys have no quotes and whose strings have these around them.
    Unquoted(&'static str),
}

/// How an argument is written.
#[derive(Debug)]
pub struct Parameter {
    /// Before its name.
    pub begin: &'static str,
    /// Behind its name.
    pub named: &'static str,
    /// Behind its value.
    pub end: &'static str,
    /// A line break belongs to the markers around a value.
    pub in_lines: bool,
}

/// How several calls stand together.
#[derive(Debug, PartialEq, Eq)]
pub enum Many {
    /// Each with its own marker, and this in between.
    Apart(&'static str),
    /// In one pair of markers, and this in between.
    Together(&'static str),
    /// In a list in one pair of markers.
    Listed,
}

/// How ids of calls look.
#[derive(Debug, PartialEq, Eq)]
pub enum CallId {
    /// `call_` and 24 hexadecimal digits.
    Hex,
    /// Nine letters and digits: templates of Mistral refuse others.
    Nine,
    /// `functions.NAME:INDEX`, which templates of Kimi show.
    Counted,
}

/// For models without a format of their own.
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

/// All of them. Of several that a template may have, the first counts.
pub static TOOL_FORMATS: &[ToolFormat] = &[
    ToolFormat {
        name: "hermes",
        aliases: &["qwen", "qwen25"],
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

/// The markers around what a model thinks.
#[derive(Debug)]
pub struct Thinking {
    /// Its name for `--reasoning-parser`.
    pub name: &'static str,
    /// Names of the same in vLLM and SGLang.
    pub aliases: &'static [&'static str],
    /// Before it.
    pub begin: &'static str,
    /// Behind it; a template that has this thinks so.
    pub end: &'static str,
    /// An answer begins within it, whether or not the prompt shows that it has begun.
    pub is_open: bool,
}

/// All of them. Of several that a template may have, the first counts.
pub static THINKING: &[Thinking] = &[
    Thinking {
        name: "qwen3",
        aliases: &[],
        begin: "<think>",
        end: "</think>",
        is_open: false,
    },
    Thinking {
        name: "deepseek_r1",
        aliases: &[],
        begin: "<think>",
        end: "</think>",
        is_open: true,
    },
    Thinking {
        name: "mistral",
        aliases: &[],
        begin: "[THINK]",
        end: "[/THINK]",
        is_open: false,
    },
];

impl ToolFormat {
    /// The one of a name, for a tokenizer with these tokens.
    pub fn named(name: &str, has_token: impl Fn(&str) -> bool) -> Option<&'static Self> {
        (TOOL_FORMATS.iter()).find(|one| (one.name == name || one.aliases.contains(&name)) && one.fits(&has_token))
    }

    /// The one that a model has by its template and its tokens.
    pub fn detect(template: &str, has_token: impl Fn(&str) -> bool) -> &'static Self {
        let has = |all: &&[&str]| all.iter().all(|one| template.contains(one));
        let found = TOOL_FORMATS.iter().find(|one| {
            let is_its = one.detected_by.iter().any(has) || (one.by_token && has_token(one.begin.trim()));
            is_its && one.fits(&has_token)
        });
        found.unwrap_or(const { &PLAIN })
    }

    fn fits(&self, has_token: impl Fn(&str) -> bool) -> bool {
        self.needs.is_none_or(has_token)
    }

    /// All that the parser looks for.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut found = vec![self.begin, self.end];
        found.extend(self.also);
        if let Call::Pattern(pieces) = &self.call {
            for piece in *pieces {
                match piece {
                    Piece::Lit(text) | Piece::Opt(text) | Piece::Skip(text) | Piece::Unquoted(text) => {
                        found.push(text);
                    }
                    Piece::Parameters(one) => found.extend([one.begin, one.named, one.end]),
                    Piece::Name | Piece::Index | Piece::Arguments => {}
                }
            }
        }
        let mut found: Vec<&str> = found.into_iter().map(str::trim).filter(|one| !one.is_empty()).collect();
        found.dedup();
        found
    }
}

impl Thinking {
    /// The one of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        THINKING
            .iter()
            .find(|one| one.name == name || one.aliases.contains(&name))
    }

    /// The one that a model has by its template.
    pub fn detect(template: &str) -> Option<&'static Self> {
        THINKING.iter().find(|one| template.contains(one.end))
    }
}
