//! Access checks for probes by the request header (a subset of `server/core/callers.py`), and random ids.

use crate::http::{self, Head};

/// Returns true if the request carries no sign of a web page of another origin, and its Host header is a loopback name
/// or one of `hosts` (`None`: any host). False means that Python decides.
pub fn may_probe(head: &Head, hosts: Option<&[String]>) -> bool {
    let is_foreign = ["origin", "sec-fetch-site"]
        .iter()
        .any(|name| !matches!(head.header(name), Ok(None)));
    let host = head.header("host").ok().flatten();
    let host = host.and_then(|host| std::str::from_utf8(host).ok());
    let Some(host) = host.filter(|_| !is_foreign) else {
        return false;
    };
    let Some(hosts) = hosts else { return true };
    name_of(host).is_some_and(|name| is_loopback(&name) || hosts.contains(&name))
}

/// Returns the client's request id if it is safe in logs and headers, else a new one. `None` if the client sent
/// several.
pub fn request_id(head: &Head) -> Option<String> {
    head.header("x-request-id").ok()?;
    Some(http::request_id(Some(head)))
}

/// Returns `len` random characters of `alphabet`, which must be 1 to 256 ASCII characters.
pub fn random_id(len: usize, alphabet: &str) -> String {
    let mut id = String::with_capacity(len);
    let fair = 256 / alphabet.len() * alphabet.len(); // a byte above would favour the alphabet's first characters
    while id.len() < len {
        let mut bytes = [0_u8; 16];
        // 16 bytes are filled completely, or not at all while the system starts
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        for byte in bytes.map(usize::from) {
            if byte < fair && id.len() < len {
                id.push(char::from(alphabet.as_bytes()[byte % alphabet.len()]));
            }
        }
    }
    id
}

/// Returns the name in a `Host` header without its port, in lower case. `None` if it is not a plain name or address.
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
