//! What the router itself takes for a request: `add` + `place` + `remove`, with full trees and many requests in flight.
//! With `trees`, what looking into a radix tree of every engine takes instead.
//!
//!     cargo run --release -p minisgl-router --example cost -- ENGINES TREE_PAGES [trees]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use minisgl_core::{CachePolicy, RadixCacheManager};
use minisgl_router::policy::{Policy, Router, RouterConfig};

const PAGE: usize = 16;
const INFLIGHT: usize = 16; // by engine

/// Requests of one kind, without end.
struct Prompts {
    state: u64,
    turns: Vec<usize>,
    chat: bool,
    max_len: usize,
}

impl Prompts {
    fn new(chat: bool, max_len: usize) -> Self {
        Self {
            state: 1,
            turns: vec![0; 50_000],
            chat,
            max_len,
        }
    }

    fn draw(&mut self) -> u64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.state >> 33
    }

    /// Chat: one of 20 system prompts of 1,024 tokens, then a conversation that grows by 1,400 tokens a turn, 16 turns
    /// long: 12,224 tokens in the mean, as in the Mooncake trace. Else 1,155 tokens like no others, as in Azure's.
    fn next(&mut self) -> Vec<i32> {
        let drawn = self.draw();
        if !self.chat {
            return (0..1155).map(|place| token(drawn, place)).collect();
        }
        let session = (drawn % 50_000) as usize;
        let turn = &mut self.turns[session];
        *turn = *turn % 16 + 1;
        let len = (1024 + *turn * 1400 - 700).min(self.max_len);
        let system = session as u64 % 20;
        let of = |place| if place < 1024 { system } else { 1000 + session as u64 };
        (0..len).map(|place| token(of(place), place)).collect()
    }
}

fn token(seed: u64, place: usize) -> i32 {
    let mixed = (seed ^ (place as u64) << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed >> 40) % 150_000) as i32
}

fn report(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let sum: Duration = times.iter().sum();
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    println!(
        "{name}: mean {:.1} us, p50 {:.1}, p99 {:.1}, {} requests",
        micros(sum) / times.len() as f64,
        micros(times[times.len() / 2]),
        micros(times[times.len() * 99 / 100]),
        times.len(),
    );
}

fn router(engines: usize, tree_pages: usize, policy: Policy, chat: bool, warm: usize, count: usize) {
    let config = RouterConfig {
        policy,
        num_engines: engines,
        page_size: PAGE,
        tree_pages,
        ..RouterConfig::default()
    };
    let mut router = Router::new(config).expect("a config");
    (0..engines).for_each(|engine| router.engine_up(engine, None));
    let (mut prompts, mut inflight, mut out) = (Prompts::new(chat, usize::MAX), VecDeque::new(), Vec::new());
    let (mut times, mut matched, mut total) = (Vec::new(), 0, 0);
    for id in 0..(warm + count) as i64 {
        let tokens = prompts.next();
        let began = Instant::now();
        router.add(id, &tokens, 0, 0, false, 0).expect("a new id");
        out.clear();
        router.place(&mut out);
        if inflight.len() >= INFLIGHT * engines {
            router.remove(inflight.pop_front().expect("not empty"), 200);
        }
        let took = began.elapsed();
        inflight.push_back(id);
        if id >= warm as i64 {
            times.push(took);
            matched += out[0].matched_len;
            total += tokens.len();
        }
    }
    let kind = if chat { "conversations" } else { "single prompts" };
    let name = format!(
        "{policy:?}, {engines} engines, {kind}, {:.3} matched",
        matched as f64 / total as f64
    );
    report(&name, times);
}

/// The way that was not taken.
fn trees(engines: usize, tree_pages: usize, chat: bool, warm: usize, count: usize) {
    let make = |_| RadixCacheManager::new(tree_pages, PAGE, CachePolicy::Lru).expect("sizes");
    let mut trees: Vec<_> = (0..engines).map(make).collect();
    let mut free: Vec<Vec<u32>> = (0..engines).map(|_| (0..tree_pages as u32).collect()).collect();
    let mut prompts = Prompts::new(chat, tree_pages * PAGE);
    let mut times = Vec::new();
    for id in 0..warm + count {
        let tokens = prompts.next();
        let began = Instant::now();
        let mut best = (0, id % engines);
        if id >= warm {
            for (engine, tree) in trees.iter_mut().enumerate() {
                let (handle, _) = tree.match_prefix(&tokens).expect("no error");
                best = best.max((handle.cached_len(), engine));
            }
        }
        let (engine, pages) = (best.1, tokens.len() / PAGE);
        let free = &mut free[engine];
        if free.len() < pages {
            free.extend(trees[engine].evict(pages - free.len()).expect("as many"));
        }
        let taken = free.split_off(free.len() - pages);
        let had = trees[engine]
            .insert_prefix(&tokens[..pages * PAGE], &taken)
            .expect("pages");
        free.extend(&taken[..had]);
        if id >= warm {
            times.push(began.elapsed());
        }
    }
    report(
        &format!("a radix tree for each of {engines} engines, chat {chat}"),
        times,
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| args.get(at).map_or(default, |text| text.parse().expect("a number"));
    let (engines, tree_pages) = (number(0, 1000), number(1, 8192));
    let warm = 2 * engines * tree_pages / 760;
    if args.get(2).is_some() {
        trees(engines, tree_pages, true, warm, 2000);
        trees(engines, tree_pages, false, warm, 2000);
        return;
    }
    router(engines, tree_pages, Policy::CacheAware, true, warm, 20_000);
    router(engines, tree_pages, Policy::CacheAware, false, 10 * warm, 50_000);
    router(engines, tree_pages, Policy::LeastLoad, false, warm, 50_000);
}
