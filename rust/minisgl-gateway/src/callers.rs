//! Who may ask: `server/callers.py` for those who plainly may. Everybody else is passed on, and refused there.

use crate::config::GatewayConfig;
use crate::http::Head;
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
    let given = head.header("x-request-id").ok()?;
    let fits = |id: &&[u8]| {
        (1..=128).contains(&id.len())
            && id
                .iter()
                .all(|&byte| byte.is_ascii_alphanumeric() || b"._:/+=@-".contains(&byte))
    };
    Some(match given.filter(fits).and_then(text) {
        Some(id) => id.to_owned(),
        None => format!("req-{}", &random_hex()[..24]),
    })
}

/// 32 random hexadecimal digits.
pub fn random_hex() -> String {
    random_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
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
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use bytes::Bytes;

    fn head(headers: &[(&str, &'static str)]) -> Head {
        Head {
            raw: Bytes::new(),
            method: "POST".into(),
            target: "/generate".into(),
            headers: headers
                .iter()
                .map(|(name, value)| ((*name).to_owned(), Bytes::from_static(value.as_bytes())))
                .collect(),
            content_length: 1,
            keep_alive: true,
        }
    }

    fn config(changes: serde_json::Value) -> GatewayConfig {
        crate::answer::tests::config(changes)
    }

    #[test]
    fn only_names_of_the_server_are_answered() {
        let config = config(serde_json::json!({"hosts": ["box"]}));
        for host in [
            "localhost",
            "localhost:80",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:5",
            "BOX:1",
            "box",
        ] {
            assert!(may_ask(&head(&[("host", host)]), &config, true).is_some(), "{host}");
        }
        for host in [
            "evil",
            "box.evil",
            "",
            "localhost:x",
            "a@localhost",
            "[::1",
            "localhost, box",
            "localhost.",
        ] {
            assert!(may_ask(&head(&[("host", host)]), &config, true).is_none(), "{host}");
        }
        assert!(may_ask(&head(&[]), &config, true).is_none());
        assert!(may_ask(&head(&[("host", "box"), ("host", "box")]), &config, true).is_none());
        for (site, may) in [("cross-site", false), ("same-origin", true), ("none", true)] {
            let asks = head(&[("host", "box"), ("sec-fetch-site", site)]);
            assert_eq!(may_ask(&asks, &config, true).is_some(), may, "{site}");
        }
    }

    #[test]
    fn the_key_is_asked_for() {
        let config = config(serde_json::json!({"api_key": "secret"}));
        let asks = |key: &'static str| may_ask(&head(&[("host", "localhost"), ("authorization", key)]), &config, true);
        assert!(asks("Bearer secret").is_some());
        for key in ["Bearer secre", "Bearer secrets", "Bearer ", "Basic secret", "secret"] {
            assert!(asks(key).is_none(), "{key}");
        }
        assert!(may_ask(&head(&[("host", "localhost")]), &config, true).is_none());
        assert!(may_ask(&head(&[("host", "localhost")]), &config, false).is_some());
    }

    #[test]
    fn pages_of_the_server_itself_and_of_named_origins_are_answered() {
        let names = |origin: &'static str, origins: serde_json::Value| {
            let config = config(serde_json::json!({ "cors_origins": origins }));
            let head = head(&[("host", "localhost:9"), ("origin", origin)]);
            let found = headers(&head, &config, "id".into())?;
            Some(found.into_iter().map(|(name, _)| name).skip(3).collect::<Vec<_>>())
        };
        let none = serde_json::json!([]);
        assert_eq!(names("http://localhost:9", none.clone()), Some(vec![]));
        assert_eq!(names("http://localhost:8", none.clone()), None);
        assert_eq!(names("null", none), None);
        let named = serde_json::json!(["https://page.example"]);
        let allowed = vec!["access-control-allow-origin", "vary", "access-control-expose-headers"];
        assert_eq!(names("https://page.example", named.clone()), Some(allowed));
        assert_eq!(names("http://localhost:9", named.clone()), Some(vec!["vary"]));
        assert_eq!(names("https://other.example", named), None);
        let any = vec!["access-control-allow-origin", "access-control-expose-headers"];
        assert_eq!(names("https://other.example", serde_json::json!(["*"])), Some(any));
    }

    #[test]
    fn random_ids_have_their_length_and_letters() {
        for (len, alphabet) in [(24, "0123456789abcdef"), (9, "xyz"), (0, "a")] {
            let id = random_id(len, alphabet);
            assert!(id.len() == len && id.chars().all(|one| alphabet.contains(one)), "{id}");
        }
        assert_ne!(random_id(24, "0123456789abcdef"), random_id(24, "0123456789abcdef"));
    }

    #[test]
    fn an_id_that_cannot_stand_in_a_log_is_replaced() {
        assert_eq!(request_id(&head(&[("x-request-id", "a-1")])).unwrap(), "a-1");
        for id in ["", "a b", "a\"b"] {
            assert!(
                request_id(&head(&[("x-request-id", id)])).unwrap().starts_with("req-"),
                "{id}"
            );
        }
        assert!(request_id(&head(&[("x-request-id", "a"), ("x-request-id", "b")])).is_none());
    }
}
