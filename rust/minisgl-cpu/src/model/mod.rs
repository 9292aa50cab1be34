//! The decoder: one for all architectures.
//!
//! `layers` and `load` build lists of operations from a configuration and a file; `forward` runs them. Invariants: all
//! that differs between architectures is in `ModelConfig`; weights come from `Tensors`, whatever the file format.

mod adapter;
mod attend;
mod buffers;
mod config;
mod convolve;
mod decoder;
mod delta;
mod experts;
mod forward;
mod gated_delta;
mod grid;
mod held;
mod images;
mod layers;
mod load;
mod mamba;
mod mlp;
mod names;
mod operation;
mod pieces;
mod printed;
mod products;
mod streams;
mod tensors;
mod tower;
mod weights;
mod worker;

pub use adapter::{Adapter, Pair, RUN, Run};
pub use config::ModelConfig;
pub use decoder::{Decoder, Memory};
pub use grid::Grid;
pub use layers::check;
pub use load::Progress;
pub use names::{Files, Names, Part};
pub(crate) use products::Groups;
pub use tensors::{Origin, Tensors};
pub use tower::{Tower, TowerRun, TowerSettings};
pub use weights::Weights;
pub use worker::{PARTS, Times, Tokens};
