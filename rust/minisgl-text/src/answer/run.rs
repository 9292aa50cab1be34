//! The output parser: first reasoning, then content and tool calls.
//!
//! White space between text and a call, and around reasoning, belongs to the markers.
//!
//! Invariants: text that does not become a call is content, unchanged, with its markers; a call is emitted once its
//! name is known and its arguments have begun, and its arguments follow as JSON as they arrive (`arguments`). A call
//! whose arguments break off, or are followed by text that may belong to them, is broken: an output with a broken call
//! calls no tools.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use super::arguments::{Outcome, Reader};
use super::formats::{Call, HARMONY, Parameter, Piece, Thinking, ToolFormat};
use super::growing::{End, Growing, ValueScan};
use super::literals::{json_string, python_arguments, quoted, typed};
use super::parts::{Part, Tools};
use super::values::Borders;
use crate::is_space;

const FENCE: &str = "```";
/// Maximum length of surplus brackets after a call, with white space, in bytes.
const MAX_SURPLUS: usize = 16;
const NAME_KEYS: [&str; 3] = ["name", "function", "tool_name"];
const ARGUMENT_KEYS: [&str; 2] = ["arguments", "parameters"];
const OTHER_KEYS: [&str; 3] = ["type", "id", "tool_call_id"];

/// Buffer that holds back white space at the end of the text until more follows.
#[derive(Default)]
struct Trimmed(String);

impl Trimmed {
    /// Adds `text`. Returns the text up to its last non-space character, or `None` if there is none.
    fn push(&mut self, text: &str) -> Option<String> {
        let body = text.trim_end_matches(is_space);
        let decided = (!body.is_empty()).then(|| std::mem::take(&mut self.0) + body);
        self.0.push_str(&text[body.len()..]);
        decided
    }
}

/// Fields read so far of a call written as an object.
#[derive(Default)]
struct Named {
    name: Option<String>,
    /// Arguments as JSON; empty if they were emitted while they were read.
    arguments: Option<String>,
    begun: bool,
    /// Whether there is a field that calls do not have.
    is_strange: bool,
}

#[derive(Default)]
struct Run {
    growing: Growing,
    format: Option<&'static ToolFormat>,
    /// Reasoning format, and whether the output begins inside it; `None`: detected from the output.
    thinking: Option<(&'static Thinking, Option<bool>)>,
    tools: Arc<Tools>,
    num_calls: usize,
    text: Spaces,
    /// Text that may belong to a call, from its marker on.
    held: String,
    /// Whether `held` has a marker or a tool's name: then it is dropped if the output is cut off.
    is_likely: bool,
}

/// State of the white space between content and calls.
#[derive(Default)]
struct Spaces {
    waiting: Trimmed,
    after_call: bool,
}

/// A parser run and the growing text that it parses.
pub(super) struct Running {
    pub(super) growing: Growing,
    running: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Running {
    pub(super) fn new(
        format: Option<&'static ToolFormat>,
        thinking: Option<(&'static Thinking, Option<bool>)>,
        tools: &Arc<Tools>,
    ) -> Self {
        let growing = Growing::default();
        let run = Run {
            growing: growing.clone(),
            format,
            thinking,
            tools: Arc::clone(tools),
            ..Run::default()
        };
        Self {
            growing,
            running: Some(Box::pin(run.run())),
        }
    }

    /// Adds `text` and returns the parts that are final now.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        if !text.is_empty() {
            self.growing.push(text);
            self.go_on();
        }
        self.growing.parts()
    }

    /// Ends the text and returns the parts that were held back.
    pub(super) fn finish(&mut self, end: End) -> Vec<Part> {
        self.growing.finish(end);
        self.go_on();
        self.growing.parts()
    }

    /// Polls the run until it needs more text. It waits for nothing else, so no waker is needed.
    fn go_on(&mut self) {
        if let Some(running) = &mut self.running
            && running
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready()
        {
            self.running = None;
        }
    }
}

impl Run {
    async fn run(mut self) {
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
                    self.emit_text(text); // behind the white space that waited for thoughts
                }
            }
            Some(format) => self.content(format).await,
        }
        if !self.text.after_call {
            self.emit_text(String::new());
        }
    }

    /// Emits content with the white space held back before it.
    fn emit_text(&mut self, text: String) {
        let spaces = std::mem::take(&mut self.text.waiting.0);
        if !(spaces.is_empty() && text.is_empty()) {
            self.growing.emit_text(spaces + &text, 0);
        }
    }

    /// Emits content, holding back its trailing white space.
    fn put(&mut self, text: &str) {
        if let Some(decided) = self.text.waiting.push(text) {
            self.text.after_call = false;
            self.growing.emit_text(decided, self.text.waiting.0.len());
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
        let mut markers = vec![thinking.end];
        markers.extend(self.format.iter().flat_map(|format| format.openings()));
        let mut inner = Trimmed::default();
        while let Some((text, found)) = self.growing.before(&markers).await {
            self.reason(&mut inner, &text);
            let Some(which) = found else { continue };
            if which > 0 && self.unfinished(&mut inner, thinking, markers[which].len()).await {
                continue;
            }
            if which == 0 || self.growing.is_at_end().await {
                self.takes(thinking.end).await;
                self.space().await;
                self.held.clear();
                return;
            }
        }
        if !inner.0.is_empty() {
            self.growing.emit(Part::Reasoning(inner.0));
        }
    }

    fn reason(&self, inner: &mut Trimmed, text: &str) {
        if let Some(decided) = inner.push(text) {
            self.growing.emit(Part::Reasoning(decided));
        }
    }

    /// Tries calls inside unfinished reasoning, after a call marker of `len` bytes. If nothing follows the calls, the
    /// model omitted the end marker and they are emitted. Returns true if they are reasoning.
    async fn unfinished(&mut self, inner: &mut Trimmed, thinking: &Thinking, len: usize) -> bool {
        let mut trial = Running::new(self.format, None, &self.tools);
        let mut text = self.growing.take(len);
        let mut parts = trial.push(&text);
        let is_text = |part: &Part| matches!(part, Part::Text(text) if !text.trim().is_empty());
        while !self.growing.comes(thinking.end).await {
            let Some(next) = self.growing.peek().await else { break };
            let next = self.growing.take(next.len_utf8());
            parts.extend(trial.push(&next));
            text += &next;
            if parts.last().is_some_and(is_text) {
                break;
            }
        }
        if !parts.iter().any(is_text) && self.growing.is_at_end().await {
            let end = if self.growing.is_cut() { End::Cut } else { End::Whole };
            parts.extend(trial.finish(end));
            let has_called = parts.iter().any(|part| matches!(part, Part::CallBegun { .. }));
            if has_called && !parts.iter().any(is_text) && (end == End::Cut || trial.growing.broken().is_empty()) {
                inner.0.clear();
                self.text.after_call = true;
                trial
                    .growing
                    .broken()
                    .into_iter()
                    .for_each(|index| self.growing.break_call(index));
                let calls = parts.into_iter().filter(|part| !matches!(part, Part::Text(_)));
                calls.for_each(|part| self.growing.emit(part));
                return false;
            }
        }
        self.reason(inner, &text);
        true
    }

    // -------------------------------------------------------------------------------------------------------- calls

    async fn content(&mut self, format: &'static ToolFormat) {
        let markers = format.openings();
        while self.opening(format, &markers).await {}
        while let Some((text, found)) = self.growing.before(&markers).await {
            self.put(&text);
            let Some(which) = found else { continue };
            self.held = std::mem::take(&mut self.text.waiting.0);
            self.is_likely = true;
            if !format.begins_call(markers[which]) {
                self.hold(markers[which].len());
            }
            self.marked(format).await;
        }
    }

    /// Parses calls of known tools without a marker at the beginning of an output, also in a code block. Returns true
    /// if there were any and no text follows.
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
        if found {
            self.leftovers(format).await;
        }
        if found && is_fenced {
            self.space().await;
            self.takes(FENCE).await;
        }
        self.is_likely |= found;
        self.give_back();
        found && self.text.after_call
    }

    /// Parses what follows a call marker, which is held.
    async fn marked(&mut self, format: &'static ToolFormat) {
        self.space().await;
        while !format.begin.is_empty() && self.holds(format.begin.trim()).await {
            self.space().await;
        }
        let found = match (self.growing.peek().await, &format.call) {
            (Some('{' | '['), _) => self.calls(format, false).await,
            (Some(_), Call::Pattern(pieces)) => self.patterns(format, pieces).await,
            _ => false,
        };
        self.is_likely |= found;
        if found {
            self.leftovers(format).await;
        }
        self.give_back();
    }

    /// Drops markers and surplus brackets after a call. Marks it as broken if possible arguments follow.
    async fn leftovers(&mut self, format: &ToolFormat) {
        let closers = format.closers();
        let mut has_end = false;
        loop {
            self.space().await;
            let mut taken = false;
            for marker in &closers {
                taken = taken || self.takes(marker).await;
            }
            if !taken && self.has_surplus(&closers).await {
                self.growing.take(1);
                self.held.clear();
                taken = true;
            }
            if !taken {
                break;
            }
            has_end = true;
        }
        let goes_on = match self.growing.peek().await {
            Some('"' | ',' | ':' | '}' | ']') => true,
            Some('<' | '[' | ';' | '`') | None => false,
            Some(_) if format.end.is_empty() => self.held.is_empty(),
            Some(_) => !has_end && !self.held.contains('\n'),
        };
        if goes_on {
            self.growing.break_call(self.num_calls - 1);
        }
    }

    /// Returns true if an unmatched bracket comes next, before a marker or the end of the text.
    async fn has_surplus(&self, closers: &[&str]) -> bool {
        let find = |rest: &str, ended: bool| {
            let behind = rest.trim_start_matches(|one| "}]".contains(one) || is_space(one));
            if !rest.starts_with(['}', ']']) || rest.len() - behind.len() > MAX_SURPLUS {
                return (!rest.is_empty() || ended).then_some(false);
            }
            if behind.is_empty() {
                return ended.then_some(true);
            }
            if closers.iter().chain(&[FENCE]).any(|one| behind.starts_with(one)) {
                return Some(true);
            }
            let may_come = closers.iter().chain(&[FENCE]).any(|one| one.starts_with(behind));
            (ended || !may_come).then_some(false)
        };
        self.growing.look(find).await
    }

    /// Returns true if a call may end here: at a marker or the end of the text.
    async fn may_end(&self, format: &ToolFormat) -> bool {
        for marker in format.markers() {
            if marker.starts_with(['<', '[']) && self.growing.comes(marker).await {
                return true;
            }
        }
        matches!(self.growing.peek().await, None | Some(']' | '}' | '`'))
    }

    /// Emits the held text as content, or drops it if it is likely a call that was cut off.
    fn give_back(&mut self) {
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.is_likely) && self.growing.is_cut() {
            self.growing.drop_rest();
        } else {
            self.put(&held);
        }
    }

    fn hold(&mut self, len: usize) {
        let taken = self.growing.take(len);
        self.held.push_str(&taken);
    }

    /// Moves `text` into the held text if it comes next. Returns true if it did.
    async fn holds(&mut self, text: &str) -> bool {
        let comes = self.growing.comes(text).await;
        if comes {
            self.hold(text.len());
        }
        comes
    }

    /// Drops `text` and the held text if `text` comes next. Returns true if it did.
    async fn takes(&mut self, text: &str) -> bool {
        let comes = self.growing.comes(text).await;
        if comes {
            self.growing.take(text.len());
            self.held.clear();
        }
        comes
    }

    /// Moves white space into the held text.
    async fn space(&mut self) {
        while let Some(spaces) = self.growing.run_of(is_space).await {
            self.held.push_str(&spaces);
        }
    }

    /// Moves `text` and the white space around it into the held text. Returns true if `text` came next.
    async fn literal(&mut self, text: &str) -> bool {
        self.space().await;
        let comes = self.holds(text.trim()).await;
        if comes {
            self.space().await;
        }
        comes
    }

    /// Emits the start of a call and drops the held text, which belonged to it.
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

    /// Moves one value into the held text. Returns true if it is complete.
    async fn value(&mut self, is_python: bool) -> bool {
        let mut scan = ValueScan::new(is_python);
        while let Some((text, ends)) = self.growing.more_of(&mut scan).await {
            self.held.push_str(&text);
            if ends {
                return !scan.is_broken;
            }
        }
        false // a number may end where the text does, but no call does
    }

    /// Moves a JSON string into the held text and returns its value. `None` if something else comes.
    async fn string(&mut self) -> Option<String> {
        let from = self.held.len();
        if self.growing.peek().await != Some('"') || !self.value(false).await {
            return None;
        }
        json_string(&self.held[from..])
    }

    /// Moves a word into the held text and returns it.
    async fn word(&mut self) -> String {
        let from = self.held.len();
        let belongs = |found: char| found.is_alphanumeric() || "_.-".contains(found);
        while let Some(letters) = self.growing.run_of(belongs).await {
            self.held.push_str(&letters);
        }
        self.held[from..].to_owned()
    }

    /// Parses an object, several of them, a list, or a list of Python calls. Returns true if there was a call; other
    /// text becomes content. `known`: only names of the request's tools count.
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
        if !found || !self.held.chars().all(is_space) {
            self.give_back();
        }
        found
    }

    /// Parses an object with a tool's name and arguments, also in doubled braces. Returns true if it became a call;
    /// text that is no part of it is held.
    async fn object(&mut self, format: &'static ToolFormat, known: bool) -> bool {
        self.hold(1);
        self.space().await;
        let is_doubled = self.holds("{").await;
        let mut found = Named::default();
        if !self.fields(format, known, &mut found).await {
            if found.begun && !self.may_end(format).await {
                self.growing.break_call(self.num_calls - 1);
            }
            return found.begun;
        }
        if !found.begun {
            // without a marker a name alone is too little, where the model has another way to call
            let is_enough = found.arguments.is_some() || !known || format.begin.is_empty();
            let is_strange = found.is_strange && found.arguments.is_none();
            let Some(name) = found.name.filter(|_| is_enough && !is_strange) else {
                return false;
            };
            self.begin(&name);
            self.argue(found.arguments.unwrap_or_else(|| "{}".to_owned()));
        }
        if is_doubled {
            self.space().await;
            self.holds("}").await;
        }
        self.held.clear();
        true
    }

    /// Parses the fields of a call object into `found`. Returns true if the object ends after them.
    async fn fields(&mut self, format: &'static ToolFormat, known: bool, found: &mut Named) -> bool {
        loop {
            self.space().await;
            if found.begun && self.holds("}").await {
                return true; // behind a comma
            }
            let key = self.string().await;
            self.space().await;
            let Some(key) = key else { return false };
            if !self.holds(":").await {
                return false;
            }
            self.space().await;
            let key = key.as_str();
            if NAME_KEYS.contains(&key) && found.name.is_none() {
                let name = self.string().await.filter(|name| !name.is_empty());
                let Some(name) = name.filter(|name| !known || self.tools.has(name)) else {
                    return false;
                };
                found.name = Some(name);
                self.is_likely = true;
            } else if ARGUMENT_KEYS.contains(&key) && found.arguments.is_none() {
                if !self.arguments(format, found).await {
                    return false;
                }
            } else {
                let is_other = !known || found.begun || OTHER_KEYS.contains(&key);
                if found.begun && (found.name.iter()).any(|name| self.tools.names(name, key)) {
                    self.growing.break_call(self.num_calls - 1); // it stands outside of its arguments
                }
                found.is_strange |= !OTHER_KEYS.contains(&key);
                if !is_other || !self.value(false).await {
                    return false;
                }
            }
            self.space().await;
            if !self.holds(",").await {
                return self.holds("}").await;
            }
        }
    }

    /// Parses the value of an `arguments` field. Returns true if it is valid. Arguments before the name, or in a
    /// string, are buffered and not streamed. `null` means no arguments.
    async fn arguments(&mut self, format: &'static ToolFormat, found: &mut Named) -> bool {
        if let Some(name) = found.name.as_deref().filter(|_| !found.begun)
            && self.growing.peek().await == Some('{')
        {
            self.begin(name);
            found.begun = true;
            found.arguments = Some(String::new());
            return self.read(format, name, None, 1).await;
        }
        let from = self.held.len();
        if !self.value(false).await {
            return false;
        }
        let text = &self.held[from..];
        let inner = text.starts_with('"').then(|| json_string(text));
        let (text, is_none) = match &inner {
            Some(Some(inner)) => (inner.trim_matches(is_space), inner.trim().is_empty()),
            Some(None) => return false,
            None => (text, text == "null"),
        };
        found.arguments = if is_none {
            Some("{}".to_owned())
        } else {
            Reader::whole(text, &self.tools)
        };
        found.arguments.is_some()
    }

    /// Parses an argument object and streams it as JSON. `quote`: the format's quote mark, if any; `outer`: open
    /// brackets around it. Returns true if it is complete.
    async fn read(
        &mut self,
        format: &'static ToolFormat,
        name: &str,
        quote: Option<&'static str>,
        outer: usize,
    ) -> bool {
        let mut reader = Reader::new(&format.markers(), &self.tools, name, quote, outer);
        loop {
            self.growing.take_by(|text, end| reader.read(text, end));
            self.argue(std::mem::take(&mut reader.out));
            match reader.outcome {
                Some(Outcome::Whole) => break,
                Some(Outcome::Broken) => {
                    self.growing.break_call(self.num_calls - 1);
                    return false;
                }
                None => self.growing.more().await,
            }
        }
        for _ in 0..reader.doubled {
            self.space().await;
            self.takes("}").await;
        }
        true
    }

    /// Parses a list of Python calls, after its opening bracket. Returns true if there was a call.
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
            let is_whole = self.value(true).await;
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

    /// Parses calls written as `pieces`. Returns true if there was one.
    async fn patterns(&mut self, format: &'static ToolFormat, pieces: &'static [Piece]) -> bool {
        let mut found = false;
        while self.pattern(format, pieces).await {
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

    async fn pattern(&mut self, format: &'static ToolFormat, pieces: &'static [Piece]) -> bool {
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
                        return false;
                    }
                    self.begin(&name);
                    begun = true;
                    let is_whole = match piece {
                        Piece::Parameters(one) => self.parameters(format, &name, one).await,
                        Piece::Unquoted(quote) => self.read(format, &name, Some(quote), 0).await,
                        _ => self.read(format, &name, None, 0).await,
                    };
                    if !is_whole {
                        self.growing.break_call(self.num_calls - 1);
                        return true;
                    }
                    true
                }
            };
            if !fits {
                if begun && !self.may_end(format).await {
                    self.growing.break_call(self.num_calls - 1);
                }
                return begun;
            }
        }
        self.held.clear();
        begun
    }

    /// Parses arguments with their own markers. Returns false if the text breaks off in one or is ambiguous.
    async fn parameters(&mut self, format: &'static ToolFormat, name: &str, parameter: &'static Parameter) -> bool {
        let mut separator = "{";
        loop {
            self.space().await;
            if !self.takes(parameter.begin.trim()).await {
                break;
            }
            let key = self.up_to(parameter.named.trim()).await;
            let Some(key) = key.filter(|key| !key.contains(['<', '\n']) && !key.trim().is_empty()) else {
                return false;
            };
            self.argue(format!("{separator}{}: ", quoted(key.trim())));
            separator = ", ";
            if !parameter.value.is_empty() && !self.literal(parameter.value).await {
                return false;
            }
            self.held.clear();
            if parameter.in_lines && self.growing.peek().await == Some('\n') {
                self.growing.take(1);
            }
            let tools = Arc::clone(&self.tools);
            let kinds = tools.kinds(name, [Some(key.trim())]);
            let borders = Borders::new(format, parameter, &tools, name);
            let is_whole = if kinds.is_text() {
                self.argue("\"".to_owned());
                let is_whole = self.value_within(&borders, parameter, &mut None).await;
                self.argue(if is_whole { "\"" } else { "" }.to_owned());
                is_whole
            } else {
                let mut value = Some(String::new());
                let is_whole = self.value_within(&borders, parameter, &mut value).await;
                if is_whole {
                    self.argue(typed(&value.unwrap_or_default(), &kinds));
                }
                is_whole
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

    /// Consumes the text up to and including `marker` and returns it without the marker. `None` if it does not come.
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

    /// Consumes a value up to its end marker into `to`, or streams it inside a JSON string. Returns true if it ends.
    async fn value_within(&mut self, borders: &Borders<'_>, parameter: &Parameter, to: &mut Option<String>) -> bool {
        let (mut waiting, mut in_line) = ("", false);
        while let Some((text, found)) = self.growing.before(&["<"]).await {
            let ends = if found.is_some() {
                let in_line = if text.is_empty() {
                    in_line
                } else {
                    !text.ends_with('\n')
                };
                let look = |rest: &str, ended: bool| borders.value_ends(rest, ended, in_line);
                self.growing.look(look).await
            } else {
                None
            };
            let mut text = if waiting.is_empty() {
                text
            } else {
                std::mem::take(&mut waiting).to_owned() + &text
            };
            in_line = if text.is_empty() {
                in_line
            } else {
                !text.ends_with('\n')
            };
            if found.is_some() && ends.is_none() {
                text += &self.growing.take(1);
                in_line = true;
            }
            if text.ends_with('\n') && (parameter.in_lines || ends.is_none_or(|len| len == 0)) {
                text.pop();
                waiting = if ends.is_none() { "\n" } else { "" };
            }
            if let Some(to) = to {
                to.push_str(&text);
            } else {
                let inner = quoted(&text);
                self.argue(inner[1..inner.len() - 1].to_owned());
            }
            if let Some(len) = ends {
                self.growing.take(len);
                return true;
            }
        }
        false
    }

    /// Parses the messages of gpt-oss (Harmony): reasoning, calls and content, as each message's header says.
    async fn channels(&mut self) {
        loop {
            let mut is_headed = false;
            for begin in ["<|start|>", "<|channel|>", " to=", "to="] {
                is_headed = is_headed || self.growing.comes(begin).await;
            }
            let mut head = String::new();
            if is_headed {
                match self.head().await {
                    Some(found) => head = found,
                    None => return, // half a head says nothing
                }
            }
            if !self.message(&head).await {
                return;
            }
        }
    }

    /// Consumes a message header; one that ends without `<|message|>` is content. `None` if the text ends inside it.
    async fn head(&mut self) -> Option<String> {
        let ends = ["<|message|>", "<|end|>", "<|call|>", "<|return|>"];
        let mut head = String::new();
        while let Some((text, found)) = self.growing.before(&ends).await {
            head += &text;
            if let Some(which) = found {
                if which > 0 {
                    self.growing.emit_text(std::mem::take(&mut head), 0);
                }
                self.growing.take(ends[which].len());
                return Some(head);
            }
        }
        None
    }

    /// Returns the tool to which a message with this header is addressed.
    fn recipient<'a>(&self, head: &'a str) -> Option<&'a str> {
        let name = head.split("to=").nth(1)?;
        let name = name.split(|one: char| one == '<' || is_space(one)).next()?;
        let own = name.strip_prefix("functions.");
        own.or_else(|| self.tools.has(name).then_some(name))
            .filter(|name| !name.is_empty())
    }

    /// Parses the body of a message. Returns false if the text ends with it.
    async fn message(&mut self, head: &str) -> bool {
        let ends = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];
        let mut is_call = false;
        if let Some(name) = self.recipient(head) {
            is_call = self.call_message(name, &ends).await;
        }
        let is_thought = !is_call && self.thinking.is_some() && head.contains("<|channel|>analysis");
        let mut inner = Trimmed::default();
        while let Some((text, found)) = self.growing.before(&ends).await {
            let decided = if is_thought { inner.push(&text) } else { Some(text) };
            match decided.filter(|text| !text.is_empty()) {
                Some(text) if is_thought => self.growing.emit(Part::Reasoning(text)),
                Some(text) => {
                    if is_call {
                        self.growing.break_call(self.num_calls - 1); // it may belong to its arguments
                    }
                    self.growing.emit_text(text, 0);
                }
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

    /// Parses the arguments of a call message: an object, or nothing. Returns false if it is no call.
    async fn call_message(&mut self, name: &str, ends: &[&str]) -> bool {
        self.space().await;
        let mut is_empty = self.growing.is_at_end().await;
        for end in ends {
            is_empty = is_empty || self.growing.comes(end).await;
        }
        if !is_empty && self.growing.peek().await != Some('{') {
            let spaces = std::mem::take(&mut self.held);
            self.growing.emit_text(spaces, 0);
            return false;
        }
        self.begin(name);
        let format = ToolFormat::named("harmony", |_| true);
        if let Some(format) = format.filter(|_| !is_empty) {
            self.read(format, name, None, 0).await;
        } else if self.growing.is_cut() {
            self.growing.break_call(self.num_calls - 1);
        } else {
            self.argue("{}".to_owned());
        }
        self.held.clear();
        while (self.growing.run_of(|one| is_space(one) || "}]".contains(one)).await).is_some() {}
        true
    }
}
