//! Splits the output of an engine's step by front end (as `minisgl.runner.front_ends`, with owners from a table).

use minisgl_gateway::message::StepTokens;

/// Front end that owns a request and the request's id there; `None` if the front end has disconnected.
pub(super) type Owner = Option<(u32, i64)>;

/// Output of an engine's step, with the owner of each of its rows, admissions, errors, prompt logprobs and embeddings.
pub(super) struct OwnedStep {
    pub(super) step: StepTokens,
    pub(super) rows: Vec<Owner>,
    pub(super) admitted: Vec<Owner>,
    pub(super) errors: Vec<Owner>,
    pub(super) prompts: Vec<Owner>,
    pub(super) embeddings: Vec<Owner>,
}

impl OwnedStep {
    /// Returns the one front end that owns the whole step, or `None` if there are several or a row has no owner.
    fn only_front_end(&self) -> Option<u32> {
        let others = [&self.admitted, &self.errors, &self.prompts, &self.embeddings];
        let mut all = [&self.rows].into_iter().chain(others).flatten();
        let (first, _) = (*all.next()?)?;
        all.all(|owner| owner.is_some_and(|(front_end, _)| front_end == first))
            .then_some(first)
    }

    /// Appends each front end's part of the step to `parts`, with its own request ids, in the order of the rows.
    pub(super) fn split(mut self, parts: &mut Vec<(u32, StepTokens)>) {
        if let Some(front_end) = self.only_front_end() {
            let own = |owner: &Owner| owner.map_or(0, |(_, own_id)| own_id);
            let step = &mut self.step;
            step.req_ids.clear();
            step.req_ids.extend(self.rows.iter().map(own));
            (step.admitted.iter_mut().zip(&self.admitted)).for_each(|(one, owner)| one.0 = own(owner));
            (step.errors.0.iter_mut().zip(&self.errors)).for_each(|(one, owner)| one.0 = own(owner));
            (step.prompt_logprobs.iter_mut().zip(&self.prompts)).for_each(|(one, owner)| one.req_id = own(owner));
            (step.embeddings.iter_mut().zip(&self.embeddings)).for_each(|(one, owner)| one.req_id = own(owner));
            parts.push((front_end, self.step));
            return;
        }
        let begin = parts.len();
        let step_id = self.step.step;
        let mut new_index = Vec::with_capacity(self.rows.len());
        for (row, owner) in self.rows.iter().enumerate() {
            let Some((front_end, own_id)) = *owner else {
                new_index.push(0);
                continue;
            };
            let to = part_of(front_end, step_id, parts, begin);
            new_index.push(to.req_ids.len());
            to.req_ids.push(own_id);
            to.tokens.push(self.step.tokens[row]);
            to.reasons.push(self.step.reasons[row]);
        }
        for (&(_, cached_len), owner) in self.step.admitted.iter().zip(&self.admitted) {
            if let Some((front_end, own_id)) = *owner {
                part_of(front_end, step_id, parts, begin)
                    .admitted
                    .push((own_id, cached_len));
            }
        }
        for ((_, text), owner) in self.step.errors.0.into_iter().zip(&self.errors) {
            if let Some((front_end, own_id)) = *owner {
                part_of(front_end, step_id, parts, begin).errors.0.push((own_id, text));
            }
        }
        for mut one in self.step.logprobs {
            if let Some((front_end, _)) = self.rows[one.index] {
                one.index = new_index[one.index];
                part_of(front_end, step_id, parts, begin).logprobs.push(one);
            }
        }
        for (mut one, owner) in self.step.prompt_logprobs.into_iter().zip(&self.prompts) {
            if let Some((front_end, own_id)) = *owner {
                one.req_id = own_id;
                part_of(front_end, step_id, parts, begin).prompt_logprobs.push(one);
            }
        }
        for (mut one, owner) in self.step.embeddings.into_iter().zip(&self.embeddings) {
            if let Some((front_end, own_id)) = *owner {
                one.req_id = own_id;
                part_of(front_end, step_id, parts, begin).embeddings.push(one);
            }
        }
    }
}

/// Returns the part of front end `front_end` among `parts[begin..]`; adds an empty one if there is none.
fn part_of(front_end: u32, step: i64, parts: &mut Vec<(u32, StepTokens)>, begin: usize) -> &mut StepTokens {
    let at = parts[begin..].iter().position(|one| one.0 == front_end);
    let at = at.map_or(parts.len(), |at| begin + at);
    if at == parts.len() {
        let empty = StepTokens {
            step,
            ..StepTokens::default()
        };
        parts.push((front_end, empty));
    }
    &mut parts[at].1
}
