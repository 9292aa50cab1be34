//! Requests of a pool, from `AddRequest` to their ends.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::rc::Rc;

use minisgl_gateway::live::IdHasher;
use minisgl_gateway::message::{NewRequest, ToEngine};
use serde::Deserialize;

use super::steps::Whose;

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

#[derive(Debug, Default)]
pub(super) struct Request {
    /// Number of its front end; None once that is gone.
    pub(super) owner: Option<u32>,
    /// As that gave it, but for its tokens: prompt and what was generated.
    pub(super) given: NewRequest,
    pub(super) num_prompt: usize,
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
    pub(super) fn new(owner: u32, given: NewRequest, num_generated: usize) -> Self {
        Self {
            owner: Some(owner),
            num_prompt: given.tokens.len() - num_generated,
            given,
            ..Self::default()
        }
    }

    pub(super) fn num_generated(&self) -> usize {
        self.given.tokens.len() - self.num_prompt
    }

    /// Whose it is, and the id it has there.
    pub(super) fn whose(&self) -> Whose {
        self.owner.map(|owner| (owner, self.given.req_id))
    }

    /// An engine gets it, with its priority if that `counts` there.
    pub(super) fn placed(&mut self, place: Place, counts: bool) -> ToEngine {
        self.place = Some(place);
        self.admitted_here = false;
        self.has_token_here = false;
        ToEngine::AddRequest(NewRequest {
            req_id: place.link_id,
            priority: if counts { self.given.priority } else { 0 },
            num_generated: as_i64(self.num_generated()),
            ..self.given.clone()
        })
    }

    pub(super) fn got(&mut self, token: i32) {
        self.given.tokens.push(token);
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
        let most = self.given.sampling.max_tokens.unwrap_or(i64::MAX);
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

/// What the requests of each key have had in prefix caches, as hashes of the beginnings of their tokens, page by page. So
/// a key is told of what was cached for itself and not of what it has in common with others, whose texts it could guess.
pub(super) struct OwnPrefixes {
    page_size: usize,
    /// Its secret: nobody finds two texts of one hash.
    state: RandomState,
    /// By key: those of late, and those before them.
    pages: HashMap<i64, [HashSet<u64>; 2]>,
}

/// Each of the two sets of a key holds no more.
const MOST_PAGES: usize = 1 << 15;

impl OwnPrefixes {
    pub(super) fn new(page_size: usize) -> Self {
        Self {
            page_size,
            state: RandomState::new(),
            pages: HashMap::new(),
        }
    }

    /// How many of `cached_len` tokens, which an engine had for this request, its key may know of.
    pub(super) fn shown(&self, request: &Request, cached_len: i32) -> i32 {
        let most = usize::try_from(cached_len).unwrap_or(0) / self.page_size;
        let Some([late, before]) = self.pages.get(&request.given.key) else {
            return 0;
        };
        let is_own = |page: &u64| late.contains(page) || before.contains(page);
        let num_own = self.hashes(request).take(most).take_while(is_own).count();
        i32::try_from(num_own * self.page_size).unwrap_or(cached_len)
    }

    /// From now on its key knows of all of it.
    pub(super) fn add(&mut self, request: &Request) {
        let hashes: Vec<u64> = self.hashes(request).take(MOST_PAGES).collect();
        let [late, before] = self.pages.entry(request.given.key).or_default();
        if late.len() + hashes.len() > MOST_PAGES {
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

/// `minisgl.runner.front_ends.FrontEndRules`.
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
    /// Its requests that have not ended: the pool's ids by its own.
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

    /// Why it must go, if it may not say this now.
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
