//! Pieces of JSON that answers of several shapes have.

use std::io::Write as _;

use super::choice::Choice;

/// Tokens of a request: each prompt counts once, however many choices it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt: usize,
    /// Tokens of the answers.
    pub completion: usize,
    /// Tokens of the prompts that were in the cache.
    pub cached: i64,
    /// Tokens of what models thought; None: that is not told.
    pub reasoning: Option<usize>,
}

impl Usage {
    /// The usage of choices in order, `n` of each prompt.
    pub fn of(choices: &[Choice], n: usize) -> Usage {
        let prompts = || choices.iter().step_by(n);
        Usage {
            prompt: prompts().map(|one| one.num_prompt).sum(),
            completion: choices.iter().map(|one| one.num_generated).sum(),
            cached: prompts().map(|one| i64::from(one.cached_len.unwrap_or(0))).sum(),
            reasoning: None,
        }
    }

    /// As OpenAI's APIs show it, at the end of `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let total = self.prompt + self.completion;
        let _ = write!(
            out,
            r#"{{"prompt_tokens":{},"completion_tokens":{},"total_tokens":{total},"prompt_tokens_details":{{"cached_tokens":{}}}"#,
            self.prompt, self.completion, self.cached
        );
        if let Some(count) = self.reasoning {
            let _ = write!(out, r#","completion_tokens_details":{{"reasoning_tokens":{count}}}"#);
        }
        out.push(b'}');
    }
}

/// A text as JSON, at the end of `out`.
pub fn write_text(out: &mut Vec<u8>, text: &str) {
    let _ = serde_json::to_writer(out, text); // writing to memory does not fail
}

/// A text as JSON.
pub fn json_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
