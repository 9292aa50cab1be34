//! The crate has no dependencies, and its sources reach for nothing outside.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::path::Path;

const FORBIDDEN: [&str; 10] = [
    "std::time",
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::process",
    "std::thread",
    "unsafe {",
    "pyo3",
    "RandomState",
];

fn sources(folder: &Path, into: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else {
            into.push((
                path.display().to_string(),
                fs::read_to_string(&path).unwrap(),
            ));
        }
    }
}

/// Lines of code, without comments.
fn offences(text: &str) -> Vec<&str> {
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    code.filter(|line| FORBIDDEN.iter().any(|word| line.contains(word)))
        .collect()
}

#[test]
fn no_source_reaches_outside() {
    let mut found = Vec::new();
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut found,
    );
    assert!(found.len() > 10);
    for (path, text) in &found {
        assert!(offences(text).is_empty(), "{path}: {:?}", offences(text));
    }
    let lib = &found
        .iter()
        .find(|(path, _)| path.ends_with("lib.rs"))
        .unwrap()
        .1;
    assert!(lib.contains("#![forbid(unsafe_code)]"));
}

#[test]
fn no_dependencies() {
    let manifest = include_str!("../Cargo.toml");
    assert!(
        !manifest.contains("dependencies]"),
        "minisgl-core depends on nothing"
    );
}

#[test]
fn an_offence_is_seen() {
    assert_eq!(
        offences("use std::time::Instant;\n// std::env in a comment\n").len(),
        1
    );
}
