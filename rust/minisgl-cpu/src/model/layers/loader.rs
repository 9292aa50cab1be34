//! Context that all parts of a layer are loaded with, and checks of sizes.

use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::held::Norm;
use crate::model::names::{At, Part};
use crate::model::operation::{Project, Rows};
use crate::model::pieces::{load_norm, pack, padded};
use crate::model::tensors::{ModelTensor, Tensors};
use crate::weights::Packing;

/// Maximum of most sizes. A larger value means a damaged file.
pub(super) const MAX_SIZE: usize = 1 << 24;

pub(super) fn within(name: &str, value: usize, most: usize) -> Result<()> {
    if value == 0 || value > most {
        return Err(unsupported(name, value, &format!("must be 1..{most}")));
    }
    Ok(())
}

pub(super) fn unsupported(name: &str, value: usize, why: &str) -> Error {
    Error::unsupported(format!("config.json: {name}: {value}: {why}"))
}

/// Loader of one layer: reads and packs its tensors.
pub(crate) struct Loader<'a> {
    pub tensors: &'a Tensors,
    pub config: &'a ModelConfig,
    pub packing: Packing<'a>,
    pub layer: usize,
}

impl Loader<'_> {
    /// Loads a matrix and returns the operation that multiplies `from` by it and writes the hidden states.
    pub(super) fn product(&self, part: Part, shape: [usize; 2], bias: bool, from: Rows) -> Result<Project> {
        let matrix = pack(&self.packing, &[self.part(part, shape)?], false)?;
        Ok(Project {
            bias: self.bias(bias, part, shape[0])?,
            ..Project::new(from, vec![(0, matrix)], Rows::Hidden)
        })
    }

    pub(super) fn at(&self) -> At {
        At {
            layer: self.layer,
            ..At::default()
        }
    }

    pub(super) fn part(&self, part: Part, shape: [usize; 2]) -> Result<ModelTensor<'_>> {
        self.tensors.part(part, self.at(), &shape)
    }

    pub(super) fn vector(&self, part: Part, what: &str, size: usize) -> Result<Vec<f32>> {
        self.tensors.part_vector(part, self.at(), what, size)
    }

    pub(super) fn norm(&self, part: Part) -> Result<Norm> {
        load_norm(self.tensors, self.config, part, self.at(), self.config.hidden_size)
    }

    pub(super) fn bias(&self, there: bool, part: Part, size: usize) -> Result<Option<Vec<f32>>> {
        if !there {
            return Ok(None);
        }
        self.vector(part, "bias", size).map(|bias| Some(padded(bias)))
    }
}
