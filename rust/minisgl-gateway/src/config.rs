//! What the Python server tells the gateway once, as JSON, when the engine is ready (`server/gateway_config.py`).

use std::sync::Arc;

use serde::Deserialize;

use crate::answer::errors::Errors;
use crate::engine::WatchTimes;
use crate::metrics::MetricsConfig;

/// What is told has it. Another one is refused.
pub const VERSION: u32 = 8;

/// Everything that an answer depends on beside what Python prepared of its request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// See [`VERSION`].
    pub version: u32,
    /// Callers whose use is counted apart: the API keys of a file, and number 0 for all others; 0 without a file.
    pub num_keys: usize,
    /// What the HTTP side takes on.
    pub limits: Limits,
    /// How long a stream says nothing.
    pub silence: Silence,
    /// Names that the server answers to, in lower case and without ports; loopback addresses are among them always.
    /// None: to any.
    pub hosts: Option<Vec<String>>,
    /// What keeps an answer from being taken for something else by a foreign page that includes it.
    pub harmless_headers: Vec<(String, String)>,
    /// What is said where a request fails that was accepted.
    pub errors: Arc<Errors>,
    /// How answered requests are logged.
    pub log: LogConfig,
    /// How what happens is measured.
    pub metrics: MetricsConfig,
    /// When the engine process is in trouble.
    pub watch: WatchTimes,
}

impl GatewayConfig {
    /// Reads it; the version first, so that another one is not taken for a mistake.
    pub fn read(json: &str) -> Result<GatewayConfig, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_str(json).map_err(|error| error.to_string())?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}, the extension reads {VERSION}: build the extension again"
            ));
        }
        serde_json::from_str(json).map_err(|error| error.to_string())
    }
}

/// See `minisgl.config.Limits`, which has more; times in seconds.
#[derive(Clone, Debug, Deserialize)]
pub struct Limits {
    pub max_body_bytes: usize,
    pub max_encoding_bytes: usize,
    pub request_timeout: Option<f64>,
    pub slow_client_timeout: f64,
    pub keep_alive_timeout: u64,
    pub step_timeout: f64,
}

/// See `minisgl.config.Silence`; seconds.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Silence {
    pub head_wait: f64,
    pub longest: f64,
}

/// How answered requests are logged.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// One JSON object a line instead of plain text.
    pub json: bool,
    /// Lines of plain text begin with the time.
    pub times: bool,
    /// A line for each request.
    pub access: bool,
    /// Lines for probes too.
    pub probes: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_of_another_version_is_refused_by_its_number() {
        let error = |json| GatewayConfig::read(json).err().unwrap_or_default();
        let other = error(r#"{"version": 0, "no_such_field": 1}"#);
        assert!(other.starts_with("it has version 0, the extension reads 8"), "{other}");
        assert!(error(r#"{"version": 8}"#).contains("missing field"));
        assert!(error("{}").contains("version"));
    }
}
