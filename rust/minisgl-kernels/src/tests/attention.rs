//! Tests of attention against a plain softmax in f64, and against itself where no bit may change.

use crate::attention::{Attention, Rows};
use crate::kernels::{Isa, plain};
use crate::kv::{KvDtype, KvHeads, KvPool, KvShape};
use proptest::prelude::*;

use crate::tests::attention_case::{Case, PLAIN, Row, alone, assert_near, bits, noise, small, ways};

#[test]
fn softmax_matches_f64() {
    let case = small();
    assert_near(&case.run(PLAIN), &case.expected(), 2e-6);
}

#[test]
fn kv_dtype_error_stays_below_bound() {
    for (dtype, bound) in [(KvDtype::F16, 2e-3), (KvDtype::Q8, 3e-2), (KvDtype::Q4, 0.4)] {
        let case = small().with(|c| c.dtype = dtype);
        assert_near(&case.run(PLAIN), &case.expected(), bound);
    }
}

/// Makes elements integers from -8 to 7 after the Hadamard transform, so that q4 stores them exactly.
fn four_bits(numbers: &mut [f32], dim: usize) {
    for block in numbers.chunks_mut(32) {
        for x in block.iter_mut() {
            *x = (*x * 3.0).round();
        }
        block[7] = -8.0;
    }
    numbers
        .chunks_mut(dim)
        .for_each(|head| plain::hadamard_transform(head, dim));
}

#[test]
fn values_that_fit_q4_are_stored_exactly() {
    for (dim, page_size) in [(32, 16), (64, 1), (64, 16), (128, 4), (256, 48)] {
        let case = small().with(|c| {
            c.dim = dim;
            c.page_size = page_size;
        });
        let fit = |_, _, k: &mut [f32], v: &mut [f32]| [k, v].into_iter().for_each(|x| four_bits(x, dim));
        let expected: Vec<f64> = case.run_with(PLAIN, fit).into_iter().map(f64::from).collect();
        let case = case.with(|c| c.dtype = KvDtype::Q4);
        let found = case.run_with(PLAIN, fit);
        assert_near(&found, &expected, 2e-4);
        for how in ways() {
            assert_eq!(bits(&case.run_with(how, fit)), bits(&found), "{how:?}");
        }
    }
}

#[test]
fn the_hadamard_transform_is_its_own_inverse_and_keeps_products() {
    for size in [1usize, 2, 32, 64, 128, 512] {
        let numbers = |which: u64| -> Vec<f32> { (0..1024).map(|i| noise([which, i, 0, 0])).collect() };
        let (one, other) = (numbers(1), numbers(2));
        let turned = |x: &[f32]| {
            let mut x = x.to_vec();
            plain::hadamard_transform(&mut x, size);
            x
        };
        let back: Vec<f64> = turned(&turned(&one)).into_iter().map(f64::from).collect();
        assert_near(&one, &back, 1e-6);
        let kept = plain::dot(&turned(&one), &turned(&other)) - plain::dot(&one, &other);
        assert!(kept.abs() < 1e-4, "{size}: {kept}");
    }
}

#[test]
fn an_outlier_costs_q4_little_precision() {
    let stands_out = |_, _, k: &mut [f32], _: &mut [f32]| k.iter_mut().step_by(64).for_each(|x| *x = 40.0);
    let error = |dtype| {
        let case = small().with(|c| c.rows = vec![alone(100, 1)]);
        let expected = case.run_with(PLAIN, stands_out);
        let found = case.with(|c| c.dtype = dtype).run_with(PLAIN, stands_out);
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        off.sum::<f32>() / found.len() as f32
    };
    let mut numbers = [0.5; 64];
    numbers[0] = 40.0;
    // without the transform, 0.5 next to 40 would be 0 in 4 bits
    let plain_codes = plain::quantize_q4(numbers.first_chunk().unwrap()).1;
    assert_eq!(plain_codes[1..], [8; 31]);
    assert!(error(KvDtype::Q4) < 0.25, "{}", error(KvDtype::Q4));
}

#[test]
fn q4_takes_9_32nds_of_f16_and_needs_whole_blocks() {
    let shape = |dtype, dim, latent| KvShape {
        layers: vec![KvHeads { count: 2, dim }],
        pages: 4,
        page_size: 16,
        latent,
        dtype,
    };
    let of = |dtype, dim| KvPool::page_bytes(&shape(dtype, dim, None));
    for dim in [64, 128, 256] {
        assert_eq!(of(KvDtype::Q4, dim) * 32, of(KvDtype::F16, dim) * 9);
    }
    for (dim, latent) in [(80, None), (33, None), (96, Some(80))] {
        let told = KvPool::new(shape(KvDtype::Q4, dim, latent)).err().unwrap().to_string();
        let odd = if latent.is_some() { 80 } else { dim };
        assert!(
            told.contains(&format!("--kv-dtype q4: the model has heads of {odd} elements")),
            "{told}"
        );
        assert!(KvPool::new(shape(KvDtype::Q8, dim, latent)).is_ok());
    }
}

#[test]
fn keys_outside_a_window_have_no_effect() {
    for window in [1, 5, 64, 65, 100] {
        let case = small().with(|c| c.window = Some(window));
        assert_near(&case.run(PLAIN), &case.expected(), 2e-6);
        let sinks = case.with(|c| c.sinks = true);
        assert_near(&sinks.run(PLAIN), &sinks.expected(), 2e-6);
        // A key outside of all windows has no effect, whatever its value.
        let spoiled = case.run_with(PLAIN, |row, position, k, _| {
            let r = case.rows[row];
            if position + window < r.len - r.extend + 1 {
                k.fill(f32::NAN);
            }
        });
        assert_eq!(bits(&spoiled), bits(&case.run(PLAIN)));
    }
}

#[test]
fn keys_that_are_not_finite_give_output_that_is_not_finite() {
    let kinds = [KvDtype::F32, KvDtype::F16, KvDtype::Q8, KvDtype::Q4];
    for (spoil, dtype) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
        .into_iter()
        .flat_map(|spoil| kinds.map(|dtype| (spoil, dtype)))
    {
        let case = small().with(|c| c.dtype = dtype);
        for how in ways() {
            let out = case.run_with(how, |row, position, k, _| {
                if row == 3 && position == 100 {
                    k.fill(spoil);
                }
            });
            let all = case.last(&out, 3).iter().all(|x| !x.is_finite());
            assert!(all, "{spoil} {dtype:?} {how:?}");
            assert!(case.last(&out, 1).iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn a_prompt_has_the_same_bits_at_once_in_chunks_and_by_token() {
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
fn tokens_of_an_image_attend_to_all_of_it() {
    for window in [None, Some(20), Some(70)] {
        let case = |parts: &[(usize, usize)]| {
            small().with(|c| {
                c.window = window;
                c.images = vec![10..60, 100..230];
                c.rows = parts.iter().map(|(len, extend)| alone(*len, *extend)).collect();
            })
        };
        let whole = case(&[(250, 250)]);
        let plain = whole.run(PLAIN);
        assert_near(&plain, &whole.expected(), 2e-6);
        for how in ways() {
            assert_eq!(bits(&whole.run(how)), bits(&plain), "{how:?}");
        }
        // chunks that begin or end at an image, or begin within one
        let mut parts = Vec::new();
        for part in [(60, 60), (100, 40), (230, 130), (231, 1), (250, 19)] {
            parts.extend(case(&[part]).run(PLAIN));
        }
        assert_eq!(bits(&parts), bits(&plain));
        let rest = case(&[(250, 41)]).run(PLAIN);
        assert_eq!(bits(&rest), bits(&plain[plain.len() - rest.len()..]));
        assert_ne!(bits(&plain), bits(&whole.with(|c| c.images.clear()).run(PLAIN)));
    }
}

#[test]
fn rows_that_share_a_prefix_keep_their_bits() {
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
fn a_long_row_split_over_threads_keeps_its_bits() {
    let case = small().with(|c| c.rows = vec![alone(5000, 1), alone(3000, 20)]);
    let plain = case.run(PLAIN);
    for how in ways() {
        assert_eq!(bits(&case.run(how)), bits(&plain), "{how:?}");
    }
}

#[test]
fn a_damaged_plan_is_an_error() {
    let shape = KvShape {
        layers: vec![KvHeads { count: 1, dim: 8 }],
        pages: 4,
        page_size: 16,
        latent: None,
        dtype: KvDtype::F16,
    };
    let kv = KvPool::new(shape.clone()).unwrap();
    let attention = Attention::new(Isa::Scalar, 1, 1, 8, 1.0, 0.0).unwrap();
    let mut plan = attention.plan(&kv, 1, &[None]);
    let mut build_with = |lens: &[u32], indptr: &[u32], table: &[u32], slots: &[u32], ends: &[u32]| {
        plan.build(&Rows {
            seq_lens: lens,
            qo_indptr: indptr,
            table,
            columns: 2,
            slots,
            ends,
        })
        .is_ok()
    };
    assert!(build_with(&[20], &[0, 2], &[0, 3], &[0], &[19, 20]));
    for ends in [&[19][..], &[18, 20], &[20, 19], &[19, 21]] {
        assert!(!build_with(&[20], &[0, 2], &[0, 3], &[0], ends), "ends of {ends:?}");
    }
    let mut build =
        |lens: &[u32], indptr: &[u32], table: &[u32], slots: &[u32]| build_with(lens, indptr, table, slots, &[]);
    assert!(build(&[20], &[0, 1], &[0, 3], &[0]));
    assert!(!build(&[20], &[0, 1], &[0, 4], &[0]), "a page past the pool");
    assert!(!build(&[33], &[0, 1], &[0, 3], &[0]), "longer than its table");
    assert!(!build(&[20], &[0, 1], &[0, 3], &[1]), "no such table");
    assert!(!build(&[20], &[0, 21], &[0, 3], &[0]), "more tokens than length");
    assert!(!build(&[20], &[1, 0], &[0, 3], &[0]), "falling sums");
    assert!(!build(&[20], &[0, 1, 2], &[0, 3], &[0]), "a sum too many");
    assert!(
        KvPool::new(KvShape {
            layers: Vec::new(),
            ..shape.clone()
        })
        .is_ok(),
        "a model without attention"
    );
    for (layers, pages, dim) in [(1, 0, 8), (1, 1, 0), (1, 1, 4096), (1 << 10, 1 << 60, 8)] {
        let layers = vec![KvHeads { count: 1, dim }; layers];
        assert!(
            KvPool::new(KvShape {
                layers,
                pages,
                ..shape.clone()
            })
            .is_err()
        );
    }
    for (heads, kv_heads, dim) in [(3, 2, 8), (0, 1, 8), (4, 0, 8), (4, 2, 4096)] {
        assert!(Attention::new(Isa::Scalar, heads, kv_heads, dim, 1.0, 0.0).is_err());
    }
}

fn row() -> impl Strategy<Value = Row> {
    let kinds = prop_oneof![3 => Just(1usize), 1 => 1usize..90];
    (1usize..320, kinds, 0u64..3, 0usize..300).prop_map(|(len, extend, family, shared)| {
        let extend = extend.min(len);
        // The tokens that a row computes now are its own, not shared.
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
        Just(512),
        Just(33)
    ];
    let dtype = prop_oneof![
        Just(KvDtype::F16),
        Just(KvDtype::F32),
        Just(KvDtype::Q8),
        Just(KvDtype::Q4)
    ];
    let page = prop_oneof![Just(1usize), Just(2), Just(4), Just(16), Just(12), Just(48), Just(128)];
    let window = prop_oneof![2 => Just(None), 1 => (1usize..300).prop_map(Some)];
    let rows = proptest::collection::vec(row(), 1..9);
    (
        1usize..4,
        1usize..20,
        dims,
        page,
        dtype,
        window,
        any::<bool>(),
        rows,
        any::<bool>(),
    )
        .prop_map(
            |(kv_heads, group, dim, page_size, dtype, window, sinks, rows, latent)| {
                let block = if dtype == KvDtype::Q4 { 32 } else { 16 };
                let dim = if dtype == KvDtype::Q4 {
                    dim.next_multiple_of(block)
                } else {
                    dim
                };
                Case {
                    kv_heads,
                    group: group.min((2048 / (kv_heads * dim)).max(1)), // wide heads in small groups: it takes half as long
                    dim,
                    latent: (latent && dim >= block).then_some(dim / block * block),
                    page_size,
                    dtype,
                    window,
                    sinks,
                    rows,
                    images: Vec::new(),
                }
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
            KvDtype::Q4 => 2.0,
        };
        assert_near(&plain, &case.expected(), bound);
        for how in ways() {
            prop_assert_eq!(bits(&case.run(how)), bits(&plain), "{:?}", how);
        }
        let row = case.rows.len() / 2;
        for page_size in [1, 4, 16] {
            // Unshared rows: sharing depends on the pages, which differ here.
            let other = case.with(|c| c.page_size = page_size);
            prop_assert_eq!(bits(&other.run(PLAIN)), bits(&plain), "pages of {}", page_size);
        }
        let mut alone = case.clone();
        alone.rows = vec![case.rows[row]];
        // The values of a row's own tokens depend on the row's index.
        if row == 0 {
            prop_assert_eq!(bits(alone.last(&alone.run(PLAIN), 0)), bits(case.last(&plain, 0)));
        }
    }
}
