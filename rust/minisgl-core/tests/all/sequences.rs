//! Sequences and page tables are complete, however many steps pass before they are read.

use std::collections::{HashMap, HashSet};

use crate::common::{Bench, arrival, config};
use minisgl_core::Event;

const ROWS: i64 = 40; // rows, in more than two blocks of slots
const STEPS: i64 = 150;

/// Runs requests of many lengths with `overlap` steps in flight. Every fifth forbids overlap, so it pauses in between.
fn run(overlap: usize) {
    let mut bench = Bench::new(config(1, 20_000, ROWS as usize));
    let mut texts: HashMap<i64, Vec<i32>> = HashMap::new();
    let mut tables: HashMap<i64, Vec<u32>> = HashMap::new();
    let mut in_flight = Vec::new();
    let (mut step, mut num_ended) = (0, 0);
    while num_ended < texts.len() || step == 0 {
        let coming = if step < STEPS { 0..2 } else { 0..0 };
        let events = coming.map(|at| {
            let req_id = 2 * step + at;
            let text: Vec<i32> = (0..=req_id as i32 % 7)
                .map(|place| 1000 + req_id as i32 + place)
                .collect();
            let mut arrival = arrival(req_id, text.clone(), 1 + req_id * 7 % 60);
            arrival.no_overlap = req_id % 5 == 0;
            texts.insert(req_id, text);
            Event::Arrival(arrival)
        });
        let plan = bench.schedule(step, events.collect()).unwrap();
        in_flight.push((step, plan.num_rows));
        while in_flight.len() > if plan.num_rows == 0 { 0 } else { overlap } {
            let (committed, num_rows) = in_flight.remove(0);
            bench.commit(committed, num_rows, 100_000 + committed as i32).unwrap();
            for entry in &bench.entries {
                let token = entry.sampled.unwrap().token;
                texts.get_mut(&entry.req_id).unwrap().push(token);
            }
            num_ended += bench.ended().count();
        }
        for (&req_id, table) in &mut tables {
            let now = bench.scheduler.page_table(req_id).unwrap_or_else(|| table.clone());
            assert!(
                now.starts_with(table),
                "request {req_id} at step {step}: {now:?} after {table:?}"
            );
        }
        tables.extend(
            texts
                .keys()
                .filter_map(|&id| Some((id, bench.scheduler.page_table(id)?))),
        );
        step += 1;
    }
    bench.scheduler.check().unwrap();
    let pages: HashSet<(Vec<i32>, u32)> = bench.scheduler.tree_pages().into_iter().collect();
    assert!(tables.len() > 200);
    for (req_id, table) in &tables {
        for (place, &page) in table.iter().enumerate() {
            let path = texts[req_id][..=place].to_vec();
            assert!(pages.contains(&(path, page)), "request {req_id}, place {place}");
        }
    }
}

#[test]
fn sequences_are_complete_without_overlap() {
    run(0);
}

#[test]
fn sequences_are_complete_with_overlap() {
    run(1);
}
