//! The forward through routed experts: each token goes through the few that its router scores most.
//!
//! Invariants: weights of experts that no token of a step chose are not read, those of the others once; a token's sum
//! runs over its experts from the one that scores most on, whatever else is in the step; of experts with equal scores the
//! one with the lower number wins.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;

use minisgl_kernels::Kernels;
use minisgl_kernels::exp;
use minisgl_kernels::panels::PANEL;

use crate::model::buffers::{ExpertBuffers, Order, Phase, TOKENS, Used};
use crate::model::config::{MoeConfig, Norms, Score};
use crate::model::products::{Groups, To};
use crate::model::weights::{Experts, Layer};
use crate::model::worker::{FEW, Forward, Worker, each};

impl Worker<'_, '_> {
    pub(super) fn experts(&mut self, index: usize, layer: &Layer, experts: &Experts) {
        let shared = self.shared;
        let (Some(buffers), Some(moe)) = (&shared.buffers.experts, shared.config.moe.as_ref()) else {
            return;
        };
        self.route(index, layer, experts, buffers, moe);
        // SAFETY: written by thread 0 before the last barrier.
        let order = unsafe { &*buffers.order.get() };
        let hidden = shared.config.hidden_size;
        let assignments = order.assignments.len();
        let Some(any) = experts.experts.first() else {
            return;
        };
        let acts = buffers
            .acts
            .writer_as(assignments, hidden, any.gate_up_mode(shared.mode));
        let (normed, norm) = (self.own.row.at(0, 0), layer.norm_before_mlp());
        let own = experts.norms.as_ref().map(|norms| &norms.before).or(norm);
        each(shared.counter(index, Phase::PrepareMlp), assignments, FEW, |place| {
            let token = order.assignments[place] as usize / moe.experts_per_token;
            // SAFETY: its piece: a row of `acts`; the choices were written before a barrier.
            unsafe {
                let mut x = shared.normed(own, token, normed);
                if moe.weighs_input {
                    let (_, weight) = *buffers.chosen[order.assignments[place] as usize].get();
                    for i in 0..hidden {
                        *normed.add(i) = *x.add(i) * weight;
                    }
                    x = normed;
                }
                order.kernels(shared, place).prepare(x, acts, place);
            }
        });
        self.barrier.wait();
        self.lap(0);
        self.each_piece(
            index,
            Phase::GateUp,
            order,
            experts,
            true,
            |worker, expert, panels, rows| {
                let first = rows.start;
                worker.gate_and_up(
                    order.kernels(worker.shared, rows.start),
                    &experts.experts[expert],
                    acts,
                    panels,
                    rows,
                    &buffers.inner,
                    first,
                    None,
                );
            },
        );
        self.barrier.wait();
        self.lap(5);
        let acts = buffers
            .acts
            .writer_as(assignments, moe.intermediate_size, shared.mode.with(&any.down.weight));
        each(shared.counter(index, Phase::PrepareDown), assignments, FEW, |place| {
            // SAFETY: its piece: a row of `acts`; `inner` was written before the barrier.
            unsafe {
                order
                    .kernels(shared, place)
                    .prepare(buffers.inner.at(place, 0), acts, place)
            };
        });
        self.barrier.wait();
        self.each_piece(
            index,
            Phase::Down,
            order,
            experts,
            false,
            |worker, expert, panels, rows| {
                let (column, width, stride) = (panels.start * PANEL, panels.len() * PANEL, buffers.out.stride());
                let (to, count) = (buffers.out.at(rows.start, column), rows.len());
                let down = &experts.experts[expert].down;
                let kernels = order.kernels(worker.shared, rows.start);
                // SAFETY: its piece: these columns of these rows.
                unsafe {
                    kernels.matmul(&down.weight, panels, acts, rows, to, stride, false);
                    if let Some(bias) = &down.bias {
                        (0..count).for_each(|row| kernels.add(to.add(row * stride), bias[column..].as_ptr(), width));
                    }
                }
            },
        );
        self.barrier.wait();
        if let Some(shared_mlp) = &experts.shared {
            let phases = [
                Phase::PrepareShared,
                Phase::SharedUp,
                Phase::PrepareSharedDown,
                Phase::SharedDown,
            ];
            self.mlp(index, norm, shared_mlp, phases, false, To::Aside);
        }
        each(shared.counter(index, Phase::Combine), shared.count(), FEW, |token| {
            self.combine(token, order, buffers, moe, (layer, experts));
        });
        self.barrier.wait();
        self.lap(6);
    }

    /// Choose each token's experts, and sort what follows by expert.
    fn route(&mut self, index: usize, layer: &Layer, experts: &Experts, buffers: &ExpertBuffers, moe: &MoeConfig) {
        let shared = self.shared;
        let hidden = shared.config.hidden_size;
        let acts = buffers
            .router_acts
            .writer_as(shared.count(), hidden, shared.mode.with(&experts.router));
        let own = experts.router_norm.as_deref();
        let (normed, norm) = (self.own.row.at(0, 0), own.or(layer.norm_before_mlp()));
        let panels = experts.router.panels();
        // one kernel for all, and one row at a time
        let kernels = shared.kernels.decoding();
        each(shared.counter(index, Phase::Route), shared.count(), FEW, |token| {
            let to = buffers.logits.at(token, 0);
            // SAFETY: its piece: the rows of this token; `x` was written before a barrier.
            let logits = unsafe {
                let x = shared.normed(norm, token, normed);
                kernels.prepare(x, acts, token);
                let rows = token..token + 1;
                kernels.matmul(
                    &experts.router,
                    0..panels,
                    acts,
                    rows,
                    to,
                    buffers.logits.stride(),
                    false,
                );
                if let Some(bias) = &experts.router_bias {
                    kernels.add(to, bias.as_ptr(), moe.num_experts);
                }
                std::slice::from_raw_parts(to, moe.num_experts)
            };
            let mut choices = choose(logits, moe, experts.choice_bias.as_deref());
            if let Some(scales) = &experts.scales {
                let scaled = choices.iter_mut();
                scaled.for_each(|(expert, weight)| *weight *= scales[*expert as usize]);
            }
            for (rank, choice) in choices.into_iter().enumerate() {
                // SAFETY: its piece: the choices of this token.
                unsafe { *buffers.chosen[token * moe.experts_per_token + rank].get() = choice };
            }
        });
        self.barrier.wait();
        if self.thread == 0 {
            // SAFETY: the others wait at the barrier.
            unsafe {
                (*buffers.order.get()).sort(
                    &buffers.chosen[..shared.count() * moe.experts_per_token],
                    shared.tokens.decode * moe.experts_per_token,
                )
            };
        }
        self.barrier.wait();
    }

    /// Deal out the products of all used experts with the rows that are theirs.
    fn each_piece(
        &mut self,
        index: usize,
        phase: Phase,
        order: &Order,
        experts: &Experts,
        pairs: bool,
        mut work: impl FnMut(&mut Self, usize, std::ops::Range<usize>, std::ops::Range<usize>),
    ) {
        let Some(first) = order.used.first() else {
            return;
        };
        let mlp = &experts.experts[first.expert];
        let groups = if pairs && !self.shared.config.gated {
            Groups::of(&mlp.gate_up.weight, self.shared.threads)
        } else if pairs {
            Groups::pairs(mlp.gate_up_panels(), self.shared.threads)
        } else {
            Groups::of(&mlp.down.weight, self.shared.threads)
        };
        let counter = self.shared.counter(index, phase);
        while let Some(piece) = counter.take(order.used.len() * groups.count) {
            let used = &order.used[piece / groups.count];
            for (start, end) in [(used.start, used.prompts), (used.prompts, used.end)] {
                for from in (start..end).step_by(TOKENS) {
                    let panels = groups.panels(piece % groups.count);
                    work(self, used.expert, panels, from..(from + TOKENS).min(end));
                }
            }
        }
    }

    /// Add a token's experts, weighted, to its hidden numbers, the one that all go through last.
    fn combine(
        &self,
        token: usize,
        order: &Order,
        buffers: &ExpertBuffers,
        moe: &MoeConfig,
        (layer, experts): (&Layer, &Experts),
    ) {
        let (config, per_token) = (self.shared.config, moe.experts_per_token);
        let hidden = config.hidden_size;
        // SAFETY: its piece: the row of this token; `out` and `chosen` were written before a barrier.
        unsafe {
            let x = std::slice::from_raw_parts_mut(self.shared.buffers.x.at(token, 0), hidden);
            let mut sum = experts.sum_bias.clone().unwrap_or_else(|| vec![0.0; hidden]);
            for assignment in token * per_token..(token + 1) * per_token {
                let place = order.places[assignment] as usize;
                let (_, weight) = *buffers.chosen[assignment].get();
                let weight = if moe.weighs_input { 1.0 } else { weight };
                let out = std::slice::from_raw_parts(buffers.out.at(place, 0), hidden);
                for (sum, number) in sum.iter_mut().zip(out) {
                    *sum = weight.mul_add(*number, *sum);
                }
            }
            if let Some(norms) = &experts.norms {
                let (at, beside) = (sum.as_mut_ptr(), self.shared.buffers.behind.at(token, 0));
                norms.behind.apply((&self.shared.kernels, config), at, (0, hidden), at);
                norms
                    .of_mlp
                    .apply((&self.shared.kernels, config), beside, (0, hidden), beside);
            }
            if experts.shared.is_some() {
                let weight = if moe.shared_gated {
                    let gate = *buffers.logits.at(token, moe.num_experts);
                    1.0 / (1.0 + exp(-gate))
                } else {
                    1.0
                };
                let out = std::slice::from_raw_parts(self.shared.buffers.behind.at(token, 0), hidden);
                for (sum, number) in sum.iter_mut().zip(out) {
                    *sum = weight.mul_add(*number, *sum);
                }
            }
            if let Some((_, norm)) = layer.norms_behind.as_ref().filter(|_| config.norms == Norms::Over) {
                x.iter_mut().zip(sum).for_each(|(x, sum)| *x += sum);
                let at = x.as_mut_ptr();
                norm.apply((&self.shared.kernels, config), at, (0, hidden), at);
                return;
            }
            if let Some((_, norm)) = &layer.norms_behind {
                let at = sum.as_mut_ptr();
                norm.apply((&self.shared.kernels, config), at, (0, hidden), at);
            }
            let scale = layer.scale_behind_mlp();
            for (x, sum) in x.iter_mut().zip(sum) {
                *x += sum * config.residual_scale;
                *x *= scale;
            }
        }
    }
}

/// A token's experts, from the one that scores most on, with their weights.
fn choose(logits: &[f32], moe: &MoeConfig, bias: Option<&[f32]>) -> Vec<(u32, f32)> {
    let scores: Vec<f32> = match moe.score {
        Score::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        Score::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let shares: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
            let total: f32 = shares.iter().sum();
            shares.into_iter().map(|share| share / total).collect()
        }
    };
    let mut wanted = scores.clone();
    if let Some(bias) = bias {
        wanted.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
    }
    let size = wanted.len() / moe.groups;
    let first = |scores: &[f32]| {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
        order
    };
    if moe.chosen_groups < moe.groups {
        let best = |group: &[f32]| -> f32 {
            let order = first(group);
            order.iter().take(moe.group_best).map(|at| group[*at as usize]).sum()
        };
        let groups: Vec<f32> = wanted.chunks(size).map(best).collect();
        for group in first(&groups).into_iter().skip(moe.chosen_groups) {
            wanted[group as usize * size..][..size].fill(f32::NEG_INFINITY);
        }
    }
    let mut order = first(&wanted);
    order.truncate(moe.experts_per_token);
    let kept: f32 = if moe.norm_topk_prob {
        let sum: f32 = order.iter().map(|expert| scores[*expert as usize]).sum();
        sum.max(moe.least_sum)
    } else {
        1.0
    };
    order
        .into_iter()
        .map(|expert| (expert, scores[expert as usize] / kept * moe.scale))
        .collect()
}

impl Order {
    /// What multiplies the rows from sorted place `place` on.
    fn kernels(&self, shared: &Forward<'_>, place: usize) -> Kernels {
        if self.assignments[place] < self.prompts {
            shared.kernels.decoding()
        } else {
            shared.kernels
        }
    }

    fn sort(&mut self, chosen: &[UnsafeCell<(u32, f32)>], prompts: usize) {
        self.prompts = prompts as u32;
        // SAFETY: written before a barrier, read by this thread only.
        let expert_of = |assignment: u32| unsafe { (*chosen[assignment as usize].get()).0 };
        self.assignments.clear();
        self.assignments.extend(0..chosen.len() as u32);
        self.assignments.sort_by_key(|assignment| expert_of(*assignment));
        self.places.clear();
        self.places.resize(chosen.len(), 0);
        self.used.clear();
        for (place, assignment) in self.assignments.iter().enumerate() {
            self.places[*assignment as usize] = place as u32;
            let expert = expert_of(*assignment) as usize;
            if self.used.last().is_none_or(|last| last.expert != expert) {
                let (start, end) = (place, place);
                self.used.push(Used {
                    expert,
                    start,
                    prompts: start,
                    end,
                });
            }
            let decodes = *assignment < self.prompts;
            if let Some(used) = self.used.last_mut() {
                used.end = place + 1;
                if decodes {
                    used.prompts = place + 1; // the sort is stable: an expert's prompts come last
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_goes_through_each_chosen_expert_once() {
        // two tokens that decode and two of prompts, with two experts each
        let chosen = [5, 2, 2, 7, 7, 5, 5, 2].map(|expert| UnsafeCell::new((expert, 0.5)));
        let mut order = Order::default();
        order.sort(&chosen, 4);
        let used = |expert, start, prompts, end| Used {
            expert,
            start,
            prompts,
            end,
        };
        assert_eq!(order.used, [used(2, 0, 2, 3), used(5, 3, 4, 6), used(7, 6, 7, 8)]);
        assert_eq!(order.assignments, [1, 2, 7, 0, 5, 6, 3, 4]);
        order.sort(&chosen[..2], 2);
        assert_eq!(
            order.used,
            [used(2, 0, 1, 1), used(5, 1, 2, 2)],
            "one row: its own experts"
        );
    }
}
