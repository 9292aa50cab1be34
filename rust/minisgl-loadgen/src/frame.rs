//! Classification of the events of an OpenAI-compatible stream without parsing their JSON.
//!
//! A key is searched with its quotes and colon: inside a JSON string its quotes would be escaped, so text that a model
//! wrote cannot be mistaken for one. Nothing is allocated.

use memchr::memmem;

/// Token counts of a `usage` object; `None` for one that is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `prompt_tokens`: tokens of the prompt.
    pub prompt: Option<i64>,
    /// `completion_tokens`: generated tokens.
    pub completion: Option<i64>,
    /// `cached_tokens` of `prompt_tokens_details`: prompt tokens from the cache.
    pub cached: Option<i64>,
}

/// Kinds of stream events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Event with generated text (content, reasoning or tool arguments).
    Text,
    /// `[DONE]`, the end of the stream.
    Done,
    /// An `error` object: the response has failed.
    Error,
    /// A role, a finish reason, usage, or a chunk without text.
    Other,
}

const TEXT_KEYS: [&[u8]; 5] = [
    b"\"content\":",
    b"\"text\":",
    b"\"reasoning_content\":",
    b"\"reasoning\":",
    b"\"arguments\":",
];

/// Classifies the data of an event. A text key with a non-empty string makes it `Text`.
pub fn classify(data: &[u8]) -> Frame {
    if data == b"[DONE]" {
        return Frame::Done;
    }
    if TEXT_KEYS.iter().any(|key| has_text(data, key)) {
        return Frame::Text;
    }
    match value_of(data, b"\"error\":") {
        Some(value) if value.first().is_some_and(|byte| matches!(byte, b'{' | b'"')) => Frame::Error,
        _ => Frame::Other,
    }
}

/// Returns the counts of the event's `usage` object; `None` if it has none or null.
pub fn usage(data: &[u8]) -> Option<Usage> {
    let object = value_of(data, b"\"usage\":")?;
    if object.first() != Some(&b'{') {
        return None;
    }
    let count = |key: &[u8]| value_of(object, key).and_then(number);
    Some(Usage {
        prompt: count(b"\"prompt_tokens\":"),
        completion: count(b"\"completion_tokens\":"),
        cached: count(b"\"cached_tokens\":"),
    })
}

fn has_text(data: &[u8], key: &[u8]) -> bool {
    value_of(data, key).is_some_and(|value| value.len() > 1 && value[0] == b'"' && value[1] != b'"')
}

/// Returns the bytes after the first `key`, without leading spaces; `None` if the key is missing.
fn value_of<'a>(data: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let at = memmem::find(data, key)? + key.len();
    Some(data[at..].trim_ascii_start())
}

fn number(value: &[u8]) -> Option<i64> {
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&value[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_events_are_distinguished_from_other_chunks() {
        let cases: [(&str, Frame); 10] = [
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
                Frame::Other,
            ),
            (r#"{"choices":[{"delta":{"content":"a"}}]}"#, Frame::Text),
            (r#"{"choices": [{"delta": {"content": "a"}}]}"#, Frame::Text),
            (
                r#"{"choices":[{"delta":{"content":null,"reasoning_content":"h"}}]}"#,
                Frame::Text,
            ),
            (r#"{"choices":[{"text":"a","finish_reason":null}]}"#, Frame::Text),
            (r#"{"choices":[{"text":"","finish_reason":"length"}]}"#, Frame::Other),
            (r#"{"choices":[],"usage":{"prompt_tokens":3}}"#, Frame::Other),
            (r#"{"error":{"message":"no"}}"#, Frame::Error),
            (r#"{"choices":[{"text":"","x":1}],"error":null}"#, Frame::Other),
            ("[DONE]", Frame::Done),
        ];
        for (data, frame) in cases {
            assert_eq!(classify(data.as_bytes()), frame, "{data}");
        }
    }

    #[test]
    fn json_inside_generated_text_is_ignored() {
        let data = br#"{"choices":[{"delta":{"content":"{\"usage\":{\"completion_tokens\":9}, \"error\":{}"}}]}"#;
        assert_eq!(usage(data), None);
        assert_eq!(classify(data), Frame::Text);
    }

    #[test]
    fn usage_is_parsed_with_and_without_details() {
        let full = concat!(
            r#"{"usage": {"prompt_tokens": 12, "completion_tokens":34,"#,
            r#""prompt_tokens_details":{"cached_tokens":8}}}"#
        );
        let expected = Usage {
            prompt: Some(12),
            completion: Some(34),
            cached: Some(8),
        };
        assert_eq!(usage(full.as_bytes()), Some(expected));
        assert_eq!(usage(br#"{"usage":null,"choices":[]}"#), None);
        let short = usage(br#"{"usage":{"completion_tokens":5}}"#).map(|u| (u.prompt, u.completion, u.cached));
        assert_eq!(short, Some((None, Some(5), None)));
    }
}
