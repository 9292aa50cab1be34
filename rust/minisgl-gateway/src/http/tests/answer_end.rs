//! Tests of the search for a response's end, for any split into packets.

use proptest::prelude::*;

use super::super::relay::AnswerEnd;
use super::super::writer::Progress;

/// Complete responses, each with whether it keeps the connection open.
const WHOLE: [(&str, bool); 10] = [
    ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", true),
    (
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: Close\r\n\r\n",
        false,
    ),
    ("HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n", true),
    ("HTTP/1.1 304 Not Modified\r\n\r\n", true),
    (
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na",
        true,
    ),
    ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", true),
    (
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n1\r\na\r\n0\r\n\r\n",
        false,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n00A\r\n0123456789\r\n2;a=\"b\"\r\n\r\n\r\n0;x\r\n\r\n",
        true,
    ),
    (
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\n\r\n0\r\nfirst: a\r\nsecond: b\r\n\r\n",
        true,
    ),
    ("HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na", false),
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn response_end_is_found_for_any_split(
        (answer, keeps) in prop::sample::select(WHOLE.to_vec()),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let bytes = [answer.as_bytes(), b"HTTP/1.1 more"].concat();
        let mut places: Vec<_> = places.iter().map(|place| place.index(bytes.len())).collect();
        places.push(bytes.len());
        places.sort_unstable();
        let (mut end, mut at, mut used) = (AnswerEnd::new(false), 0, 0);
        for place in places {
            used += end.feed(&bytes[at..place]).unwrap();
            assert_eq!(end.progress() == Progress::Ended, place >= answer.len());
            let interim = answer.rfind("HTTP/").unwrap_or(0);
            assert!(end.has_begun() || place <= interim);
            at = place;
        }
        assert_eq!((used, end.keep_alive), (answer.len(), keeps));
    }

    #[test]
    fn invalid_response_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..100), begin in 0..WHOLE.len()) {
        let mut end = AnswerEnd::new(false);
        let answer = WHOLE[begin].0.as_bytes();
        let _ = end.feed(&answer[..answer.len() - 3]);
        let _ = end.feed(&bytes);
    }
}

#[test]
fn response_to_head_has_no_body() {
    let mut end = AnswerEnd::new(true);
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-request-id: mine\r\n\r\n";
    assert_eq!(end.feed(answer), Ok(answer.len()));
    assert!(end.progress() == Progress::Ended && end.keep_alive && end.request_id.as_deref() == Some("mine"));
}

#[test]
fn response_without_length_ends_with_the_connection() {
    let mut end = AnswerEnd::new(false);
    for part in [&b"HTTP/1.1 200 OK\r\n\r\n"[..], b"anything", b"0\r\n\r\n"] {
        assert_eq!(end.feed(part), Ok(part.len()));
        assert!(end.progress() == Progress::Begun && !end.keep_alive);
    }
}

#[test]
fn invalid_responses_are_errors() {
    for broken in [
        "no answer\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    ] {
        assert!(AnswerEnd::new(false).feed(broken.as_bytes()).is_err(), "{broken:?}");
    }
    assert!(AnswerEnd::new(false).feed(&vec![b'a'; 2 << 20]).is_err());
}
