//! Tests of the pool's rules, one rule each.

use minisgl_gateway::message::{
    Embedding, EngineReady, FromEngine, Pairs, PromptLogprobs, StepTokens, ToEngine, TokenLogprobs,
};

use super::super::requests::{ABORT, ERROR, LENGTH, STOP};
use super::super::steps::OwnedStep;
use super::world::{Stream, World, expected_tokens, line, request, rules};
use crate::policy::{KeyShare, Policy, RouterConfig};

pub(super) fn config(num_engines: usize) -> RouterConfig {
    RouterConfig {
        policy: Policy::RoundRobin,
        num_engines,
        ..RouterConfig::default()
    }
}

fn states(world: &World, client: u32) -> Vec<(i64, String)> {
    let other = &world.front_ends[&client].other;
    let states = other.iter().filter_map(|message| match message {
        FromEngine::EngineState { engine, state, .. } => Some((*engine, state.clone())),
        _ => None,
    });
    states.collect()
}

#[test]
fn ready_is_sent_when_all_engines_are_ready() {
    let mut world = World::new(config(3), false);
    let client = world.connect();
    let Some(FromEngine::EngineReady(ready)) = world.front_ends[&client].other.last() else {
        panic!()
    };
    assert_eq!((ready.max_seq_len, ready.num_pages), (100, 30));
    assert_eq!(ready.engine_details, "3 engines");
    let all: Vec<_> = (0..3).map(|engine| (engine, "ready".to_owned())).collect();
    assert_eq!(states(&world, client), all);
}

#[test]
fn loss_before_all_are_ready_fails_the_pool() {
    let mut board = super::super::Switchboard::new(config(2), rules()).unwrap();
    board.on_engine_connected(0);
    board.on_engine_lost(0, false, "out of memory");
    assert_eq!(board.ended(), Some("engine 0: out of memory"));
}

#[test]
fn requests_of_a_lost_engine_continue_in_another() {
    let mut world = World::new(config(2), false);
    let client = world.connect();
    let id = world.add(client, vec![1, 2, 3], 8);
    world.engine(0).step(9);
    world.engine(0).step(9);
    world.deliver(0, 1); // the second token is never delivered
    world.lose(0, false);
    let added = world.engine(1).added(|new| (new.tokens.clone(), new.num_generated));
    let whole = expected_tokens(&[1, 2, 3], 8);
    assert_eq!(added, [([&[1, 2, 3][..], &whole[..1]].concat(), 1)]);
    world.run_until_idle();
    let stream = &world.front_ends[&client].requests[&id];
    assert_eq!(
        (&stream.tokens, stream.end, stream.num_admitted),
        (&whole, Some(LENGTH), 1)
    );
    assert_eq!(states(&world, client).last(), Some(&(0, "dead".to_owned())));
    let messages = &world.front_ends[&client].other;
    assert!(messages.contains(&line("engine 0 was lost: 1 request moved to other engines")));
}

#[test]
fn lost_engines_requests_continue_with_their_images() {
    let mut world = World::new(config(2), false);
    let client = world.connect();
    let id = world.add(client, vec![2, 3], 8);
    world.engine(0).step(9);
    world.deliver(0, 1);
    let pixels = |world: &mut World, engine| world.engine(engine).added(|new| new.images[0].pixels.clone());
    let first = pixels(&mut world, 0);
    world.lose(0, false);
    let again = pixels(&mut world, 1);
    assert_eq!((first[0].len(), again.len()), (8, 1));
    assert_eq!(first[0].as_ptr(), again[0].as_ptr(), "the pool keeps one copy");
    world.run_until_idle();
    assert_eq!(world.front_ends[&client].requests[&id].end, Some(LENGTH));
}

#[test]
fn pool_accepts_images_if_all_engines_do() {
    for (second, all) in [(true, true), (false, false)] {
        let mut board = super::super::Switchboard::new(config(2), rules()).unwrap();
        for (engine, sees) in [(0, true), (1, second)] {
            let ready = EngineReady {
                sees,
                ..EngineReady::default()
            };
            board.on_engine_connected(engine);
            board.handle_engine_message(engine, FromEngine::EngineReady(Box::new(ready)), b"");
        }
        assert_eq!(board.sent_ready.as_ref().unwrap().sees, all);
    }
}

#[test]
fn aborts_sent_to_a_lost_engine_end_requests() {
    let mut world = World::new(config(2), false);
    let client = world.connect();
    let ids: Vec<i64> = (0..4).map(|_| world.add(client, vec![1], 8)).collect();
    world.send(client, ToEngine::AbortRequest(ids[0]));
    world.send(client, ToEngine::FinishRequest(ids[2]));
    world.lose(0, true);
    let requests = &world.front_ends[&client].requests;
    let ends: Vec<_> = ids.iter().map(|id| requests[id].end).collect();
    assert_eq!(ends, [Some(ABORT), None, Some(STOP), None]);
    world.run_until_idle();
}

#[test]
fn requests_wait_for_a_restarting_engine() {
    let mut world = World::new(config(1), true);
    let client = world.connect();
    let id = world.add(client, vec![1], 3);
    world.lose(0, false);
    assert_eq!(world.board.ended(), None);
    let late = world.add(client, vec![2], 3);
    world.send(client, ToEngine::AbortRequest(late));
    assert_eq!(world.front_ends[&client].requests[&late].end, Some(ABORT), "queued");
    world.start(0);
    world.run_until_idle();
    assert_eq!(world.front_ends[&client].requests[&id].tokens, expected_tokens(&[1], 3));
    world.board.on_engine_lost(0, false, "it was told to die"); // this time the engine is not restarted
    world.settle();
    let failed = "no engine is left: engine 0: it was told to die";
    assert_eq!(world.board.ended(), Some(failed));
    let last = world.front_ends[&client].other.last();
    assert_eq!(last, Some(&FromEngine::EngineFailed(failed.into())));
}

#[test]
fn request_that_may_crash_engines_ends_with_an_error() {
    let mut world = World::new(config(3), false);
    let client = world.connect();
    let id = world.add(client, vec![1], 8);
    for engine in 0..2 {
        let step = StepTokens {
            admitted: vec![(i64::try_from(engine).unwrap(), 0)],
            ..StepTokens::default()
        };
        world.engine(engine).outbox.push_back(FromEngine::StepTokens(step));
        world.deliver(engine, 1);
        world.lose(engine, false);
    }
    let stream = &world.front_ends[&client].requests[&id];
    assert_eq!(stream.end, Some(ERROR));
    assert!(stream.error.contains("may crash engines"), "{}", stream.error);
    assert_eq!(world.board.num_live(), 0);
}

#[test]
fn request_without_admission_is_moved_three_times() {
    let mut world = World::new(config(1), true);
    let client = world.connect();
    let id = world.add(client, vec![1], 8);
    for turn in 0..4 {
        assert_eq!(world.front_ends[&client].requests[&id].end, None, "{turn}");
        world.lose(0, false);
        world.start(0);
        world.deliver(0, 9);
    }
    assert_eq!(world.front_ends[&client].requests[&id].end, Some(ERROR));
}

#[test]
fn shutdown_ends_without_failure() {
    let mut world = World::new(config(2), false);
    let client = world.connect();
    world.send(client, ToEngine::Shutdown);
    for engine in 0..2 {
        assert_eq!(world.engine(engine).inbox, [ToEngine::Shutdown]);
        assert_eq!(world.board.ended(), None);
        world.lose(engine, false);
    }
    assert_eq!(world.board.ended(), Some(""));
    let failed = |message: &FromEngine| matches!(message, FromEngine::EngineFailed(_));
    assert!(!world.front_ends[&client].other.iter().any(failed));
}

#[test]
fn key_sees_only_its_own_cached_tokens() {
    let keys = vec![KeyShare::default(); 2];
    let mut world = World::new(RouterConfig { keys, ..config(1) }, false);
    let client = world.connect();
    let cached = |world: &mut World, tokens: std::ops::Range<i32>, key, runs: bool| {
        let engine = world.engine(0);
        engine.cached_len = (tokens.end - tokens.start - 1) / 16 * 16;
        let id = world.add_with_key(client, tokens.collect(), 10, key);
        if !runs {
            world.send(client, ToEngine::AbortRequest(id));
        }
        world.run_until_idle();
        world.front_ends[&client].requests[&id].cached_len
    };
    assert_eq!(cached(&mut world, 0..49, 1, true), 0, "another key's");
    assert_eq!(cached(&mut world, 0..49, 1, true), 48);
    assert_eq!(cached(&mut world, 0..49, 2, false), 0);
    assert_eq!(cached(&mut world, 0..49, 2, true), 0, "the first never ran");
    assert_eq!(cached(&mut world, 0..33, 2, true), 32);
    assert_eq!(cached(&mut world, 0..65, 1, true), 48, "the rest is another key's");
}

#[test]
fn invalid_messages_are_refused_by_name() {
    let mut world = World::new(config(1), false);
    let client = world.board.add_front_end();
    let refused = |world: &mut World, message| world.board.handle_message(client, message).unwrap_err();
    let early = refused(&mut world, ToEngine::ClearCache);
    assert_eq!(early, "no hello");
    let hello = ToEngine::Hello { name: "x".repeat(99) };
    world.board.handle_message(client, hello).unwrap();
    for (req_id, num_generated, key) in [(3, 2, 0), (4, -1, 0), (5, 0, 1), (6, 0, -1)] {
        let message = request(req_id, vec![1, 2], 5, 0, num_generated, key);
        world.board.handle_message(client, message).unwrap();
    }
    assert_eq!(world.board.num_live(), 0, "each ended with an error");
    let again = refused(&mut world, request(6, vec![1, 2], 5, 0, 0, 0));
    assert_eq!(again, "6 is not above 6");
}

#[test]
fn with_keys_engines_get_no_priorities() {
    for (keys, expected) in [(vec![], [-4, 0]), (vec![KeyShare::default()], [0, 0])] {
        let mut world = World::new(RouterConfig { keys, ..config(1) }, false);
        let client = world.connect();
        for (req_id, priority) in [(0, -4), (1, 0)] {
            world.send(client, request(req_id, vec![1, 2], 5, priority, 0, 0));
        }
        assert_eq!(world.engine(0).added(|new| new.priority), expected);
    }
}

#[test]
fn background_requests_are_placed_last_of_their_key() {
    let limited = RouterConfig {
        max_inflight: 1,
        ..config(1)
    };
    let mut world = World::new(limited, false);
    let client = world.connect();
    for (req_id, in_background) in [(0, false), (1, true), (2, false)] {
        let stream = Stream {
            prompt: vec![1, 2],
            max_tokens: 5,
            ..Stream::default()
        };
        let requests = &mut world.front_ends.get_mut(&client).unwrap().requests;
        requests.insert(req_id, stream);
        let mut message = request(req_id, vec![1, 2], 5, 4, 0, 0);
        if let ToEngine::AddRequest(new) = &mut message {
            new.background = in_background;
        }
        world.send(client, message);
    }
    world.run_until_idle();
    assert_eq!(world.engine(0).added(|new| new.background), [false, false, true]);
}

#[test]
fn step_is_split_by_owner() {
    let logprobs = |index| TokenLogprobs {
        index,
        logprob: -0.5,
        top_ids: vec![],
        top_logprobs: vec![],
    };
    let prompt = |req_id| PromptLogprobs {
        req_id,
        first: 1,
        logprobs: vec![],
        top_ids: vec![],
        top_logprobs: vec![],
    };
    let embedding = |req_id| Embedding {
        req_id,
        numbers: vec![1, 2],
    };
    let step = StepTokens {
        step: 9,
        req_ids: vec![10, 11, 12, 13],
        tokens: vec![1, 2, 3, 4],
        reasons: vec![0, 4, 0, 0],
        admitted: vec![(10, 5), (12, 6)],
        errors: Pairs(vec![(11, "no".into())]),
        logprobs: (0..4).map(logprobs).collect(),
        prompt_logprobs: vec![prompt(12), prompt(10)],
        embeddings: vec![embedding(13), embedding(11), embedding(12)],
    };
    let mut parts = Vec::new();
    let owned = OwnedStep {
        step: step.clone(),
        rows: vec![Some((0, 100)), Some((1, 101)), None, Some((0, 103))],
        admitted: vec![Some((0, 100)), None],
        errors: vec![Some((1, 101))],
        prompts: vec![None, Some((0, 100))],
        embeddings: vec![Some((0, 103)), Some((1, 101)), None],
    };
    owned.split(&mut parts);
    let first = StepTokens {
        step: 9,
        req_ids: vec![100, 103],
        tokens: vec![1, 4],
        reasons: vec![0, 0],
        admitted: vec![(100, 5)],
        logprobs: vec![
            logprobs(0),
            TokenLogprobs {
                index: 1,
                ..logprobs(1)
            },
        ],
        prompt_logprobs: vec![prompt(100)],
        embeddings: vec![embedding(103)],
        ..StepTokens::default()
    };
    let second = StepTokens {
        step: 9,
        req_ids: vec![101],
        tokens: vec![2],
        reasons: vec![4],
        errors: Pairs(vec![(101, "no".into())]),
        logprobs: vec![logprobs(0)],
        embeddings: vec![embedding(101)],
        ..StepTokens::default()
    };
    assert_eq!(parts, [(0, first), (1, second)]);
}

#[test]
fn disconnected_front_end_aborts_its_requests() {
    let mut world = World::new(
        RouterConfig {
            max_inflight_per_engine: 1,
            ..config(1)
        },
        false,
    );
    let (goes, stays) = (world.connect(), world.connect());
    world.add(goes, vec![1], 5);
    world.add(goes, vec![2], 5);
    let id = world.add(stays, vec![3], 5);
    world.board.remove_front_end(goes, None);
    world.settle();
    world.front_ends.remove(&goes);
    assert_eq!(world.board.num_live(), 2, "one is in an engine, which must end it");
    assert!(world.front_ends[&stays].other.contains(&line("test 0 gone; 2")));
    world.run_until_idle();
    assert_eq!(world.front_ends[&stays].requests[&id].tokens, expected_tokens(&[3], 5));
    let inbox = &world.engine(0).inbox;
    let aborted = inbox.iter().filter(|one| matches!(one, ToEngine::AbortRequest(_)));
    let added = inbox.iter().filter(|one| matches!(one, ToEngine::AddRequest(_)));
    assert_eq!((aborted.count(), added.count()), (1, 2));
}

#[test]
fn cleared_cache_loses_its_prefix_matches() {
    let mut world = World::new(
        RouterConfig {
            policy: Policy::CacheAware,
            page_size: 2,
            ..config(2)
        },
        false,
    );
    let client = world.connect();
    let mut places: Vec<usize> = Vec::new();
    for turn in 0..4 {
        if turn == 3 {
            let clear = FromEngine::CacheCleared;
            world.engine(places[0]).outbox.push_back(clear);
            world.deliver(places[0], 1);
        }
        world.add(client, (0..9).collect(), 1);
        let engine = usize::from(world.engine(1).inbox.len() > places.iter().sum());
        places.push(engine);
        world.run_until_idle();
    }
    assert_eq!(places[..3], [places[0]; 3], "where its prefix is");
    assert_ne!(places[3], places[0], "nothing draws it there");
}
