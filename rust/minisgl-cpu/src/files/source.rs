//! Where tensors come from.

use minisgl_kernels::{Kind, TensorView};

use super::Mapping;
use crate::{Error, Result};

/// Tensors by name, wherever they come from.
pub trait Source: Send + Sync {
    /// The tensor of that name.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// All names, in the order of the data.
    fn names(&self) -> Vec<&str>;

    /// ggml's name of the architecture, whose names and order of rows the tensors have; none: those of checkpoints.
    fn architecture(&self) -> Option<&str> {
        None
    }

    /// The files, where they are mapped.
    fn mappings(&self) -> &[Mapping] {
        &[]
    }

    /// Lets go of the memory of what was read so far.
    fn release(&self) {
        self.mappings().iter().for_each(Mapping::release);
    }

    /// Bytes of all tensors.
    fn bytes(&self) -> usize {
        let sizes = self.names().into_iter().filter_map(|name| self.tensor(name));
        sizes.map(|tensor| tensor.data().len()).sum()
    }
}

/// A tensor's place in a mapped file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub kind: Kind,
    pub shape: Vec<usize>,
    /// Which of several files.
    pub file: usize,
    pub bytes: std::ops::Range<usize>,
}

impl Entry {
    pub fn view<'a>(&'a self, file: &'a [u8]) -> Result<TensorView<'a>> {
        let data = file
            .get(self.bytes.clone())
            .ok_or_else(|| Error::file(format!("tensor {}: beyond its file", self.name)))?;
        TensorView::new(&self.name, self.kind, &self.shape, data)
    }
}
