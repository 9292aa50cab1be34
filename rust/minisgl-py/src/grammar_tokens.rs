//! Tokenizer in llguidance's form: the bytes of each id, and how bytes become ids.
//!
//! Invariants: an id that the tokenizer does not have stands for a special token without text.

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use minisgl_text::{byte_token, char_to_byte, flat_steps, type_of};
use serde_json::Value;
use tokenizers::Tokenizer;

struct Tokens {
    tokenizer: Tokenizer,
    trie: TokTrie,
}

impl Tokens {
    fn ids(&self, text: &str) -> Vec<TokenId> {
        // Text that cannot be encoded has no ids: the mask then allows every spelling of it.
        self.tokenizer
            .encode_fast(text, false)
            .map_or_else(|_| Vec::new(), |found| found.get_ids().to_vec())
    }
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.ids(text))
    }

    fn tokenize_bytes_special(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.trie.tokenize_with_special(text, |plain| self.ids(plain))
        })
    }
}

/// Reads a `tokenizer.json` for a model of `vocab_size` ids. Fails if it is invalid, or if its decoder is neither
/// byte-level nor has byte fallback.
pub(crate) fn read(json: &str, vocab_size: usize, eos_ids: &[u32]) -> Result<TokEnv, String> {
    let mut config: Value = serde_json::from_str(json).map_err(|error| error.to_string())?;
    let steps = flat_steps(config["decoder"].clone(), "decoders");
    let has = |name: &str| steps.iter().any(|step| type_of(step) == name);
    let falls_back = has("ByteFallback");
    if !has("ByteLevel") && !falls_back {
        return Err("the tokenizer's decoder is neither byte-level nor has byte fallback".to_owned());
    }
    without_first_space(&mut config["normalizer"]);
    without_first_space(&mut config["pre_tokenizer"]);
    let tokenizer = Tokenizer::from_bytes(config.to_string()).map_err(|error| error.to_string())?;
    let num_known = (tokenizer.get_vocab(true).values().max()).map_or(0, |&last| last as usize + 1);
    let bytes_of = token_bytes(
        &tokenizer,
        falls_back.then(|| space_of(&steps)),
        num_known.max(vocab_size),
    );
    let Some(&first_eos) = eos_ids.first() else {
        return Err("eos_ids is empty".to_owned());
    };
    let num_ids = u32::try_from(bytes_of.len()).map_err(|error| error.to_string())?;
    let trie = TokTrie::from(&TokRxInfo::new(num_ids, first_eos), &bytes_of).with_eos_tokens(eos_ids);
    Ok(std::sync::Arc::new(Tokens { tokenizer, trie }))
}

/// Removes the steps that put a space before a text: a grammar's bytes are in the middle of one.
fn without_first_space(step: &mut Value) {
    match step["type"].as_str() {
        Some("Prepend") => *step = Value::Null,
        Some("Metaspace") => step["prepend_scheme"] = "never".into(),
        Some("Sequence") => {
            for list in ["normalizers", "pretokenizers"] {
                if let Some(inner) = step.get_mut(list).and_then(Value::as_array_mut) {
                    inner.iter_mut().for_each(without_first_space);
                    inner.retain(|one| !one.is_null());
                }
            }
        }
        _ => {}
    }
}

/// Returns the character that represents a space in tokens.
fn space_of(steps: &[Value]) -> char {
    let spaces = steps
        .iter()
        .filter(|step| type_of(step) == "Replace" && step["content"] == " ");
    let mut spaces = spaces.filter_map(|step| {
        let mut of_pattern = step["pattern"]["String"].as_str()?.chars();
        of_pattern.next().filter(|_| of_pattern.next().is_none())
    });
    spaces.next_back().unwrap_or(' ')
}

/// Returns the bytes of each id. Added tokens that are special or look like `<...>` stand for themselves only. `space`:
/// the space character of a byte-fallback tokenizer; `None` for a byte-level one.
fn token_bytes(tokenizer: &Tokenizer, space: Option<char>, num_ids: usize) -> Vec<Vec<u8>> {
    let alphabet = char_to_byte();
    let added = tokenizer.get_added_tokens_decoder();
    (0..num_ids)
        .map(|id| {
            let id = u32::try_from(id).unwrap_or(u32::MAX);
            let Some(token) = tokenizer.id_to_token(id) else {
                return special(&format!("<[{id}]>"));
            };
            if let Some(one) = added.get(&id) {
                if one.special || (one.content.starts_with('<') && one.content.ends_with('>')) {
                    return special(&token);
                }
                return one.content.clone().into_bytes();
            }
            let Some(space) = space else {
                let bytes = token.chars().map(|one| alphabet.get(one as usize).copied().flatten());
                // a token outside the byte-level alphabet has no bytes
                return bytes.collect::<Option<_>>().unwrap_or_default();
            };
            byte_token(&token).map_or_else(|| token.replace(space, " ").into_bytes(), |byte| vec![byte])
        })
        .collect()
}

fn special(name: &str) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
}
