//! Tests of slots, logit changes and sampling against their definitions.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use minisgl_kernels::{Isa, softmax};
use proptest::prelude::*;

use super::*;

fn bound(params: Params, prompt: &[i32], output: &[i32], vocab: usize) -> Slots {
    let mut slots = Slots::new(1, vocab, &[1]);
    slots.bind(
        0,
        Binding {
            req_id: 7,
            params,
            tokens: [prompt, output].concat(),
            num_prompt: prompt.len(),
            ..Binding::default()
        },
    );
    slots
}

fn greedy() -> Params {
    Params {
        temperature: 0.0,
        ..Params::default()
    }
}

/// Returns the ids of tokens that cannot be sampled.
fn banned(slots: &Slots, position: u64, vocab: usize) -> Vec<usize> {
    let mut logits: Vec<f32> = (0..vocab).map(|i| i as f32 * 0.1 - 1.0).collect();
    slots.apply(0, position, &mut logits);
    (0..vocab).filter(|&i| logits[i] == f32::NEG_INFINITY).collect()
}

#[test]
fn greedy_is_the_first_maximum() {
    let mut logits = vec![0.0_f32; 151_936];
    (logits[7], logits[9]) = (2.0, 2.0);
    assert_eq!(argmax(&logits, 0).id, 7);
    (logits[100_000], logits[140_000]) = (5.0, 5.0);
    logits[3] = f32::NAN;
    assert_eq!(argmax(&logits, 0).id, 100_000);
    assert_eq!(argmax(&[f32::NEG_INFINITY; 5], 0).id, 0);
    assert_eq!(argmax(&[f32::NAN; 5], 0).id, 0);
    assert_eq!(argmax(&[-0.0, 0.0], 0).id, 0);
    assert_eq!(argmax(&[], 0), Best::NONE);
}

#[test]
fn ties_at_the_cut_go_to_lower_ids() {
    let params = Params {
        top_k: 3,
        seed: 8,
        ..Params::default()
    };
    let mut scratch = Scratch::default();
    let mut seen = [0; 6];
    for position in 0..2000 {
        seen[sample(&params, position, &[0.0; 6], &mut scratch) as usize] += 1;
    }
    assert!(seen[..3].iter().all(|&n| n > 500) && seen[3..] == [0; 3], "{seen:?}");
}

#[test]
fn samples_follow_the_distribution() {
    // chi-square, 7 degrees of freedom: 24.3 is the 0.1 % point
    let logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.2_f32];
    let mut scratch = Scratch::default();
    for temperature in [0.7, 1.0, 1.8] {
        let params = Params {
            temperature,
            seed: 11,
            ..Params::default()
        };
        let mut observed = [0.0; 8];
        for position in 0..20_000 {
            observed[sample(&params, position, &logits, &mut scratch) as usize] += 1.0;
        }
        let shares = logits.map(|x| f64::from(x / temperature).exp());
        let total: f64 = shares.iter().sum();
        let expected = shares.map(|share| share / total * 20_000.0);
        let chi: f64 = (0..8).map(|i| (observed[i] - expected[i]).powi(2) / expected[i]).sum();
        assert!(chi < 24.3, "{temperature}: {chi}");
    }
}

#[test]
fn rows_without_finite_probabilities_still_give_a_token() {
    let mut scratch = Scratch::default();
    for logits in [
        [f32::NEG_INFINITY; 4],
        [f32::NAN; 4],
        [f32::INFINITY; 4],
        [1.0, 9.0, f32::NAN, 2.0],
    ] {
        for (top_k, top_p, temperature) in [(-1, 1.0, 1.0), (2, 0.5, 1.0), (1, 1.0, 1e-40)] {
            let params = Params {
                temperature,
                top_k,
                top_p,
                ..Params::default()
            };
            assert!(sample(&params, 3, &logits, &mut scratch) < 4);
        }
    }
}

#[test]
fn single_allowed_token_is_sampled() {
    let params = Params {
        allowed_token_ids: vec![5, 99],
        bad_token_ids: vec![vec![5]],
        ..Params::default()
    };
    let slots = bound(params, &[1, 2], &[], 8);
    let drawn = slots.draw(0, 2, &mut [0.5; 8], None, &mut Scratch::default());
    assert_eq!(drawn.token, 5); // bad words are ignored if nothing else is left
}

#[test]
fn bad_words_follow_the_output_only() {
    let params = Params {
        bad_token_ids: vec![vec![4, 5, 6], vec![5, 7], vec![8], vec![99, 3], vec![]],
        ..greedy()
    };
    for (prompt, output, expected) in [
        (&[4, 5][..], &[][..], &[8][..]),
        (&[4], &[5], &[7, 8]),
        (&[1], &[4, 5], &[6, 7, 8]),
        (&[1], &[4, 5, 9], &[8]),
    ] {
        let whole = bound(params.clone(), prompt, output, 12);
        let mut grown = bound(params.clone(), prompt, &[], 12);
        for &token in output {
            grown.record(0, token as u32);
        }
        assert_eq!(banned(&whole, 9, 12), expected);
        assert_eq!(banned(&grown, 9, 12), expected);
    }
}

#[test]
fn end_tokens_are_banned_before_min_tokens() {
    let params = Params {
        min_tokens: 2,
        stop_token_ids: vec![3, 500],
        ..greedy()
    };
    let slots = bound(params.clone(), &[1, 2, 3], &[], 6);
    assert_eq!(banned(&slots, 3, 6), [1, 3]);
    assert_eq!(banned(&slots, 4, 6), [1, 3]);
    assert!(banned(&slots, 5, 6).is_empty());
    let ignoring = Params {
        ignore_eos: true,
        ..params
    };
    assert_eq!(banned(&bound(ignoring, &[1, 2, 3], &[], 6), 3, 6), [3]);
}

#[test]
fn penalties_count_the_output_and_restart_on_bind() {
    let params = Params {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..greedy()
    };
    let mut slots = bound(params, &[0, 1], &[1, 2, 2], 5);
    let mut logits = [1.0, -1.0, 1.0, 1.0, -1.0];
    slots.apply(0, 5, &mut logits);
    assert_eq!(logits, [0.5, -2.75, -0.75, 1.0, -1.0]);
    slots.record(0, 3);
    let mut logits = [1.0; 5];
    slots.apply(0, 6, &mut logits);
    assert_eq!(logits, [0.5, -0.25, -0.75, -0.25, 1.0]);
    slots.bind(0, Binding::default());
    let mut logits = [1.0; 5];
    slots.apply(0, 6, &mut logits);
    assert_eq!(logits, [1.0; 5]);
}

#[test]
fn log_probabilities_ignore_logit_changes() {
    let params = Params {
        logprobs: Some(2),
        logit_bias: vec![(0, 100.0)],
        ..greedy()
    };
    let slots = bound(params, &[1], &[], 4);
    let mut logits = [0.0, 1.0, 2.0, 2.0];
    let drawn = slots.draw(0, 1, &mut logits, None, &mut Scratch::default());
    assert_eq!((drawn.token, logits[0]), (0, 100.0));
    let found = drawn.logprobs.unwrap();
    let norm = (1.0 + 1f32.exp() + 2.0 * 2f32.exp()).ln();
    assert_eq!(found.top_ids, [2, 3]);
    assert!((found.own + norm).abs() < 1e-6 && (found.top[0] - (2.0 - norm)).abs() < 1e-6);
    assert_eq!(logprobs(Isa::Scalar, &logits, 0, 9).top_ids, [0, 2, 3, 1]);
}

#[test]
fn mask_is_applied_before_logit_changes() {
    let params = Params {
        logprobs: Some(4),
        logit_bias: vec![(0, 100.0), (2, -2.0)],
        ..greedy()
    };
    let slots = bound(params, &[1], &[], 4);
    let mut logits = [0.0, 1.0, 3.0, 2.0];
    let drawn = slots.draw(0, 1, &mut logits, Some(&[0b0110]), &mut Scratch::default());
    assert_eq!(logits, [f32::NEG_INFINITY, 1.0, 1.0, f32::NEG_INFINITY]);
    let found = drawn.logprobs.unwrap();
    assert_eq!((drawn.token, found.top_ids), (1, vec![2, 3, 1, 0]));
    let mut logits = [0.0, 1.0, 3.0, 2.0];
    let unlikely = bound(Params::default(), &[1], &[], 4);
    let drawn = unlikely.draw(0, 1, &mut logits, Some(&[0b0001]), &mut Scratch::default());
    assert_eq!(drawn.token, 0);
}

#[test]
fn prompt_part_follows_the_computed_positions() {
    let params = Params {
        prompt_logprobs: Some(3),
        ..greedy()
    };
    let slots = bound(params, &[10, 11, 12, 13, 14], &[15], 20);
    let tokens = |start, count| slots.prompt_part(0, start, count).map(|part| (part.first, part.tokens));
    assert_eq!(tokens(0, 3), Some((1, &[11, 12, 13][..])));
    assert_eq!(tokens(3, 3), Some((4, &[14][..])));
    assert_eq!(tokens(4, 1), None);
    assert_eq!(tokens(40, 1), None);
    assert_eq!(bound(greedy(), &[1, 2], &[], 4).prompt_part(0, 0, 2), None);
}

/// Reference: a stable sort of the whole row, then sums in that order.
fn kept_by_sorting(probabilities: &[f32], top_k: i64, top_p: f32) -> Vec<f32> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
    let mut values: Vec<f32> = order.iter().map(|&id| probabilities[id]).collect();
    if top_k > 0 {
        values.iter_mut().skip(top_k as usize).for_each(|p| *p = 0.0);
    }
    let total: f64 = values.iter().map(|&p| f64::from(p)).sum();
    let (mut mass, mut kept) = (0.0, vec![0.0; probabilities.len()]);
    for (rank, (&id, &p)) in order.iter().zip(&values).enumerate() {
        mass += f64::from(p);
        let enough = mass - f64::from(p) >= f64::from(top_p) * total;
        if !(top_p < 1.0 && enough && rank > 0) {
            kept[id] = p;
        }
    }
    kept
}

/// Reference: all cumulative sums, and the first of them beyond the target.
fn drawn_by_sums(probabilities: &[f32], uniform: f64) -> usize {
    let mut sum = 0.0;
    let sums: Vec<f64> = probabilities
        .iter()
        .map(|&p| {
            sum += f64::from(p);
            sum
        })
        .collect();
    let first = |enough: &dyn Fn(f64) -> bool| sums.iter().position(|&s| enough(s)).unwrap_or(usize::MAX);
    first(&|s| s > uniform * sum).min(first(&|s| s >= sum))
}

proptest! {
    #[test]
    fn sample_equals_that_of_a_full_sort(
        levels in prop::collection::vec(prop_oneof![3 => -60..60_i32, 1 => Just(-2000)], 1..700),
        step in prop_oneof![Just(0.0_f32), Just(0.001), Just(0.11), Just(1.0)],
        temperature in 0.05_f32..2.0,
        top_k in prop_oneof![Just(-1_i64), 1..20_i64, 1..800_i64],
        top_p in prop_oneof![Just(1.0_f32), 0.0001_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..1.0],
        seed: i64,
    ) {
        let logits: Vec<f32> = levels.iter().map(|&x| x as f32 * step).collect();
        let mut probabilities = vec![0.0; logits.len()];
        prop_assert!(softmax::softmax(Isa::Scalar, &logits, temperature, &mut probabilities));
        let floor = softmax::max(&probabilities) * min_p;
        if min_p > 0.0 {
            probabilities.iter_mut().filter(|p| **p < floor).for_each(|p| *p = 0.0);
        }
        let kept = kept_by_sorting(&probabilities, top_k, top_p);
        let params = Params { temperature, top_k, top_p, min_p, seed, ..Params::default() };
        let mut scratch = Scratch::default();
        for position in 0..8 {
            let token = sample(&params, position, &logits, &mut scratch) as usize;
            prop_assert_eq!(token, drawn_by_sums(&kept, uniform(seed, position)));
        }
    }

    #[test]
    fn argmax_of_ranges_merges_to_that_of_the_whole(
        logits in prop::collection::vec(prop_oneof![
            8 => (-9..9_i32).prop_map(|x| x as f32),
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::NAN),
        ], 1..3000),
        cuts in prop::collection::vec(0..3000_usize, 0..5),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(logits.len())).chain([0, logits.len()]).collect();
        cuts.sort_unstable();
        let parts = cuts.windows(2).map(|at| argmax(&logits[at[0]..at[1]], at[0] as u32));
        let merged = parts.rev().fold(Best::NONE, Best::merge);
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assert_eq!(merged, argmax(&logits, 0));
        let first = logits.iter().position(|&x| x == most && x > f32::NEG_INFINITY);
        prop_assert_eq!(merged.id as usize, first.unwrap_or(0));
    }

    #[test]
    fn rebound_slot_changes_logits_like_a_grown_one(
        prompt in prop::collection::vec(0..9_i32, 1..6),
        output in prop::collection::vec(0..9_i32, 0..12),
        bad in prop::collection::vec(prop::collection::vec(0..9_u32, 1..4), 0..6),
        allowed in prop::collection::vec(0..9_u32, 0..4),
        penalties in (0.1_f32..3.0, -2.0_f32..2.0, -2.0_f32..2.0),
        min_tokens in 0..14_usize,
    ) {
        let params = Params {
            repetition_penalty: penalties.0,
            frequency_penalty: penalties.1,
            presence_penalty: penalties.2,
            logit_bias: vec![(3, 1.5), (4, -2.5)],
            allowed_token_ids: allowed.clone(),
            bad_token_ids: bad,
            min_tokens,
            stop_token_ids: vec![2],
            ..greedy()
        };
        let whole = bound(params.clone(), &prompt, &output, 9);
        let mut grown = bound(params, &prompt, &[], 9);
        output.iter().for_each(|&token| grown.record(0, token as u32));
        let position = (prompt.len() + output.len()) as u64;
        let mut logits = [[0.5, -0.5, 1.0, 2.0, -3.0, 0.0, 0.25, 7.0, 1.0_f32]; 2];
        whole.apply(0, position, &mut logits[0]);
        grown.apply(0, position, &mut logits[1]);
        prop_assert_eq!(logits[0].map(f32::to_bits), logits[1].map(f32::to_bits));
        prop_assert!(logits[0].iter().any(|x| x.is_finite()));
        let fits = |(id, x): (usize, &f32)| allowed.is_empty() || allowed.contains(&(id as u32)) || !x.is_finite();
        prop_assert!(logits[0].iter().enumerate().all(fits));
    }

    #[test]
    fn mask_keeps_the_bits_of_allowed_logits(
        bits in prop::collection::vec(any::<u32>(), 1..200),
        seed in prop::collection::vec(prop_oneof![Just(0), Just(u32::MAX), any::<u32>()], 7),
    ) {
        let mut logits: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        mask::apply(&seed[..mask_words(bits.len())], &mut logits);
        for (i, (x, &before)) in logits.iter().zip(&bits).enumerate() {
            let may = seed[i / 32] >> (i % 32) & 1 == 1;
            prop_assert_eq!(x.to_bits(), if may { before } else { f32::NEG_INFINITY.to_bits() });
        }
    }

    #[test]
    fn row_without_changes_keeps_its_logits(bits in prop::collection::vec(any::<u32>(), 1..50)) {
        let slots = bound(Params { logprobs: Some(3), top_k: 4, ..Params::default() }, &[1], &[], 50);
        let mut logits: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let drawn = slots.draw(0, 9, &mut logits, None, &mut Scratch::default());
        prop_assert!((drawn.token as usize) < bits.len());
        prop_assert!(logits.iter().zip(&bits).all(|(x, &b)| x.to_bits() == b));
    }
}

/// Grammar that allows one id after the other from the last generated one on; fails after `breaks`, slow at `slow`.
#[derive(Debug)]
struct Counting {
    next: u32,
    breaks: u32,
    slow: u32,
}

impl Grammar for Counting {
    fn restart(&mut self, generated: &[i32]) {
        self.next = generated.last().map_or(0, |last| *last as u32 + 1);
    }

    fn try_fill(&mut self, mask: &mut [u32], _: Duration) -> bool {
        mask.fill(0);
        mask[self.next as usize / 32] |= 1 << (self.next % 32);
        self.next != self.slow
    }

    fn consume(&mut self, token: u32) {
        assert_eq!(token, self.next);
        self.next += 1;
    }

    fn error(&self) -> Option<String> {
        (self.next > self.breaks).then(|| format!("behind {}", self.breaks))
    }
}

#[test]
fn grammar_constrains_its_slot_only() {
    let vocab = 70;
    let mut slots = Slots::new(3, vocab, &[1]);
    let shared = Arc::new(Mutex::new(Counting {
        next: 0,
        breaks: 66,
        slow: 20,
    }));
    let bind = |slots: &mut Slots, slot: usize, generated: &[i32], grammar| {
        let binding = Binding {
            params: greedy(),
            tokens: [&[5], generated].concat(),
            num_prompt: 1,
            grammar,
            ..Binding::default()
        };
        slots.bind(slot, binding);
    };
    bind(&mut slots, 0, &[], None);
    bind(&mut slots, 1, &[63], Some(Arc::clone(&shared) as SharedGrammar));
    bind(&mut slots, 2, &[], None);
    let logits: Vec<f32> = (0..vocab).map(|i| -(i as f32)).collect();
    let mut scratch = Scratch::default();
    for expected in [64, 65, 66] {
        slots.masks([0, 1, 2].into_iter()).fill();
        for slot in [0, 2] {
            let mut row = logits.clone();
            let (drawn, failure) = slots.sample_with_grammar(slot, 1, &mut row, &mut scratch);
            assert_eq!((drawn.token, failure, row), (0, None, logits.clone()));
        }
        let (drawn, failure) = slots.sample_with_grammar(1, 1, &mut logits.clone(), &mut scratch);
        assert_eq!(drawn.token, if expected == 66 { 1 } else { expected });
        assert_eq!(failure.is_some(), expected == 66);
    }
    // resumed in another slot after its own was freed: the grammar follows the request
    slots.free(1);
    bind(&mut slots, 2, &[63, 9], Some(Arc::clone(&shared) as SharedGrammar));
    slots.masks([1, 2].into_iter()).fill();
    let (drawn, _) = slots.sample_with_grammar(2, 1, &mut logits.clone(), &mut scratch);
    assert_eq!(drawn.token, 10);
    let (drawn, _) = slots.sample_with_grammar(1, 1, &mut logits.clone(), &mut scratch);
    assert_eq!(drawn.token, 0);
    // a slow mask gives no token in this step, nor in one that was already scheduled
    bind(&mut slots, 2, &[63, 19], Some(Arc::clone(&shared) as SharedGrammar));
    for _ in 0..2 {
        slots.masks([2].into_iter()).fill();
        let (drawn, why) = slots.sample_with_grammar(2, 1, &mut logits.clone(), &mut scratch);
        assert_eq!((drawn.token, why), (1, Some(String::new())));
        shared.lock().unwrap().slow = 0;
    }
    bind(&mut slots, 2, &[63, 19], Some(shared as SharedGrammar));
    slots.masks([2].into_iter()).fill();
    let (drawn, _) = slots.sample_with_grammar(2, 1, &mut logits.clone(), &mut scratch);
    assert_eq!(drawn.token, 20);
}
