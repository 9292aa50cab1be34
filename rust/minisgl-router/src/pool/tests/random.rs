//! Random test: engines crash or hang, front ends disconnect, and every stream is the one of an undisturbed run.

use proptest::prelude::*;

use super::super::requests::{ABORT, STOP};
use super::world::World;
use crate::policy::{Policy, RouterConfig};
use minisgl_gateway::message::ToEngine;

#[derive(Clone, Debug)]
enum Act {
    Connect,
    Add {
        front_end: usize,
        prompt: usize,
        max_tokens: usize,
    },
    End {
        front_end: usize,
        request: usize,
        abort: bool,
    },
    Leave {
        front_end: usize,
    },
    Step {
        engine: usize,
        most: usize,
    },
    Deliver {
        engine: usize,
        number: usize,
    },
    Lose {
        engine: usize,
        is_silent: bool,
    },
    Start {
        engine: usize,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let one = 0..8usize;
    prop_oneof![
        1 => Just(Act::Connect),
        6 => (one.clone(), 1..9usize, 1..12usize)
            .prop_map(|(front_end, prompt, max_tokens)| Act::Add { front_end, prompt, max_tokens }),
        2 => (one.clone(), 0..40usize, any::<bool>())
            .prop_map(|(front_end, request, abort)| Act::End { front_end, request, abort }),
        1 => one.clone().prop_map(|front_end| Act::Leave { front_end }),
        8 => (one.clone(), 0..6usize).prop_map(|(engine, most)| Act::Step { engine, most }),
        8 => (one.clone(), 0..4usize).prop_map(|(engine, number)| Act::Deliver { engine, number }),
        2 => (one.clone(), any::<bool>()).prop_map(|(engine, is_silent)| Act::Lose { engine, is_silent }),
        3 => one.prop_map(|engine| Act::Start { engine }),
    ]
}

fn run(world: &mut World, act: Act) {
    let num_engines = world.engines.len();
    let pick = |world: &World, number: usize| -> Option<u32> {
        let all: Vec<u32> = world.front_ends.keys().copied().collect();
        all.get(number % all.len().max(1)).copied()
    };
    match act {
        Act::Connect => drop(world.connect()),
        Act::Add {
            front_end,
            prompt,
            max_tokens,
        } => {
            if let Some(number) = pick(world, front_end) {
                let tokens = (0..prompt).map(|at| i32::try_from(at * 7 % 5).unwrap()).collect();
                world.add(number, tokens, max_tokens);
            }
        }
        Act::End {
            front_end,
            request,
            abort,
        } => {
            let Some(number) = pick(world, front_end) else { return };
            let requests = &mut world.front_ends.get_mut(&number).unwrap().requests;
            let Some(stream) = requests.get_mut(&i64::try_from(request).unwrap()) else {
                return;
            };
            stream.requested_end.get_or_insert(if abort { ABORT } else { STOP });
            let message = if abort {
                ToEngine::AbortRequest
            } else {
                ToEngine::FinishRequest
            };
            world.send(number, message(i64::try_from(request).unwrap()));
        }
        Act::Leave { front_end } => {
            if let Some(number) = pick(world, front_end) {
                world.front_ends.remove(&number);
                world.board.remove_front_end(number, None);
                world.settle();
            }
        }
        Act::Step { engine, most } => {
            if let Some(one) = &mut world.engines[engine % num_engines] {
                one.step(most);
            }
        }
        Act::Deliver { engine, number } => world.deliver(engine % num_engines, number),
        Act::Lose { engine, is_silent } => world.lose(engine % num_engines, is_silent),
        Act::Start { engine } => {
            if world.engines[engine % num_engines].is_none() {
                world.start(engine % num_engines);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn streams_survive_random_losses_unchanged(
        num_engines in 1..4usize,
        policy in prop::sample::select(vec![Policy::RoundRobin, Policy::LeastLoad, Policy::Random, Policy::CacheAware]),
        max_inflight_per_engine in 0..4usize,
        acts in prop::collection::vec(act(), 0..120),
    ) {
        let config = RouterConfig { policy, num_engines, page_size: 2, max_inflight_per_engine, ..RouterConfig::default() };
        let mut world = World::new(config, true);
        for act in acts {
            run(&mut world, act);
            world.front_ends.values().for_each(|one| one.check());
        }
        for engine in 0..num_engines {
            if world.engines[engine].is_none() {
                world.start(engine);
            }
        }
        world.run_until_idle();
        for front_end in world.front_ends.values() {
            front_end.check();
            prop_assert!(front_end.requests.values().all(|stream| stream.end.is_some()), "each ends once");
        }
        prop_assert!(world.board.router.loads().iter().all(|&load| load == 0));
        prop_assert_eq!(world.board.router.num_waiting(), 0);
    }
}
