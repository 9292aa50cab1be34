//! Attention against a plain softmax in f64, and against itself: what may not change a bit.
//!
//! Doesn't know: how steps are cut into units.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};

use minisgl_cpu::attention::{Attention, Call, Rows};
use minisgl_cpu::kernels::Isa;
use minisgl_cpu::kv::{KvDtype, KvPool, KvShape};
use proptest::prelude::*;

/// A row of a step: who it shares its first `shared` tokens with is decided by `family`.
#[derive(Clone, Copy, Debug)]
struct Row {
    len: usize,
    extend: usize,
    family: u64,
    shared: usize,
}

#[derive(Clone, Debug)]
struct Case {
    kv_heads: usize,
    group: usize,
    dim: usize,
    page_size: usize,
    dtype: KvDtype,
    window: Option<usize>,
    rows: Vec<Row>,
}

/// How a case is run; none of it may change the result.
#[derive(Clone, Copy, Debug)]
struct How {
    isa: Isa,
    threads: usize,
    sharing: bool,
}

const PLAIN: How = How {
    isa: Isa::Scalar,
    threads: 1,
    sharing: false,
};

/// A number from -1 to 1 that depends on all of `at`.
fn noise(at: [u64; 4]) -> f32 {
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
    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Whose token it is: the family's or the row's own.
    fn owner(&self, row: usize, position: usize) -> u64 {
        let r = self.rows[row];
        if position < r.shared {
            r.family
        } else {
            1000 + row as u64
        }
    }

    fn key(&self, row: usize, position: usize) -> Vec<f32> {
        let owner = self.owner(row, position);
        let count = self.kv_heads * self.dim;
        (0..count)
            .map(|i| 2.0 * noise([1, owner, position as u64, i as u64]))
            .collect()
    }

    fn value(&self, row: usize, position: usize) -> Vec<f32> {
        let owner = self.owner(row, position);
        let count = self.kv_heads * self.dim;
        (0..count)
            .map(|i| noise([2, owner, position as u64, i as u64]))
            .collect()
    }

    fn query(&self, row: usize, position: usize) -> Vec<f32> {
        let count = self.heads() * self.dim;
        (0..count)
            .map(|i| 3.0 * noise([3, row as u64, position as u64, i as u64]))
            .collect()
    }

    /// What each token of the step sees, in f64.
    fn expected(&self) -> Vec<f64> {
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
                        q.iter()
                            .zip(k)
                            .map(|(q, k)| f64::from(*q) * f64::from(*k))
                            .sum::<f64>()
                            / (self.dim as f64).sqrt()
                    };
                    let scores: Vec<_> = (from..=position).map(score).collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<_> = scores.iter().map(|s| (s - most).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for d in 0..self.dim {
                        let seen = values[from..].iter().zip(&weights);
                        out.push(seen.map(|(v, w)| w * f64::from(v[kv + d])).sum::<f64>() / sum);
                    }
                }
            }
        }
        out
    }

    /// Page tables: whole pages of a shared prefix are the family's, the rest the row's own, in an order of no meaning.
    fn tables(&self) -> (Vec<u32>, usize, usize) {
        let columns = self
            .rows
            .iter()
            .map(|r| r.len.div_ceil(self.page_size))
            .max()
            .unwrap()
            + 1;
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

    fn run(&self, how: How) -> Vec<f32> {
        self.run_with(how, |_, _, _| {})
    }

    fn run_with(&self, how: How, spoil: impl Fn(usize, usize, &mut [f32])) -> Vec<f32> {
        let (table, columns, pages) = self.tables();
        let shape = KvShape {
            layers: 2,
            pages: pages + 1,
            page_size: self.page_size,
            kv_heads: self.kv_heads,
            head_dim: self.dim,
            dtype: self.dtype,
        };
        let kv = KvPool::new(shape).unwrap();
        for (row, r) in self.rows.iter().enumerate() {
            for position in 0..r.len {
                let page = table[row * columns + position / self.page_size];
                let slot = page * self.page_size as u32 + (position % self.page_size) as u32;
                let (mut k, v) = (self.key(row, position), self.value(row, position));
                spoil(row, position, &mut k);
                // SAFETY: both are heads of one token, and nobody else is there.
                unsafe { kv.store(1, &[slot], k.as_ptr(), v.as_ptr(), 0) };
            }
        }
        let width = self.heads() * self.dim;
        let (stride, out_stride) = (width + 3, width + 5);
        let (mut queries, mut indptr) = (Vec::new(), vec![0u32]);
        for (row, r) in self.rows.iter().enumerate() {
            for position in r.len - r.extend..r.len {
                queries.extend(self.query(row, position));
                queries.extend([f32::NAN; 3]);
            }
            indptr.push((queries.len() / stride) as u32);
        }
        let tokens = queries.len() / stride;
        let lens: Vec<_> = self.rows.iter().map(|r| r.len as u32).collect();
        let slots: Vec<_> = (0..self.rows.len() as u32).collect();
        let rows = Rows {
            seq_lens: &lens,
            qo_indptr: &indptr,
            table: &table,
            columns,
            slots: &slots,
        };
        let scale = 1.0 / (self.dim as f32).sqrt();
        let attention =
            Attention::new(how.isa, self.heads(), self.kv_heads, self.dim, scale).unwrap();
        let mut plan = attention.plan(&kv, how.threads, &[None, self.window]);
        plan.share(how.sharing);
        // Twice: a plan forgets the step before.
        plan.build(&rows).unwrap();
        plan.build(&rows).unwrap();
        let mut out = vec![7.0f32; tokens * out_stride];
        let call = Call {
            rows,
            kv: &kv,
            layer: 1,
            queries: queries.as_ptr(),
            query_stride: stride,
            out: out.as_mut_ptr(),
            out_stride,
        };
        for merging in [false, true] {
            let next = AtomicUsize::new(0);
            let units = if merging {
                plan.merges(1)
            } else {
                plan.units(1)
            };
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

    /// Outputs of the last token of row `row`.
    fn last<'a>(&self, out: &'a [f32], row: usize) -> &'a [f32] {
        let width = self.heads() * self.dim;
        let end: usize = self.rows[..=row].iter().map(|r| r.extend).sum();
        &out[(end - 1) * width..end * width]
    }

    fn with(&self, change: impl Fn(&mut Case)) -> Case {
        let mut case = self.clone();
        change(&mut case);
        case
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn assert_near(got: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (f64::from(*g) - e).abs() <= bound,
            "number {i}: {g} is not {e}"
        );
    }
}

/// Every way that this machine has.
fn ways() -> Vec<How> {
    let mut all = Vec::new();
    for isa in Isa::here() {
        for (threads, sharing) in [(1, true), (2, false), (3, true)] {
            all.push(How {
                isa,
                threads,
                sharing,
            });
        }
    }
    all
}

fn alone(len: usize, extend: usize) -> Row {
    Row {
        len,
        extend,
        family: 0,
        shared: 0,
    }
}

fn small() -> Case {
    Case {
        kv_heads: 2,
        group: 3,
        dim: 64,
        page_size: 16,
        dtype: KvDtype::F32,
        window: None,
        rows: vec![
            alone(1, 1),
            alone(130, 1),
            alone(77, 77),
            alone(200, 40),
            alone(64, 1),
        ],
    }
}

#[test]
fn a_softmax() {
    let case = small();
    assert_near(&case.run(PLAIN), &case.expected(), 2e-6);
}

#[test]
fn half_floats_and_bytes_lose_what_they_say() {
    for (dtype, bound) in [(KvDtype::F16, 2e-3), (KvDtype::Q8, 3e-2)] {
        let case = small().with(|c| c.dtype = dtype);
        assert_near(&case.run(PLAIN), &case.expected(), bound);
    }
}

#[test]
fn a_window_hides_the_rest() {
    for window in [1, 5, 64, 65, 100] {
        let case = small().with(|c| c.window = Some(window));
        assert_near(&case.run(PLAIN), &case.expected(), 2e-6);
        // A key outside of all windows does not count, whatever it is.
        let spoiled = case.run_with(PLAIN, |row, position, k| {
            let r = case.rows[row];
            if position + window < r.len - r.extend + 1 {
                k.fill(f32::NAN);
            }
        });
        assert_eq!(bits(&spoiled), bits(&case.run(PLAIN)));
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    for spoil in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let case = small();
        for how in ways() {
            let out = case.run_with(how, |row, position, k| {
                if row == 3 && position == 100 {
                    k.fill(spoil);
                }
            });
            assert!(
                case.last(&out, 3).iter().all(|x| !x.is_finite()),
                "{spoil} {how:?}"
            );
            assert!(case.last(&out, 1).iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn a_prompt_at_once_in_chunks_and_token_by_token() {
    for window in [None, Some(70)] {
        let len = 150;
        let case = |len, extend| {
            small().with(|c| {
                c.window = window;
                c.rows = vec![alone(len, extend)];
            })
        };
        let whole = case(len, len).run(PLAIN);
        let width = case(1, 1).heads() * 64;
        for step in [1, 7, 64, 100] {
            let mut parts = Vec::new();
            for from in (0..len).step_by(step) {
                let to = len.min(from + step);
                parts.extend(case(to, to - from).run(PLAIN));
            }
            assert_eq!(parts.len(), len * width);
            assert_eq!(bits(&parts), bits(&whole), "steps of {step}");
        }
    }
}

#[test]
fn many_rows_of_one_prefix() {
    let rows = (0..40).map(|i| Row {
        len: 1060 + i * 5,
        extend: 1,
        family: 1,
        shared: 1024,
    });
    let case = small().with(|c| {
        c.dtype = KvDtype::F16;
        c.kv_heads = 1;
        c.rows = rows.clone().collect();
    });
    let plain = case.run(PLAIN);
    assert_near(&plain, &case.expected(), 2e-3);
    for how in ways() {
        assert_eq!(bits(&case.run(how)), bits(&plain), "{how:?}");
    }
    let alone = case.with(|c| c.rows.truncate(1)).run(PLAIN);
    assert_eq!(bits(&alone), bits(case.last(&plain, 0)));
}

#[test]
fn one_long_row_on_many_threads() {
    let case = small().with(|c| c.rows = vec![alone(5000, 1), alone(3000, 20)]);
    let plain = case.run(PLAIN);
    for how in ways() {
        assert_eq!(bits(&case.run(how)), bits(&plain), "{how:?}");
    }
}

#[test]
fn a_damaged_plan_is_an_error() {
    let shape = KvShape {
        layers: 1,
        pages: 4,
        page_size: 16,
        kv_heads: 1,
        head_dim: 8,
        dtype: KvDtype::F16,
    };
    let kv = KvPool::new(shape).unwrap();
    let attention = Attention::new(Isa::Scalar, 1, 1, 8, 1.0).unwrap();
    let mut plan = attention.plan(&kv, 1, &[None]);
    let mut build = |lens: &[u32], indptr: &[u32], table: &[u32], slots: &[u32]| {
        plan.build(&Rows {
            seq_lens: lens,
            qo_indptr: indptr,
            table,
            columns: 2,
            slots,
        })
        .is_ok()
    };
    assert!(build(&[20], &[0, 1], &[0, 3], &[0]));
    assert!(
        !build(&[20], &[0, 1], &[0, 4], &[0]),
        "a page past the pool"
    );
    assert!(
        !build(&[33], &[0, 1], &[0, 3], &[0]),
        "longer than its table"
    );
    assert!(!build(&[20], &[0, 1], &[0, 3], &[1]), "no such table");
    assert!(
        !build(&[20], &[0, 21], &[0, 3], &[0]),
        "more tokens than length"
    );
    assert!(!build(&[20], &[1, 0], &[0, 3], &[0]), "falling sums");
    assert!(!build(&[20], &[0, 1, 2], &[0, 3], &[0]), "a sum too many");
    for (layers, pages, dim) in [
        (0, 1, 8),
        (1, 0, 8),
        (1, 1, 0),
        (1, 1, 512),
        (1 << 40, 1 << 40, 8),
    ] {
        assert!(
            KvPool::new(KvShape {
                layers,
                pages,
                head_dim: dim,
                ..shape
            })
            .is_err()
        );
    }
    for (heads, kv_heads, dim) in [(3, 2, 8), (0, 1, 8), (17, 1, 8), (4, 0, 8), (4, 2, 300)] {
        assert!(Attention::new(Isa::Scalar, heads, kv_heads, dim, 1.0).is_err());
    }
}

fn row() -> impl Strategy<Value = Row> {
    let kinds = prop_oneof![3 => Just(1usize), 1 => 1usize..90];
    (1usize..320, kinds, 0u64..3, 0usize..300).prop_map(|(len, extend, family, shared)| {
        let extend = extend.min(len);
        // What a row computes now is its own.
        Row {
            len,
            extend,
            family,
            shared: shared.min(len - extend),
        }
    })
}

fn case() -> impl Strategy<Value = Case> {
    let dims = prop_oneof![
        Just(64usize),
        Just(128),
        (1usize..40).prop_map(|d| d * 2),
        Just(256),
        Just(33)
    ];
    let dtype = prop_oneof![Just(KvDtype::F16), Just(KvDtype::F32), Just(KvDtype::Q8)];
    let page = prop_oneof![
        Just(1usize),
        Just(2),
        Just(4),
        Just(16),
        Just(12),
        Just(48),
        Just(128)
    ];
    let window = prop_oneof![2 => Just(None), 1 => (1usize..300).prop_map(Some)];
    let rows = proptest::collection::vec(row(), 1..9);
    (1usize..4, 1usize..17, dims, page, dtype, window, rows).prop_map(
        |(kv_heads, group, dim, page_size, dtype, window, rows)| Case {
            kv_heads,
            group,
            dim,
            page_size,
            dtype,
            window,
            rows,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").map_or(24, |n| n.parse().unwrap())
    ))]

    #[test]
    fn any_step_is_a_softmax_and_the_same_bits_however_it_is_run(case in case()) {
        let plain = case.run(PLAIN);
        let bound = match case.dtype {
            KvDtype::F32 => 1e-5,
            KvDtype::F16 => 1e-2,
            KvDtype::Q8 => 0.2,
        };
        assert_near(&plain, &case.expected(), bound);
        for how in ways() {
            prop_assert_eq!(bits(&case.run(how)), bits(&plain), "{:?}", how);
        }
        let row = case.rows.len() / 2;
        for page_size in [1, 4, 16] {
            // Rows of their own: what is shared by pages is another matter with other pages.
            let other = case.with(|c| c.page_size = page_size);
            prop_assert_eq!(bits(&other.run(PLAIN)), bits(&plain), "pages of {}", page_size);
        }
        let mut alone = case.clone();
        alone.rows = vec![case.rows[row]];
        // The row's own tokens are numbered by its place.
        if row == 0 {
            prop_assert_eq!(bits(alone.last(&alone.run(PLAIN), 0)), bits(case.last(&plain, 0)));
        }
    }
}
