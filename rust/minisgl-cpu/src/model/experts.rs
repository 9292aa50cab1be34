//! Forward pass through routed experts: each token goes through the few experts with its highest router scores.
//!
//! Invariants: the weights of an unused expert are not read, those of a used one once; a token's sum runs over its
//! experts from the highest score down, whatever else is in the step; on equal scores the lower expert index wins.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;

use minisgl_kernels::Kernels;
use minisgl_kernels::exp;
use minisgl_kernels::panels::PANEL;

use crate::model::buffers::{ExpertBuffers, Order, TOKENS, Used};
use crate::model::config::{MoeConfig, Score};
use crate::model::operation::{Combine, Experts, Route};
use crate::model::products::Groups;
use crate::model::worker::{Forward, ITEM_TOKENS, Worker, each};

impl Worker<'_, '_> {
    /// Runs the gate/up and down projection of all chosen experts. `combine` adds the outputs to the hidden states.
    pub(super) fn experts(&mut self, experts: &Experts) {
        let (shared, hidden) = (self.shared, self.shared.hidden);
        let (Some(buffers), Some(any)) = (&shared.buffers.experts, experts.experts.first()) else {
            return;
        };
        // SAFETY: written by thread 0 before the last barrier.
        let order = unsafe { &*buffers.order.get() };
        let assignments = order.assignments.len();
        let mode = shared.mode.with_all(any.halves.matrices());
        let acts = buffers.acts.writer_as(assignments, hidden, mode);
        let normed = self.own.row.at(0, 0);
        each(self.counter(), assignments, ITEM_TOKENS, |index| {
            let token = order.assignments[index] as usize / experts.per_token;
            // SAFETY: this thread's work item: a row of `acts`; the choices were written before a barrier.
            unsafe {
                let mut x = shared.normed(experts.norm.as_deref(), token, normed);
                if experts.weighs_input {
                    let (_, weight) = *buffers.chosen[order.assignments[index] as usize].get();
                    for i in 0..hidden {
                        *normed.add(i) = *x.add(i) * weight;
                    }
                    x = normed;
                }
                order.kernels(shared, index).prepare(x, acts, index);
            }
        });
        self.barrier.wait();
        self.lap(0);
        let groups = any.halves.groups(shared.threads);
        self.each_piece(order, &groups, |worker, expert, panels, rows| {
            let (kernels, halves) = (order.kernels(shared, rows.start), &experts.experts[expert].halves);
            worker.gate_and_up(kernels, (halves, None), acts, panels, rows, &buffers.inner);
        });
        self.barrier.wait();
        self.lap(5);
        let mode = shared.mode.with(&any.down.weight);
        let acts = buffers.acts.writer_as(assignments, any.halves.inner, mode);
        each(self.counter(), assignments, ITEM_TOKENS, |index| {
            let kernels = order.kernels(shared, index);
            // SAFETY: this thread's work item: a row of `acts`; `inner` was written before the barrier.
            unsafe { kernels.prepare(buffers.inner.at(index, 0), acts, index) };
        });
        self.barrier.wait();
        let groups = Groups::new(&any.down.weight, shared.threads);
        self.each_piece(order, &groups, |_, expert, panels, rows| {
            let (column, width, stride) = (panels.start * PANEL, panels.len() * PANEL, buffers.out.stride());
            let (to, count) = (buffers.out.at(rows.start, column), rows.len());
            let (kernels, down) = (order.kernels(shared, rows.start), &experts.experts[expert].down);
            // SAFETY: this thread's work item: these columns of these rows.
            unsafe {
                kernels.matmul(&down.weight, panels, acts, rows, to, stride, false);
                if let Some(bias) = &down.bias {
                    (0..count).for_each(|row| kernels.add(to.add(row * stride), bias[column..].as_ptr(), width));
                }
            }
        });
        self.barrier.wait();
    }

    /// Chooses each token's experts, and sorts the assignments by expert.
    pub(super) fn route(&mut self, route: &Route) {
        let (shared, moe) = (self.shared, &route.by);
        let Some(buffers) = &shared.buffers.experts else {
            return;
        };
        let mode = shared.mode.with(&route.router);
        let acts = buffers.router_acts.writer_as(shared.count(), shared.hidden, mode);
        let (normed, stride) = (self.own.row.at(0, 0), buffers.logits.stride());
        let panels = route.router.panels();
        // same kernel for all, one row at a time, so that the choice does not depend on the step
        let kernels = shared.kernels.decoding();
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let to = buffers.logits.at(token, 0);
            // SAFETY: this thread's work item: the rows of this token; `x` was written before a barrier.
            let logits = unsafe {
                let x = shared.normed(route.norm.as_deref(), token, normed);
                kernels.prepare(x, acts, token);
                let rows = token..token + 1;
                kernels.matmul(&route.router, 0..panels, acts, rows, to, stride, false);
                if let Some(bias) = &route.bias {
                    kernels.add(to, bias.as_ptr(), moe.num_experts);
                }
                std::slice::from_raw_parts(to, moe.num_experts)
            };
            let mut choices = choose_experts(logits, moe, route.choice_bias.as_deref());
            if let Some(scales) = &route.scales {
                let scaled = choices.iter_mut();
                scaled.for_each(|(expert, weight)| *weight *= scales[*expert as usize]);
            }
            for (rank, choice) in choices.into_iter().enumerate() {
                // SAFETY: this thread's work item: the choices of this token.
                unsafe { *buffers.chosen[token * moe.experts_per_token + rank].get() = choice };
            }
        });
        self.barrier.wait();
        if self.thread == 0 {
            let chosen = &buffers.chosen[..shared.count() * moe.experts_per_token];
            let prompts = shared.tokens.decode * moe.experts_per_token;
            // SAFETY: the others wait at the barrier.
            unsafe { (*buffers.order.get()).sort(chosen, prompts) };
        }
        self.barrier.wait();
    }

    /// Calls `work(worker, expert, panels, rows)` for each used expert, dividing panels among the threads.
    fn each_piece(
        &mut self,
        order: &Order,
        groups: &Groups,
        mut work: impl FnMut(&mut Self, usize, Range<usize>, Range<usize>),
    ) {
        let counter = self.counter();
        while let Some(piece) = counter.claim(order.used.len() * groups.count) {
            let used = &order.used[piece / groups.count];
            for (start, end) in [(used.start, used.prompts), (used.prompts, used.end)] {
                for from in (start..end).step_by(TOKENS) {
                    let panels = groups.panels(piece % groups.count);
                    work(self, used.expert, panels, from..(from + TOKENS).min(end));
                }
            }
        }
    }

    /// Adds each token's weighted expert outputs, and that of the shared expert last, to its hidden states.
    pub(super) fn combine(&mut self, combine: &Combine) {
        let shared = self.shared;
        let Some(buffers) = &shared.buffers.experts else {
            return;
        };
        // SAFETY: written by thread 0 before a barrier.
        let order = unsafe { &*buffers.order.get() };
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe { shared.combine(combine, order, buffers, token) };
        });
        self.barrier.wait();
    }
}

impl Forward<'_> {
    /// Combines the expert outputs of one token.
    ///
    /// # Safety
    /// No other thread may use the token's rows meanwhile; expert outputs were written before a barrier.
    unsafe fn combine(&self, combine: &Combine, order: &Order, buffers: &ExpertBuffers, token: usize) {
        let (hidden, kernels) = (self.hidden, &self.kernels);
        let aside = self.buffers.side.at(token, 0);
        let mut sum = combine.sum_bias.clone().unwrap_or_else(|| vec![0.0; hidden]);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let add = |sum: &mut [f32], weight: f32, numbers: *const f32| {
                let numbers = std::slice::from_raw_parts(numbers, hidden);
                for (sum, number) in sum.iter_mut().zip(numbers) {
                    *sum = weight.mul_add(*number, *sum);
                }
            };
            for assignment in token * combine.per_token..(token + 1) * combine.per_token {
                let index = order.sorted_index[assignment] as usize;
                let (_, weight) = *buffers.chosen[assignment].get();
                let weight = if combine.weighs_input { 1.0 } else { weight };
                add(&mut sum, weight, buffers.out.at(index, 0));
            }
            if let Some(norms) = &combine.norms {
                let at = sum.as_mut_ptr();
                norms.0.apply(kernels, at, (0, hidden), at);
                norms.1.apply(kernels, aside, (0, hidden), aside);
            }
            if let Some(gate) = combine.aside {
                let sigmoid = |gate: usize| 1.0 / (1.0 + exp(-*buffers.logits.at(token, gate)));
                add(&mut sum, gate.map_or(1.0, sigmoid), aside);
            }
            let x = std::slice::from_raw_parts_mut(self.buffers.x.at(token, 0), hidden);
            let at = if combine.over {
                x.iter_mut().zip(&sum).for_each(|(x, sum)| *x += sum);
                x.as_mut_ptr()
            } else {
                sum.as_mut_ptr()
            };
            if let Some(norm) = &combine.add.norm {
                norm.apply(kernels, at, (0, hidden), at);
            }
            if !combine.over {
                for (x, sum) in x.iter_mut().zip(sum) {
                    *x += sum * combine.add.scale;
                    *x *= combine.add.last;
                }
            }
        }
    }
}

/// Returns a token's (expert, weight) pairs, highest score first.
fn choose_experts(logits: &[f32], moe: &MoeConfig, bias: Option<&[f32]>) -> Vec<(u32, f32)> {
    let scores: Vec<f32> = match moe.score {
        Score::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        Score::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let shares: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
            let total: f32 = shares.iter().sum();
            shares.into_iter().map(|share| share / total).collect()
        }
    };
    let mut ranking = scores.clone();
    if let Some(bias) = bias {
        ranking.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
    }
    let size = ranking.len() / moe.groups;
    let by_score = |scores: &[f32]| {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
        order
    };
    if moe.chosen_groups < moe.groups {
        let best = |group: &[f32]| -> f32 {
            let order = by_score(group);
            order.iter().take(moe.group_best).map(|at| group[*at as usize]).sum()
        };
        let groups: Vec<f32> = ranking.chunks(size).map(best).collect();
        for group in by_score(&groups).into_iter().skip(moe.chosen_groups) {
            ranking[group as usize * size..][..size].fill(f32::NEG_INFINITY);
        }
    }
    let mut order = by_score(&ranking);
    order.truncate(moe.experts_per_token);
    let divisor: f32 = if moe.norm_topk_prob {
        let sum: f32 = order.iter().map(|expert| scores[*expert as usize]).sum();
        sum.max(moe.least_sum)
    } else {
        1.0
    };
    order
        .into_iter()
        .map(|expert| (expert, scores[expert as usize] / divisor * moe.scale))
        .collect()
}

impl Order {
    /// Returns the kernels for the rows from sorted index `index` on: those for decode or for prefill.
    fn kernels(&self, shared: &Forward<'_>, index: usize) -> Kernels {
        if self.assignments[index] < self.prompts {
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
        self.sorted_index.clear();
        self.sorted_index.resize(chosen.len(), 0);
        self.used.clear();
        for (index, assignment) in self.assignments.iter().enumerate() {
            self.sorted_index[*assignment as usize] = index as u32;
            let expert = expert_of(*assignment) as usize;
            if self.used.last().is_none_or(|last| last.expert != expert) {
                let (start, end) = (index, index);
                self.used.push(Used {
                    expert,
                    start,
                    prompts: start,
                    end,
                });
            }
            let decodes = *assignment < self.prompts;
            if let Some(used) = self.used.last_mut() {
                used.end = index + 1;
                if decodes {
                    used.prompts = index + 1; // the sort is stable: an expert's prompts come last
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sort_lists_each_chosen_expert_once() {
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
