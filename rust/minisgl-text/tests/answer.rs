//! Every format of tool calls and thinking: what models write, cut at every byte, ended at every byte, and mixed up.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use minisgl_text::answer::{AnswerParser, Call, End, Part, Piece, THINKING, TOOL_FORMATS, Thinking, ToolFormat, Tools};
use proptest::prelude::*;
use serde_json::{Value, json};

type Joined = (String, String, Vec<(String, String)>);

fn tools() -> Arc<Tools> {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}}, "place": {"$ref": "#/$defs/place"}, "any": {}
    }, "$defs": {"place": {"anyOf": [{"type": "object"}, {"type": "null"}]}}});
    Arc::new(Tools(
        [("weather".to_owned(), schema), ("now".to_owned(), json!({}))].into(),
    ))
}

fn joined<'a>(
    format: Option<&'static ToolFormat>,
    thinking: Option<&'static Thinking>,
    pieces: impl IntoIterator<Item = &'a str>,
    end: End,
) -> Joined {
    let mut number = 0;
    let new_id = move |_: usize, _: &str| {
        number += 1;
        number.to_string()
    };
    let mut parser = AnswerParser::new(format, thinking.map(|one| (one, None)), tools(), Box::new(new_id));
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
    (content, reasoning, calls)
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

/// Two calls as models of a format write them: of `weather` with what its schema has, of `now` without arguments.
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
fn every_format_is_read_wherever_it_is_cut() {
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
fn a_limit_leaves_no_marker_and_no_half_call_as_content() {
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
fn arguments_have_the_types_of_the_schema() {
    let values = [
        ("city", "5", json!("5")),
        ("city", "a\n\"b\"\n", json!("a\n\"b\"\n")),
        ("days", "5", json!(5)),
        ("days", "many", json!("many")),
        ("zip", "null", Value::Null),
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
            let found: Value = serde_json::from_str(&calls[0].1).unwrap();
            assert_eq!(found, json!({key: value}), "{name} {written}");
        }
    }
}

#[test]
fn what_is_thought_is_told_from_content_and_calls() {
    for thinking in THINKING.iter().filter(|one| one.name != "harmony") {
        let text = format!("{}\nhm 😀\n{}\n\nYes.", thinking.begin, thinking.end);
        for (before, after) in cuts(&text) {
            let found = joined(Some(format("hermes")), Some(thinking), [before, after], End::Whole);
            assert_eq!(
                found,
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
        let found = joined(Some(format("harmony")), harmony, [before, after], End::Whole);
        let calls = vec![("now".to_owned(), "{}".to_owned())];
        assert_eq!(found, ("I look. Yes.".to_owned(), "hm 😀".to_owned(), calls));
    }
    assert_eq!(joined(None, harmony, ["Just text."], End::Whole).0, "Just text.");
}

#[test]
fn formats_are_told_from_templates() {
    for one in TOOL_FORMATS.iter().filter(|one| !one.detected_by.is_empty()) {
        for all in one.detected_by {
            let found = ToolFormat::detect(&all.join(" "), |token| one.needs == Some(token));
            assert_eq!(found.name, one.name);
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
    let mut found: Vec<String> = [
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
        found.extend(one.markers().into_iter().map(str::to_owned));
        if let Call::Pattern(pieces) = &one.call {
            assert!(pieces.iter().any(|piece| matches!(piece, Piece::Name)), "{}", one.name);
        }
    }
    found.extend(
        THINKING
            .iter()
            .flat_map(|one| [one.begin.to_owned(), one.end.to_owned()]),
    );
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn pieces_change_nothing(
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
