//! Tests that splitting bytes into packets changes neither requests nor responses.

use crate::common::*;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const ANSWERS: [&[u8]; 4] = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0000a\r\n0123456789\r\n0\r\nx: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\ncontent-type: x\r\ncontent-length: 0\r\n\r\n",
];

/// Splits `bytes` at these offsets.
fn cut<'a>(bytes: &'a [u8], places: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = places.iter().map(|place| place.index(bytes.len())).collect();
    places.extend([0, bytes.len()]);
    places.sort_unstable();
    places.windows(2).map(|two| &bytes[two[0]..two[1]]).collect()
}

/// Lets other tasks read what was written.
async fn turns() {
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
}

/// Starts a server whose fallback reads to `|` and sends the response that the byte before selects, split at `places`.
fn start(places: Vec<prop::sample::Index>) -> Server {
    let mut server = Server::start();
    server.serve_fallback(async move |mut stream, fallback| {
        let mut found = Vec::new();
        while !found.ends_with(b"|") {
            found.push(stream.read_u8().await.unwrap());
        }
        let answer = ANSWERS[usize::from(found[found.len() - 2]) % ANSWERS.len()];
        fallback.received.borrow_mut().push(found);
        for piece in cut(answer, &places) {
            stream.write_all(piece).await.unwrap();
            turns().await;
        }
    });
    server
}

async fn answers(stream: TcpStream, pieces: &[&[u8]]) -> String {
    let (mut reading, mut writing) = stream.into_split();
    let write = async {
        for piece in pieces {
            writing.write_all(piece).await.unwrap();
            turns().await;
        }
    };
    let mut found = Vec::new();
    let (_, read) = tokio::join!(write, reading.read_to_end(&mut found));
    read.unwrap();
    plain(std::str::from_utf8(&found).unwrap())
}

fn one_request() -> impl Strategy<Value = String> {
    (0..5_usize, "[a-z]{0,40}", 0..4_usize).prop_map(|(kind, text, answer)| match kind {
        0 => request("POST", "/echo", &text),
        1 => request("POST", "/stream", &text),
        2 => request("POST", "/pass", &format!("{text}{answer}|")),
        3 => request("POST", "/other", &format!("{text}{answer}|")),
        _ => request("GET", "/other?x", &format!("{text}{answer}|")),
    })
}

/// Generates a last request, which ends the connection in one way or another.
fn end() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        last("POST", "/echo", "end"),
        last("POST", "/other", "end1|"),
        "GET /other HTTP/1.0\r\n\r\n0|".to_owned(),
        "POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc3|\r\n0\r\n\r\n".to_owned(),
        "no HTTP at all|".to_owned(),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_split_gives_the_same_responses(
        requests in prop::collection::vec(one_request(), 0..10),
        end in end(),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
        answer_places in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
    ) {
        run(async move {
            let sent = requests.concat() + &end;
            let (whole, in_pieces) = (start(Vec::new()), start(answer_places));
            let expected = answers(whole.connect().await, &[sent.as_bytes()]).await;
            let found = answers(in_pieces.connect().await, &cut(sent.as_bytes(), &places)).await;
            assert_eq!(found, expected);
            assert_eq!(*in_pieces.fallback.received.borrow(), *whole.fallback.received.borrow());
            let passed_on = whole.fallback.received.borrow().concat();
            let mine = |one: &&String| !one.starts_with("POST /echo HTTP/1.1\r\nhost") && !one.contains(" /stream ");
            let rest = (!end.contains("/echo HTTP/1.1\r\nconnection")).then_some(end);
            let expected: String = requests.iter().filter(mine).chain(&rest).map(String::as_str).collect();
            assert!(expected.starts_with(std::str::from_utf8(&passed_on).unwrap()));
            whole.all_gone().await;
            in_pieces.all_gone().await;
        });
    }
}
