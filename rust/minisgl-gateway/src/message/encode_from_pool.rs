//! What a pool of engines says, to bytes.

use super::encode::Bytes;
use super::{EngineReady, FromPool, Heartbeat, Phase, PromptLogprobs, StepTokens, TokenLogprobs};

/// One frame of `messages`, with its length in front.
#[must_use]
pub fn encode_from_pool(messages: &[FromPool<'_>]) -> Vec<u8> {
    let mut out = Bytes::frame(messages.len(), messages.iter().map(estimate).sum());
    for message in messages {
        out.say(message);
    }
    out.framed()
}

/// About as many bytes as `message` takes.
fn estimate(message: &FromPool<'_>) -> usize {
    match message {
        FromPool::StepTokens(step) => 64 + 16 * step.req_ids.len() + 12 * step.admitted.len(),
        FromPool::EngineSays { messages, .. } => 24 + messages.iter().map(|one| one.len()).sum::<usize>(),
        _ => 256,
    }
}

impl Bytes {
    fn say(&mut self, message: &FromPool<'_>) {
        match *message {
            FromPool::LoadProgress(progress) => {
                self.tagged("progress", 3);
                self.str(&progress.text);
                self.int(progress.done);
                self.int(progress.total);
            }
            FromPool::EngineReady(ready) => self.ready(ready),
            FromPool::Heartbeat(beat) => self.heartbeat(beat),
            FromPool::StepTokens(step) => self.step(step),
            FromPool::EngineSays { engine, messages } => {
                self.tagged("says", 2);
                self.int(engine);
                self.list_of_raw(messages);
            }
            FromPool::EngineState { engine, state, reason } => {
                self.tagged("engine", 3);
                self.int(engine);
                self.str(state);
                self.str(reason);
            }
            FromPool::EngineFailed(text) => {
                self.tagged("failed", 1);
                self.str(text);
            }
        }
    }

    /// An array of messages that are bytes already, itself as bytes.
    fn list_of_raw(&mut self, messages: &[&[u8]]) {
        let head = Self::list_head(messages.len());
        let parts: Vec<&[u8]> = std::iter::once(&head[..]).chain(messages.iter().copied()).collect();
        self.bytes(&parts);
    }

    fn heartbeat(&mut self, beat: &Heartbeat) {
        self.tagged("beat", 5);
        self.str(match beat.phase {
            Phase::Idle => "idle",
            Phase::Working => "working",
            Phase::Forward => "forward",
        });
        self.float(beat.age_s);
        self.int(beat.step);
        self.float(0.0);
        self.int(0);
    }

    fn ready(&mut self, ready: &EngineReady) {
        self.tagged("ready", 13);
        self.str(&ready.engine);
        match &ready.model_dir {
            Some(folder) => self.str(folder),
            None => self.none(),
        }
        self.int(ready.vocab_size);
        self.int(ready.max_seq_len);
        self.int32_list(&ready.eos_ids);
        self.int(ready.num_pages);
        self.int(ready.page_size);
        for text in [
            &ready.device,
            &ready.dtype,
            &ready.cpu_backend,
            &ready.cpu_backend_fallback,
            &ready.simulated,
            &ready.engine_details,
        ] {
            self.str(text);
        }
    }

    fn step(&mut self, step: &StepTokens) {
        self.tagged("step", 10);
        self.int(step.step);
        self.int64s(step.req_ids.iter().copied());
        self.int32s(&step.tokens);
        self.int32s(&step.reasons);
        self.int64s(step.admitted.iter().map(|&(req_id, _)| req_id));
        let cached: Vec<i32> = step.admitted.iter().map(|&(_, cached_len)| cached_len).collect();
        self.int32s(&cached);
        self.map(step.errors.len());
        for (req_id, text) in &step.errors {
            self.int(*req_id);
            self.str(text);
        }
        self.array(step.logprobs.len());
        step.logprobs.iter().for_each(|one| self.token_logprobs(one));
        self.array(step.prompt_logprobs.len());
        step.prompt_logprobs.iter().for_each(|one| self.prompt_logprobs(one));
        self.array(step.embeddings.len());
        for one in &step.embeddings {
            self.array(2);
            self.int(one.req_id);
            self.bytes(&[&one.numbers]);
        }
    }

    fn token_logprobs(&mut self, one: &TokenLogprobs) {
        self.array(4);
        self.int(i64::try_from(one.index).unwrap_or(i64::MAX));
        self.float(one.logprob);
        self.int32_list(&one.top_ids);
        self.float_list(&one.top_logprobs);
    }

    fn prompt_logprobs(&mut self, one: &PromptLogprobs) {
        self.array(5);
        self.int(one.req_id);
        self.int(one.first);
        self.float_list(&one.logprobs);
        self.array(one.top_ids.len());
        one.top_ids.iter().for_each(|ids| self.int32_list(ids));
        self.array(one.top_logprobs.len());
        one.top_logprobs.iter().for_each(|logprobs| self.float_list(logprobs));
    }

    fn int32_list(&mut self, values: &[i32]) {
        self.array(values.len());
        values.iter().for_each(|&value| self.int(value.into()));
    }

    fn float_list(&mut self, values: &[f64]) {
        self.array(values.len());
        values.iter().for_each(|&value| self.float(value));
    }
}
