//! Errors of the kernels and of the engine, with the text that a user reads.

use std::fmt;

/// Cause of an error, which decides what the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Damaged file, or one that does not fit the model; the text names the file and the tensor.
    File,
    /// Valid file or model that this engine does not support; another engine may.
    Unsupported,
    /// Invalid setting, which the text names.
    Setting,
    /// Failed step; the engine can continue.
    Step,
}

/// Error with its cause and its text, which names the thing, its value and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Cause of the error.
    pub fault: Fault,
    text: String,
}

/// Result with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error for a damaged or unfitting file.
    pub fn file(text: impl Into<String>) -> Self {
        Self::new(Fault::File, text)
    }

    /// Creates an error for a valid file or model that this engine does not support.
    pub fn unsupported(text: impl Into<String>) -> Self {
        Self::new(Fault::Unsupported, text)
    }

    /// Creates an error for an invalid setting.
    pub fn setting(text: impl Into<String>) -> Self {
        Self::new(Fault::Setting, text)
    }

    /// Creates an error for a failed step after which the engine can continue.
    pub fn step(text: impl Into<String>) -> Self {
        Self::new(Fault::Step, text)
    }

    /// Prefixes the text with its context, such as a file's name.
    #[must_use]
    pub fn within(self, what: &str) -> Self {
        Self::new(self.fault, format!("{what}: {}", self.text))
    }

    fn new(fault: Fault, text: impl Into<String>) -> Self {
        Self {
            fault,
            text: text.into(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
