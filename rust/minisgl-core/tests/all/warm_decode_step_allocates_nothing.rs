//! A decode step of a warm scheduler allocates no memory, with free pages and with evictions.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::common::{self, Bench, arrival};
use minisgl_core::{Config, Event};

/// Allocator that counts this thread's allocations, so that threads of the test harness do not matter.
struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to `System` unchanged; counting touches a thread-local cell that needs no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BATCH: usize = 32;
const LENGTH: usize = 100;

fn config(page_size: usize, num_pages: usize) -> Config {
    Config {
        max_prefill_length: BATCH * LENGTH,
        eos_ids: vec![2],
        ..common::config(page_size, num_pages, BATCH)
    }
}

/// Returns the allocations of each of `timed` decode steps after `warm` others, with `cached` one-page prompts in the
/// tree.
fn allocations(page_size: usize, num_pages: usize, cached: usize, warm: i64, timed: i64) -> Vec<u64> {
    let mut bench = Bench::new(config(page_size, num_pages));
    let mut step = 0;
    for id in 0..cached as i64 {
        let mut tokens = vec![5; page_size + 1];
        tokens[0] = 1000 + id as i32;
        let plan = bench
            .schedule(step, vec![Event::Arrival(arrival(id, tokens, 1))])
            .unwrap();
        bench.commit(step, plan.num_rows, 7).unwrap();
        step += 1;
    }
    let prompts = (0..BATCH as i64).map(|i| {
        let tokens = (0..LENGTH as i32).map(|at| 3 + at + i as i32 * 1000).collect();
        Event::Arrival(arrival(1_000_000 + i, tokens, 1500))
    });
    let plan = bench.schedule(step, prompts.collect()).unwrap();
    assert_eq!(plan.num_rows, BATCH);
    bench.commit(step, plan.num_rows, 7).unwrap();
    let mut counts = Vec::with_capacity(timed as usize);
    for at in 0..warm + timed {
        step += 1;
        let before = COUNT.with(Cell::get);
        let plan = bench.schedule(step, Vec::new()).unwrap();
        bench.commit(step, plan.num_rows, 7).unwrap();
        let count = COUNT.with(Cell::get) - before;
        assert_eq!((plan.num_decode_rows, plan.num_rows), (BATCH, BATCH));
        if at >= warm {
            counts.push(count);
        }
    }
    counts
}

#[test]
fn counting_allocator_counts_an_allocation() {
    let before = COUNT.with(Cell::get);
    drop(std::hint::black_box(vec![1, 2, 3]));
    assert_eq!(COUNT.with(Cell::get) - before, 1);
}

#[test]
fn decode_step_with_free_pages_allocates_nothing() {
    for page_size in [1, 4, 16] {
        let counts = allocations(page_size, 70_000, 0, 20, 300);
        assert_eq!(counts.iter().sum::<u64>(), 0, "page size {page_size}: {counts:?}");
    }
}

#[test]
fn decode_step_with_evictions_allocates_nothing() {
    let pages = 4000 + BATCH * LENGTH.div_ceil(16);
    let counts = allocations(16, pages, 4000, 20, 300);
    assert_eq!(counts.iter().sum::<u64>(), 0, "{counts:?}");
}
