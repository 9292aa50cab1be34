//! Injected panics, for tests of recovery. Empty without the cargo feature `test-panics`.
//!
//! A call panics at the one moment that was requested, if at all.

/// Scheduler call in which to panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    Schedule,
    Commit,
}

/// Moment of a call: before it changed anything, with the state half changed, or after it took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Moment {
    Before,
    Amid,
    After,
}

#[derive(Default)]
pub(crate) struct Faults {
    #[cfg(feature = "test-panics")]
    pub order: Option<(Call, i64, Moment)>,
}

impl Faults {
    /// Panics if a panic was requested for this call, step and moment.
    #[cfg(feature = "test-panics")]
    pub fn point(&self, call: Call, step: i64, moment: Moment) {
        if self.order == Some((call, step, moment)) {
            panic!("{call:?} {step} panics on order: {moment:?}");
        }
    }

    #[cfg(not(feature = "test-panics"))]
    #[allow(clippy::unused_self)]
    pub fn point(&self, _call: Call, _step: i64, _moment: Moment) {}
}
