//! Tests of the CPU engine's public interfaces. They share the binary of the unit tests, since a second binary would
//! compile all kernels again, which takes longer than these tests.
#![allow(missing_docs, clippy::unwrap_used)]

mod hostile_files;
