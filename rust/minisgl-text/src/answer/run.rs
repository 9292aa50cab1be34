//! The parser of an answer: what the model thinks first, then content and tool calls.
//!
//! White space between text and a call, and around what the model thinks, counts as part of the markers.
//!
//! Invariants: what does not become a call is text, as it was, with its markers; a call begins once its name is known and
//! its arguments have begun: what comes of them after that is handed on as it comes, and a text that breaks off within
//! them leaves a call with what came.

use std::sync::Arc;

use super::formats::{Call, Piece, Thinking, ToolFormat};
use super::growing::{Growing, ValueScan, is_space};
use super::literals::{json_string, object_of, python_arguments};
use super::parts::{Part, Tools};

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
        if self.growing.comes(thinking.begin).await {
            self.growing.take(thinking.begin.len());
        } else if is_open != Some(true) {
            self.give_back();
            return;
        }
        self.space().await;
        self.held.clear();
        let mut inner = Trimmed::default();
        loop {
            let (text, found) = self.growing.before(&[thinking.end]).await;
            let is_end = text.is_empty() && found.is_none();
            if let Some(decided) = inner.push(&text) {
                self.growing.emit(Part::Reasoning(decided));
            }
            if found.is_some() {
                break;
            }
            if is_end {
                if !inner.0.is_empty() {
                    self.growing.emit(Part::Reasoning(inner.0));
                }
                return;
            }
        }
        self.growing.take(thinking.end.len());
        self.space().await;
        self.held.clear();
    }

    // -------------------------------------------------------------------------------------------------------- calls

    async fn content(&mut self, format: &'static ToolFormat) {
        let mut markers = vec![format.begin.trim()];
        markers.extend(format.also);
        markers.retain(|marker| !marker.is_empty());
        while self.opening(format, &markers).await {}
        loop {
            let (text, found) = self.growing.before(&markers).await;
            let is_end = text.is_empty() && found.is_none();
            self.put(To::Text, text);
            match found {
                None if is_end => return,
                None => {}
                Some(which) => {
                    self.held = std::mem::take(&mut self.text.waiting.0);
                    self.is_likely = true;
                    self.hold(markers[which].len());
                    self.marked(format).await;
                }
            }
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
        let is_fenced = self.growing.comes(FENCE).await;
        if is_fenced {
            self.hold(FENCE.len());
            self.word().await;
            self.space().await;
        }
        let is_open = self.growing.comes("{").await || self.growing.comes("[").await;
        let found = is_open && self.calls(format, true).await;
        if found && is_fenced {
            self.space().await;
            if self.growing.comes(FENCE).await {
                self.growing.take(FENCE.len());
                self.held.clear();
            }
        }
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
        if found && !format.end.is_empty() {
            self.space().await;
            let end = format.end.trim();
            if self.growing.comes(end).await {
                self.growing.take(end.len());
                self.held.clear();
            }
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

    /// Takes white space.
    async fn space(&mut self) {
        while let Some(spaces) = self.growing.run_of(is_space).await {
            self.held.push_str(&spaces);
        }
    }

    /// Holds `text` if it comes next, with the white space around it.
    async fn literal(&mut self, text: &str) -> bool {
        self.space().await;
        let comes = self.growing.comes(text.trim()).await;
        if comes {
            self.hold(text.trim().len());
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
        let in_list = self.growing.comes("[").await;
        if in_list {
            self.hold(1);
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
                if self.growing.comes(separator).await {
                    self.hold(1);
                    self.space().await;
                    break;
                }
            }
        }
        if found && in_list && self.growing.comes("]").await {
            self.growing.take(1);
            self.held.clear();
        }
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
            if !self.growing.comes(":").await {
                return begun;
            }
            self.hold(1);
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
            if self.growing.comes(",").await {
                self.hold(1);
                continue;
            }
            if !self.growing.comes("}").await {
                return begun;
            }
            self.hold(1);
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
            let from = self.held.len();
            let is_whole = self.value(To::Held, true).await;
            let Some(arguments) = is_whole.then(|| python_arguments(&self.held[from..])).flatten() else {
                return found;
            };
            self.begin(&name);
            self.argue(arguments);
            found = true;
            self.space().await;
            if !self.growing.comes(",").await {
                return found;
            }
            self.hold(1);
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
                Piece::Arguments => {
                    if self.growing.peek().await != Some('{') {
                        false
                    } else {
                        self.begin(&name);
                        begun = true;
                        if !self.value(To::Arguments, false).await {
                            return true;
                        }
                        true
                    }
                }
                Piece::Parameters(_) | Piece::Unquoted(_) => false,
            };
            if !fits {
                return begun;
            }
        }
        begun
    }
}
