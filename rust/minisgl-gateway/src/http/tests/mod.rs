#![allow(clippy::unwrap_used)]

mod answer_end;
mod head;
