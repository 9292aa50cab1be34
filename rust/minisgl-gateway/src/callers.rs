//! Who may ask: `server/callers.py` for those who plainly may. Everybody else is passed on, and refused there.

use crate::config::GatewayConfig;
use crate::http::{self, Head};
use crate::keys::number_of;

/// What an answer's head has for every caller: `x-request-id`, and what pages of other origins need.
pub type Headers = Vec<(&'static str, String)>;

/// The number of the caller's API key; None: not plainly. `needs_key`: what is asked for is not for everybody.
pub fn may_ask(head: &Head, config: &GatewayConfig, needs_key: bool) -> Option<usize> {
    let host = text(head.header("host").ok()??)?;
    let knows = config
        .hosts
        .as_ref()
        .is_none_or(|hosts| name_of(host).is_some_and(|name| is_loopback(&name) || hosts.contains(&name)));
    knows.then_some(())?;
    // what a foreign page includes is refused, a link to the server is not: browsers say which
    (!matches!(head.header("sec-fetch-site"), Err(()) | Ok(Some(b"cross-site")))).then_some(())?;
    if !needs_key {
        return Some(0);
    }
    // several are no question where no key is asked for
    let given = match head.header("authorization") {
        Ok(None) => head.header("x-api-key").ok().flatten(), // as Anthropic's clients send it
        found => found.ok().flatten().and_then(|text| text.strip_prefix(b"Bearer ")),
    };
    number_of(given, config)
}

/// Whether it asks for a name that any server answers to.
pub fn is_local(head: &Head) -> bool {
    let host = head.header("host").ok().flatten().and_then(text);
    host.and_then(name_of).is_some_and(|name| is_loopback(&name))
}

/// Whether a body is JSON, by what its head says; of a POST.
pub fn sends_json(head: &Head) -> bool {
    matches!(head.header("content-type"), Ok(Some(kind)) if kind == b"application/json"
        || kind == b"application/json; charset=utf-8" || kind == b"application/json; charset=UTF-8")
}

/// The headers of an answer; None: not plainly an origin that may read it.
pub fn headers(head: &Head, config: &GatewayConfig, request_id: String) -> Option<Headers> {
    let mut found: Headers = vec![("x-request-id", request_id)];
    found.extend(config.harmless_headers.iter().cloned());
    let origin = match head.header("origin").ok()? {
        None => None,
        Some(origin) => Some(text(origin)?),
    };
    let origins = &config.cors_origins;
    if origins.iter().any(|one| one == "*") {
        found.push(("access-control-allow-origin", "*".to_owned()));
    } else if let Some(origin) = origin.filter(|one| origins.iter().any(|other| other.eq_ignore_ascii_case(one))) {
        found.push(("access-control-allow-origin", origin.to_owned()));
        found.push(("vary", "Origin".to_owned()));
    } else {
        let may = origin.is_none_or(|one| is_own(one, head));
        may.then_some(())?;
        if !origins.is_empty() {
            found.push(("vary", "Origin".to_owned()));
        }
        return Some(found);
    }
    found.push(("access-control-expose-headers", config.exposed_headers.clone()));
    Some(found)
}

/// The client's own id if it can stand in a log and a header, else a new one; None: it gave several.
pub fn request_id(head: &Head) -> Option<String> {
    head.header("x-request-id").ok()?;
    Some(http::request_id(Some(head)))
}

/// 32 random hexadecimal digits.
pub fn random_hex() -> String {
    http::hex(&random_bytes())
}

/// A seed, as `secrets.randbits(63)`.
pub fn random_seed() -> i64 {
    let [a, b, c, d, e, f, g, h, ..] = random_bytes();
    i64::from_le_bytes([a, b, c, d, e, f, g, h]) & i64::MAX
}

/// A random UUID (version 4) without its dashes.
pub fn random_uuid() -> String {
    let mut bytes = random_bytes();
    bytes[6] = bytes[6] & 0x0F | 0x40;
    bytes[8] = bytes[8] & 0x3F | 0x80;
    http::hex(&bytes)
}

/// So many characters of these, which are at most 256 and plain ones.
pub fn random_id(len: usize, alphabet: &str) -> String {
    let mut found = String::with_capacity(len);
    let fair = 256 / alphabet.len() * alphabet.len(); // bytes beyond would favour the first
    while found.len() < len {
        for byte in random_bytes() {
            let byte = usize::from(byte);
            if byte < fair && found.len() < len {
                found.push(char::from(alphabet.as_bytes()[byte % alphabet.len()]));
            }
        }
    }
    found
}

fn random_bytes() -> [u8; 16] {
    let mut found = [0; 16];
    // so few bytes come whole or not at all, and only before the system has started not at all
    let _ = rustix::rand::getrandom(&mut found, rustix::rand::GetRandomFlags::empty());
    found
}

/// Whether a page comes from the server itself.
fn is_own(origin: &str, head: &Head) -> bool {
    let host = head.header("host").ok().flatten().and_then(text);
    let named = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"));
    host.zip(named)
        .is_some_and(|(host, named)| named.eq_ignore_ascii_case(host))
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// The name in a `Host` header without its port, in lower case; None for what is not plainly a name or an address.
fn name_of(host: &str) -> Option<String> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let (name, after) = rest.split_once(']')?;
            (name, if after.is_empty() { "" } else { after.strip_prefix(':')? })
        }
        None => host.split_once(':').unwrap_or((host, "")),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-:".contains(&byte);
    let fits = !name.is_empty() && name.bytes().all(plain) && port.bytes().all(|byte| byte.is_ascii_digit());
    fits.then(|| name.to_ascii_lowercase())
}

fn is_loopback(name: &str) -> bool {
    name == "localhost"
        || name
            .parse()
            .is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}
