//! Tests of state that is sent to all engines, and again to an engine that returns.

use minisgl_gateway::message::{FromEngine, ToEngine};

use super::rules::config;
use super::world::World;

#[test]
fn restarted_engine_gets_prefixes_and_adapters() {
    let mut world = World::new(config(2), true);
    let number = world.connect();
    let prefix = |prefix_id, pin| ToEngine::AddPrefix {
        prefix_id,
        tokens: vec![1, 2],
        pin,
    };
    let adapter = |number| ToEngine::LoadAdapter {
        adapter: number,
        name: "a".into(),
        path: "b".into(),
    };
    for message in [
        prefix(1, true),
        prefix(2, false),
        prefix(3, true),
        ToEngine::RemovePrefix(2),
        ToEngine::ClearCache,
        adapter(1),
        adapter(2),
        adapter(3),
        ToEngine::UnloadAdapter(2),
    ] {
        world.send(number, message);
    }
    assert_eq!(world.engine(0).inbox.len(), 9);
    let refused = FromEngine::PrefixChanged {
        prefix_id: 3,
        state: "refused".into(),
    };
    let not_read = FromEngine::AdapterChanged {
        adapter: 3,
        state: "refused".into(),
    };
    world.engine(0).outbox.extend([refused, not_read]);
    world.deliver(0, 2);
    world.lose(1, false);
    world.send(number, ToEngine::ClearCache); // not repeated to an engine that starts later
    world.start(1);
    world.deliver(1, 1);
    assert_eq!(world.engine(1).inbox, [adapter(1), prefix(1, true)]);
    let forwarded = |engine: i64| FromEngine::EngineSays {
        engine,
        messages: b"\x91\xa3raw".to_vec(),
    };
    assert!(world.front_ends[&number].other.contains(&forwarded(0)));
}

#[test]
fn restarted_engine_gets_no_watch() {
    let mut world = World::new(config(2), true);
    let number = world.connect();
    let watch = || ToEngine::Watch {
        steps: true,
        tree: false,
    };
    world.send(number, watch());
    assert_eq!(world.engine(1).inbox, [watch()]);
    world.lose(1, false);
    world.start(1);
    world.deliver(1, 1);
    assert!(world.engine(1).inbox.is_empty());
}
