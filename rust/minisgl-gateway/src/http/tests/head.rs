//! Tests of which request headers are plain and which are odd.

use bytes::BytesMut;
use proptest::prelude::*;

use super::super::head::{Finder, Search, only_whole_requests};

const MAX: usize = 64 * 1024;

fn find(sent: &str) -> Search {
    Finder::default().find(&mut BytesMut::from(sent), MAX)
}

fn with(line: &str) -> String {
    format!("POST /v1 HTTP/1.1\r\nhost: a\r\n{line}\r\n\r\n")
}

#[test]
fn plain_header_is_parsed() {
    let mut bytes =
        BytesMut::from("POST /a?b=c HTTP/1.1\r\nHost: x\r\nX-A:\t 1 2\r\nContent-Length: 12\r\nE:\r\n\r\nbody");
    let Search::Head(head) = Finder::default().find(&mut bytes, MAX) else {
        panic!()
    };
    assert_eq!(
        (&*head.method, &*head.target, head.content_length, head.keep_alive),
        ("POST", "/a?b=c", 12, true)
    );
    let headers: Vec<_> = head
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_ref()))
        .collect();
    assert_eq!(
        headers,
        [
            ("host", &b"x"[..]),
            ("x-a", b"1 2"),
            ("content-length", b"12"),
            ("e", b"")
        ]
    );
    assert!(head.raw.ends_with(b"E:\r\n\r\n") && &bytes[..] == b"body");
}

#[test]
fn connection_header_sets_keep_alive() {
    for (line, keeps) in [
        ("connection: close", false),
        ("Connection: CLOSE", false),
        ("connection: Keep-Alive", true),
    ] {
        let Search::Head(head) = find(&with(line)) else {
            panic!("{line}")
        };
        assert_eq!(head.keep_alive, keeps);
    }
}

#[test]
fn odd_headers_are_left_unparsed() {
    let odd = [
        "transfer-encoding: identity",
        "expect: 100-continue",
        "upgrade: h2c",
        "proxy-connection: close",
        "connection: upgrade",
        "connection: close, te",
        "connection:",
        "connection: close\r\nconnection: close",
        "host: a",
        "content-length: 1\r\ncontent-length: 1",
        "content-length:",
        "content-length: -1",
        "content-length: +1",
        "content-length: 01",
        "content-length: 1,1",
        "content-length: 0x1",
        "content-length: 99999999999999999999",
        "content-length: 1\u{b2}",
        "content-length : 1",
        " content-length: 1",
        "content-length: 1 ",
        "a: b\r\n c",
        "a: b\rc",
        "a: b\0c",
        "a: b\u{1}c",
        "a: b\u{7f}c",
        "a: b\t",
        "a",
        ": b",
        "a b: c",
        "\u{e9}: b",
        "a: b\n",
        "a: b\nc: d",
    ];
    for line in odd {
        let sent = with(line);
        let mut bytes = BytesMut::from(sent.as_str());
        assert!(
            matches!(Finder::default().find(&mut bytes, MAX), Search::Odd),
            "{line:?}"
        );
        assert_eq!(&bytes[..], sent.as_bytes(), "it goes on whole");
    }
    for line in [
        "GET  / HTTP/1.1",
        "GET /  HTTP/1.1",
        " GET / HTTP/1.1",
        "\r\nGET / HTTP/1.1",
        "GET / HTTP/1.0",
        "GET / HTTP/1.2",
        "GET / HTTP/2.0",
        "GET / http/1.1",
        "GET /",
        "GET",
        "get / HTTP/1.1",
        "FOO / HTTP/1.1",
        "GETS / HTTP/1.1",
        "CONNECT a:1 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "GET a HTTP/1.1",
        "GET http://a/ HTTP/1.1",
        "GET /#a HTTP/1.1",
        "GET /\u{e9} HTTP/1.1",
        "GET /\0 HTTP/1.1",
        "GET /\t HTTP/1.1",
        "PRI * HTTP/2.0",
    ] {
        assert!(
            matches!(find(&format!("{line}\r\nhost: a\r\n\r\n")), Search::Odd),
            "{line:?}"
        );
    }
    let many: String = (0..130).map(|index| format!("h{index}: a\r\n")).collect();
    assert!(matches!(find(&with(many.trim_end())), Search::Odd));
    assert!(matches!(find(&with(&format!("a: {}", "b".repeat(MAX)))), Search::Odd));
}

#[test]
fn odd_headers_are_detected_before_their_end() {
    for sent in [
        "\u{16}\u{3}",
        "X",
        "GEX",
        "GET / HTTP/9",
        "GET / HTTP/1.1\n",
        "GET /\0",
        "GET / HTTP/1.1\r\n a",
    ] {
        assert!(matches!(find(sent), Search::Odd), "{sent:?}");
    }
    assert!(matches!(find(&format!("GET /{}", "a".repeat(MAX))), Search::Odd));
    for sent in [
        "G",
        "GET",
        "GET ",
        "GET / HT",
        "GET / HTTP/1.1\r",
        "GET / HTTP/1.1\r\n",
        "GET / HTTP/1.1\r\na: b\r\n\r",
    ] {
        assert!(matches!(find(sent), Search::Incomplete), "{sent:?}");
    }
}

#[test]
fn only_whole_requests_rejects_partial_ones() {
    let whole = with("content-length: 2") + "ab";
    for (sent, is_whole) in [
        (String::new(), true),
        (whole.clone(), true),
        (whole.repeat(3), true),
        (whole.repeat(2) + "odd\r\n\r\n", true),
        (whole.repeat(2) + "GET", false),
        (whole.repeat(2) + &whole[..whole.len() - 1], false),
    ] {
        assert_eq!(only_whole_requests(sent.as_bytes(), MAX), is_whole, "{sent}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// An odd header may be recognized earlier in some splits than in others, but every split has the same result.
    #[test]
    fn any_split_of_a_header_has_the_same_result(
        head in "(GET|POST|PUT) /[a-z]{0,9} HTTP/1.1\r\n([A-Za-z]{1,5}: ?[a-z 0-9]{0,9}[ \t\r\n]{0,2}\r\n){0,9}\r\n[a-z\r\n]{0,9}",
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let whole = find(&head);
        let mut places: Vec<_> = places.iter().map(|place| place.index(head.len())).collect();
        places.sort_unstable();
        let (mut finder, mut bytes, mut at) = (Finder::default(), BytesMut::new(), 0);
        let mut found = Search::Incomplete;
        for place in places.into_iter().chain([head.len()]) {
            bytes.extend_from_slice(&head.as_bytes()[at..place]);
            at = place;
            if !bytes.is_empty() {
                found = finder.find(&mut bytes, MAX);
            }
            if !matches!(found, Search::Incomplete) {
                break;
            }
        }
        match (whole, found) {
            (Search::Head(one), Search::Head(other)) => assert_eq!(format!("{one:?}"), format!("{other:?}")),
            (Search::Incomplete, Search::Incomplete) | (Search::Odd, Search::Odd) => {}
            other => panic!("{other:?}"),
        }
    }
}
