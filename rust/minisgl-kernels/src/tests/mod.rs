//! Tests of attention and instruction sets by their interfaces. They are part of the unit tests' binary: a separate one
//! would compile all kernels once more, which takes longer than all of these tests.
#![allow(missing_docs, clippy::unwrap_used)]

mod amx_refused;
mod attention;
mod attention_case;
