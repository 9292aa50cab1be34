//! How long a chat template may take. What it renders is asked in `tests/gateway/test_text_template.py`.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;

use minisgl_text::{ChatTemplate, ChatTemplateSource, ContentShape, MAX_STEPS, TextError};
use serde_json::{Map, json};

#[test]
fn a_template_takes_as_many_steps_as_it_may() {
    let source = ChatTemplateSource {
        source: "{% for i in range(9999) %}{% endfor %}a".to_owned(),
        content: ContentShape::String,
    };
    let template = ChatTemplate::new(&source, &BTreeMap::new()).unwrap();
    let rendered = |most_steps| {
        let messages = [json!({"role": "user", "content": ""})];
        template.render(&messages, &Map::new(), true, most_steps)
    };
    assert!(matches!(rendered(100), Err(TextError::Template(_))));
    assert_eq!(rendered(MAX_STEPS).unwrap(), "a");
}
