//! Fake engines whose next token is a hash of all tokens before it, and fake front ends that check what they receive.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use minisgl_gateway::message::{
    EngineReady, FromEngine, LENGTH_BYTES, LoadProgress, NewRequest, PromptImage, SamplingParams, StepTokens, ToEngine,
    decode,
};

use super::super::requests::{ABORT, ERROR, FrontEndRules, LENGTH, STOP};
use super::super::switchboard::{Out, Switchboard};
use crate::policy::RouterConfig;

pub(super) fn rules() -> Rc<FrontEndRules> {
    Rc::new(FrontEndRules {
        max_front_ends: 9,
        max_name: 64,
        send_buffer_bytes: 1 << 17,
        max_queued_bytes: 1 << 20,
        too_many: "too many".to_owned(),
        hello_first: "no hello".to_owned(),
        does_not_read: "does not read".to_owned(),
        not_above: "{req_id} is not above {last_id}".to_owned(),
        ends: "ends: {reason}".to_owned(),
        put_out: "{name} out: {reason}; {num_live}".to_owned(),
        has_gone: "{name} gone; {num_live}".to_owned(),
    })
}

/// Returns the fake token that follows `tokens`: a hash of all of them.
pub(super) fn next_token(tokens: &[i32]) -> i32 {
    let hash = tokens.iter().fold(7u64, |hash, &token| {
        hash.wrapping_mul(0x0100_0000_01B3) ^ u64::from(token.unsigned_abs())
    });
    i32::try_from((hash >> 20) % 997).unwrap()
}

pub(super) fn expected_tokens(prompt: &[i32], max_tokens: usize) -> Vec<i32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.len())
}

/// Returns the images that the fake front ends send with this prompt: none if its length is odd.
pub(super) fn images_of(prompt: &[i32]) -> Vec<PromptImage> {
    let image = PromptImage {
        digest: bytes_of(prompt),
        start: 0,
        num_tokens: 1,
        grid: (1, 1),
        pixels: bytes_of(prompt).into(),
    };
    vec![image; (prompt.len() + 1) % 2]
}

fn bytes_of(tokens: &[i32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

pub(super) fn request(
    req_id: i64,
    tokens: Vec<i32>,
    max_tokens: i64,
    priority: i64,
    num_generated: i64,
    key: i64,
) -> ToEngine {
    let sampling = SamplingParams {
        max_tokens: Some(max_tokens),
        seed: Some(1),
        ..SamplingParams::default()
    };
    ToEngine::AddRequest(NewRequest {
        req_id,
        images: images_of(&tokens),
        tokens,
        sampling: Box::new(sampling),
        priority,
        num_generated,
        key,
        ..NewRequest::default()
    })
}

/// Returns the message with a log line for all front ends.
pub(super) fn line(text: &str) -> FromEngine {
    let text = text.to_owned();
    FromEngine::LoadProgress(LoadProgress {
        text,
        done: 0,
        total: 0,
    })
}

struct Row {
    tokens: Vec<i32>,
    num_prompt: usize,
    max_tokens: usize,
    is_admitted: bool,
    ending: Option<i32>,
}

/// A fake engine process. Its messages wait in `said` until they are delivered.
#[derive(Default)]
pub(super) struct FakeEngine {
    rows: BTreeMap<i64, Row>,
    last_id: i64,
    /// Number of cached tokens that the fake engine reports for each admitted request.
    pub(super) cached_len: i32,
    pub(super) outbox: VecDeque<FromEngine>,
    pub(super) inbox: Vec<ToEngine>,
}

impl FakeEngine {
    fn handle(&mut self, message: ToEngine) {
        match &message {
            ToEngine::AddRequest(NewRequest {
                req_id,
                tokens,
                sampling,
                num_generated,
                images,
                ..
            }) => {
                assert!(*req_id >= self.last_id, "ids ascend on a connection");
                self.last_id = req_id + 1;
                let num_generated = usize::try_from(*num_generated).unwrap();
                let max_tokens = usize::try_from(sampling.max_tokens.unwrap()).unwrap();
                assert!(num_generated < max_tokens && num_generated < tokens.len());
                assert_eq!(*images, images_of(&tokens[..tokens.len() - num_generated]));
                self.rows.insert(
                    *req_id,
                    Row {
                        num_prompt: tokens.len() - num_generated,
                        tokens: tokens.clone(),
                        max_tokens,
                        is_admitted: false,
                        ending: None,
                    },
                );
            }
            ToEngine::AbortRequest(id) | ToEngine::FinishRequest(id) => {
                let reason = if matches!(message, ToEngine::AbortRequest(_)) {
                    ABORT
                } else {
                    STOP
                };
                if let Some(row) = self.rows.get_mut(id) {
                    row.ending.get_or_insert(reason);
                }
            }
            _ => {}
        }
        self.inbox.push(message);
    }

    /// Returns a value of each request that was added to this engine.
    pub(super) fn added<T>(&self, value: impl Fn(&NewRequest) -> T) -> Vec<T> {
        let values = self.inbox.iter().filter_map(|message| match message {
            ToEngine::AddRequest(new) => Some(value(new)),
            _ => None,
        });
        values.collect()
    }

    /// Generates a token for up to `most` rows and ends the rows that were aborted or finished.
    pub(super) fn step(&mut self, most: usize) {
        let mut step = StepTokens::default();
        for (&id, row) in &mut self.rows {
            if let Some(reason) = row.ending {
                step.req_ids.push(id);
                step.tokens.push(-1);
                step.reasons.push(reason);
            } else if step.req_ids.len() < most {
                if !std::mem::replace(&mut row.is_admitted, true) {
                    step.admitted.push((id, self.cached_len));
                }
                row.tokens.push(next_token(&row.tokens));
                let is_last = row.tokens.len() - row.num_prompt >= row.max_tokens;
                step.req_ids.push(id);
                step.tokens.push(*row.tokens.last().unwrap());
                step.reasons.push(if is_last { LENGTH } else { 0 });
            }
        }
        let ended = step.req_ids.iter().zip(&step.reasons).filter(|one| *one.1 != 0);
        let ended: Vec<i64> = ended.map(|one| *one.0).collect();
        ended.iter().for_each(|id| drop(self.rows.remove(id)));
        if !step.req_ids.is_empty() {
            self.outbox.push_back(FromEngine::StepTokens(step));
        }
    }
}

/// Output of one request as a front end received it.
#[derive(Default)]
pub(super) struct Stream {
    pub(super) prompt: Vec<i32>,
    pub(super) max_tokens: usize,
    pub(super) tokens: Vec<i32>,
    pub(super) end: Option<i32>,
    pub(super) error: String,
    pub(super) num_admitted: usize,
    pub(super) cached_len: i32,
    pub(super) requested_end: Option<i32>,
}

#[derive(Default)]
pub(super) struct FakeFrontEnd {
    pub(super) requests: BTreeMap<i64, Stream>,
    pub(super) other: Vec<FromEngine>,
}

impl FakeFrontEnd {
    fn handle(&mut self, frame: &[u8]) {
        for message in decode(&frame[LENGTH_BYTES..]).unwrap() {
            let FromEngine::StepTokens(step) = message else {
                self.other.push(message);
                continue;
            };
            for (id, cached_len) in &step.admitted {
                let stream = self.requests.get_mut(id).unwrap();
                stream.num_admitted += 1;
                stream.cached_len = *cached_len;
            }
            for (row, id) in step.req_ids.iter().enumerate() {
                let stream = self.requests.get_mut(id).expect("somebody else's");
                assert_eq!(stream.end, None, "it goes on after its end");
                stream
                    .tokens
                    .extend((step.tokens[row] >= 0).then_some(step.tokens[row]));
                stream.end = (step.reasons[row] != 0).then_some(step.reasons[row]);
            }
            for (id, text) in step.errors.0 {
                self.requests.get_mut(&id).unwrap().error = text;
            }
        }
    }

    /// Asserts that each request received a prefix of its expected tokens, or all of them if it ended by length.
    pub(super) fn check(&self) {
        for (id, stream) in &self.requests {
            let whole = expected_tokens(&stream.prompt, stream.max_tokens);
            assert!(whole.starts_with(&stream.tokens), "request {id}: {:?}", stream.tokens);
            assert!(stream.num_admitted <= 1, "request {id} was admitted again");
            match stream.end {
                Some(LENGTH) => assert_eq!(stream.tokens, whole, "request {id}"),
                Some(ERROR) => assert!(stream.error.contains("may crash engines"), "request {id}"),
                end => assert!(end.is_none() || end == stream.requested_end, "request {id}: {end:?}"),
            }
        }
    }
}

pub(super) struct World {
    pub(super) board: Switchboard,
    /// Engines by index; `None`: the process has exited.
    pub(super) engines: Vec<Option<FakeEngine>>,
    pub(super) front_ends: BTreeMap<u32, FakeFrontEnd>,
    pub(super) gone: BTreeSet<u32>,
    forever: bool,
}

impl World {
    /// Makes a pool whose engines are all ready; with `forever`, a lost engine counts as being restarted.
    pub(super) fn new(config: RouterConfig, forever: bool) -> Self {
        let mut world = Self {
            board: Switchboard::new(config.clone(), rules()).unwrap(),
            engines: (0..config.num_engines).map(|_| None).collect(),
            front_ends: BTreeMap::new(),
            gone: BTreeSet::new(),
            forever,
        };
        for engine in 0..config.num_engines {
            world.start(engine);
            world.deliver(engine, 9);
        }
        world
    }

    pub(super) fn engine(&mut self, index: usize) -> &mut FakeEngine {
        self.engines[index].as_mut().unwrap()
    }

    /// Delivers all queued messages of the pool.
    pub(super) fn settle(&mut self) {
        for out in self.board.take_out() {
            match out {
                Out::Engine(engine, message) => {
                    if let Some(engine) = &mut self.engines[engine] {
                        engine.handle(message);
                    }
                }
                Out::Frame { to, frame, .. } => {
                    if let Some(front_end) = self.front_ends.get_mut(&to) {
                        front_end.handle(&frame);
                    }
                }
                Out::Close(number) => drop(self.gone.insert(number)),
            }
        }
    }

    pub(super) fn start(&mut self, engine: usize) {
        self.board.on_engine_connected(engine);
        let mut started = FakeEngine::default();
        started.outbox.push_back(FromEngine::EngineReady(Box::new(EngineReady {
            max_seq_len: 100 + i64::try_from(engine).unwrap(),
            num_pages: 10,
            ..EngineReady::default()
        })));
        self.engines[engine] = Some(started);
        self.settle();
    }

    /// Delivers up to `number` messages of an engine to the pool.
    pub(super) fn deliver(&mut self, engine: usize, count: usize) {
        for _ in 0..count {
            let message = self.engines[engine].as_mut().and_then(|one| one.outbox.pop_front());
            let Some(message) = message else { break };
            self.board.handle_engine_message(engine, message, b"\xa3raw");
        }
        self.settle();
    }

    /// Loses an engine, with its undelivered messages.
    pub(super) fn lose(&mut self, engine: usize, is_silent: bool) {
        if self.engines[engine].take().is_some() {
            self.board.restarting(engine, self.forever);
            self.board.on_engine_lost(engine, is_silent, "it was told to die");
            self.settle();
        }
    }

    pub(super) fn connect(&mut self) -> u32 {
        let number = self.board.add_front_end();
        self.front_ends.insert(number, FakeFrontEnd::default());
        let hello = ToEngine::Hello {
            name: format!("test {number}"),
        };
        self.board.handle_message(number, hello).unwrap();
        self.settle();
        number
    }

    pub(super) fn add(&mut self, front_end: u32, prompt: Vec<i32>, max_tokens: usize) -> i64 {
        self.add_with_key(front_end, prompt, max_tokens, 0)
    }

    pub(super) fn add_with_key(&mut self, front_end: u32, prompt: Vec<i32>, max_tokens: usize, key: i64) -> i64 {
        let requests = &mut self.front_ends.get_mut(&front_end).unwrap().requests;
        let req_id = i64::try_from(requests.len()).unwrap();
        let stream = Stream {
            prompt: prompt.clone(),
            max_tokens,
            ..Stream::default()
        };
        requests.insert(req_id, stream);
        let max_tokens = i64::try_from(max_tokens).unwrap();
        self.send(front_end, request(req_id, prompt, max_tokens, 0, 0, key));
        req_id
    }

    pub(super) fn send(&mut self, front_end: u32, message: ToEngine) {
        self.board.handle_message(front_end, message).unwrap();
        self.settle();
    }

    /// Runs steps of all engines until no request is left. Panics after 1000 rounds.
    pub(super) fn run_until_idle(&mut self) {
        for _ in 0..1000 {
            for engine in 0..self.engines.len() {
                if let Some(one) = &mut self.engines[engine] {
                    one.step(usize::MAX);
                }
                self.deliver(engine, usize::MAX);
            }
            if self.board.num_live() == 0 {
                return;
            }
        }
        panic!("{} requests never end", self.board.num_live());
    }
}
