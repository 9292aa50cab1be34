//! The router by examples.

use super::{KeyShare, Placed, Policy, Router, RouterConfig};

fn router(policy: Policy, num_engines: usize, change: impl FnOnce(&mut RouterConfig)) -> Router {
    let mut config = RouterConfig {
        policy,
        num_engines,
        page_size: 4,
        tree_pages: 64,
        ..RouterConfig::default()
    };
    change(&mut config);
    let mut router = Router::new(config).expect("a config");
    (0..num_engines).for_each(|engine| router.engine_up(engine, None));
    router
}

fn placed(router: &mut Router) -> Vec<(i64, usize)> {
    let mut out = Vec::new();
    router.place(&mut out);
    out.iter().map(|one| (one.req_id, one.engine)).collect()
}

fn add(router: &mut Router, ids: std::ops::Range<i64>) {
    for id in ids {
        router.add(id, &[1; 10], 0, 0, false, 0).expect("a new id");
    }
}

#[test]
fn round_robin_passes_over_who_is_down() {
    let mut router = router(Policy::RoundRobin, 3, |_| ());
    assert!(router.engine_down(1).is_empty());
    add(&mut router, 0..4);
    assert_eq!(placed(&mut router), [(0, 0), (1, 2), (2, 0), (3, 2)]);
    assert_eq!(router.loads(), [2, 0, 2]);
}

#[test]
fn limits_hold_and_the_line_moves_when_somebody_ends() {
    let mut router = router(Policy::LeastLoad, 2, |config| {
        config.max_inflight_per_engine = 2;
        config.max_inflight = 3;
    });
    add(&mut router, 0..5);
    assert_eq!(placed(&mut router), [(0, 0), (1, 1), (2, 0)]);
    assert_eq!(router.num_waiting(), 2);
    router.remove(1, 7);
    assert_eq!(placed(&mut router), [(3, 1)]);
    router.remove(4, 0);
    assert_eq!(router.num_waiting(), 0);
}

#[test]
fn a_lost_engine_gives_back_what_it_had_and_they_go_first() {
    let mut router = router(Policy::LeastLoad, 2, |config| config.max_inflight_per_engine = 2);
    add(&mut router, 0..6);
    placed(&mut router);
    let lost = router.engine_down(0);
    assert_eq!(lost, [0, 2]);
    for id in lost {
        router.add(id, &[1; 12], 0, 0, true, 0).expect("forgotten");
    }
    assert!(placed(&mut router).is_empty());
    router.engine_up(0, None);
    assert_eq!(placed(&mut router), [(0, 0), (2, 0)]);
}

#[test]
fn the_deepest_match_wins_until_its_engine_has_too_much() {
    let mut router = router(Policy::CacheAware, 2, |config| config.balance_requests = 2);
    let mut engines = Vec::new();
    let prompt: Vec<i32> = (0..17).collect();
    for id in 0..5 {
        router.add(id, &prompt, 0, 0, false, 0).expect("a new id");
        let mut out: Vec<Placed> = Vec::new();
        router.place(&mut out);
        engines.push((out[0].engine, out[0].matched_len));
    }
    assert_eq!(engines, [(0, 0), (0, 16), (0, 16), (1, 0), (1, 16)]);
}

#[test]
fn a_key_at_its_limit_holds_up_nobody_else() {
    let mut router = router(Policy::LeastLoad, 1, |config| {
        config.keys = vec![KeyShare {
            share: 1,
            max_inflight: 1,
        }];
    });
    for (id, key) in [(0, 1), (1, 1), (2, 0)] {
        router.add(id, &[1], 0, key, false, 0).expect("a new id");
    }
    assert_eq!(placed(&mut router), [(2, 0), (0, 0)]);
    router.remove(0, 0);
    assert_eq!(placed(&mut router), [(1, 0)]);
}
