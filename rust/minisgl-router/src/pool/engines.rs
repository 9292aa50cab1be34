//! State of a pool's engines, and the snapshot of it for front ends that connect later.

use std::collections::VecDeque;

use minisgl_gateway::message::{EngineReady, FromEngine, LoadProgress, list_of};

use super::requests::{ById, as_i64};

/// Log lines of an engine's start that are stored.
const NUM_LINES: usize = 256;

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
    /// The owner of the engine's process is restarting it.
    pub(super) is_restarting: bool,
    /// A connection to the engine exists.
    pub(super) is_linked: bool,
    /// Pool ids of the requests on this engine, by their ids on its connection.
    pub(super) ids: ById<i64>,
    pub(super) num_losses: u64,
    pub(super) ready: Option<EngineReady>,
    said: VecDeque<(LoadProgress, Vec<u8>)>,
    stats: Option<Vec<u8>>,
}

impl Engine {
    /// Returns true if the engine accepts requests now or may do so later.
    pub(super) fn has_future(&self) -> bool {
        self.is_restarting || matches!(self.state, State::Starting | State::Ready)
    }

    /// Stores a progress line of the engine's start. A line replaces an earlier one of the same step. Ignored once the
    /// engine is ready.
    pub(super) fn remember_line(&mut self, line: LoadProgress, raw: &[u8]) {
        if self.state == State::Ready {
            return;
        }
        if (self.said.back()).is_some_and(|last| line.total > 0 && last.0.text == line.text) {
            self.said.pop_back();
        } else if self.said.len() >= NUM_LINES {
            self.said.pop_front();
        }
        self.said.push_back((line, raw.to_vec()));
    }

    pub(super) fn remember_stats(&mut self, raw: &[u8]) {
        self.stats = Some(raw.to_vec());
    }

    /// Drops all state of a process that has exited.
    pub(super) fn forget(&mut self) {
        self.ids.clear();
        self.said.clear();
        self.stats = None;
        self.ready = None;
    }

    /// Returns the messages that bring a new front end up to date about this engine, whose index is `number`.
    pub(super) fn snapshot(&self, number: usize) -> Vec<FromEngine> {
        let lines: Vec<&[u8]> = self.said.iter().map(|(_, raw)| &raw[..]).collect();
        let lines = (!lines.is_empty()).then(|| says(number, &lines));
        let stats = self.stats.as_ref().map(|stats| says(number, &[stats]));
        let found = [lines, Some(self.told_state(number)), stats];
        found.into_iter().flatten().collect()
    }

    pub(super) fn told_state(&self, number: usize) -> FromEngine {
        FromEngine::EngineState {
            engine: as_i64(number),
            state: self.state.name().to_owned(),
            reason: self.reason.clone(),
        }
    }
}

/// Wraps encoded messages of `engine` for front ends, byte for byte.
pub(super) fn says(engine: usize, messages: &[&[u8]]) -> FromEngine {
    FromEngine::EngineSays {
        engine: as_i64(engine),
        messages: list_of(messages),
    }
}

/// Combines the `EngineReady` messages of all engines: the minimum sequence length, the sum of pages. `None` if not all
/// are ready.
pub(super) fn together(engines: &[Engine]) -> Option<EngineReady> {
    let all: Option<Vec<&EngineReady>> = engines.iter().map(|engine| engine.ready.as_ref()).collect();
    let all = all?;
    let first = *all.first()?;
    let number = match all.len() {
        1 => String::new(), // behind a pool for its limits
        several => format!("{several} engines"),
    };
    Some(EngineReady {
        max_seq_len: all.iter().map(|one| one.max_seq_len).min()?,
        num_pages: all.iter().map(|one| one.num_pages).sum(),
        engine_details: [&number[..], &first.engine_details]
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect::<Vec<_>>()
            .join(", "),
        ..first.clone()
    })
}
