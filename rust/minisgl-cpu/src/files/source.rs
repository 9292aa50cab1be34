//! Common interface of tensor sources.

use minisgl_kernels::{Kind, TensorView};

use super::Mapping;
use crate::{Error, Result};

/// Named tensors of a model, from mapped files or elsewhere.
pub trait Source: Send + Sync {
    /// Returns the tensor `name`, `None` if it does not exist.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// Returns all tensor names, in the order of the data.
    fn names(&self) -> Vec<&str>;

    /// Returns ggml's architecture name; `None` if tensor names and row order are those of Hugging Face checkpoints.
    fn architecture(&self) -> Option<&str> {
        None
    }

    /// Returns the mapped files; empty if the tensors are not mapped.
    fn mappings(&self) -> &[Mapping] {
        &[]
    }

    /// Drops mapped pages that were read so far from the process's memory.
    fn release(&self) {
        self.mappings().iter().for_each(Mapping::release);
    }

    /// Returns the total bytes of all tensors.
    fn bytes(&self) -> usize {
        let sizes = self.names().into_iter().filter_map(|name| self.tensor(name));
        sizes.map(|tensor| tensor.data().len()).sum()
    }
}

/// Location of a tensor in a mapped file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub kind: Kind,
    pub shape: Vec<usize>,
    /// Index of the file that holds the tensor.
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
