//! What a router is told once.

use serde::Deserialize;

/// How an engine is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests.
    LeastLoad,
    /// Any, by a generator with a seed.
    Random,
    /// The one that has most of the prompt in its cache, if its load is near the least.
    CacheAware,
}

/// It says what an API key gets of the engines beside others that wait, and how many requests at once (0: any).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyShare {
    /// Weight, at least 1.
    pub share: u64,
    /// Requests placed at once, 0 for any number.
    pub max_inflight: usize,
}

impl Default for KeyShare {
    fn default() -> Self {
        Self {
            share: 1,
            max_inflight: 0,
        }
    }
}

/// `minisgl.routing.api.RouterConfig`: limits are 0 where there is none; request key k is `keys[k - 1]`, key 0 are all
/// others.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// How an engine is chosen.
    pub policy: Policy,
    /// They are 0 .. `num_engines` - 1.
    pub num_engines: usize,
    /// Tokens to a page.
    pub page_size: usize,
    /// Pages that are remembered of each engine's prefix cache.
    pub tree_pages: usize,
    /// Requests placed at once, on all engines.
    pub max_inflight: usize,
    /// Requests placed at once on one engine.
    pub max_inflight_per_engine: usize,
    /// Requests above the least load that an engine may have that matches the whole prompt; for a match of a part that
    /// part of them ...
    pub balance_requests: usize,
    /// ... or so many percent of the least load, if that is more.
    pub balance_percent: usize,
    /// What `Policy::Random` draws from.
    pub seed: u64,
    /// Shares and limits of keys 1, 2, ...
    pub keys: Vec<KeyShare>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: Policy::CacheAware,
            num_engines: 1,
            page_size: 16,
            tree_pages: 65_536,
            max_inflight: 0,
            max_inflight_per_engine: 0,
            balance_requests: 8,
            balance_percent: 50,
            seed: 0,
            keys: Vec::new(),
        }
    }
}

/// The largest share: charges are divided by it, and stay above 0.
pub(super) const MAX_SHARE: u64 = 1 << 20;

impl RouterConfig {
    /// # Errors
    /// Names the field that cannot be.
    pub fn check(&self) -> Result<(), String> {
        let counts = [
            ("num_engines", self.num_engines),
            ("page_size", self.page_size),
            ("tree_pages", self.tree_pages),
        ];
        for (name, value) in counts {
            if value == 0 || u32::try_from(value).is_err() {
                return Err(format!("{name} {value}: must be between 1 and 2^32 - 1"));
            }
        }
        for (name, value) in [
            ("balance_requests", self.balance_requests),
            ("balance_percent", self.balance_percent),
        ] {
            if u32::try_from(value).is_err() {
                return Err(format!("{name} {value}: must be below 2^32"));
            }
        }
        for (at, key) in self.keys.iter().enumerate() {
            if key.share == 0 || key.share > MAX_SHARE {
                return Err(format!(
                    "keys[{at}].share {}: must be between 1 and {MAX_SHARE}",
                    key.share
                ));
            }
        }
        Ok(())
    }
}
