//! Requests of a pool, from `AddRequest` to their end.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::rc::Rc;

use minisgl_gateway::live::IdHasher;
use minisgl_gateway::message::{NewRequest, ToEngine};
use serde::Deserialize;

use super::steps::Owner;

/// Hash map by consecutive integer ids.
pub(super) type ById<T> = HashMap<i64, T, BuildHasherDefault<IdHasher>>;

/// Finish reasons, as in `minisgl.step.FinishReason`.
pub(super) const STOP: i32 = 1;
pub(super) const LENGTH: i32 = 2;
pub(super) const ABORT: i32 = 3;
pub(super) const ERROR: i32 = 4;

/// Crash count at which a request ends with an error instead of moving on: it may be what crashes engines.
const MAX_CRASHES: u8 = 4;
/// Crash count for a request that was admitted to an engine which was lost before it generated a token of it;
/// `CRASH_SENT` is for one that was only sent there. (An engine reports an admission after its next step, so a request
/// without such a report may be the cause as well.)
const CRASH_ADMITTED: u8 = 2;
const CRASH_SENT: u8 = 1;

/// Engine that a request is on, and its id there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) engine: usize,
    /// Id of the request on the connection to that engine.
    pub(super) link_id: i64,
}

/// Outcome for a request whose engine was lost: it moves, is dropped, or ends.
pub(super) enum Fate {
    /// The request continues in another engine.
    Moves,
    /// The request is dropped: its front end has disconnected.
    Forgotten,
    /// The request ends with this finish reason and error text.
    Ends(i32, Option<&'static str>),
}

#[derive(Debug, Default)]
pub(super) struct Request {
    /// Id of the front end that sent the request; `None` once it has disconnected.
    pub(super) front_end: Option<u32>,
    /// The request as its front end sent it, except that `tokens` is the prompt and all generated tokens.
    pub(super) given: NewRequest,
    pub(super) num_prompt: usize,
    /// Engine that the request is on; `None` while it is queued.
    pub(super) assignment: Option<Assignment>,
    /// Finish reason if the front end has aborted or finished the request.
    pub(super) ending: Option<i32>,
    /// Whether the front end was notified of the request's admission.
    pub(super) reported_admission: bool,
    admitted_here: bool,
    crashes: u8,
    has_token_here: bool,
}

impl Request {
    pub(super) fn new(front_end: u32, given: NewRequest, num_generated: usize) -> Self {
        Self {
            front_end: Some(front_end),
            num_prompt: given.tokens.len() - num_generated,
            given,
            ..Self::default()
        }
    }

    pub(super) fn num_generated(&self) -> usize {
        self.given.tokens.len() - self.num_prompt
    }

    /// Returns the request's front end and its id there, or `None` if the front end has disconnected.
    pub(super) fn owner(&self) -> Owner {
        self.front_end.map(|front_end| (front_end, self.given.req_id))
    }

    /// Records a placement and returns the message for the engine, with priority 0 unless it `counts` in engines.
    pub(super) fn assign(&mut self, assignment: Assignment, counts: bool) -> ToEngine {
        self.assignment = Some(assignment);
        self.admitted_here = false;
        self.has_token_here = false;
        ToEngine::AddRequest(NewRequest {
            req_id: assignment.link_id,
            priority: if counts { self.given.priority } else { 0 },
            num_generated: as_i64(self.num_generated()),
            ..self.given.clone()
        })
    }

    pub(super) fn push_token(&mut self, token: i32) {
        self.given.tokens.push(token);
        self.has_token_here = true;
        self.crashes = 0;
    }

    /// Records an admission and returns true if the front end was not notified of one yet.
    pub(super) fn record_admission(&mut self) -> bool {
        self.admitted_here = true;
        !std::mem::replace(&mut self.reported_admission, true)
    }

    /// Records the loss of the request's engine and returns what happens to the request.
    pub(super) fn record_loss(&mut self) -> Fate {
        self.assignment = None;
        if self.front_end.is_none() {
            return Fate::Forgotten;
        }
        if let Some(reason) = self.ending {
            return Fate::Ends(reason, None);
        }
        let most = self.given.sampling.max_tokens.unwrap_or(i64::MAX);
        if as_i64(self.num_generated()) >= most {
            return Fate::Ends(LENGTH, None);
        }
        if !self.has_token_here {
            self.crashes += if self.admitted_here { CRASH_ADMITTED } else { CRASH_SENT };
        }
        if self.crashes >= MAX_CRASHES {
            let text =
                "several engines were lost with this request before it got a token: the request may crash engines";
            return Fate::Ends(ERROR, Some(text));
        }
        Fate::Moves
    }
}

/// Prefixes that the requests of each API key have had in caches, as hashes of whole pages. A key is told how many
/// tokens of its own prefixes were cached, and nothing about other keys' prompts, which it could otherwise guess.
pub(super) struct OwnPrefixes {
    page_size: usize,
    /// Hash state with a secret: clients cannot construct two sequences of the same hash.
    state: RandomState,
    /// Hashes of the pages that each API key has had: a recent set, and the set before it.
    pages: HashMap<i64, [HashSet<u64>; 2]>,
}

/// Hashes that each of the two sets of a key holds at most.
const MAX_PAGES: usize = 1 << 15;

impl OwnPrefixes {
    pub(super) fn new(page_size: usize) -> Self {
        Self {
            page_size,
            state: RandomState::new(),
            pages: HashMap::new(),
        }
    }

    /// Returns how many of `cached_len` tokens the request's API key may know of: those of its own earlier prefixes.
    pub(super) fn visible_len(&self, request: &Request, cached_len: i32) -> i32 {
        let most = usize::try_from(cached_len).unwrap_or(0) / self.page_size;
        let Some([late, before]) = self.pages.get(&request.given.key) else {
            return 0;
        };
        let is_own = |page: &u64| late.contains(page) || before.contains(page);
        let num_shown = self.hashes(request).take(most).take_while(is_own).count();
        i32::try_from(num_shown * self.page_size).unwrap_or(cached_len)
    }

    /// Adds the full pages of the request's tokens to what its key may know of.
    pub(super) fn add(&mut self, request: &Request) {
        let hashes: Vec<u64> = self.hashes(request).take(MAX_PAGES).collect();
        let [late, before] = self.pages.entry(request.given.key).or_default();
        if late.len() + hashes.len() > MAX_PAGES {
            *before = std::mem::take(late);
        }
        late.extend(hashes);
    }

    fn hashes(&self, request: &Request) -> impl Iterator<Item = u64> {
        let mut hasher = self.state.build_hasher();
        hasher.write_i64(request.given.sampling.adapter);
        let tokens = request.given.tokens.chunks_exact(self.page_size);
        tokens.map(move |page| {
            page.iter().for_each(|&token| hasher.write_i32(token));
            hasher.finish()
        })
    }
}

pub(super) fn as_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Limits and error texts for front ends, as `minisgl.runner.front_ends.FrontEndRules` has them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct FrontEndRules {
    pub max_front_ends: usize,
    pub max_name: usize,
    pub send_buffer_bytes: usize,
    pub max_queued_bytes: usize,
    pub too_many: String,
    pub hello_first: String,
    pub does_not_read: String,
    pub not_above: String,
    pub ends: String,
    pub put_out: String,
    pub has_gone: String,
}

pub(super) struct FrontEnd {
    pub(super) name: String,
    pub(super) greeted: bool,
    last_id: i64,
    rules: Rc<FrontEndRules>,
    /// Pool ids of the front end's unfinished requests, by their ids there.
    pub(super) live: ById<i64>,
}

impl FrontEnd {
    pub(super) fn new(number: u32, rules: &Rc<FrontEndRules>) -> Self {
        Self {
            name: format!("front end {number}"),
            greeted: false,
            last_id: -1,
            rules: Rc::clone(rules),
            live: ById::default(),
        }
    }

    pub(super) fn hello(&mut self, name: &str) {
        self.name = name.chars().take(self.rules.max_name).collect();
        self.greeted = true;
    }

    /// Checks whether the front end may send `message`: after `Hello`, with ascending ids. An error disconnects it.
    pub(super) fn check(&mut self, message: &ToEngine) -> Result<(), String> {
        if !self.greeted && !matches!(message, ToEngine::Hello { .. }) {
            return Err(self.rules.hello_first.clone());
        }
        if let ToEngine::AddRequest(NewRequest { req_id, .. }) = *message {
            let last_id = self.last_id;
            if req_id <= last_id {
                let text = self.rules.not_above.replace("{req_id}", &req_id.to_string());
                return Err(text.replace("{last_id}", &last_id.to_string()));
            }
            self.last_id = req_id;
        }
        Ok(())
    }
}
