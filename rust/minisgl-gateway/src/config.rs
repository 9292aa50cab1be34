//! Configuration of the gateway, sent by the Python server as JSON when the engine is ready
//! (`server/gateway_config.py`).

use std::sync::Arc;

use serde::Deserialize;

use crate::answer::errors::Errors;
use crate::engine::WatchTimes;
use crate::metrics::MetricsConfig;

/// Version of the configuration's format. Another version is refused.
pub const VERSION: u32 = 8;

/// Settings of the gateway that do not depend on a single request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// Format version, which must be [`VERSION`].
    pub version: u32,
    /// Callers with counters of their own: the keys of an API key file plus index 0 for all others; 0 without a file.
    pub num_keys: usize,
    /// Limits of requests and connections.
    pub limits: Limits,
    /// Longest silence of a stream.
    pub silence: Silence,
    /// Host names of the server, in lower case and without ports, in addition to loopback names. `None`: any name.
    pub hosts: Option<Vec<String>>,
    /// Headers that keep a web page of another origin from misusing a response that it includes.
    pub harmless_headers: Vec<(String, String)>,
    /// Error responses for requests that fail after they were accepted.
    pub errors: Arc<Errors>,
    /// Log settings for answered requests.
    pub log: LogConfig,
    /// Bucket bounds and window of the metrics.
    pub metrics: MetricsConfig,
    /// Heartbeat timing: when the engine process counts as failed.
    pub watch: WatchTimes,
}

impl GatewayConfig {
    /// Parses the configuration. Checks the version first, so that an error names it and not an unknown field.
    pub fn read(json: &str) -> Result<GatewayConfig, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_str(json).map_err(|error| error.to_string())?;
        if version != VERSION {
            return Err(format!(
                "version {version}: the extension reads version {VERSION}: build the extension again"
            ));
        }
        serde_json::from_str(json).map_err(|error| error.to_string())
    }
}

/// Request and connection limits, a subset of `minisgl.config.Limits`. All times are in seconds.
#[derive(Clone, Debug, Deserialize)]
pub struct Limits {
    pub max_body_bytes: usize,
    pub max_encoding_bytes: usize,
    pub request_timeout: Option<f64>,
    pub slow_client_timeout: f64,
    pub keep_alive_timeout: u64,
    pub step_timeout: f64,
}

/// Longest times without output on a stream, in seconds, as in `minisgl.config.Silence`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Silence {
    pub head_wait: f64,
    pub longest: f64,
}

/// Log settings for answered requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// Whether log lines are JSON objects instead of plain text.
    pub json: bool,
    /// Whether plain text lines begin with the time.
    pub times: bool,
    /// Whether each answered request gets an access log line.
    pub access: bool,
    /// Whether answered probes get access log lines, too.
    pub probes: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_configuration_version_is_refused_by_number() {
        let error = |json| GatewayConfig::read(json).err().unwrap_or_default();
        let other = error(r#"{"version": 0, "no_such_field": 1}"#);
        assert!(other.starts_with("version 0: the extension reads version 8"), "{other}");
        assert!(error(r#"{"version": 8}"#).contains("missing field"));
        assert!(error("{}").contains("version"));
    }
}
