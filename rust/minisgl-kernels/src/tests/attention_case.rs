//! Small test steps of attention, the expected output, and every way to run them.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::attention::{Attention, Call, Rows};
use crate::kernels::Isa;
use crate::kv::{KvDtype, KvHeads, KvPool, KvShape};

/// Row of a test step. Rows of the same `family` share their first `shared` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub len: usize,
    pub extend: usize,
    pub family: u64,
    pub shared: usize,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub kv_heads: usize,
    pub group: usize,
    pub dim: usize,
    /// Elements of a value that are the first elements of the key; `None`: values are stored separately.
    pub latent: Option<usize>,
    pub page_size: usize,
    pub dtype: KvDtype,
    pub window: Option<usize>,
    pub sinks: bool,
    pub rows: Vec<Row>,
    /// Positions of images, whose tokens attend to each other.
    pub images: Vec<Range<usize>>,
}

/// Options of running a case, none of which may change the result.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub isa: Isa,
    pub threads: usize,
    pub sharing: bool,
}

pub const PLAIN: How = How {
    isa: Isa::Scalar,
    threads: 1,
    sharing: false,
};

/// Returns a pseudo-random value from -1 to 1 that depends on all of `at`.
pub fn noise(at: [u64; 4]) -> f32 {
    let mut h = 0u64;
    for x in at {
        h = (h ^ x).wrapping_add(0x9e37_79b9_7f4a_7c15);
        h = (h ^ h >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h = (h ^ h >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        h ^= h >> 31;
    }
    (h >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

impl Case {
    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Returns the id of the token's owner: the family for shared tokens, otherwise the row.
    pub fn owner(&self, row: usize, position: usize) -> u64 {
        let r = self.rows[row];
        if position < r.shared {
            r.family
        } else {
            1000 + row as u64
        }
    }

    pub fn key(&self, row: usize, position: usize) -> Vec<f32> {
        let owner = self.owner(row, position);
        let count = self.kv_heads * self.dim;
        (0..count)
            .map(|i| 2.0 * noise([1, owner, position as u64, i as u64]))
            .collect()
    }

    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.dim)
    }

    pub fn value(&self, row: usize, position: usize) -> Vec<f32> {
        if self.latent.is_some() {
            return self.key(row, position);
        }
        let owner = self.owner(row, position);
        let count = self.kv_heads * self.dim;
        (0..count)
            .map(|i| noise([2, owner, position as u64, i as u64]))
            .collect()
    }

    pub fn query(&self, row: usize, position: usize) -> Vec<f32> {
        let count = self.heads() * self.dim;
        (0..count)
            .map(|i| 3.0 * noise([3, row as u64, position as u64, i as u64]))
            .collect()
    }

    /// Returns the end of the positions that a token attends to.
    fn end_of(&self, position: usize) -> usize {
        let image = self.images.iter().find(|image| image.contains(&position));
        image.map_or(position + 1, |image| image.end)
    }

    /// Returns the sink of a head: below all scores, among them, or far above.
    fn sink(&self, head: usize) -> f32 {
        [-300.0, 2.0, 0.5, 300.0][head % 4]
    }

    /// Returns the expected output of each token of the step, in f64.
    pub fn expected(&self) -> Vec<f64> {
        let mut out = Vec::new();
        for (row, r) in self.rows.iter().enumerate() {
            let keys: Vec<_> = (0..r.len).map(|p| self.key(row, p)).collect();
            let values: Vec<_> = (0..r.len).map(|p| self.value(row, p)).collect();
            for position in r.len - r.extend..r.len {
                let query = self.query(row, position);
                let from = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
                for head in 0..self.heads() {
                    let kv = head / self.group * self.dim;
                    let score = |p: usize| {
                        let q = &query[head * self.dim..][..self.dim];
                        let k = &keys[p][kv..][..self.dim];
                        q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
                            / (self.dim as f64).sqrt()
                    };
                    let scores: Vec<_> = (from..self.end_of(position)).map(score).collect();
                    let sink = if self.sinks {
                        f64::from(self.sink(head))
                    } else {
                        f64::NEG_INFINITY
                    };
                    let most = scores.iter().copied().fold(sink, f64::max);
                    let weights: Vec<_> = scores.iter().map(|s| (s - most).exp()).collect();
                    let sum = weights.iter().sum::<f64>() + (sink - most).exp();
                    for d in 0..self.value_dim() {
                        let seen = values[from..].iter().zip(&weights);
                        out.push(seen.map(|(v, w)| w * f64::from(v[kv + d])).sum::<f64>() / sum);
                    }
                }
            }
        }
        out
    }

    /// Returns page tables: whole pages of a shared prefix belong to the family, the rest to the row, shuffled.
    pub fn tables(&self) -> (Vec<u32>, usize, usize) {
        let columns = self.rows.iter().map(|r| r.len.div_ceil(self.page_size)).max().unwrap() + 1;
        let mut seen = std::collections::HashMap::new();
        let mut owners = Vec::new();
        for (row, r) in self.rows.iter().enumerate() {
            for page in 0..r.len.div_ceil(self.page_size) {
                let shared = (page + 1) * self.page_size <= r.shared;
                owners.push((row, page, if shared { r.family } else { 1000 + row as u64 }));
            }
        }
        owners.sort_by_key(|(_, page, owner)| noise([9, *page as u64, *owner, 0]).to_bits());
        let mut table = vec![u32::MAX; columns * self.rows.len()];
        for (row, page, owner) in owners {
            let next = seen.len() as u32;
            table[row * columns + page] = *seen.entry((page, owner)).or_insert(next);
        }
        (table, columns, seen.len())
    }

    pub fn run(&self, how: How) -> Vec<f32> {
        self.run_with(how, |_, _, _, _| {})
    }

    pub fn run_with(&self, how: How, spoil: impl Fn(usize, usize, &mut [f32], &mut [f32])) -> Vec<f32> {
        let (table, columns, pages) = self.tables();
        let shape = KvShape {
            // the first layer has heads of its own
            layers: vec![
                KvHeads {
                    count: 3,
                    dim: if self.dtype == KvDtype::Q4 { 32 } else { 10 },
                },
                KvHeads {
                    count: self.kv_heads,
                    dim: self.dim,
                },
            ],
            pages: pages + 1,
            page_size: self.page_size,
            latent: self.latent,
            dtype: self.dtype,
        };
        let kv = KvPool::new(shape).unwrap();
        for (row, r) in self.rows.iter().enumerate() {
            for position in 0..r.len {
                let page = table[row * columns + position / self.page_size];
                let slot = page * self.page_size as u32 + (position % self.page_size) as u32;
                let (mut k, mut v) = (self.key(row, position), self.value(row, position));
                spoil(row, position, &mut k, &mut v);
                // SAFETY: both are heads of one token, and nobody else is there.
                unsafe { kv.store(1, &[slot], k.as_ptr(), v.as_ptr(), 0) };
            }
        }
        let width = self.heads() * self.value_dim();
        let (stride, out_stride) = (self.heads() * self.dim + 3, width + 5);
        let (mut queries, mut indptr) = (Vec::new(), vec![0u32]);
        for (row, r) in self.rows.iter().enumerate() {
            for position in r.len - r.extend..r.len {
                queries.extend(self.query(row, position));
                queries.extend([f32::NAN; 3]);
            }
            indptr.push((queries.len() / stride) as u32);
        }
        let tokens = queries.len() / stride;
        let positions = self.rows.iter().flat_map(|r| r.len - r.extend..r.len);
        let ends: Vec<u32> = positions.map(|position| self.end_of(position) as u32).collect();
        let ends = if self.images.is_empty() { Vec::new() } else { ends };
        let lens: Vec<_> = self.rows.iter().map(|r| r.len as u32).collect();
        let slots: Vec<_> = (0..self.rows.len() as u32).collect();
        let rows = Rows {
            seq_lens: &lens,
            qo_indptr: &indptr,
            table: &table,
            columns,
            slots: &slots,
            ends: &ends,
        };
        let scale = 1.0 / (self.dim as f32).sqrt();
        let attention = Attention::new(how.isa, self.heads(), self.kv_heads, self.dim, scale, 0.0).unwrap();
        let attention = match self.latent {
            Some(size) => attention.with_values_of_keys(size),
            None => attention,
        };
        let mut plan = attention.plan(&kv, how.threads, &[None, self.window]);
        plan.share(how.sharing);
        // Built twice: a plan keeps nothing of the previous step.
        plan.build(&rows).unwrap();
        plan.build(&rows).unwrap();
        let mut out = vec![7.0f32; tokens * out_stride];
        let sink = |head| self.sink(head) * std::f32::consts::LOG2_E;
        let sinks: Vec<f32> = (0..self.heads()).map(sink).collect();
        let call = Call {
            rows,
            kv: &kv,
            layer: 1,
            kv_layer: 1,
            queries: queries.as_ptr(),
            query_stride: stride,
            out: out.as_mut_ptr(),
            out_stride,
            sinks: self.sinks.then_some(&sinks),
            distances: None,
        };
        for merging in [false, true] {
            let next = AtomicUsize::new(0);
            let units = if merging { plan.merges(1) } else { plan.units(1) };
            std::thread::scope(|s| {
                for _ in 0..how.threads {
                    s.spawn(|| {
                        let call = &call;
                        let mut scratch = attention.scratch();
                        loop {
                            let unit = next.fetch_add(1, Ordering::Relaxed);
                            if unit >= units {
                                break;
                            }
                            // SAFETY: every unit is claimed once, merges after all units; all is alive.
                            unsafe {
                                if merging {
                                    attention.merge(&plan, unit, call);
                                } else {
                                    attention.run_unit(&plan, unit, call, &mut scratch);
                                }
                            }
                        }
                    });
                }
            });
        }
        let mut dense = Vec::new();
        for row in out.chunks(out_stride) {
            dense.extend(&row[..width]);
            assert_eq!(row[width..], [7.0; 5], "wrote past a token's heads");
        }
        dense
    }

    /// Returns the outputs of the last token of row `row`.
    pub fn last<'a>(&self, out: &'a [f32], row: usize) -> &'a [f32] {
        let width = self.heads() * self.value_dim();
        let end: usize = self.rows[..=row].iter().map(|r| r.extend).sum();
        &out[(end - 1) * width..end * width]
    }

    pub fn with(&self, change: impl Fn(&mut Case)) -> Case {
        let mut case = self.clone();
        change(&mut case);
        case
    }
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn assert_near(got: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*g) - e).abs() <= bound, "number {i}: {g} is not {e}");
    }
}

/// Returns every combination of options that this machine supports.
pub fn ways() -> Vec<How> {
    let mut all = Vec::new();
    for isa in Isa::here() {
        for (threads, sharing) in [(1, true), (2, false), (3, true)] {
            all.push(How { isa, threads, sharing });
        }
    }
    all
}

pub fn alone(len: usize, extend: usize) -> Row {
    Row {
        len,
        extend,
        family: 0,
        shared: 0,
    }
}

pub fn small() -> Case {
    Case {
        kv_heads: 2,
        group: 3,
        dim: 64,
        latent: None,
        page_size: 16,
        dtype: KvDtype::F32,
        window: None,
        sinks: false,
        rows: vec![alone(1, 1), alone(130, 1), alone(77, 77), alone(200, 40), alone(64, 1)],
        images: Vec::new(),
    }
}
