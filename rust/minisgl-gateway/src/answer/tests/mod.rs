//! Which bodies the gateway takes, and what it makes of them. That its answers are those of the Python server is shown
//! over sockets (tests/gateway).
#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};

use super::fields::Prompt;
use super::plan::{Endpoint, Input, Plan, plan};
use crate::config::{GatewayConfig, VERSION};

pub(crate) fn config(changes: Value) -> GatewayConfig {
    let mut found = json!({
        "model_name": "echo", "aliases": ["also"], "thinking": null, "tools": null, "template_variables": [], "template_names": ["messages"], "version": VERSION,
        "fields": {"chat": {"echo": [false], "continue_final_message": null, "modalities": [["text"]]}, "generate": {"text": null}},
        "max_kept_answers": 9, "max_kept_bytes": 9000, "max_priority": 100, "any_model_name": false, "models": "{}", "max_seq_len": 100, "vocab_size": 50,
        "simulated": false, "special_tokens": {}, "defaults": {}, "api_key": null, "api_keys": [],
        "chat_templates": {"default": {"source": "", "content": "string"}}, "hosts": null, "cors_origins": [],
        "errors": errors(), "embeds": true, "pooling": "last", "ranges": ranges(), "bounds": bounds(), "log": {"json": false, "access": true, "probes": false},
        "limits": {"max_queued_requests": 1, "max_queued_tokens": 1, "max_body_bytes": 1, "max_encoding_bytes": 1,
            "request_timeout": null, "slow_client_timeout": 1.0, "keep_alive_timeout": 1, "step_timeout": 1.0,
            "drain_timeout": 1.0, "adaptive_max_tokens": null, "context_margin": 0},
    });
    found["harmless_headers"] = json!([["x-content-type-options", "nosniff"], ["x-other", "a"]]);
    found["writes"] = true.into();
    found["metrics"] = json!({"seconds": [1.0], "tokens": [1.0], "window_s": 10.0});
    found["watch"] = json!({"interval_s": 0.5, "silent_s": 1.5, "silence_s": 3.0, "loop_timeout_s": 3.0});
    found["exposed_headers"] = "X-Request-Id".into();
    for (name, value) in changes.as_object().unwrap() {
        found[name] = value.clone();
    }
    serde_json::from_value(found).unwrap()
}

fn ranges() -> Value {
    let range = |least: f64, most: Option<f64>| json!({"least": least, "most": most, "off": null, "is_open": false});
    let unit = range(0.0, Some(1.0));
    let (penalty, logprobs) = (range(-2.0, Some(2.0)), range(0.0, Some(20.0)));
    json!({
        "max_tokens": range(1.0, None), "min_tokens": range(0.0, None), "temperature": range(0.0, Some(2.0)),
        "top_k": {"least": 1, "most": null, "off": -1, "is_open": false}, "top_p": unit, "min_p": unit,
        "n": range(1.0, Some(128.0)), "logprobs": logprobs, "prompt_logprobs": logprobs,
        "frequency_penalty": penalty, "presence_penalty": penalty, "logit_bias": range(-100.0, Some(100.0)),
        "repetition_penalty": {"least": 0, "most": 10, "off": null, "is_open": true},
    })
}

fn errors() -> Value {
    let told = |code: &str, status: u16, message: &str| {
        json!({"status": status, "code": code, "openai": {"error": {"message": message, "code": code}},
            "anthropic": {"type": "error", "error": {"message": message}}})
    };
    let mut found = json!({"grammar_refused": "g: ", "dimensions": told("dimensions", 400, "{asked} of {has}")});
    for code in ["engine", "grammar", "engine_gone", "no_embedding", "too_late", "bug"] {
        found[code] = told(code, 500, "");
    }
    found
}

fn bounds() -> Value {
    json!({
        "max_stop_strings": 64, "max_stop_chars": 4096, "max_stop_token_ids": 256, "max_logit_bias": 1024,
        "max_bad_words": 256, "max_bad_word_chars": 256, "max_allowed_token_ids": 16384, "max_messages": 4096,
        "max_values": 4000, "more_values": 100, "max_containers": 1000, "max_parts": 4096, "max_prompts": 256, "max_inputs": 1024, "max_metadata": 16, "max_choices": 1024, "max_logprob_entries": 1000,
        "completion_tokens": 16, "generate_tokens": 128,
    })
}

#[test]
fn a_configuration_of_another_version_is_refused_by_its_number() {
    let error = GatewayConfig::read(r#"{"version": 0, "no_such_field": 1}"#).unwrap_err();
    assert!(error.starts_with("it has version 0, the extension reads 5"), "{error}");
    assert!(
        GatewayConfig::read(r#"{"version": 5}"#)
            .unwrap_err()
            .contains("missing field")
    );
    assert!(GatewayConfig::read("{}").unwrap_err().contains("version"));
}

fn planned(endpoint: Endpoint, body: &Value, config: &GatewayConfig) -> Option<Plan> {
    plan(endpoint, body.to_string().as_bytes(), config).ok()
}

fn chat(more: Value) -> Value {
    let mut body = json!({"model": "echo", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn takes(more: Value) -> bool {
    planned(Endpoint::Chat, &chat(more), &config(json!({}))).is_some()
}

#[test]
fn usual_bodies_are_taken() {
    for more in [
        json!({}),
        json!({"temperature": 1, "top_p": 0.5, "n": 2, "stop": "x", "seed": -1, "stream": true}),
        json!({"stop": ["a", "b"], "max_tokens": 5, "frequency_penalty": 2.0, "logit_bias": {"7": -100}}),
        json!({"stream": true, "stream_options": {"include_usage": true}, "user": "me", "metadata": {"a": "b"}, "store": false}),
        json!({"temperature": null, "n": null, "tools": null, "tools": [], "tool_choice": "none", "logprobs": false}),
        json!({"messages": [{"role": "assistant", "content": null}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        json!({"messages": [{"role": "developer", "content": "x", "tool_calls": null, "whatever": 1}]}),
        json!({"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "n"}], "tool_calls": [{}], "reasoning": "r"}]}),
        json!({"response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": false}}),
        json!({"logprobs": true, "top_logprobs": 20, "model": "other", "priority": 5, "reasoning_effort": "low"}),
        json!({"tools": [{}], "tool_choice": {}, "parallel_tool_calls": 1, "guided_json": {}}), // Python looks at them
        json!({"tool_choice": "auto"}),
        json!({"max_tokens": -1}),
        json!({"unknown": 1, "echo": false, "continue_final_message": null, "modalities": ["text"]}),
    ] {
        assert!(takes(more.clone()), "{more}");
    }
}

#[test]
fn what_any_check_could_refuse_is_not_taken() {
    let deep = (0..120).fold(json!(1), |inner, _| json!([inner]));
    for more in [
        json!({"unknown": deep}),
        json!({"unknown": vec![1; 10_000]}),
        json!({"unknown": vec![json!([]); 1100]}),
        json!({"messages": [{"role": "user", "content": "x", "whatever": vec![1; 10_000]}]}),
        json!({"messages": [{"role": "user", "content": "x", "whatever": deep}]}),
        json!({"temperature": 2.1}),
        json!({"temperature": "1"}),
        json!({"temperature": true}),
        json!({"top_p": -0.1}),
        json!({"top_k": -2}),
        json!({"n": 0}),
        json!({"n": 129}),
        json!({"n": 1.0}),
        json!({"max_tokens": 0}),
        json!({"max_completion_tokens": 0}),
        json!({"min_tokens": 5, "max_tokens": 4}),
        json!({"stop": ""}),
        json!({"stop": vec!["a"; 65]}),
        json!({"stop_token_ids": [50]}),
        json!({"logit_bias": {"50": 1}}),
        json!({"logit_bias": {"07": 1}}),
        json!({"logit_bias": {"7": 100.5}}),
        json!({"tool_choice": "required"}),
        json!({"parallel_tool_calls": "no"}),
        json!({"tools": [], "tool_choice": {}}),
        json!({"top_logprobs": 1}),
        json!({"logprobs": true, "top_logprobs": 21}),
        json!({"enable_thinking": true}),
        json!({"reasoning_effort": 1}),
        json!({"verbosity": "much"}),
        json!({"messages": [{"role": "user", "content": "x", "refusal": "n"}]}),
        json!({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"stream_options": [true]}),
        json!({"stream_options": {"continuous_usage_stats": true}}),
        json!({"chat_template_kwargs": {"messages": []}}),
        json!({"messages": []}),
        json!({"messages": [{"role": "user"}]}),
        json!({"messages": [{"role": "robot", "content": "x"}]}),
        json!({"messages": [["user", "x"]]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        json!({"echo": true}),
        json!({"echo": 0}),
        json!({"continue_final_message": false}),
        json!({"modalities": ["text", "audio"]}),
    ] {
        assert!(!takes(more.clone()), "{more}");
    }
}

#[test]
fn broken_json_is_not_taken() {
    let config = config(json!({}));
    for body in [
        "",
        "[]",
        "null",
        "{",
        r#"["echo"]"#,
        r#"{"prompt": "a"} x"#,
        r#"{"prompt": "\ud800"}"#,
        r#"{"prompt": "a", "unknown": "\ud800"}"#,
        r#"{"prompt": "a", "unknown": "\ud83dx\ude00"}"#,
        r#"{"prompt": "a", "unknown": ["\ude00\ud83d"]}"#,
        "{\"prompt\": \"a\u{0}\"}",
        r#"{"prompt": "a", "n": NaN}"#,
        r#"{"prompt": "a", "n": 1, "n": 1}"#,
    ] {
        assert!(plan(Endpoint::Completion, body.as_bytes(), &config).is_err(), "{body}");
    }
    for body in [
        r#"{"prompt": "a", "unknown": "\ud83d\ude00 \\ud83d \u00e9 \" ["}"#,
        r#"{"prompt": "\uD83D\uDE00\\"}"#,
    ] {
        assert!(plan(Endpoint::Completion, body.as_bytes(), &config).is_ok(), "{body}");
    }
    assert!(plan(Endpoint::Completion, br#" {"prompt": "a"} "#, &config).is_ok());
}

#[test]
fn prompts_of_all_kinds() {
    let config = config(json!({}));
    let prompts = |prompt: Value| match planned(Endpoint::Completion, &json!({ "prompt": prompt }), &config)?.input {
        Input::Prompts(found) => Some(found),
        Input::Conversation { .. } => None,
    };
    assert_eq!(prompts(json!("a")), Some(vec![Prompt::Text("a".into())]));
    assert_eq!(prompts(json!([1, 2])), Some(vec![Prompt::Ids(vec![1, 2])]));
    assert_eq!(
        prompts(json!([[1], [2]])),
        Some(vec![Prompt::Ids(vec![1]), Prompt::Ids(vec![2])])
    );
    assert_eq!(prompts(json!(["a", "b"])).map(|found| found.len()), Some(2));
    for odd in [
        json!(["a", 1]),
        json!([1, "a"]),
        json!([[1], "a"]),
        json!([1, [1]]),
        json!([-1]),
        json!([1.0]),
        json!([]),
    ] {
        assert_eq!(prompts(odd.clone()), None, "{odd}");
    }
}

#[test]
fn defaults_of_the_model_stand_for_what_is_missing() {
    let config = config(json!({"defaults": {"temperature": 0.6, "top_k": 20, "max_tokens": 9}}));
    let plain = planned(Endpoint::Chat, &chat(json!({})), &config).unwrap().sampling;
    assert_eq!((plain.temperature, plain.top_k, plain.max_tokens), (0.6, 20, Some(9)));
    let given = planned(
        Endpoint::Chat,
        &chat(json!({"temperature": 0, "top_k": 0, "max_tokens": 3})),
        &config,
    );
    let given = given.unwrap().sampling;
    assert_eq!((given.temperature, given.top_k, given.max_tokens), (0.0, -1, Some(3)));
    let body = json!({"prompt": "a"});
    assert_eq!(
        planned(Endpoint::Completion, &body, &config)
            .unwrap()
            .sampling
            .max_tokens,
        Some(16)
    );
}

#[test]
fn generate_takes_its_fields_on_one_side() {
    let config = config(json!({}));
    let limit = |body: Value| planned(Endpoint::Generate, &body, &config).map(|plan| plan.sampling.max_tokens.unwrap());
    assert_eq!(
        limit(json!({"prompt": "a", "sampling_params": {"max_new_tokens": 3}})),
        Some(3)
    );
    assert_eq!(limit(json!({"prompt": "a", "max_tokens": 4, "stream": true})), Some(4));
    assert_eq!(limit(json!({"prompt": "a"})), Some(128));
    assert_eq!(limit(json!({"text": "a"})), None);
    assert_eq!(limit(json!({"input_ids": [1]})), None);
    assert_eq!(limit(json!({"text": "a", "prompt": "a"})), None);
    assert_eq!(
        limit(json!({"prompt": "a", "max_tokens": 1, "sampling_params": {"max_new_tokens": 1}})),
        None
    );
    assert_eq!(
        limit(json!({"prompt": "a", "max_tokens": 1, "max_new_tokens": 1})),
        None
    );
    assert_eq!(limit(json!({"prompt": "a", "n": 2})), None);
    assert_eq!(limit(json!({"prompt": "a", "sampling_params": [3]})), None);
}
