//! Tests of the CPU engine's public interfaces, in the binary of the unit tests, so that kernels are compiled once.
#![allow(missing_docs, clippy::unwrap_used)]

mod hostile_files;
