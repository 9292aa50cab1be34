//! The tests of the CPU engine's parts by their interfaces, in one binary.
#![allow(missing_docs, clippy::unwrap_used)]

mod amx_refused;
mod attention;
mod attention_case;
mod hostile_files;
