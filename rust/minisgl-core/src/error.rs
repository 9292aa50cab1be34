//! What can go wrong in a call.
//!
//! Keeps true: an `Event` error means that nothing was changed; a `Broken` one that the state may be half changed.

use std::fmt;

/// An error of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A malformed event: its index, the field and the reason. The call changed nothing.
    Event {
        /// Index of the event in the call.
        index: usize,
        /// Name of the field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A bad argument of a function that stands by itself. The call changed nothing.
    Argument {
        /// Its name.
        name: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A broken invariant: the object must not be used any more.
    Broken(String),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Event {
                index,
                field,
                reason,
            } => write!(f, "event {index}: {field}: {reason}"),
            Self::Argument { name, reason } => write!(f, "{name}: {reason}"),
            Self::Broken(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// A broken invariant unless `ok`; `what` is made only if it is needed.
pub(crate) fn need(ok: bool, what: impl FnOnce() -> String) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(Error::Broken(format!("broken invariant: {}", what())))
    }
}

/// A refused call or a broken invariant.
pub(crate) fn broken<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Broken(what.into()))
}

/// A bad argument.
pub(crate) fn argument<T>(name: &'static str, reason: impl Into<String>) -> Result<T> {
    let reason = reason.into();
    Err(Error::Argument { name, reason })
}
