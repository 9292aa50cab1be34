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
use super::buffer::{End, TextBuffer, ValueScan};
use super::formats::{Call, HARMONY, Parameter, Piece, Thinking, ToolFormat};
use super::literals::{json_string, python_arguments, quoted, typed};
use super::parts::{Part, Tools};
use super::values::ValueEnds;
use crate::is_space;

const FENCE: &str = "```";
/// Maximum length of surplus brackets after a call, with white space, in bytes.
const MAX_SURPLUS: usize = 16;
const NAME_KEYS: [&str; 3] = ["name", "function", "tool_name"];
const ARGUMENT_KEYS: [&str; 2] = ["arguments", "parameters"];
const OTHER_KEYS: [&str; 3] = ["type", "id", "tool_call_id"];

/// Buffer that holds back white space at the end of the text until more follows.
#[derive(Default)]
struct TrimmedText(String);

impl TrimmedText {
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
struct CallFields {
    name: Option<String>,
    /// Arguments as JSON; empty if they were emitted while they were read.
    arguments: Option<String>,
    begun: bool,
    /// Whether the object has a field that tool calls do not have.
    is_strange: bool,
}

#[derive(Default)]
struct Run {
    buffer: TextBuffer,
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
    waiting: TrimmedText,
    after_call: bool,
}

/// A parser run and the text buffer that it parses.
pub(super) struct Running {
    pub(super) buffer: TextBuffer,
    running: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Running {
    pub(super) fn new(
        format: Option<&'static ToolFormat>,
        thinking: Option<(&'static Thinking, Option<bool>)>,
        tools: &Arc<Tools>,
    ) -> Self {
        let buffer = TextBuffer::default();
        let run = Run {
            buffer: buffer.clone(),
            format,
            thinking,
            tools: Arc::clone(tools),
            ..Run::default()
        };
        Self {
            buffer,
            running: Some(Box::pin(run.run())),
        }
    }

    /// Adds `text` and returns the parts that are final now.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        if !text.is_empty() {
            self.buffer.push(text);
            self.poll_run();
        }
        self.buffer.parts()
    }

    /// Ends the text and returns the parts that were held back.
    pub(super) fn finish(&mut self, end: End) -> Vec<Part> {
        self.buffer.finish(end);
        self.poll_run();
        self.buffer.parts()
    }

    /// Polls the run until it needs more text. It waits for nothing else, so no waker is needed.
    fn poll_run(&mut self) {
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
                while let Some(text) = self.buffer.run_of(|_| true).await {
                    self.emit_text(text); // after the white space held back before possible reasoning
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
            self.buffer.emit_text(spaces + &text, 0);
        }
    }

    /// Emits content, holding back its trailing white space.
    fn put(&mut self, text: &str) {
        if let Some(decided) = self.text.waiting.push(text) {
            self.text.after_call = false;
            self.buffer.emit_text(decided, self.text.waiting.0.len());
        }
    }

    async fn think(&mut self, thinking: &Thinking, is_open: Option<bool>) {
        self.space().await;
        if !self.takes(thinking.begin).await && is_open != Some(true) {
            self.emit_held();
            return;
        }
        self.space().await;
        self.held.clear();
        let mut markers = vec![thinking.end];
        markers.extend(self.format.iter().flat_map(|format| format.openings()));
        let mut inner = TrimmedText::default();
        while let Some((text, found)) = self.buffer.before(&markers).await {
            self.reason(&mut inner, &text);
            let Some(which) = found else { continue };
            if which > 0 && self.unclosed_calls(&mut inner, thinking, markers[which].len()).await {
                continue;
            }
            if which == 0 || self.buffer.is_at_end().await {
                self.takes(thinking.end).await;
                self.space().await;
                self.held.clear();
                return;
            }
        }
        if !inner.0.is_empty() {
            self.buffer.emit(Part::Reasoning(inner.0));
        }
    }

    fn reason(&self, inner: &mut TrimmedText, text: &str) {
        if let Some(decided) = inner.push(text) {
            self.buffer.emit(Part::Reasoning(decided));
        }
    }

    /// Tries calls inside unclosed reasoning, after a call marker of `len` bytes. If nothing follows the calls, the
    /// model omitted the end marker and they are emitted. Returns true if they are reasoning.
    async fn unclosed_calls(&mut self, inner: &mut TrimmedText, thinking: &Thinking, len: usize) -> bool {
        let mut trial = Running::new(self.format, None, &self.tools);
        let mut text = self.buffer.take(len);
        let mut parts = trial.push(&text);
        let is_text = |part: &Part| matches!(part, Part::Text(text) if !text.trim().is_empty());
        while !self.buffer.comes(thinking.end).await {
            let Some(next) = self.buffer.peek().await else { break };
            let next = self.buffer.take(next.len_utf8());
            parts.extend(trial.push(&next));
            text += &next;
            if parts.last().is_some_and(is_text) {
                break;
            }
        }
        if !parts.iter().any(is_text) && self.buffer.is_at_end().await {
            let end = if self.buffer.is_cut() { End::Cut } else { End::Whole };
            parts.extend(trial.finish(end));
            let has_called = parts.iter().any(|part| matches!(part, Part::CallBegun { .. }));
            if has_called && !parts.iter().any(is_text) && (end == End::Cut || trial.buffer.broken().is_empty()) {
                inner.0.clear();
                self.text.after_call = true;
                trial
                    .buffer
                    .broken()
                    .into_iter()
                    .for_each(|index| self.buffer.break_call(index));
                let calls = parts.into_iter().filter(|part| !matches!(part, Part::Text(_)));
                calls.for_each(|part| self.buffer.emit(part));
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
        while let Some((text, found)) = self.buffer.before(&markers).await {
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
            if self.buffer.comes(marker).await {
                self.emit_held();
                return false;
            }
        }
        let is_fenced = self.holds(FENCE).await;
        if is_fenced {
            self.word().await;
            self.space().await;
        }
        let is_open = self.buffer.comes("{").await || self.buffer.comes("[").await;
        let has_calls = is_open && self.calls(format, true).await;
        if has_calls {
            self.leftovers(format).await;
        }
        if has_calls && is_fenced {
            self.space().await;
            self.takes(FENCE).await;
        }
        self.is_likely |= has_calls;
        self.emit_held();
        has_calls && self.text.after_call
    }

    /// Parses what follows a call marker, which is held.
    async fn marked(&mut self, format: &'static ToolFormat) {
        self.space().await;
        while !format.begin.is_empty() && self.holds(format.begin.trim()).await {
            self.space().await;
        }
        let has_calls = match (self.buffer.peek().await, &format.call) {
            (Some('{' | '['), _) => self.calls(format, false).await,
            (Some(_), Call::Pattern(pieces)) => self.patterns(format, pieces).await,
            _ => false,
        };
        self.is_likely |= has_calls;
        if has_calls {
            self.leftovers(format).await;
        }
        self.emit_held();
    }

    /// Drops markers and surplus brackets after a call. Marks it as broken if possible arguments follow.
    async fn leftovers(&mut self, format: &ToolFormat) {
        let closers = format.closers();
        let mut has_end = false;
        loop {
            self.space().await;
            let mut dropped = false;
            for marker in &closers {
                dropped = dropped || self.takes(marker).await;
            }
            if !dropped && self.has_surplus(&closers).await {
                self.buffer.take(1);
                self.held.clear();
                dropped = true;
            }
            if !dropped {
                break;
            }
            has_end = true;
        }
        let goes_on = match self.buffer.peek().await {
            Some('"' | ',' | ':' | '}' | ']') => true,
            Some('<' | '[' | ';' | '`') | None => false,
            Some(_) if format.end.is_empty() => self.held.is_empty(),
            Some(_) => !has_end && !self.held.contains('\n'),
        };
        if goes_on {
            self.buffer.break_call(self.num_calls - 1);
        }
    }

    /// Returns true if an unmatched bracket comes next, before a marker or the end of the text.
    async fn has_surplus(&self, closers: &[&str]) -> bool {
        let find = |rest: &str, ended: bool| {
            let after = rest.trim_start_matches(|one| "}]".contains(one) || is_space(one));
            if !rest.starts_with(['}', ']']) || rest.len() - after.len() > MAX_SURPLUS {
                return (!rest.is_empty() || ended).then_some(false);
            }
            if after.is_empty() {
                return ended.then_some(true);
            }
            if closers.iter().chain(&[FENCE]).any(|one| after.starts_with(one)) {
                return Some(true);
            }
            let may_come = closers.iter().chain(&[FENCE]).any(|one| one.starts_with(after));
            (ended || !may_come).then_some(false)
        };
        self.buffer.look(find).await
    }

    /// Returns true if a call may end here: at a marker or the end of the text.
    async fn may_end(&self, format: &ToolFormat) -> bool {
        for marker in format.markers() {
            if marker.starts_with(['<', '[']) && self.buffer.comes(marker).await {
                return true;
            }
        }
        matches!(self.buffer.peek().await, None | Some(']' | '}' | '`'))
    }

    /// Emits the held text as content, or drops it if it is likely a call that was cut off.
    fn emit_held(&mut self) {
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.is_likely) && self.buffer.is_cut() {
            self.buffer.drop_rest();
        } else {
            self.put(&held);
        }
    }

    fn hold(&mut self, len: usize) {
        let text = self.buffer.take(len);
        self.held.push_str(&text);
    }

    /// Moves `text` into the held text if it comes next. Returns true if it did.
    async fn holds(&mut self, text: &str) -> bool {
        let comes = self.buffer.comes(text).await;
        if comes {
            self.hold(text.len());
        }
        comes
    }

    /// Drops `text` and the held text if `text` comes next. Returns true if it did.
    async fn takes(&mut self, text: &str) -> bool {
        let comes = self.buffer.comes(text).await;
        if comes {
            self.buffer.take(text.len());
            self.held.clear();
        }
        comes
    }

    /// Moves white space into the held text.
    async fn space(&mut self) {
        while let Some(spaces) = self.buffer.run_of(is_space).await {
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
        let id = String::new(); // generated when the part is returned
        let name = name.to_owned();
        self.buffer.emit(Part::CallBegun { index, id, name });
    }

    fn argue(&mut self, text: String) {
        if !text.is_empty() {
            self.buffer.emit(Part::CallArguments(self.num_calls - 1, text));
        }
    }

    /// Moves one value into the held text. Returns true if it is complete.
    async fn value(&mut self, is_python: bool) -> bool {
        let mut scan = ValueScan::new(is_python);
        while let Some((text, ends)) = self.buffer.more_of(&mut scan).await {
            self.held.push_str(&text);
            if ends {
                return !scan.is_broken;
            }
        }
        false // a number may end with the text, but a call may not
    }

    /// Moves a JSON string into the held text and returns its value. `None` if something else comes.
    async fn string(&mut self) -> Option<String> {
        let from = self.held.len();
        if self.buffer.peek().await != Some('"') || !self.value(false).await {
            return None;
        }
        json_string(&self.held[from..])
    }

    /// Moves a word into the held text and returns it.
    async fn word(&mut self) -> String {
        let from = self.held.len();
        let belongs = |found: char| found.is_alphanumeric() || "_.-".contains(found);
        while let Some(letters) = self.buffer.run_of(belongs).await {
            self.held.push_str(&letters);
        }
        self.held[from..].to_owned()
    }

    /// Parses an object, several of them, a list, or a list of Python calls. Returns true if there was a call; other
    /// text becomes content. `known`: only names of the request's tools count.
    async fn calls(&mut self, format: &'static ToolFormat, known: bool) -> bool {
        let mut has_calls = false;
        let in_list = self.holds("[").await;
        if in_list {
            self.space().await;
        }
        if in_list && format.python && !self.buffer.comes("{").await {
            has_calls = self.python_calls().await;
        }
        while self.buffer.comes("{").await && self.object(format, known).await {
            has_calls = true;
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
        if has_calls && in_list {
            self.takes("]").await;
        }
        self.is_likely |= has_calls; // the held text continues with calls
        if !has_calls || !self.held.chars().all(is_space) {
            self.emit_held();
        }
        has_calls
    }

    /// Parses an object with a tool's name and arguments, also in doubled braces. Returns true if it became a call;
    /// text that is no part of it is held.
    async fn object(&mut self, format: &'static ToolFormat, known: bool) -> bool {
        self.hold(1);
        self.space().await;
        let is_doubled = self.holds("{").await;
        let mut call = CallFields::default();
        if !self.fields(format, known, &mut call).await {
            if call.begun && !self.may_end(format).await {
                self.buffer.break_call(self.num_calls - 1);
            }
            return call.begun;
        }
        if !call.begun {
            // without a marker, a name alone is no call if the format has a marker
            let is_enough = call.arguments.is_some() || !known || format.begin.is_empty();
            let is_strange = call.is_strange && call.arguments.is_none();
            let Some(name) = call.name.filter(|_| is_enough && !is_strange) else {
                return false;
            };
            self.begin(&name);
            self.argue(call.arguments.unwrap_or_else(|| "{}".to_owned()));
        }
        if is_doubled {
            self.space().await;
            self.holds("}").await;
        }
        self.held.clear();
        true
    }

    /// Parses the fields of a call object into `found`. Returns true if the object ends after them.
    async fn fields(&mut self, format: &'static ToolFormat, known: bool, found: &mut CallFields) -> bool {
        loop {
            self.space().await;
            if found.begun && self.holds("}").await {
                return true; // after a trailing comma
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
                    self.buffer.break_call(self.num_calls - 1); // the argument is outside of the argument object
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
    async fn arguments(&mut self, format: &'static ToolFormat, found: &mut CallFields) -> bool {
        if let Some(name) = found.name.as_deref().filter(|_| !found.begun)
            && self.buffer.peek().await == Some('{')
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
            self.buffer.take_by(|text, end| reader.read(text, end));
            self.argue(std::mem::take(&mut reader.out));
            match reader.outcome {
                Some(Outcome::Whole) => break,
                Some(Outcome::Broken) => {
                    self.buffer.break_call(self.num_calls - 1);
                    return false;
                }
                None => self.buffer.more().await,
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
        let mut has_calls = false;
        loop {
            self.space().await;
            let name = self.word().await;
            if !self.tools.has(&name) || !self.buffer.comes("(").await {
                return has_calls;
            }
            self.is_likely = true;
            let from = self.held.len();
            let is_whole = self.value(true).await;
            let Some(arguments) = is_whole.then(|| python_arguments(&self.held[from..])).flatten() else {
                return has_calls;
            };
            self.begin(&name);
            self.argue(arguments);
            has_calls = true;
            self.space().await;
            if !self.holds(",").await {
                return has_calls;
            }
        }
    }

    /// Parses calls written as `pieces`. Returns true if there was one.
    async fn patterns(&mut self, format: &'static ToolFormat, pieces: &'static [Piece]) -> bool {
        let mut has_calls = false;
        while self.pattern(format, pieces).await {
            has_calls = true;
            self.space().await;
            let Some(Piece::Lit(first)) = pieces.first() else {
                break;
            };
            if !self.buffer.comes(first.trim()).await {
                break;
            }
        }
        has_calls
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
                            self.buffer.comes(one.begin.trim()).await || self.buffer.comes("</").await
                        }
                        _ => self.buffer.peek().await == Some('{'),
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
                        self.buffer.break_call(self.num_calls - 1);
                        return true;
                    }
                    true
                }
            };
            if !fits {
                if begun && !self.may_end(format).await {
                    self.buffer.break_call(self.num_calls - 1);
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
            if parameter.in_lines && self.buffer.peek().await == Some('\n') {
                self.buffer.take(1);
            }
            let tools = Arc::clone(&self.tools);
            let kinds = tools.kinds(name, [Some(key.trim())]);
            let borders = ValueEnds::new(format, parameter, &tools, name);
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
        if self.buffer.is_cut() {
            return false;
        }
        self.argue("}".to_owned());
        true
    }

    /// Consumes the text up to and including `marker` and returns it without the marker. `None` if it does not come.
    async fn up_to(&mut self, marker: &str) -> Option<String> {
        let mut all = String::new();
        while let Some((text, found)) = self.buffer.before(&[marker]).await {
            all += &text;
            if found.is_some() {
                self.buffer.take(marker.len());
                return Some(all);
            }
        }
        None
    }

    /// Consumes a value up to its end marker into `to`, or streams it inside a JSON string. Returns true if it ends.
    async fn value_within(&mut self, borders: &ValueEnds<'_>, parameter: &Parameter, to: &mut Option<String>) -> bool {
        let (mut waiting, mut in_line) = ("", false);
        while let Some((text, found)) = self.buffer.before(&["<"]).await {
            let ends = if found.is_some() {
                let in_line = if text.is_empty() {
                    in_line
                } else {
                    !text.ends_with('\n')
                };
                let look = |rest: &str, ended: bool| borders.value_ends(rest, ended, in_line);
                self.buffer.look(look).await
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
                text += &self.buffer.take(1);
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
                self.buffer.take(len);
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
                is_headed = is_headed || self.buffer.comes(begin).await;
            }
            let mut head = String::new();
            if is_headed {
                match self.head().await {
                    Some(found) => head = found,
                    None => return, // an incomplete header is dropped
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
        while let Some((text, found)) = self.buffer.before(&ends).await {
            head += &text;
            if let Some(which) = found {
                if which > 0 {
                    self.buffer.emit_text(std::mem::take(&mut head), 0);
                }
                self.buffer.take(ends[which].len());
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
        let mut inner = TrimmedText::default();
        while let Some((text, found)) = self.buffer.before(&ends).await {
            let decided = if is_thought { inner.push(&text) } else { Some(text) };
            match decided.filter(|text| !text.is_empty()) {
                Some(text) if is_thought => self.buffer.emit(Part::Reasoning(text)),
                Some(text) => {
                    if is_call {
                        self.buffer.break_call(self.num_calls - 1); // the text may belong to the arguments
                    }
                    self.buffer.emit_text(text, 0);
                }
                None => {}
            }
            if let Some(which) = found {
                if which < 3 {
                    self.buffer.take(ends[which].len()); // the other markers begin the next header
                }
                return true;
            }
        }
        false
    }

    /// Parses the arguments of a call message: an object, or nothing. Returns false if it is no call.
    async fn call_message(&mut self, name: &str, ends: &[&str]) -> bool {
        self.space().await;
        let mut is_empty = self.buffer.is_at_end().await;
        for end in ends {
            is_empty = is_empty || self.buffer.comes(end).await;
        }
        if !is_empty && self.buffer.peek().await != Some('{') {
            let spaces = std::mem::take(&mut self.held);
            self.buffer.emit_text(spaces, 0);
            return false;
        }
        self.begin(name);
        let format = ToolFormat::named("harmony", |_| true);
        if let Some(format) = format.filter(|_| !is_empty) {
            self.read(format, name, None, 0).await;
        } else if self.buffer.is_cut() {
            self.buffer.break_call(self.num_calls - 1);
        } else {
            self.argue("{}".to_owned());
        }
        self.held.clear();
        while (self.buffer.run_of(|one| is_space(one) || "}]".contains(one)).await).is_some() {}
        true
    }
}
