//! The text module by itself: a byte tokenizer, the cache's bounds, templates. With real tokenizers: `tests/tokenizer`.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use minisgl_text::{ChatTemplate, ChatTemplateSource, ContentShape, TextError, Tokenizer, TokenizerSource};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const CACHE_BYTES: usize = 1 << 14;

/// One id a byte, `<|a|>` is 256 and `<|b|>` 257; as the echo engine's.
fn tokenizer(cache_bytes: usize) -> Arc<Tokenizer> {
    let mut next = 256;
    let vocab: Map<String, Value> = (0..=255_u8)
        .map(|byte| {
            let is_printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if is_printable { u32::from(byte) } else { next };
            next += u32::from(!is_printable);
            (char::from_u32(code).unwrap().to_string(), json!(byte))
        })
        .collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let step = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": step,
        "post_processor": null, "decoder": step, "added_tokens": [special(256, "<|a|>"), special(257, "<|b|>")],
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    });
    Arc::new(Tokenizer::new(&TokenizerSource::Text(file.to_string()), cache_bytes).unwrap())
}

/// What the tokenizer means, without the tokenizer.
fn ids_of(text: &str) -> Vec<u32> {
    let mut found = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let token = [(256, "<|a|>"), (257, "<|b|>")]
            .into_iter()
            .find(|(_, token)| rest.starts_with(token));
        let len = match token {
            Some((id, token)) => {
                found.push(id);
                token.len()
            }
            None => {
                let len = rest.chars().next().unwrap().len_utf8();
                found.extend(rest.as_bytes()[..len].iter().map(|&byte| u32::from(byte)));
                len
            }
        };
        rest = &rest[len..];
    }
    found
}

fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("<|a|>".to_owned()),
        Just("<|b|>".to_owned()),
        Just("<|a".to_owned()),
        "[a-c é漢]{0,6}",
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn ids_are_the_same_with_a_cache_without_one_and_by_definition(all in prop::collection::vec(texts(), 1..6)) {
        let (cached, plain) = (tokenizer(CACHE_BYTES), tokenizer(0));
        for text in all.iter().chain(&all) {
            let expected = ids_of(text);
            prop_assert_eq!(&cached.encode(text, false, usize::MAX).unwrap(), &expected);
            prop_assert_eq!(&plain.encode(text, true, usize::MAX).unwrap(), &expected);
            if let Some(less) = expected.len().checked_sub(1) {
                let is_too_many = matches!(cached.encode(text, false, less), Err(TextError::TooMany { .. }));
                prop_assert!(is_too_many);
            }
        }
        prop_assert_eq!(plain.cache_stats().bytes_held, 0);
    }
}

#[test]
fn invalid_bytes_are_marked_and_special_tokens_are_no_text() {
    let tokenizer = tokenizer(0);
    let mut decoder = tokenizer.decoder(true);
    let mut out = String::new();
    decoder.push(&[0xe6, 0xbc], &mut out);
    assert_eq!(out, "");
    decoder.push(&[256, 0xa2, 0xff, -1, 9999, 0xe6], &mut out);
    assert_eq!(out, "漢\u{fffd}");
    assert_eq!(decoder.place(i32::from(b'x'), &mut out), 1);
    decoder.push(&[0xf0, 0x9f], &mut out);
    decoder.flush(&mut out);
    assert_eq!(out, "漢\u{fffd}\u{fffd}x\u{fffd}");
    out.clear();
    decoder.push(&[0xed, 0xa0], &mut out); // the beginning of a surrogate
    assert_eq!(out, "");
    decoder.push(&[0x80], &mut out);
    assert_eq!(out, "\u{fffd}\u{fffd}\u{fffd}");
    let mut shown = String::new();
    tokenizer.decoder(false).push(&[256, 97], &mut shown);
    assert_eq!(shown, "<|a|>a");
}

#[test]
fn the_cache_stays_small_and_keeps_what_is_used() {
    let tokenizer = tokenizer(CACHE_BYTES);
    for number in 0..2000 {
        tokenizer.encode("<|a|>kept<|b|>", false, usize::MAX).unwrap();
        tokenizer
            .encode(&format!("<|a|>passing {number}<|b|>"), false, usize::MAX)
            .unwrap();
        assert!(tokenizer.cache_stats().bytes_held <= CACHE_BYTES as u64);
    }
    let stats = tokenizer.cache_stats();
    assert_eq!((stats.hits, stats.misses), (1999, 2001));
    assert_eq!(stats.bytes_hit, 1999 * 4);
    let before = tokenizer.cache_stats().bytes_held;
    tokenizer.encode(&"x".repeat(CACHE_BYTES), false, usize::MAX).unwrap(); // would take all of it
    assert_eq!(tokenizer.cache_stats().bytes_held, before);
}

#[test]
fn threads_share_a_tokenizer() {
    let tokenizer = tokenizer(CACHE_BYTES);
    thread::scope(|scope| {
        for thread in 0..4 {
            let tokenizer = &tokenizer;
            scope.spawn(move || {
                for number in 0..300 {
                    let text = format!("<|a|>{}<|b|>{}", number % 17, (number + thread) % 40);
                    assert_eq!(tokenizer.encode(&text, false, usize::MAX).unwrap(), ids_of(&text));
                }
            });
        }
    });
}

fn rendered(source: &str, messages: &[Value]) -> Result<String, TextError> {
    let source = ChatTemplateSource {
        source: source.to_owned(),
        content: ContentShape::String,
    };
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    ChatTemplate::new(&source, &tokens)?.render(messages, &Map::new(), true)
}

#[test]
fn templates_see_what_python_would_give_them() {
    let user =
        json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "x": null});
    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"n\": 1.50}"}}]});
    let messages = [user, call];
    let source = "{{ bos_token }}{{ messages[0].content }}{{ 'x' in messages[0] }}{{ tools is none }}\
        {{ messages[1].tool_calls[0].function.arguments }}{{ add_generation_prompt }}";
    assert_eq!(rendered(source, &messages).unwrap(), "<s>a\nbFalseTrue{'n': 1.5}True");
}

#[test]
fn what_is_not_certain_is_refused() {
    let hello = [json!({"role": "user", "content": "héllo"})];
    for source in [
        "{{ messages[0].content.upper() }}",
        "{{ [messages[0].content] }}",
        "{{ messages[0].content | e }}",
        "{{ messages[0].__class__ }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ 1 < 'a' }}",
    ] {
        assert!(
            matches!(rendered(source, &hello), Err(TextError::Template(_))),
            "{source}"
        );
    }
    let large = [json!({"role": "user", "content": "", "n": 123_456_789_012_345_678_901_234_567_890.0})];
    assert!(rendered("a", &large).is_err());
    assert!(rendered("a", &[]).is_err());
}
