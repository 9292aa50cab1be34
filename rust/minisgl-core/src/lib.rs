//! The control plane as pure logic: no Python, no I/O, no clock, no environment, no unsafe.
//!
//! The Python reference (`minisgl.scheduler.reference`) is the control plane that serves; its modules will stand here
//! under the same names. Today this crate tells which build it is, so that tools can refuse the wrong one.

#![forbid(unsafe_code)]

/// What was compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildInfo {
    /// Version of the workspace.
    pub version: &'static str,
    /// `release` or `debug`; benchmarks refuse the latter.
    pub profile: &'static str,
}

/// The build of this crate.
#[must_use]
pub const fn build_info() -> BuildInfo {
    BuildInfo {
        version: env!("CARGO_PKG_VERSION"),
        profile: if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_follows_the_compiler() {
        let expected = if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        };
        assert_eq!(build_info().profile, expected);
    }

    #[test]
    fn version_is_a_release_number() {
        let parts: Vec<u32> = build_info()
            .version
            .split('.')
            .filter_map(|part| part.parse().ok())
            .collect();
        assert_eq!(parts.len(), 3);
    }
}
