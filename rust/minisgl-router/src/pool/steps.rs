//! Splits the output of an engine's step by front end, as `minisgl.runner.front_ends` does, but with a table of owners
//! in place of owners encoded in request ids.

use minisgl_gateway::message::StepTokens;

/// Front end that owns a request and the request's id there; `None` if the front end has disconnected.
pub(super) type Whose = Option<(u32, i64)>;

/// Output of an engine's step, with the owner of each of its rows, admissions, errors, prompt logprobs and embeddings.
pub(super) struct Owned {
    pub(super) step: StepTokens,
    pub(super) rows: Vec<Whose>,
    pub(super) admitted: Vec<Whose>,
    pub(super) errors: Vec<Whose>,
    pub(super) prompts: Vec<Whose>,
    pub(super) embeddings: Vec<Whose>,
}

impl Owned {
    /// Returns the one front end that owns the whole step, or `None` if there are several or a row has no owner.
    fn only_owner(&self) -> Option<u32> {
        let beside = [&self.admitted, &self.errors, &self.prompts, &self.embeddings];
        let mut all = [&self.rows].into_iter().chain(beside).flatten();
        let (first, _) = (*all.next()?)?;
        all.all(|whose| whose.is_some_and(|(owner, _)| owner == first))
            .then_some(first)
    }

    /// Appends each front end's part of the step to `parts`, with the front end's own request ids, in the order of the
    /// rows.
    pub(super) fn split(mut self, parts: &mut Vec<(u32, StepTokens)>) {
        if let Some(owner) = self.only_owner() {
            let own = |whose: &Whose| whose.map_or(0, |(_, own_id)| own_id);
            let step = &mut self.step;
            step.req_ids.clear();
            step.req_ids.extend(self.rows.iter().map(own));
            (step.admitted.iter_mut().zip(&self.admitted)).for_each(|(one, whose)| one.0 = own(whose));
            (step.errors.0.iter_mut().zip(&self.errors)).for_each(|(one, whose)| one.0 = own(whose));
            (step.prompt_logprobs.iter_mut().zip(&self.prompts)).for_each(|(one, whose)| one.req_id = own(whose));
            (step.embeddings.iter_mut().zip(&self.embeddings)).for_each(|(one, whose)| one.req_id = own(whose));
            parts.push((owner, self.step));
            return;
        }
        let begin = parts.len();
        let number = self.step.step;
        let mut new_index = Vec::with_capacity(self.rows.len());
        for (row, whose) in self.rows.iter().enumerate() {
            let Some((owner, own_id)) = *whose else {
                new_index.push(0);
                continue;
            };
            let to = part_of(owner, number, parts, begin);
            new_index.push(to.req_ids.len());
            to.req_ids.push(own_id);
            to.tokens.push(self.step.tokens[row]);
            to.reasons.push(self.step.reasons[row]);
        }
        for (&(_, cached_len), whose) in self.step.admitted.iter().zip(&self.admitted) {
            if let Some((owner, own_id)) = *whose {
                part_of(owner, number, parts, begin).admitted.push((own_id, cached_len));
            }
        }
        for ((_, text), whose) in self.step.errors.0.into_iter().zip(&self.errors) {
            if let Some((owner, own_id)) = *whose {
                part_of(owner, number, parts, begin).errors.0.push((own_id, text));
            }
        }
        for mut one in self.step.logprobs {
            if let Some((owner, _)) = self.rows[one.index] {
                one.index = new_index[one.index];
                part_of(owner, number, parts, begin).logprobs.push(one);
            }
        }
        for (mut one, whose) in self.step.prompt_logprobs.into_iter().zip(&self.prompts) {
            if let Some((owner, own_id)) = *whose {
                one.req_id = own_id;
                part_of(owner, number, parts, begin).prompt_logprobs.push(one);
            }
        }
        for (mut one, whose) in self.step.embeddings.into_iter().zip(&self.embeddings) {
            if let Some((owner, own_id)) = *whose {
                one.req_id = own_id;
                part_of(owner, number, parts, begin).embeddings.push(one);
            }
        }
    }
}

/// Returns the part of front end `owner` among `parts[begin..]`; adds an empty one if there is none.
fn part_of(owner: u32, step: i64, parts: &mut Vec<(u32, StepTokens)>, begin: usize) -> &mut StepTokens {
    let at = parts[begin..].iter().position(|one| one.0 == owner);
    let at = at.map_or(parts.len(), |at| begin + at);
    if at == parts.len() {
        let empty = StepTokens {
            step,
            ..StepTokens::default()
        };
        parts.push((owner, empty));
    }
    &mut parts[at].1
}
