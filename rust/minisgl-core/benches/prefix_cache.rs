//! Benchmark of single operations of the building blocks, in Rust: times that are too short to measure from Python.
//!
//!     cargo bench -p minisgl-core --bench prefix_cache -- CASE REPEATS
//!
//! A case is evict_one, match_1024, insert_1024, plan_chunk or metadata_256. Prints the time of each operation in us,
//! one a line. `benchmark/scheduler.py` runs it and has its limits.
//!
//! The tree has `NUM_NODES` nodes at each timed operation. Preparation is not timed, nor is fresh memory: a new node
//! takes the place of a removed one, as in a server whose pool is full.

use std::time::Instant;

use minisgl_core::{CachePolicy, Candidate, ChunkLimits, Error, RadixCacheManager};
use minisgl_core::{make_metadata_buffers, prefill_admission_plan};

const NUM_NODES: usize = 100_000;
const LENGTH: usize = 1024;
const NUM_PROMPTS: usize = 64;
const NUM_EDGES: usize = 8; // edges of a matched prompt

type Result<T> = std::result::Result<T, Error>;

struct Tree {
    cache: RadixCacheManager,
    next_token: i32,
}

impl Tree {
    fn new(num_pages: usize) -> Result<Self> {
        let cache = RadixCacheManager::new(num_pages, 1, CachePolicy::Lru, None)?;
        Ok(Self { cache, next_token: 0 })
    }

    /// Appends `length` tokens that are not cached to `tokens`, and allocates pages for all of them.
    fn prompt(&mut self, mut tokens: Vec<i32>, length: usize) -> Result<(Vec<i32>, Vec<u32>)> {
        let first = self.next_token;
        self.next_token += length as i32;
        tokens.extend(first..self.next_token);
        let pages = self.cache.take(tokens.len())?;
        Ok((tokens, pages))
    }

    /// Caches `tokens` with `length` new tokens appended, and returns them.
    fn insert(&mut self, tokens: Vec<i32>, length: usize) -> Result<Vec<i32>> {
        let (tokens, pages) = self.prompt(tokens, length)?;
        let had = self.cache.insert_prefix(&tokens, &pages, 0)?;
        self.cache.free(&pages[..had])?;
        Ok(tokens)
    }
}

fn timed<T>(times: &mut Vec<f64>, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = std::hint::black_box(work());
    times.push(start.elapsed().as_nanos() as f64 / 1000.0);
    result
}

/// Times the eviction of one page, from leaves of one page.
fn evict_one(repeats: usize, times: &mut Vec<f64>) -> Result<()> {
    let mut tree = Tree::new(NUM_NODES)?;
    for _ in 0..NUM_NODES {
        tree.insert(Vec::new(), 1)?;
    }
    for _ in 0..repeats {
        timed(times, || tree.cache.evict(1))?;
        tree.insert(Vec::new(), 1)?;
    }
    Ok(())
}

/// Times the match of prompts of `LENGTH` tokens with `NUM_EDGES` edges each, among leaves of one page.
fn match_1024(repeats: usize, times: &mut Vec<f64>) -> Result<()> {
    let mut tree = Tree::new(2 * NUM_NODES)?;
    let mut prompts = Vec::new();
    for _ in 0..NUM_PROMPTS {
        let tokens = tree.insert(Vec::new(), LENGTH)?;
        for edge in 1..NUM_EDGES {
            let shared = tokens[..edge * LENGTH / NUM_EDGES].to_vec();
            tree.insert(shared, 1)?;
        }
        prompts.push(tokens);
    }
    // each prompt is NUM_EDGES nodes, and one more for each branch
    for _ in NUM_PROMPTS * (2 * NUM_EDGES - 1)..NUM_NODES {
        tree.insert(Vec::new(), 1)?;
    }
    for at in 0..repeats {
        let tokens = &prompts[at * 37 % NUM_PROMPTS];
        assert_eq!(
            timed(times, || tree.cache.match_prefix(tokens, 0))?.0.cached_len(),
            LENGTH
        );
    }
    Ok(())
}

/// Times the insertion of a new prompt of `LENGTH` tokens, after the oldest one was evicted.
fn insert_1024(repeats: usize, times: &mut Vec<f64>) -> Result<()> {
    let mut tree = Tree::new(NUM_NODES + repeats * LENGTH)?;
    for _ in 0..repeats {
        tree.insert(Vec::new(), LENGTH)?;
    }
    for _ in repeats..NUM_NODES {
        tree.insert(Vec::new(), 1)?;
    }
    for _ in 0..repeats {
        tree.cache.evict(LENGTH)?;
        let (tokens, pages) = tree.prompt(Vec::new(), LENGTH)?;
        let had = timed(times, || tree.cache.insert_prefix(&tokens, &pages, 0))?;
        assert_eq!(had, 0);
    }
    Ok(())
}

/// Times planning a chunk of one prompt of 1,024 tokens.
fn plan_chunk(repeats: usize, times: &mut Vec<f64>) -> Result<()> {
    let row = Candidate {
        length: 1024,
        num_pages: 0,
        num_matched: 100,
        num_unlocked: 0,
        num_found: 100,
        num_loadable: 0,
        has_state: false,
        num_unscheduled: 128,
    };
    let capacity = ChunkLimits {
        budget: 512,
        available: 4096,
        page_size: 1,
        max_page_changes: 65_536,
        reserve_ratio: 716,
        needed: 1000,
    };
    for _ in 0..repeats {
        assert_eq!(
            timed(times, || prefill_admission_plan(&[row], capacity))?[0].num_tokens,
            512
        );
    }
    Ok(())
}

/// Times writing the arrays of a step of 256 decode rows.
fn metadata_256(repeats: usize, times: &mut Vec<f64>) -> Result<()> {
    let (starts, lens, pages) = ([700; 256], [1; 256], [9; 256]);
    for _ in 0..repeats {
        timed(times, || make_metadata_buffers(&starts, &lens, &pages, 1))?;
    }
    Ok(())
}

fn main() -> std::result::Result<(), String> {
    // cargo adds `--bench` of its own
    let arguments: Vec<String> = std::env::args().skip(1).filter(|one| !one.starts_with("--")).collect();
    let [case, repeats] = arguments.as_slice() else {
        return Ok(()); // run as a test: nothing to measure
    };
    let repeats: usize = repeats.parse().map_err(|error| format!("{repeats}: {error}"))?;
    let mut times = Vec::with_capacity(repeats);
    let done = match case.as_str() {
        "evict_one" => evict_one(repeats, &mut times),
        "match_1024" => match_1024(repeats, &mut times),
        "insert_1024" => insert_1024(repeats, &mut times),
        "plan_chunk" => plan_chunk(repeats, &mut times),
        "metadata_256" => metadata_256(repeats, &mut times),
        other => {
            return Err(format!("{other}: unknown case"));
        }
    };
    done.map_err(|error| format!("{error:?}"))?;
    for time in times {
        println!("{time}");
    }
    Ok(())
}
