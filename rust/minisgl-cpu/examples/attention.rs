//! Time of attention alone, one layer at a time, on one thread: decode by batch and context, shared prefixes, prompts.
//!
//! `cargo run --release -p minisgl-cpu --example attention -- [heads kv_heads head_dim [f16|f32|q8 [page size]]]`
//! Times are the best of several rounds in CPU seconds of the thread, each over all layers in turn, so that keys and
//! values come from where they come from in a step.

#![allow(clippy::unwrap_used)]

use minisgl_cpu::attention::{Attention, Call, Plan, Rows, Scratch};
use minisgl_cpu::kernels::Isa;
use minisgl_cpu::kv::{KvDtype, KvPool, KvShape};

const LAYERS: usize = 8;

struct Bench {
    attention: Attention,
    kv: KvPool,
    plan: Plan,
    scratch: Scratch,
    heads: usize,
}

/// CPU seconds of this thread.
fn now() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to `t`.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// The best of some rounds.
fn best(mut round: impl FnMut()) -> f64 {
    let (mut best, mut spent, mut rounds) = (f64::INFINITY, 0.0, 0);
    while rounds < 3 || (spent < 0.1 && rounds < 200) {
        let start = now();
        round();
        let took = now() - start;
        (best, spent, rounds) = (best.min(took), spent + took, rounds + 1);
    }
    best
}

struct Step {
    lens: Vec<u32>,
    indptr: Vec<u32>,
    table: Vec<u32>,
    columns: usize,
    slots: Vec<u32>,
}

impl Step {
    /// Rows of `extend` tokens at the end of `len`; the first `shared` tokens are the same pages for all.
    fn new(rows: usize, len: usize, extend: usize, shared: usize, page_size: usize) -> Self {
        let columns = len.div_ceil(page_size);
        let common = shared / page_size;
        let mut table = Vec::new();
        for row in 0..rows {
            for page in 0..columns {
                let own = common + row * (columns - common) + page.saturating_sub(common);
                table.push(if page < common { page } else { own } as u32);
            }
        }
        Self {
            lens: vec![len as u32; rows],
            indptr: (0..=rows).map(|r| (r * extend) as u32).collect(),
            table,
            columns,
            slots: (0..rows as u32).collect(),
        }
    }

    fn rows(&self) -> Rows<'_> {
        Rows {
            seq_lens: &self.lens,
            qo_indptr: &self.indptr,
            table: &self.table,
            columns: self.columns,
            slots: &self.slots,
        }
    }
}

impl Bench {
    fn new(
        isa: Isa,
        (heads, kv_heads, dim): (usize, usize, usize),
        dtype: KvDtype,
        page_size: usize,
        tokens: usize,
    ) -> Self {
        let kv = KvPool::new(KvShape {
            layers: LAYERS,
            pages: tokens.div_ceil(page_size),
            page_size,
            kv_heads,
            head_dim: dim,
            dtype,
        })
        .unwrap();
        let attention = Attention::new(isa, heads, kv_heads, dim, 1.0 / (dim as f32).sqrt()).unwrap();
        Self {
            plan: attention.plan(&kv, 1, &[None; LAYERS]),
            scratch: attention.scratch(),
            attention,
            kv,
            heads: heads * dim,
        }
    }

    /// Put something everywhere, so that memory is there.
    fn fill(&self) {
        let s = self.kv.shape();
        let x: Vec<f32> = (0..s.kv_heads * s.head_dim)
            .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
            .collect();
        for layer in 0..LAYERS {
            for slot in 0..(s.pages * s.page_size) as u32 {
                // SAFETY: `x` is one token's heads.
                unsafe { self.kv.store(layer, &[slot], x.as_ptr(), x.as_ptr(), 0) };
            }
        }
    }

    /// Seconds of a layer, and of a plan.
    fn time(&mut self, step: &Step, sharing: bool) -> (f64, f64) {
        let rows = step.rows();
        let tokens = *step.indptr.last().unwrap() as usize;
        let queries = vec![0.1f32; tokens * self.heads];
        let mut out = vec![0.0f32; tokens * self.heads];
        self.plan.share(sharing);
        let planning = best(|| self.plan.build(&rows).unwrap());
        let running = best(|| {
            for layer in 0..LAYERS {
                let call = Call {
                    rows,
                    kv: &self.kv,
                    layer,
                    queries: queries.as_ptr(),
                    query_stride: self.heads,
                    out: out.as_mut_ptr(),
                    out_stride: self.heads,
                };
                // SAFETY: one thread, the plan's own rows, buffers for all tokens.
                unsafe {
                    for unit in 0..self.plan.units(layer) {
                        self.attention.run_unit(&self.plan, unit, &call, &mut self.scratch);
                    }
                    for unit in 0..self.plan.merges(layer) {
                        self.attention.merge(&self.plan, unit, &call);
                    }
                }
            }
        });
        (running / LAYERS as f64, planning)
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, other: usize| args.get(i).map_or(other, |a| a.parse().unwrap());
    let (heads, kv_heads, dim) = (number(0, 9), number(1, 3), number(2, 64));
    let dtype = KvDtype::parse(args.get(3).map_or("f16", |a| a)).unwrap();
    let page_size = number(4, 16);
    println!("{heads} heads over {kv_heads} of {dim}, {dtype:?}, pages of {page_size}, one thread");
    let most = 256 * 1024;
    for isa in Isa::here().into_iter().filter(|isa| *isa != Isa::Scalar) {
        let mut bench = Bench::new(isa, (heads, kv_heads, dim), dtype, page_size, most);
        bench.fill();
        let token = KvPool::page_bytes(bench.kv.shape()) / page_size / LAYERS;
        println!("{}: decode", isa.name());
        for batch in [1, 8, 32, 256] {
            for len in [128, 1024, 4096] {
                if batch * len <= most {
                    let step = Step::new(batch, len, 1, 0, page_size);
                    let (t, plan) = bench.time(&step, true);
                    let read = (batch * len * token) as f64;
                    let multiply = (batch * len * dim * heads * 2) as f64;
                    println!(
                        "  batch {batch:3} context {len:4}: {:9.1} us a layer, {:5.1} GB/s, {:5.1} GMAC/s, plan {:.1} us",
                        t * 1e6,
                        read / t * 1e-9,
                        multiply / t * 1e-9,
                        plan * 1e6
                    );
                }
            }
        }
        let step = Step::new(32, 1152, 1, 1024, page_size);
        for sharing in [false, true] {
            let (t, plan) = bench.time(&step, sharing);
            println!(
                "  32 rows, 1,024 of 1,152 shared, sharing {sharing}: {:.1} us, plan {:.1} us",
                t * 1e6,
                plan * 1e6
            );
        }
        let step = Step::new(256, 8192, 1, 8192, page_size);
        let (_, plan) = bench.time(&Step::new(256, 1024, 1, 0, page_size), true);
        bench.plan.share(true);
        let all = best(|| bench.plan.build(&step.rows()).unwrap());
        println!(
            "  planning 256 rows: {:.1} us with nothing in common, {:.1} us with all 8,192 tokens",
            plan * 1e6,
            all * 1e6
        );
        println!("{}: prompts", isa.name());
        for len in [128, 512, 2048] {
            let (t, _) = bench.time(&Step::new(1, len, len, 0, page_size), true);
            let multiply = (len * (len + 1) * dim * heads) as f64;
            println!(
                "  {len:5}: {:9.1} us a layer, {:6.1} GMAC/s",
                t * 1e6,
                multiply / t * 1e-9
            );
        }
    }
}
