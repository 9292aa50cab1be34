//! Panics on order, for tests of what happens then. Without the cargo feature `test-panics` there is nothing here.
//!
//! A call panics at most at the one moment that was ordered.

/// A call of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    Schedule,
    Commit,
}

/// When in a call: before it changed anything, when the state is half changed, or when it has taken effect.
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
    /// Panic if that is what was ordered.
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
