//! Tests of attention and instruction sets by their interfaces. They are in the binary of the unit tests: a binary of its own
//! would have all kernels compiled once more, which takes longer than all of these tests.
#![allow(missing_docs, clippy::unwrap_used)]

mod amx_refused;
mod attention;
mod attention_case;
