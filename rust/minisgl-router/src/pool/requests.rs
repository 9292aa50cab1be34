//! Requests of a pool, from `AddRequest` to their ends.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use minisgl_gateway::live::IdHasher;
use minisgl_gateway::message::{SamplingParams, ToEngine};

/// By ids that are numbers in a row.
pub(super) type ById<T> = HashMap<i64, T, BuildHasherDefault<IdHasher>>;

/// `minisgl.step.FinishReason`.
pub(super) const STOP: i32 = 1;
pub(super) const LENGTH: i32 = 2;
pub(super) const ABORT: i32 = 3;
pub(super) const ERROR: i32 = 4;

/// A request may be what ends engines: it is not moved on with so much blame.
const MOST_BLAME: u8 = 4;
/// From an engine that had admitted it and was lost before it made a token for it. (An engine says that it has admitted
/// a request only after the next step, so one that it did not say so of may be to blame as well.)
const BLAME_ADMITTED: u8 = 2;
const BLAME_SENT: u8 = 1;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) engine: usize,
    /// Its id on the connection to that engine.
    pub(super) link_id: i64,
}

/// What becomes of a request whose engine was lost.
pub(super) enum Fate {
    /// It goes on in another engine.
    Moves,
    /// Its front end is gone.
    Forgotten,
    /// It ends so.
    Ends(i32, Option<&'static str>),
}

#[derive(Debug)]
pub(super) struct Request {
    /// Number of its front end; None once that is gone.
    pub(super) owner: Option<u32>,
    /// The id that its front end gave it.
    pub(super) own_id: i64,
    /// Prompt and what was generated.
    pub(super) tokens: Vec<i32>,
    pub(super) num_prompt: usize,
    pub(super) sampling: Box<SamplingParams>,
    pub(super) priority: i64,
    pub(super) key: i64,
    /// None in line.
    pub(super) place: Option<Place>,
    /// How it ends, as its front end has asked.
    pub(super) ending: Option<i32>,
    /// Its front end knows.
    pub(super) said_admitted: bool,
    admitted_here: bool,
    blame: u8,
    has_token_here: bool,
}

impl Request {
    pub(super) fn new(owner: u32, own_id: i64, tokens: Vec<i32>, num_generated: usize, message: Rest) -> Self {
        Self {
            owner: Some(owner),
            own_id,
            num_prompt: tokens.len() - num_generated,
            tokens,
            sampling: message.sampling,
            priority: message.priority,
            key: message.key,
            place: None,
            ending: None,
            said_admitted: false,
            admitted_here: false,
            blame: 0,
            has_token_here: false,
        }
    }

    pub(super) fn num_generated(&self) -> usize {
        self.tokens.len() - self.num_prompt
    }

    /// An engine gets it, with its priority if that `counts` there.
    pub(super) fn placed(&mut self, place: Place, counts: bool) -> ToEngine {
        self.place = Some(place);
        self.admitted_here = false;
        self.has_token_here = false;
        ToEngine::AddRequest {
            req_id: place.link_id,
            tokens: self.tokens.clone(),
            sampling: self.sampling.clone(),
            priority: if counts { self.priority } else { 0 },
            num_generated: as_i64(self.num_generated()),
            key: self.key,
        }
    }

    pub(super) fn got(&mut self, token: i32) {
        self.tokens.push(token);
        self.has_token_here = true;
        self.blame = 0;
    }

    /// Whether its front end is to be told.
    pub(super) fn admitted(&mut self) -> bool {
        self.admitted_here = true;
        !std::mem::replace(&mut self.said_admitted, true)
    }

    /// The engine that has it is lost.
    pub(super) fn lost(&mut self) -> Fate {
        self.place = None;
        if self.owner.is_none() {
            return Fate::Forgotten;
        }
        if let Some(reason) = self.ending {
            return Fate::Ends(reason, None);
        }
        let most = self.sampling.max_tokens.unwrap_or(i64::MAX);
        if as_i64(self.num_generated()) >= most {
            return Fate::Ends(LENGTH, None);
        }
        if !self.has_token_here {
            self.blame += if self.admitted_here { BLAME_ADMITTED } else { BLAME_SENT };
        }
        if self.blame >= MOST_BLAME {
            let text = "one engine after another was lost with this request before it made a token: the request may be \
                        what ends them";
            return Fate::Ends(ERROR, Some(text));
        }
        Fate::Moves
    }
}

/// What else an `AddRequest` says.
pub(super) struct Rest {
    pub(super) sampling: Box<SamplingParams>,
    pub(super) priority: i64,
    pub(super) key: i64,
}

pub(super) fn as_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
