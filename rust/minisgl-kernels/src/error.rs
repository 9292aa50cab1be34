//! Errors of kernels and of the engine, with the text that a user reads.

use std::fmt;

/// The cause of an error, which decides what the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A file is damaged or does not fit the model; the text names file and tensor.
    File,
    /// The file is sound, but this engine has no code for it: another engine may.
    Unsupported,
    /// A setting that cannot be; the text names it.
    Setting,
    /// One step failed, the engine goes on.
    Step,
}

/// An error with its text, which names what is wrong, its value and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The cause.
    pub fault: Fault,
    text: String,
}

/// The crate's results.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A damaged or unfitting file.
    pub fn file(text: impl Into<String>) -> Self {
        Self::new(Fault::File, text)
    }

    /// Something sound that this engine has no code for.
    pub fn unsupported(text: impl Into<String>) -> Self {
        Self::new(Fault::Unsupported, text)
    }

    /// A setting that cannot be.
    pub fn setting(text: impl Into<String>) -> Self {
        Self::new(Fault::Setting, text)
    }

    /// A failed step of an engine that goes on.
    pub fn step(text: impl Into<String>) -> Self {
        Self::new(Fault::Step, text)
    }

    /// The same with what it is about before it, such as a file's name.
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
