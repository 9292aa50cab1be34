//! Random events under memory pressure: every invariant holds after every call, and every request ends exactly once.

use std::collections::HashSet;

use crate::common::{Bench, arrival};
use minisgl_core::{CachePolicy, Config, Draft, Error, Event, PagesRead, Plan, SchedulePolicy, TokenBudget};

/// Random number generator: splitmix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % end as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

fn draw_config(random: &mut Random) -> Config {
    let mut config = Config {
        num_pages: 8 + random.below(40),
        page_size: random.one_of(&[1, 4, 16]),
        max_running_requests: 1 + random.below(8),
        max_prefill_length: random.one_of(&[1, 5, 24, 256]),
        context_len: random.one_of(&[24, 64, 300]),
        eos_ids: vec![2],
        cache: random.one_of(&[CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::Naive]),
        graph_sizes: random.one_of(&[&[][..], &[1, 2, 4, 8][..]]).to_vec(),
        max_pinned_pages: 0,
        cache_token_budget: random.one_of(&[0, 0, 20, 60]),
        cache_max_prompt: random.one_of(&[0, 0, 5, 25]),
        max_draft_len: random.one_of(&[0, 1, 4]),
        checkpoint_interval: 0,
        num_checkpoints: 0,
        schedule_policy: random.one_of(&[SchedulePolicy::Fcfs, SchedulePolicy::Lpm, SchedulePolicy::Srpf]),
    };
    if config.max_draft_len == 0 && random.below(2) == 0 {
        config.checkpoint_interval = config.page_size * (1 + random.below(4));
        config.num_checkpoints = random.below(9);
    }
    let longest = config.limits().max_seq_len - 1;
    config.max_pinned_pages = random.below(config.num_pages - longest.div_ceil(config.page_size) + 1);
    config
}

fn draw_arrival(random: &mut Random, req_id: i64) -> Event {
    let tokens = (0..=random.below(40)).map(|_| random.below(2) as i32).collect();
    let mut arrival = arrival(req_id, tokens, 1 + random.below(40) as i64);
    arrival.priority = random.below(2) as i64;
    arrival.no_overlap = random.below(8) == 0;
    arrival.no_match = random.below(8) == 0;
    arrival.ignore_eos = random.below(2) == 0;
    arrival.background = random.below(4) == 0;
    arrival.pin = random.below(4) == 0;
    Event::Arrival(arrival)
}

/// Commits the oldest steps until `left` are in flight. Asserts that each request that ends was live.
fn commit(bench: &mut Bench, in_flight: &mut Vec<(i64, usize)>, left: usize, live: &mut HashSet<i64>, token: i32) {
    while in_flight.len() > left {
        let (step, num_rows) = in_flight.remove(0);
        bench.commit(step, num_rows, token).unwrap();
        bench.scheduler.check().unwrap();
        for req_id in bench.ended() {
            assert!(live.remove(&req_id), "request {req_id} ended twice");
        }
    }
}

fn draw_events(random: &mut Random, next_id: &mut i64, live: &mut HashSet<i64>) -> Vec<Event> {
    let mut events = Vec::new();
    if random.below(2) == 0 {
        events.push(draw_arrival(random, *next_id));
        live.insert(*next_id);
        *next_id += 1;
    }
    if *next_id > 0 && random.below(12) == 0 {
        let req_id = random.below(*next_id as usize) as i64;
        events.push(match random.below(2) {
            0 => Event::Abort(req_id),
            _ => Event::Finish(req_id),
        });
    }
    if random.below(12) == 0 {
        events.push(Event::Unpin(random.below(*next_id as usize + 1) as i64));
    }
    if random.below(30) == 0 {
        events.push(Event::ClearCache);
    }
    if random.below(6) == 0 {
        events.push(Event::PagesRead(PagesRead {
            req_id: random.below(*next_id as usize + 1) as i64,
            stored_from: random.below(3) as i64,
            stored_to: random.below(20) as i64,
        }));
    }
    if random.below(3) == 0 {
        events.push(Event::Draft(Draft {
            req_id: random.below(*next_id as usize + 1) as i64,
            length: random.below(50) as i64,
            tokens: (0..random.below(6)).map(|_| random.below(3) as i32).collect(),
        }));
    }
    if random.below(8) == 0 {
        events.push(Event::TokenBudget(TokenBudget {
            beside_decode: 1 + random.below(30) as i64,
            prefill_only: 1 + random.below(300) as i64,
            background: 1 << random.below(42),
        }));
    }
    events
}

/// Schedules a step; if a pin is refused, schedules it again without pins.
fn schedule(bench: &mut Bench, step: i64, mut events: Vec<Event>) -> Plan {
    match bench.schedule(step, events.clone()) {
        Err(Error::Event { field: "pin", .. }) => {
            for event in &mut events {
                if let Event::Arrival(arrival) = event {
                    arrival.pin = false;
                }
            }
            bench.schedule(step, events).unwrap()
        }
        other => other.unwrap(),
    }
}

const STEPS: i64 = if cfg!(miri) { 25 } else { 200 };

/// Runs `STEPS` steps with random events, then steps until all requests have ended. Returns the number of retractions.
fn run(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let config = draw_config(random);
    let num_pages = config.num_pages;
    let overlap = random.below(2);
    let mut bench = Bench::new(config);
    let (mut live, mut next_id, mut in_flight) = (HashSet::new(), 0, Vec::<(i64, usize)>::new());
    let mut step = 0;
    while step < STEPS || !live.is_empty() || !in_flight.is_empty() {
        assert!(step < 20_000, "seed {seed}: the requests do not come to an end");
        let mut events = match step < STEPS {
            true => draw_events(random, &mut next_id, &mut live),
            false => Vec::new(),
        };
        if !in_flight.is_empty() && random.below(60) == 0 {
            events.insert(0, Event::ForwardFailed(in_flight[0].0));
            in_flight.clear(); // the failure replaces their commits
        }
        let plan = schedule(&mut bench, step, events);
        bench.scheduler.check().unwrap();
        in_flight.push((step, plan.num_rows));
        let left = if plan.num_rows == 0 { 0 } else { overlap };
        let token = random.below(3) as i32;
        commit(&mut bench, &mut in_flight, left, &mut live, token);
        step += 1;
    }
    let stats = bench.scheduler.stats();
    let pages = stats.num_free_pages + stats.num_evictable_pages + stats.num_pinned_pages;
    assert_eq!(pages, num_pages, "seed {seed}: pages leaked");
    assert_eq!(stats.num_draining, 0, "seed {seed}: slots leaked");
    stats.num_retracted_total
}

#[test]
fn invariants_hold_and_every_request_ends_once() {
    let seeds = if cfg!(miri) { 3 } else { 300 };
    let retracted: u64 = (0..seeds).map(run).sum();
    assert!(
        retracted > 0 || cfg!(miri),
        "the pools are too large to test retraction"
    );
}
