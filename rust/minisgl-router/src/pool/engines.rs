//! State of a pool's engines, and the snapshot of it for front ends that connect later.

use std::collections::VecDeque;

use minisgl_gateway::message::{EngineReady, FromEngine, LoadProgress, list_of};

use super::requests::{ById, as_i64};

/// Log lines of an engine's start that are stored.
const MAX_LINES: usize = 256;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Starting,
    Ready,
    Silent,
    Dead,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Silent => "silent",
            Self::Dead => "dead",
        }
    }
}

#[derive(Default)]
pub(super) struct Engine {
    pub(super) state: State,
    pub(super) reason: String,
    /// Whether the owner of the engine's process is restarting it.
    pub(super) is_restarting: bool,
    /// Whether the pool is connected to the engine.
    pub(super) is_linked: bool,
    /// Pool ids of the requests on this engine, by their ids on its connection.
    pub(super) ids: ById<i64>,
    pub(super) num_losses: u64,
    pub(super) ready: Option<EngineReady>,
    start_lines: VecDeque<(LoadProgress, Vec<u8>)>,
    stats: Option<Vec<u8>>,
}

impl Engine {
    /// Returns true if the engine accepts requests now or may do so later.
    pub(super) fn has_future(&self) -> bool {
        self.is_restarting || matches!(self.state, State::Starting | State::Ready)
    }

    /// Stores a progress line of the engine's start, in place of the last one of the same step. No-op if it is ready.
    pub(super) fn store_line(&mut self, line: LoadProgress, raw: &[u8]) {
        if self.state == State::Ready {
            return;
        }
        if (self.start_lines.back()).is_some_and(|last| line.total > 0 && last.0.text == line.text) {
            self.start_lines.pop_back();
        } else if self.start_lines.len() >= MAX_LINES {
            self.start_lines.pop_front();
        }
        self.start_lines.push_back((line, raw.to_vec()));
    }

    pub(super) fn store_stats(&mut self, raw: &[u8]) {
        self.stats = Some(raw.to_vec());
    }

    /// Drops all state that belongs to an engine process that has exited.
    pub(super) fn forget(&mut self) {
        self.ids.clear();
        self.start_lines.clear();
        self.stats = None;
        self.ready = None;
    }

    /// Returns the messages that bring a new front end up to date about this engine, whose index is `number`.
    pub(super) fn snapshot(&self, engine: usize) -> Vec<FromEngine> {
        let lines: Vec<&[u8]> = self.start_lines.iter().map(|(_, raw)| &raw[..]).collect();
        let lines = (!lines.is_empty()).then(|| wrap_messages(engine, &lines));
        let stats = self.stats.as_ref().map(|stats| wrap_messages(engine, &[stats]));
        let messages = [lines, Some(self.state_message(engine)), stats];
        messages.into_iter().flatten().collect()
    }

    pub(super) fn state_message(&self, engine: usize) -> FromEngine {
        FromEngine::EngineState {
            engine: as_i64(engine),
            state: self.state.name().to_owned(),
            reason: self.reason.clone(),
        }
    }
}

/// Wraps encoded messages of `engine` for front ends, byte for byte.
pub(super) fn wrap_messages(engine: usize, messages: &[&[u8]]) -> FromEngine {
    FromEngine::EngineSays {
        engine: as_i64(engine),
        messages: list_of(messages),
    }
}

/// Combines the engines' properties: minimum sequence length, sum of pages, and images only if all accept them. `None`
/// if not all engines are ready.
pub(super) fn combine_ready(engines: &[Engine]) -> Option<EngineReady> {
    let all: Option<Vec<&EngineReady>> = engines.iter().map(|engine| engine.ready.as_ref()).collect();
    let all = all?;
    let first = *all.first()?;
    let prefix = match all.len() {
        1 => String::new(), // a single engine needs no count
        several => format!("{several} engines"),
    };
    Some(EngineReady {
        max_seq_len: all.iter().map(|ready| ready.max_seq_len).min()?,
        num_pages: all.iter().map(|ready| ready.num_pages).sum(),
        engine_details: [&prefix[..], &first.engine_details]
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect::<Vec<_>>()
            .join(", "),
        sees: all.iter().all(|ready| ready.sees),
        ..first.clone()
    })
}
