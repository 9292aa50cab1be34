//! The parser of an answer: what the model thinks first, then content and tool calls.
//!
//! White space between text and a call, and around what the model thinks, counts as part of the markers.
//!
//! Invariants: what does not become a call is text, as it was, with its markers; a call begins once its name is known and
//! its arguments have begun: what comes of them after that is handed on as it comes, and a text that breaks off within
//! them leaves a call with what came.

use std::sync::Arc;

use super::formats::{Call, HARMONY, Parameter, Piece, Thinking, ToolFormat};
use super::growing::{Growing, ValueScan};
use super::literals::{json_string, object_of, python_arguments, quoted, typed};
use super::parts::{Part, Tools};
use crate::is_space;

const FENCE: &str = "```";
const NAME_KEYS: [&str; 3] = ["name", "function", "tool_name"];
const ARGUMENT_KEYS: [&str; 2] = ["arguments", "parameters"];
const OTHER_KEYS: [&str; 3] = ["type", "id", "tool_call_id"];

/// What a piece of text becomes.
#[derive(Clone, Copy)]
enum To {
    Text,
    Held,
    Arguments,
}

/// A text whose last white space waits for what comes next.
#[derive(Default)]
struct Trimmed(String);

impl Trimmed {
    /// What is decided.
    fn push(&mut self, text: &str) -> Option<String> {
        let body = text.trim_end_matches(is_space);
        let decided = (!body.is_empty()).then(|| std::mem::take(&mut self.0) + body);
        self.0.push_str(&text[body.len()..]);
        decided
    }
}

#[derive(Default)]
pub(super) struct Run {
    pub(super) growing: Growing,
    pub(super) format: Option<&'static ToolFormat>,
    /// And whether the answer begins within it; None: the answer shows it.
    pub(super) thinking: Option<(&'static Thinking, Option<bool>)>,
    pub(super) tools: Arc<Tools>,
    pub(super) num_calls: usize,
    pub(super) text: Spaces,
    /// What may belong to a call, from its marker on.
    pub(super) held: String,
    /// A marker is in it, or the name of a tool: it is no text where the answer breaks off.
    pub(super) is_likely: bool,
}

/// What is known of the text so far.
#[derive(Default)]
pub(super) struct Spaces {
    waiting: Trimmed,
    after_call: bool,
}

impl Run {
    pub(super) async fn run(mut self) {
        let in_channels = self.thinking.is_some_and(|(thinking, _)| thinking.tokens == HARMONY)
            || self.format.is_some_and(|format| matches!(format.call, Call::Harmony));
        if in_channels {
            self.channels().await;
            return;
        }
        if let Some((thinking, is_open)) = self.thinking {
            self.think(thinking, is_open).await;
        }
        match self.format {
            None => {
                while let Some(text) = self.growing.run_of(|_| true).await {
                    self.growing.emit(Part::Text(text));
                }
            }
            Some(format) => self.content(format).await,
        }
        if !self.text.after_call {
            self.emit_text(String::new());
        }
    }

    /// With the white space before it.
    fn emit_text(&mut self, text: String) {
        let spaces = std::mem::take(&mut self.text.waiting.0);
        if !(spaces.is_empty() && text.is_empty()) {
            self.growing.emit(Part::Text(spaces + &text));
        }
    }

    fn put(&mut self, to: To, text: String) {
        match to {
            To::Held => self.held.push_str(&text),
            To::Arguments => self.argue(text),
            To::Text => {
                if let Some(decided) = self.text.waiting.push(&text) {
                    self.text.after_call = false;
                    self.growing.emit(Part::Text(decided));
                }
            }
        }
    }

    async fn think(&mut self, thinking: &Thinking, is_open: Option<bool>) {
        self.space().await;
        if !self.takes(thinking.begin).await && is_open != Some(true) {
            self.give_back();
            return;
        }
        self.space().await;
        self.held.clear();
        let mut inner = Trimmed::default();
        while let Some((text, found)) = self.growing.before(&[thinking.end]).await {
            if let Some(decided) = inner.push(&text) {
                self.growing.emit(Part::Reasoning(decided));
            }
            if found.is_some() {
                self.growing.take(thinking.end.len());
                self.space().await;
                self.held.clear();
                return;
            }
        }
        if !inner.0.is_empty() {
            self.growing.emit(Part::Reasoning(inner.0));
        }
    }

    // -------------------------------------------------------------------------------------------------------- calls

    async fn content(&mut self, format: &'static ToolFormat) {
        let mut markers = vec![format.begin.trim()];
        markers.extend(format.also);
        markers.retain(|marker| !marker.is_empty());
        while self.opening(format, &markers).await {}
        while let Some((text, found)) = self.growing.before(&markers).await {
            self.put(To::Text, text);
            let Some(which) = found else { continue };
            self.held = std::mem::take(&mut self.text.waiting.0);
            self.is_likely = true;
            if !format.begins_call(markers[which]) {
                self.hold(markers[which].len());
            }
            self.marked(format).await;
        }
    }

    /// Calls without a marker, of tools that are known, at the beginning of an answer; also in a block of code. Whether
    /// there were any, and no text behind them.
    async fn opening(&mut self, format: &'static ToolFormat, markers: &[&str]) -> bool {
        self.space().await;
        for marker in markers {
            if self.growing.comes(marker).await {
                self.give_back();
                return false;
            }
        }
        let is_fenced = self.holds(FENCE).await;
        if is_fenced {
            self.word().await;
            self.space().await;
        }
        let is_open = self.growing.comes("{").await || self.growing.comes("[").await;
        let found = is_open && self.calls(format, true).await;
        if found && is_fenced {
            self.space().await;
            self.takes(FENCE).await;
        }
        self.is_likely |= found;
        self.give_back();
        found && self.text.after_call
    }

    /// What is behind a marker, which is held.
    async fn marked(&mut self, format: &'static ToolFormat) {
        self.space().await;
        let found = match (self.growing.peek().await, &format.call) {
            (Some('{' | '['), _) => self.calls(format, false).await,
            (Some(_), Call::Pattern(pieces)) => self.patterns(pieces).await,
            _ => false,
        };
        self.is_likely |= found;
        if found && !format.end.is_empty() {
            self.space().await;
            self.takes(format.end.trim()).await;
        }
        self.give_back();
    }

    /// What is held is text.
    fn give_back(&mut self) {
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.is_likely) && self.growing.is_cut() {
            self.growing.drop_rest();
        } else {
            self.put(To::Text, held);
        }
    }

    fn hold(&mut self, len: usize) {
        let taken = self.growing.take(len);
        self.held.push_str(&taken);
    }

    /// Holds `text` if it comes next.
    async fn holds(&mut self, text: &str) -> bool {
        let comes = self.growing.comes(text).await;
        if comes {
            self.hold(text.len());
        }
        comes
    }

    /// Takes `text` out if it comes next: what is held belonged to it.
    async fn takes(&mut self, text: &str) -> bool {
        let comes = self.growing.comes(text).await;
        if comes {
            self.growing.take(text.len());
            self.held.clear();
        }
        comes
    }

    /// Takes white space.
    async fn space(&mut self) {
        while let Some(spaces) = self.growing.run_of(is_space).await {
            self.held.push_str(&spaces);
        }
    }

    /// Holds `text` if it comes next, with the white space around it.
    async fn literal(&mut self, text: &str) -> bool {
        self.space().await;
        let comes = self.holds(text.trim()).await;
        if comes {
            self.space().await;
        }
        comes
    }

    /// What is held belonged to a call.
    fn begin(&mut self, name: &str) {
        self.held.clear();
        self.is_likely = false;
        self.text.after_call = true;
        let index = self.num_calls;
        self.num_calls += 1;
        let id = String::new(); // it is drawn when the part is handed out
        let name = name.to_owned();
        self.growing.emit(Part::CallBegun { index, id, name });
    }

    fn argue(&mut self, text: String) {
        if !text.is_empty() {
            self.growing.emit(Part::CallArguments(self.num_calls - 1, text));
        }
    }

    /// One value; whether it is whole.
    async fn value(&mut self, to: To, is_python: bool) -> bool {
        let mut scan = ValueScan::new(is_python);
        while let Some((text, ends)) = self.growing.more_of(&mut scan).await {
            self.put(to, text);
            if ends {
                return !scan.is_broken;
            }
        }
        false // a number may end where the text does, but no call does
    }

    /// A JSON string, which is held; None if something else comes.
    async fn string(&mut self) -> Option<String> {
        let from = self.held.len();
        if self.growing.peek().await != Some('"') || !self.value(To::Held, false).await {
            return None;
        }
        json_string(&self.held[from..])
    }

    /// A word, which is held.
    async fn word(&mut self) -> String {
        let from = self.held.len();
        let belongs = |found: char| found.is_alphanumeric() || "_.-".contains(found);
        while let Some(letters) = self.growing.run_of(belongs).await {
            self.held.push_str(&letters);
        }
        self.held[from..].to_owned()
    }

    /// An object, several of them, or a list; or a list of Python calls. Whether there was a call; what is none is text.
    /// `known`: only names of the request's tools are calls.
    async fn calls(&mut self, format: &'static ToolFormat, known: bool) -> bool {
        let mut found = false;
        let in_list = self.holds("[").await;
        if in_list {
            self.space().await;
        }
        if in_list && format.python && !self.growing.comes("{").await {
            found = self.python_calls().await;
        }
        while self.growing.comes("{").await && self.object(format, known).await {
            found = true;
            if !self.held.is_empty() {
                break;
            }
            self.space().await;
            for separator in [",", ";"] {
                if self.holds(separator).await {
                    self.space().await;
                    break;
                }
            }
        }
        if found && in_list {
            self.takes("]").await;
        }
        self.is_likely |= found; // what is held goes on with calls
        self.give_back();
        found
    }

    /// An object with the name of a tool and its arguments. Whether it has become a call; what does not belong to a call
    /// is held.
    async fn object(&mut self, format: &ToolFormat, known: bool) -> bool {
        self.hold(1);
        let mut name: Option<String> = None;
        let mut arguments: Option<String> = None;
        let mut begun = false;
        loop {
            self.space().await;
            let key = self.string().await;
            self.space().await;
            let Some(key) = key else { return begun };
            if !self.holds(":").await {
                return begun;
            }
            self.space().await;
            if NAME_KEYS.contains(&key.as_str()) && name.is_none() {
                let found = self.string().await.filter(|found| !found.is_empty());
                let Some(found) = found.filter(|found| !known || self.tools.has(found)) else {
                    return begun;
                };
                name = Some(found);
                self.is_likely = true;
            } else if ARGUMENT_KEYS.contains(&key.as_str()) && arguments.is_none() {
                if name.is_some() && self.growing.peek().await == Some('{') {
                    self.begin(name.as_deref().unwrap_or_default());
                    begun = true;
                    arguments = Some(String::new());
                    if !self.value(To::Arguments, false).await {
                        return true;
                    }
                } else {
                    arguments = self.arguments().await;
                    if arguments.is_none() {
                        return false;
                    }
                }
            } else if (known && !begun && !OTHER_KEYS.contains(&key.as_str())) || !self.value(To::Held, false).await {
                return begun;
            }
            self.space().await;
            if self.holds(",").await {
                continue;
            }
            if !self.holds("}").await {
                return begun;
            }
            break;
        }
        if !begun {
            // without a marker a name alone is too little, where the model has another way to call
            let is_enough = arguments.is_some() || !known || format.begin.is_empty();
            let Some(name) = name.filter(|_| is_enough) else {
                return false;
            };
            self.begin(&name);
            self.argue(arguments.unwrap_or_else(|| "{}".to_owned()));
        }
        self.held.clear();
        true
    }

    /// Arguments that cannot be handed on as they come: before the name, or written as a string. Null is none.
    async fn arguments(&mut self) -> Option<String> {
        let from = self.held.len();
        if !self.value(To::Held, false).await {
            return None;
        }
        object_of(&self.held[from..])
    }

    /// Behind the bracket of a list of Python calls.
    async fn python_calls(&mut self) -> bool {
        let mut found = false;
        loop {
            self.space().await;
            let name = self.word().await;
            if !self.tools.has(&name) || !self.growing.comes("(").await {
                return found;
            }
            self.is_likely = true;
            let from = self.held.len();
            let is_whole = self.value(To::Held, true).await;
            let Some(arguments) = is_whole.then(|| python_arguments(&self.held[from..])).flatten() else {
                return found;
            };
            self.begin(&name);
            self.argue(arguments);
            found = true;
            self.space().await;
            if !self.holds(",").await {
                return found;
            }
        }
    }

    /// Calls that are written as `pieces` say; whether there was one.
    async fn patterns(&mut self, pieces: &'static [Piece]) -> bool {
        let mut found = false;
        while self.pattern(pieces).await {
            found = true;
            self.space().await;
            let Some(Piece::Lit(first)) = pieces.first() else {
                break;
            };
            if !self.growing.comes(first.trim()).await {
                break;
            }
        }
        found
    }

    async fn pattern(&mut self, pieces: &'static [Piece]) -> bool {
        let mut name = String::new();
        let mut begun = false;
        for piece in pieces {
            let fits = match piece {
                Piece::Lit(text) => self.literal(text).await,
                Piece::Opt(text) => {
                    self.literal(text).await;
                    true
                }
                Piece::Skip(text) => {
                    if self.literal(text).await {
                        self.word().await;
                    }
                    true
                }
                Piece::Name => {
                    name = self.word().await;
                    !name.is_empty()
                }
                Piece::Index => {
                    self.word().await;
                    true
                }
                Piece::Arguments | Piece::Parameters(_) | Piece::Unquoted(_) => {
                    let comes = match piece {
                        Piece::Parameters(one) => {
                            self.space().await;
                            self.growing.comes(one.begin.trim()).await || self.growing.comes("</").await
                        }
                        _ => self.growing.peek().await == Some('{'),
                    };
                    if !comes {
                        return begun;
                    }
                    self.begin(&name);
                    begun = true;
                    match piece {
                        Piece::Parameters(one) => self.parameters(&name, one).await,
                        Piece::Unquoted(quote) => self.unquoted(quote).await,
                        _ => self.value(To::Arguments, false).await,
                    }
                }
            };
            if !fits {
                return begun;
            }
        }
        begun
    }

    /// Arguments one after the other; false: the text breaks off within them.
    async fn parameters(&mut self, name: &str, parameter: &Parameter) -> bool {
        let mut separator = "{";
        loop {
            self.space().await;
            if !self.takes(parameter.begin.trim()).await {
                break;
            }
            let Some(key) = self.up_to(parameter.named.trim()).await else {
                return false;
            };
            self.argue(format!("{separator}{}: ", quoted(key.trim())));
            separator = ", ";
            if !parameter.value.is_empty() {
                self.literal(parameter.value).await;
                self.held.clear();
            }
            if parameter.in_lines && self.growing.peek().await == Some('\n') {
                self.growing.take(1);
            }
            let kinds = self.tools.kinds(name, key.trim());
            let is_whole = if kinds.is_text() {
                self.text_value(parameter.end.trim(), parameter.in_lines).await
            } else {
                let value = self.up_to(parameter.end.trim()).await;
                if let Some(value) = &value {
                    self.argue(typed(value, &kinds));
                }
                value.is_some()
            };
            if !is_whole {
                return false;
            }
        }
        if separator == "{" {
            self.argue("{".to_owned());
        }
        if self.growing.is_cut() {
            return false;
        }
        self.argue("}".to_owned());
        true
    }

    /// The text before `marker`, which is taken; None: it does not come.
    async fn up_to(&mut self, marker: &str) -> Option<String> {
        let mut all = String::new();
        while let Some((text, found)) = self.growing.before(&[marker]).await {
            all += &text;
            if found.is_some() {
                self.growing.take(marker.len());
                return Some(all);
            }
        }
        None
    }

    /// A text up to `end`, as it comes; `in_lines`: a line break before that belongs to it.
    async fn text_value(&mut self, end: &str, in_lines: bool) -> bool {
        self.argue("\"".to_owned());
        let mut waiting = String::new();
        while let Some((text, found)) = self.growing.before(&[end]).await {
            let mut text = std::mem::take(&mut waiting) + &text;
            if in_lines && text.ends_with('\n') {
                text.pop();
                if found.is_none() {
                    waiting.push('\n');
                }
            }
            let inner = quoted(&text);
            self.argue(inner[1..inner.len() - 1].to_owned());
            if found.is_some() {
                self.growing.take(end.len());
                self.argue("\"".to_owned());
                return true;
            }
        }
        false
    }

    /// An object whose keys have no quotes and whose strings have `quote` around them; false: it breaks off.
    async fn unquoted(&mut self, quote: &str) -> bool {
        let mut closers = Vec::new();
        loop {
            self.space().await;
            let Some(next) = self.growing.peek().await else {
                return false;
            };
            match next {
                '{' | '[' => {
                    closers.push(if next == '{' { '}' } else { ']' });
                    let bracket = self.growing.take(1);
                    self.argue(bracket);
                }
                '}' | ']' => {
                    if closers.pop() != Some(next) {
                        return false;
                    }
                    let bracket = self.growing.take(1);
                    self.argue(bracket);
                    if closers.is_empty() {
                        self.held.clear();
                        return true;
                    }
                }
                ',' | ':' => {
                    let sign = self.growing.take(1);
                    self.argue(sign + " ");
                }
                '"' => {
                    if !self.value(To::Arguments, false).await {
                        return false;
                    }
                }
                _ if self.takes(quote).await => {
                    if !self.text_value(quote, false).await {
                        return false;
                    }
                }
                _ => self.bare_word().await,
            }
            self.held.clear();
        }
    }

    /// A key, or a value without quotes.
    async fn bare_word(&mut self) {
        let mut word = String::new();
        while let Some(letters) = self.growing.run_of(|one| !",:{}[]".contains(one)).await {
            word += &letters;
        }
        let is_key = self.growing.comes(":").await;
        let is_value = !is_key && serde_json::from_str::<serde_json::Value>(word.trim()).is_ok();
        self.argue(if is_value {
            word.trim().to_owned()
        } else {
            quoted(word.trim())
        });
    }

    /// The messages of gpt-oss: what it thinks, calls and content, each with a head that says which.
    async fn channels(&mut self) {
        loop {
            let mut is_headed = false;
            for begin in ["<|start|>", "<|channel|>", " to=", "to="] {
                is_headed = is_headed || self.growing.comes(begin).await;
            }
            let mut head = Some(String::new());
            if is_headed {
                head = self.up_to("<|message|>").await;
            }
            let Some(head) = head else {
                return; // half a head says nothing
            };
            if !self.message(&head).await {
                return;
            }
        }
    }

    /// What is behind a head; false: the text ends with it.
    async fn message(&mut self, head: &str) -> bool {
        let recipient = head.split("to=functions.").nth(1);
        let name = recipient.map(|text| {
            text.split(|one: char| one == '<' || is_space(one))
                .next()
                .unwrap_or_default()
        });
        let is_thought = name.is_none() && self.thinking.is_some() && head.contains("<|channel|>analysis");
        if let Some(name) = name {
            self.begin(name);
        }
        let ends = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];
        let mut inner = Trimmed::default();
        while let Some((text, found)) = self.growing.before(&ends).await {
            let decided = if name.is_some() || is_thought {
                inner.push(&text)
            } else {
                Some(text)
            };
            match decided.filter(|text| !text.is_empty()) {
                Some(text) if name.is_some() => self.argue(text),
                Some(text) if is_thought => self.growing.emit(Part::Reasoning(text)),
                Some(text) => self.growing.emit(Part::Text(text)),
                None => {}
            }
            if let Some(which) = found {
                if which < 3 {
                    self.growing.take(ends[which].len()); // the others begin the next head
                }
                return true;
            }
        }
        false
    }
}
