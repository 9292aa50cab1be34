//! Configuration of a router: policy, limits, and the shares of API keys.

use serde::Deserialize;

/// Policy that chooses the engine of a request, among engines that are up and below their limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Each engine in turn, by index.
    RoundRobin,
    /// The engine with the fewest requests.
    LeastLoad,
    /// A random engine, from a generator seeded with `RouterConfig::seed`.
    Random,
    /// The engine whose cache holds most of the prompt, if its load is near the least load; else the least loaded one.
    CacheAware,
}

/// Share of the engines and limit of concurrent requests of one API key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyShare {
    /// Weight against the other keys that have requests waiting, 1 to 2^20.
    pub share: u64,
    /// Requests of the key that may be on engines at once; 0: no limit.
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

/// Configuration of a [`Router`](super::Router), as `minisgl.routing.api.RouterConfig` has it. A limit of 0 means no
/// limit. Key k of a request is `keys[k - 1]`; key 0 is for all other requests.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// Policy that chooses the engine of a request.
    pub policy: Policy,
    /// Number of engines; their indices are 0 to `num_engines - 1`.
    pub num_engines: usize,
    /// Tokens per page of the engines' prefix caches.
    pub page_size: usize,
    /// Pages of each engine's prefix cache that are remembered if the engine has not reported its number of pages.
    pub tree_pages: usize,
    /// Requests that may be on all engines together at once; 0: no limit.
    pub max_inflight: usize,
    /// Requests that may be on one engine at once; 0: no limit.
    pub max_inflight_per_engine: usize,
    /// Requests above the least load that an engine may have and still be chosen for a match of the whole prompt; a
    /// match of a part of the prompt allows that part of them. The larger of this and `balance_percent` counts.
    pub balance_requests: usize,
    /// Allowance of `balance_requests` in percent of the least load.
    pub balance_percent: usize,
    /// Seed of the generator of `Policy::Random`.
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

/// Largest share of a key. One token costs a key `MAX_SHARE / share`, which therefore stays above 0.
pub(super) const MAX_SHARE: u64 = 1 << 20;

impl RouterConfig {
    /// Checks the ranges of all fields.
    ///
    /// # Errors
    /// Names the first invalid field, its value, and the allowed range.
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
