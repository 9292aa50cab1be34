//! Tests of all tool-call and reasoning formats: outputs of models, split and ended at every byte, and mixed up.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use minisgl_text::answer::{AnswerParser, Call, End, Part, Piece, THINKING, TOOL_FORMATS, Thinking, ToolFormat, Tools};
use proptest::prelude::*;
use serde_json::{Value, json};

type Joined = (String, String, Vec<(String, String)>);

fn tools() -> Arc<Tools> {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}}, "maybe": {"type": "string", "nullable": true}, "place": {"$ref": "#/$defs/place"}, "any": {}
    }, "$defs": {"place": {"anyOf": [{"type": "object"}, {"type": "null"}]}}});
    let save = json!({"type": "object", "properties": {
        "body": {"type": "string"}, "when": {"type": "string"}, "code": {"type": "string"}, "size": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "string"}}, "flag": {"type": "boolean"}, "any": {}, "a": {}, "b": {},
        "deep": {"type": "object", "properties": {"code": {"type": "string"}, "ratio": {"type": "number"}}}
    }});
    Arc::new(Tools(
        [
            ("weather".to_owned(), schema),
            ("now".to_owned(), json!({})),
            ("save".to_owned(), save),
        ]
        .into(),
    ))
}

fn joined<'a>(
    format: Option<&'static ToolFormat>,
    thinking: Option<&'static Thinking>,
    pieces: impl IntoIterator<Item = &'a str>,
    end: End,
) -> Joined {
    parsed(format, thinking.map(|one| (one, None)), pieces, end).0
}

/// Parses chunks. Returns the joined content, reasoning and calls, and the indices of broken calls.
fn parsed<'a>(
    format: Option<&'static ToolFormat>,
    thinking: Option<(&'static Thinking, Option<bool>)>,
    pieces: impl IntoIterator<Item = &'a str>,
    end: End,
) -> (Joined, Vec<usize>) {
    let mut number = 0;
    let new_id = move |_: usize, _: &str| {
        number += 1;
        number.to_string()
    };
    let mut parser = AnswerParser::new(format, thinking, tools(), Box::new(new_id));
    let mut parts: Vec<Part> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish(end));
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::<(String, String)>::new());
    for part in parts {
        match part {
            Part::Text(text) => content += &text,
            Part::Reasoning(text) => reasoning += &text,
            Part::CallBegun { index, id, name } => {
                assert!(index == calls.len() && !id.is_empty());
                calls.push((name, String::new()));
            }
            Part::CallArguments(index, text) => {
                assert_eq!(index + 1, calls.len());
                calls[index].1 += &text;
            }
        }
    }
    ((content, reasoning, calls), parser.broken())
}

fn letters(text: &str) -> Vec<&str> {
    text.char_indices()
        .map(|(at, one)| &text[at..at + one.len_utf8()])
        .collect()
}

fn cuts(text: &str) -> impl Iterator<Item = (&str, &str)> {
    (0..=text.len())
        .filter(|at| text.is_char_boundary(*at))
        .map(|at| text.split_at(at))
}

/// Two calls in each format: of `weather` with arguments, and of `now` without.
const WRITTEN: &[(&str, &str)] = &[
    (
        "hermes",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
    ),
    (
        "mistral",
        "[TOOL_CALLS]weather[ARGS]{\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}",
    ),
    (
        "llama3_json",
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}}; \
         {\"name\": \"now\", \"parameters\": {}}",
    ),
    ("pythonic", "[weather(city='Zü\"</tool_call>', days=3), now()]"),
    (
        "json",
        "[{\"name\": \"weather\", \"arguments\": {\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}}, \
         {\"name\": \"now\", \"arguments\": {}}]",
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Zü\\\"</tool_call>\", \
         \"days\": 3}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nZü\"</tool_call>\n</parameter>\n<parameter=days>\n3\n\
         </parameter>\n</function>\n</tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zü\"</tool_call></arg_value>\n<arg_key>days</arg_key>\n\
         <arg_value>3</arg_value>\n</tool_call><tool_call>now</tool_call>",
    ),
    (
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Zü\"</tool_call></parameter>\n\
         <parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \
         \"Zü\\\"</tool_call>\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1\
         <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Zü\\\"</tool_call>\", \
         \"days\": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```\
         <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}\
         <｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "gemma4",
        "<|tool_call>call:weather{city:<|\"|>Zü\"</tool_call><|\"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>",
    ),
    (
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Zü\"</tool_call><escape>,days:3}<end_function_call>\
         <start_function_call>call:now{}<end_function_call>",
    ),
    (
        "command",
        "<|START_ACTION|>[\n  {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \
         \"Zü\\\"</tool_call>\", \"days\": 3}},\n  {\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n\
         ]<|END_ACTION|>",
    ),
    (
        "lfm2",
        "<|tool_call_start|>[weather(city=\"Zü\\\"</tool_call>\", days=3), now()]<|tool_call_end|>",
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[weather(city='Zü\"</tool_call>', days=3), now()]<|python_end|>",
    ),
    (
        "phi4_mini",
        "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}}, \
         {\"name\": \"now\", \"arguments\": {}}]<|/tool_call|>",
    ),
    (
        "granite",
        "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Zü\\\"</tool_call>\", \"days\": 3}}, \
         {\"name\": \"now\", \"arguments\": {}}]",
    ),
];

fn format(name: &str) -> &'static ToolFormat {
    ToolFormat::named(name, |_| true).unwrap()
}

#[test]
fn every_format_parses_equally_for_any_split() {
    for one in TOOL_FORMATS {
        assert!(
            WRITTEN.iter().any(|(name, _)| *name == one.name),
            "{} has no text here",
            one.name
        );
    }
    for (name, text) in WRITTEN {
        let format = Some(format(name));
        let whole = joined(format, None, [*text], End::Whole);
        let calls: Vec<(&str, Value)> = (whole.2.iter())
            .map(|(name, arguments)| (name.as_str(), serde_json::from_str(arguments).unwrap()))
            .collect();
        let weather = json!({"city": "Zü\"</tool_call>", "days": 3});
        assert_eq!(calls, [("weather", weather), ("now", json!({}))], "{name}");
        assert_eq!(whole.0.trim(), "", "{name}");
        assert_eq!(joined(format, None, letters(text), End::Whole), whole, "{name}");
        for (before, after) in cuts(text) {
            assert_eq!(
                joined(format, None, [before, after], End::Whole),
                whole,
                "{name} cut behind {before}"
            );
        }
    }
}

#[test]
fn truncated_output_has_no_marker_or_partial_call_in_its_content() {
    for (name, text) in WRITTEN {
        let has_marker = !format(name).begin.is_empty() || *name == "harmony";
        let text = if has_marker && *name != "harmony" {
            format!("Well.\n{text}")
        } else {
            (*text).to_owned()
        };
        for (before, _) in cuts(&text) {
            let (content, _, calls) = joined(Some(format(name)), None, [before], End::Cut);
            let is_known = has_marker || before.contains("weather\"") || before.contains("weather(");
            assert!(
                content.split_whitespace().collect::<String>().len() <= "Well.<".len() || !is_known,
                "{name}: {content:?} of {before:?}"
            );
            assert!(calls.len() <= 2, "{name}");
        }
    }
}

#[test]
fn untyped_arguments_get_the_types_of_the_schema() {
    let values = [
        ("city", "5", json!("5")),
        ("city", "a\n\"b\"\n", json!("a\n\"b\"\n")),
        ("days", "5", json!(5)),
        ("days", "many", json!("many")),
        ("zip", "null", Value::Null),
        ("days", "null", Value::Null),
        ("days", "None", Value::Null),
        ("days", "true", json!(true)),
        ("city", "null", json!("null")),
        ("maybe", "null", Value::Null),
        ("maybe", "3", json!("3")),
        ("tags", "null", Value::Null),
        ("zip", "01234", json!("01234")),
        ("tags", "[\"a\", \"b\"]", json!(["a", "b"])),
        ("tags", "['a', 'b']", json!(["a", "b"])),
        ("place", "{\"x\": 1}", json!({"x": 1})),
        ("any", "True", json!(true)),
        ("any", "so", json!("so")),
        ("other", "1.5", json!(1.5)),
    ];
    for (key, written, value) in values {
        let in_xml = format!(
            "<tool_call>\n<function=weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        );
        let in_keys =
            format!("<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>");
        for (name, text) in [("qwen3_coder", in_xml), ("glm45", in_keys)] {
            let (_, _, calls) = joined(Some(format(name)), None, letters(&text), End::Whole);
            let actual: Value = serde_json::from_str(&calls[0].1).unwrap();
            assert_eq!(actual, json!({key: value}), "{name} {written}");
        }
    }
}

/// Returns a call of `save` in a format, with `inner` as its arguments.
fn saved(name: &str, inner: &str) -> String {
    match name {
        "hermes" => format!("<tool_call>\n{{\"name\": \"save\", \"arguments\": {inner}}}\n</tool_call>"),
        "mistral" => format!("[TOOL_CALLS]save[ARGS]{inner}"),
        "llama3_json" => format!("{{\"name\": \"save\", \"parameters\": {inner}}}"),
        "json" => format!("[{{\"name\": \"save\", \"arguments\": {inner}}}]"),
        "harmony" => format!("<|channel|>commentary to=functions.save <|constrain|>json<|message|>{inner}<|call|>"),
        "kimi_k2" => format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.save:0<|tool_call_argument_begin|>{inner}\
             <|tool_call_end|><|tool_calls_section_end|>"
        ),
        "deepseek_v31" => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>save<｜tool▁sep｜>{inner}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "gemma4" => format!("<|tool_call>call:save{inner}<tool_call|>"),
        "functiongemma" => format!("<start_function_call>call:save{inner}<end_function_call>"),
        "qwen3_coder" => format!("<tool_call>\n<function=save>\n{inner}\n</function>\n</tool_call>"),
        "glm45" => format!("<tool_call>save\n{inner}\n</tool_call>"),
        "minimax_m2" => {
            format!("<minimax:tool_call>\n<invoke name=\"save\">\n{inner}\n</invoke>\n</minimax:tool_call>")
        }
        _ => unreachable!(),
    }
}

const IN_JSON: &[&str] = &[
    "hermes",
    "mistral",
    "llama3_json",
    "json",
    "harmony",
    "kimi_k2",
    "deepseek_v31",
];

/// Returns the formats, the arguments of `save` as a model writes them, and their meaning; null if they are ambiguous.
fn mended() -> Vec<(&'static [&'static str], &'static str, Value)> {
    const GEMMA: &[&str] = &["gemma4"];
    const QWEN: &[&str] = &["qwen3_coder"];
    const GLM: &[&str] = &["glm45"];
    const MINIMAX: &[&str] = &["minimax_m2"];
    let none = || Value::Null;
    let body = |text: &str| json!({"body": text});
    vec![
        (IN_JSON, "{\"body\": \"one\ntwo\tthree\"}", body("one\ntwo\tthree")),
        (IN_JSON, "{\"body\": \"blue\",}", body("blue")),
        (
            IN_JSON,
            "{\"body\": \"blue\",, \"size\": 2}",
            json!({"body": "blue", "size": 2}),
        ),
        (IN_JSON, "{\"list\": [\"a\", \"b\",]}", json!({"list": ["a", "b"]})),
        (
            IN_JSON,
            "{\"body\": None, \"flag\": True, \"any\": False}",
            json!({"body": null, "flag": true, "any": false}),
        ),
        (IN_JSON, "{body: \"blue\", size: 2}", json!({"body": "blue", "size": 2})),
        (
            IN_JSON,
            "{“body”: “it’s blue”, 'size': 2}",
            json!({"body": "it’s blue", "size": 2}),
        ),
        (
            IN_JSON,
            "{'body': 'it's blue', 'size': 2}",
            json!({"body": "it's blue", "size": 2}),
        ),
        (IN_JSON, "{\"size\": 007}", json!({"size": 7})),
        (IN_JSON, "{\"code\": 007}", json!({"code": "007"})),
        (IN_JSON, "{\"any\": 0x1F}", json!({"any": "0x1F"})),
        (IN_JSON, "{\"body\": \"say \"hi\" now\"}", body("say \"hi\" now")),
        (
            IN_JSON,
            "{\"body\": \"C:\\dir \\'x\\' \\u12\"}",
            body("C:\\dir 'x' \\u12"),
        ),
        (IN_JSON, "{\"body\": \"\\ud83d\\ude00 \\ud83d\"}", body("😀 \u{fffd}")),
        (
            IN_JSON,
            "{\"body\": blue car, \"size\": 2}",
            json!({"body": "blue car", "size": 2}),
        ),
        (
            IN_JSON,
            "{\"body\": \"blue\" \"size\": 2}",
            json!({"body": "blue", "size": 2}),
        ),
        (
            IN_JSON,
            "{\"size\": 2 \"body\": \"blue\"}",
            json!({"body": "blue", "size": 2}),
        ),
        (IN_JSON, "{\"body\": , \"any\": }", json!({"body": "", "any": null})),
        (IN_JSON, "{\"body\" \"blue\"}", body("blue")),
        (IN_JSON, "{\"list\": [\"a\", \"b\"}", json!({"list": ["a", "b"]})),
        (
            IN_JSON,
            "{\"body\": \"\"\"one\n\"two\"\n\"\"\"}",
            body("one\n\"two\"\n"),
        ),
        (IN_JSON, "{{\"body\": \"blue\"}}", body("blue")),
        (
            IN_JSON,
            "{\"body\": \"see </parameter> and <|x|>\"}",
            body("see </parameter> and <|x|>"),
        ),
        (IN_JSON, "{\"body\": blue \"x\" y}", none()),
        (IN_JSON, "{\"body\": \"he said \"yes\", and left\"}", none()),
        (IN_JSON, "{\"body: \"blue\", \"size\": 2}", none()),
        (GEMMA, "{list:['k7']}", json!({"list": ["k7"]})),
        (GEMMA, "{a={n:4},b=5}", json!({"a": {"n": 4}, "b": 5})),
        (GEMMA, "{body:'Oslo, Bergen'}", body("Oslo, Bergen")),
        (GEMMA, "{body:Oslo, Bergen}", body("Oslo, Bergen")),
        (GEMMA, "{body:https://h.example/p}", body("https://h.example/p")),
        (GEMMA, "{when:09:45,size:2}", json!({"when": "09:45", "size": 2})),
        (GEMMA, "{size:2,}", json!({"size": 2})),
        (GEMMA, "{body:,size:2}", json!({"body": "", "size": 2})),
        (GEMMA, "{body:<|\"|>blue<|\"|>", body("blue")),
        (GEMMA, "{size:2", json!({"size": 2})),
        (GEMMA, "{code:700}", json!({"code": "700"})),
        (GEMMA, "{size:null,body:null}", json!({"size": null, "body": null})),
        (
            GEMMA,
            "{size:None,list:[null,x]}",
            json!({"size": null, "list": [null, "x"]}),
        ),
        (GEMMA, "{any:True,flag:False}", json!({"any": true, "flag": false})),
        (
            GEMMA,
            "{deep:{code:7,ratio:2},size:8.0}",
            json!({"deep": {"code": "7", "ratio": 2}, "size": 8}),
        ),
        (
            GEMMA,
            "{body:<|\"|>a \"b\"\n\\c<|\"|>,list:[x,y]}",
            json!({"body": "a \"b\"\n\\c", "list": ["x", "y"]}),
        ),
        (
            GEMMA,
            "{\"body\":\"blue\",\"size\":2}",
            json!({"body": "blue", "size": 2}),
        ),
        (GEMMA, "{body:<|\"|>blue}", none()),
        (
            &["functiongemma"],
            "{body:<escape>a, b<escape>,size:2}",
            json!({"body": "a, b", "size": 2}),
        ),
        (
            &["functiongemma"],
            "{list:[<escape>a<escape> <escape>b<escape>]}",
            json!({"list": ["a", "b"]}),
        ),
        (
            &["functiongemma"],
            "{body:<escape>a<escape> <escape>size<escape>:2}",
            json!({"body": "a", "size": 2}),
        ),
        (
            &["functiongemma"],
            "{<escape>body<escape> <escape>a<escape>}",
            body("a"),
        ),
        (
            GEMMA,
            "{list:[<|\"|>a<|\"|> <|\"|>b<|\"|>]}",
            json!({"list": ["a", "b"]}),
        ),
        (QWEN, "<parameter=body>\nblue", body("blue")),
        (
            QWEN,
            "<parameter=body>\nblue\n<parameter=when>\nnow\n</parameter>",
            json!({"body": "blue", "when": "now"}),
        ),
        (
            QWEN,
            "<parameter=size>\n3\n<parameter=when>\nnow\n</parameter>",
            json!({"size": 3, "when": "now"}),
        ),
        (
            QWEN,
            "<parameter=body>\nClose it with </parameter> at the end.\n</parameter>",
            body("Close it with </parameter> at the end."),
        ),
        (
            QWEN,
            "<parameter=body>\nfirst\n</parameter>\nlast\n</parameter>",
            body("first\n</parameter>\nlast"),
        ),
        (
            QWEN,
            "<parameter=body>\ngrep -o '<parameter=x>.*</parameter>' log.txt\n</parameter>",
            body("grep -o '<parameter=x>.*</parameter>' log.txt"),
        ),
        (
            QWEN,
            "<parameter=any>\ngrep -o '<parameter=x>.*</parameter>' log.txt\n</parameter>",
            json!({"any": "grep -o '<parameter=x>.*</parameter>' log.txt"}),
        ),
        (
            QWEN,
            "<parameter=any>\n  if x:\n    y\n\n</parameter>",
            json!({"any": "  if x:\n    y\n"}),
        ),
        (
            QWEN,
            "<parameter=body>\n<tool_call>\n<function=x>\n<parameter=y>\nz\n</parameter>\n</function>\nso\n</parameter>",
            body("<tool_call>\n<function=x>\n<parameter=y>\nz\n</parameter>\n</function>\nso"),
        ),
        (QWEN, "<parameter=size>\n8.0\n</parameter>", json!({"size": 8})),
        (QWEN, "<parameter=size>\n2e2\n</parameter>", json!({"size": 200})),
        (QWEN, "<parameter=flag>\nTrue\n</parameter>", json!({"flag": true})),
        (QWEN, "<parameter=body\nblue\n</parameter>", none()),
        (GLM, "<arg_key>body</arg_key>\n<arg_value>blue", body("blue")),
        (
            GLM,
            "<arg_key>body</arg_key>\n<arg_value>blue\n<arg_key>when</arg_key>\n<arg_value>now</arg_value>",
            json!({"body": "blue", "when": "now"}),
        ),
        (
            GLM,
            "<arg_key>body</arg_key>\n<arg_value>ends in </arg_value> here</arg_value>",
            body("ends in </arg_value> here"),
        ),
        (
            GLM,
            "<arg_key>size</arg_key>\n<arg_value>8.0</arg_value>",
            json!({"size": 8}),
        ),
        (MINIMAX, "<parameter name=\"body\">blue", body("blue")),
        (
            MINIMAX,
            "<parameter name=\"body\">say </parameter> so</parameter>",
            body("say </parameter> so"),
        ),
    ]
}

/// Parses a text as a whole, split at every byte, and letter by letter. Asserts that the results are equal.
fn in_any_pieces(
    format: &'static ToolFormat,
    thinking: Option<(&'static Thinking, Option<bool>)>,
    text: &str,
) -> (Joined, Vec<usize>) {
    let whole = parsed(Some(format), thinking, [text], End::Whole);
    assert_eq!(
        parsed(Some(format), thinking, letters(text), End::Whole),
        whole,
        "{} {text}",
        format.name
    );
    for (before, after) in cuts(text) {
        let actual = parsed(Some(format), thinking, [before, after], End::Whole);
        assert_eq!(actual, whole, "{} cut behind {before}", format.name);
    }
    whole
}

#[test]
fn malformed_arguments_are_repaired_or_marked_broken_in_every_format() {
    let mut wrong = Vec::new();
    for (names, inner, meant) in mended() {
        for name in names {
            let text = saved(name, inner);
            let ((content, _, calls), broken) = in_any_pieces(format(name), None, &text);
            let actual: Vec<(&str, Option<Value>)> = calls
                .iter()
                .map(|(name, text)| (name.as_str(), serde_json::from_str(text).ok()))
                .collect();
            let is_right = if meant.is_null() {
                calls.is_empty() || !broken.is_empty()
            } else {
                actual == [("save", Some(meant.clone()))] && content.is_empty() && broken.is_empty()
            };
            if !is_right {
                wrong.push(format!("{name} {inner:?}: {calls:?} {content:?} {broken:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn markers_around_a_parsed_call_are_not_content() {
    let qwen = "<tool_call>\n<function=save>\n<parameter=body>\nblue\n</parameter>\n</function>\n</tool_call>";
    let minimax = saved("minimax_m2", "<parameter name=\"body\">blue</parameter>");
    let kimi = saved("kimi_k2", "{\"body\": \"blue\"}");
    let hermes = saved("hermes", "{\"body\": \"blue\"}");
    let fields = "{\"name\": \"save\", \"arguments\": {\"body\": \"blue\"}}";
    let without = |text: &str, marker: &str| text.replace(marker, "");
    let mut cases = vec![
        ("qwen3_coder", without(qwen, "\n</tool_call>"), ""),
        ("qwen3_coder", without(qwen, "\n</function>"), ""),
        ("qwen3_coder", format!("<tool_call>\n{qwen}"), ""),
        ("qwen3_coder", format!("{qwen}\n</tool_call> Done."), " Done."),
        ("minimax_m2", without(&minimax, "\n</minimax:tool_call>"), ""),
        ("minimax_m2", without(&minimax, "\n</invoke>"), ""),
        ("kimi_k2", without(&kimi, "<|tool_calls_section_end|>"), ""),
        ("kimi_k2", without(&kimi, "<|tool_call_end|>"), ""),
        ("hermes", hermes.replace("}}", "}}}"), ""),
        ("hermes", hermes.replace("}}", "}"), ""),
        ("hermes", hermes.replace("}}", "}}\n]"), ""),
        ("hermes", without(&hermes, "}}\n</tool_call>"), ""),
        ("hermes", format!("<tool_call>{hermes}</tool_call>"), ""),
        ("json", format!("{fields}}}"), ""),
    ];
    let inner = fields.replace("{\"body\": \"blue\"}", "{{\"body\": \"blue\"}}");
    for name in ["hermes", "json", "granite", "phi4_mini", "mistral", "command"] {
        cases.push((name, format!("{{{fields}}}"), ""));
        cases.push((name, format!("{{{inner}}}"), ""));
        cases.push((name, format!("{{ {fields} }}"), ""));
        if !format(name).begin.is_empty() {
            let (begin, end) = (format(name).begin, format(name).end);
            cases.push((name, format!("Yes. {begin}{{{fields}}}{end}"), "Yes."));
            cases.push((name, format!("{begin}{{{inner}}}{end}"), ""));
        }
    }
    let mut wrong = Vec::new();
    for (name, text, content) in cases {
        let actual = in_any_pieces(format(name), None, &text);
        let calls = vec![("save".to_owned(), "{\"body\": \"blue\"}".to_owned())];
        if actual != ((content.to_owned(), String::new(), calls), vec![]) {
            wrong.push(format!("{name} {text:?}: {actual:?}"));
        }
    }
    let unknown = "{{\"name\": \"nobody\", \"arguments\": {}}}";
    assert_eq!(joined(Some(format("hermes")), None, [unknown], End::Whole).0, unknown);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unclosed_reasoning_ends_before_calls() {
    let qwen = Thinking::named("qwen3").unwrap();
    for (name, text) in WRITTEN.iter().filter(|(name, _)| !format(name).begin.is_empty()) {
        let plain = parsed(Some(format(name)), None, [*text], End::Whole).0.2;
        let thought = format!("let me see\n{text}");
        let actual = in_any_pieces(format(name), Some((qwen, Some(true))), &thought);
        assert_eq!(
            actual.0,
            (String::new(), "let me see".to_owned(), plain.clone()),
            "{name}"
        );
        for (behind, content) in [("</think>\n7", "7"), (" so\n</think>7", "7"), (" so", "")] {
            let text = format!("{thought}{behind}");
            let (content_found, reasoning, calls) = in_any_pieces(format(name), Some((qwen, Some(true))), &text).0;
            assert_eq!((content_found.as_str(), calls.len()), (content, 0), "{name} {text}");
            assert!(reasoning.starts_with(thought.trim_end()), "{name} {reasoning}");
        }
    }
}

#[test]
fn gpt_oss_messages_to_known_tools_are_calls() {
    let head = |to: &str| format!("<|channel|>commentary to={to} <|constrain|>json<|message|>");
    let call = |arguments: &str| vec![("save".to_owned(), arguments.to_owned())];
    for (text, content, calls) in [
        (
            "<|channel|>commentary to=save json{\"size\": 2}<|call|>".to_owned(),
            "<|channel|>commentary to=save json{\"size\": 2}",
            vec![],
        ),
        (head("save") + "{\"size\": 2}<|call|>", "", call("{\"size\": 2}")),
        (head("functions.save") + "<|call|>", "", call("{}")),
        (head("functions.save") + " \n", "", call("{}")),
        (head("nobody") + "{}<|call|>", "{}", vec![]),
        (head("functions.save") + "blue<|call|>", "blue", vec![]),
        (head("functions.") + "{}<|call|>", "{}", vec![]),
        (
            head("functions.save") + "{\"size\": 2}}<|call|>",
            "",
            call("{\"size\": 2}"),
        ),
        (
            head("functions.save") + "{\"size\": 2<|call|>",
            "",
            call("{\"size\": 2}"),
        ),
    ] {
        let actual = in_any_pieces(format("harmony"), None, &text);
        assert_eq!(actual, ((content.to_owned(), String::new(), calls), vec![]), "{text}");
    }
}

/// However a call's text is damaged, an output without broken calls has arguments that are objects.
#[test]
fn one_damaged_character_leaves_no_call_without_an_object() {
    for (name, text) in WRITTEN {
        for (at, one) in text.char_indices() {
            let (before, behind) = (&text[..at], &text[at + one.len_utf8()..]);
            let changes = ["", "x", "\"", "'", "}", "{", ",", " ", "\n", "<", ":", "\\", "1"];
            let doubled = format!("{one}{one}");
            for change in changes.into_iter().chain([doubled.as_str()]) {
                let text = format!("{before}{change}{behind}");
                let actual = parsed(Some(format(name)), None, [text.as_str()], End::Whole);
                if (at + change.len()) % 11 == 0 {
                    assert_eq!(
                        parsed(Some(format(name)), None, letters(&text), End::Whole),
                        actual,
                        "{name} {text}"
                    );
                }
                let ((_, _, calls), broken) = actual;
                for (_, arguments) in calls.iter().filter(|_| broken.is_empty()) {
                    let actual: Value = serde_json::from_str(arguments).unwrap_or_default();
                    assert!(actual.is_object(), "{name} {text}: {arguments}");
                }
            }
        }
    }
}

#[test]
fn reasoning_is_separated_from_content_and_calls() {
    for thinking in THINKING.iter().filter(|one| one.name != "harmony") {
        let text = format!("{}\nhm 😀\n{}\n\nYes.", thinking.begin, thinking.end);
        for (before, after) in cuts(&text) {
            let actual = joined(Some(format("hermes")), Some(thinking), [before, after], End::Whole);
            assert_eq!(
                actual,
                ("Yes.".to_owned(), "hm 😀".to_owned(), vec![]),
                "{}",
                thinking.name
            );
        }
    }
    let harmony = Thinking::named("harmony");
    let text = "<|channel|>analysis<|message|>hm 😀<|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>\
        <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>\
        <|start|>assistant<|channel|>final<|message|>Yes.<|return|>";
    for (before, after) in cuts(text) {
        let actual = joined(Some(format("harmony")), harmony, [before, after], End::Whole);
        let calls = vec![("now".to_owned(), "{}".to_owned())];
        assert_eq!(actual, ("I look. Yes.".to_owned(), "hm 😀".to_owned(), calls));
    }
    assert_eq!(joined(None, harmony, ["Just text."], End::Whole).0, "Just text.");
}

#[test]
fn formats_are_detected_from_templates() {
    for one in TOOL_FORMATS.iter().filter(|one| !one.detected_by.is_empty()) {
        for all in one.detected_by {
            let actual = ToolFormat::detect(&all.join(" "), |token| one.needs == Some(token));
            assert_eq!(actual.name, one.name);
        }
    }
    assert_eq!(ToolFormat::detect("{{ messages }}", |_| false).name, "json");
    assert_eq!(
        ToolFormat::detect("{{ messages }}", |token| token == "[TOOL_CALLS]").name,
        "mistral"
    );
    for one in THINKING.iter().filter(|one| one.name != "deepseek_r1") {
        assert_eq!(Thinking::detect(one.detected_by).unwrap().name, one.name);
    }
}

fn bits() -> Vec<String> {
    let mut pieces: Vec<String> = [
        "{\"name\": \"weather\"",
        ", \"arguments\": ",
        "{\"city\": \"",
        "\"}",
        "now(",
        "city=",
        "3",
    ]
    .into_iter()
    .chain([
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "'",
        "\"",
        ",",
        ":",
        ";",
        "<",
        " ",
        "\n",
        "\\",
        "😀",
        "weather",
        "now",
        "```json\n",
    ])
    .map(str::to_owned)
    .collect();
    for one in TOOL_FORMATS {
        pieces.extend(one.markers().into_iter().map(str::to_owned));
        if let Call::Pattern(pattern) = &one.call {
            assert!(pattern.iter().any(|piece| matches!(piece, Piece::Name)), "{}", one.name);
        }
    }
    pieces.extend(
        THINKING
            .iter()
            .flat_map(|one| [one.begin.to_owned(), one.end.to_owned()]),
    );
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn chunking_does_not_change_the_parts(
        bits in prop::collection::vec(prop::sample::select(bits()), 0..14),
        format in prop::sample::select(TOOL_FORMATS.iter().collect::<Vec<_>>()),
        thinking in prop::option::of(prop::sample::select(THINKING.iter().collect::<Vec<_>>())),
        is_cut in any::<bool>(),
        at in any::<prop::sample::Index>(),
    ) {
        let text = bits.concat();
        let end = if is_cut { End::Cut } else { End::Whole };
        let whole = joined(Some(format), thinking, [text.as_str()], end);
        prop_assert_eq!(&joined(Some(format), thinking, letters(&text), end), &whole);
        let (before, after) = cuts(&text).nth(at.index(cuts(&text).count())).unwrap();
        prop_assert_eq!(&joined(Some(format), thinking, [before, after], end), &whole);
    }
}
