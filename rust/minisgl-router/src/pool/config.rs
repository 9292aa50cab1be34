//! What a pool is told once.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::policy::RouterConfig;

/// Front ends connect to `listen`; engine i listens at `engines[i]`. `router.num_engines` follows from them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Path of the Unix socket for front ends.
    pub listen: PathBuf,
    /// Paths of the engine processes' sockets.
    pub engines: Vec<PathBuf>,
    /// Which engine gets a request.
    #[serde(default)]
    pub router: RouterConfig,
    /// So many seconds a forward may take.
    pub step_timeout: f64,
}

impl PoolConfig {
    /// How long a forward may take; far away if that is no length of time.
    pub(super) fn step_timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.step_timeout).unwrap_or(Duration::MAX / 4)
    }
}
