//! JSON fragments that responses of several shapes share.

use std::io::Write as _;

use super::choice::Choice;

/// Token usage of a request. Each prompt counts once, however many choices it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt: usize,
    /// Generated tokens of all choices.
    pub completion: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub cached: i64,
    /// Reasoning tokens; `None` if the response does not report them.
    pub reasoning: Option<usize>,
}

impl Usage {
    /// Sums the usage of `choices`, which are in order with `n` choices for each prompt.
    pub fn of(choices: &[Choice], n: usize) -> Usage {
        let prompts = || choices.iter().step_by(n);
        Usage {
            prompt: prompts().map(|one| one.num_prompt).sum(),
            completion: choices.iter().map(|one| one.num_generated).sum(),
            cached: prompts().map(|one| i64::from(one.cached_len.unwrap_or(0))).sum(),
            reasoning: None,
        }
    }

    /// Appends the usage as JSON in the shape of OpenAI's APIs.
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

/// Appends `text` as a JSON string.
pub fn write_text(out: &mut Vec<u8>, text: &str) {
    let _ = serde_json::to_writer(out, text); // writing to memory does not fail
}

/// Returns `text` as a JSON string.
pub fn json_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
