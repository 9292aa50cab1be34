//! Tests of proxied requests: large ones, and servers that answer early, late, never, or break off.

use std::rc::Rc;

use crate::common::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::spawn_local;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

fn noise(size: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(size).collect()
}

/// Starts a fallback that runs `script` once the header of a request has arrived.
fn after_head(server: &mut Server, script: impl AsyncFn(UnixStream, Rc<Fallback>) + 'static) {
    server.serve_fallback(async move |mut stream, fallback| {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        script(stream, fallback).await;
    });
}

#[test]
fn large_bodies_are_proxied_both_ways_at_once() {
    for is_tunnel in [false, true] {
        run(async {
            let size = 6 << 20;
            let mut server = Server::start();
            after_head(&mut server, async move |mut stream, _| {
                let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n");
                stream.write_all(head.as_bytes()).await.unwrap();
                let mut input = vec![0; 10_000];
                let mut left = size;
                while left > 0 {
                    let found = stream.read(&mut input).await.unwrap();
                    stream.write_all(&input[..found]).await.unwrap();
                    left -= found;
                }
            });
            let body = noise(size);
            let odd = if is_tunnel { "expect: 100-continue\r\n" } else { "" };
            let head = format!("POST /other HTTP/1.1\r\nhost: a\r\n{odd}content-length: {size}\r\n\r\n");
            let (mut reading, mut writing) = server.connect().await.into_split();
            let sent = body.clone();
            spawn_local(async move {
                writing.write_all(head.as_bytes()).await.unwrap();
                writing.write_all(&sent).await.unwrap();
                writing.forget();
            });
            let mut answer = Vec::new();
            reading.read_to_end(&mut answer).await.unwrap();
            assert!(answer.ends_with(&body) && answer.len() - size < 100);
            assert_eq!(server.options.counts.tunnelled.get(), u64::from(is_tunnel));
            server.all_gone().await;
        });
    }
}

#[test]
fn proxy_reads_no_faster_than_it_writes() {
    run(async {
        let mut server = Server::start();
        after_head(&mut server, async move |mut stream, fallback| {
            let part = noise(1 << 16);
            let size = 64 << 20;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            for _ in 0..size / part.len() {
                stream.write_all(&part).await.unwrap();
                fallback.ended.set(fallback.ended.get() + part.len());
            }
        });
        let mut stream = server.connect().await;
        send(&mut stream, last("GET", "/other", "")).await;
        stream.readable().await.unwrap();
        let mut before = 0;
        loop {
            for _ in 0..20 {
                server.exchange(last("POST", "/echo", "others go on").as_bytes()).await;
            }
            if server.fallback.ended.get() == before {
                break; // blocked: the other side does not read
            }
            before = server.fallback.ended.get();
        }
        assert!(before < 32 << 20, "{before}");
        let mut input = Vec::new();
        stream.read_to_end(&mut input).await.unwrap();
        assert!(input.len() > 64 << 20);
    });
}

#[test]
fn response_before_the_end_of_the_body_is_proxied() {
    run(async {
        let early = b"HTTP/1.1 413 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno";
        let mut server = Server::start();
        after_head(&mut server, async move |mut stream, _| {
            stream.write_all(early).await.unwrap();
        });
        let body = noise(3 << 20);
        let head = format!(
            "POST /other HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let (mut reading, mut writing) = server.connect().await.into_split();
        spawn_local(async move {
            writing.write_all(head.as_bytes()).await.unwrap();
            let _ = writing.write_all(&body).await;
        });
        let mut answer = Vec::new();
        reading.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, early);
        server.all_gone().await;
    });
}

#[test]
fn early_response_keeps_the_connection() {
    run(async {
        let mut server = Server::start();
        after_head(&mut server, async move |mut stream, fallback| {
            stream.write_all(OK).await.unwrap();
            let mut input = Vec::new();
            let _ = stream.read_to_end(&mut input).await;
            fallback.received.borrow_mut().push(input);
        });
        let mut stream = server.connect().await;
        send(&mut stream, request("POST", "/other", "begin end").replace("end", "")).await;
        read_until(&mut stream, "ok").await;
        stream.write_all(b"end").await.unwrap();
        send(&mut stream, last("POST", "/echo", "next")).await;
        assert!(read_all(&mut stream).await.ends_with("next"));
        until(|| *server.fallback.received.borrow() == [b"begin end"]).await;
    });
}

#[test]
fn dying_server_gives_503_or_a_truncated_response() {
    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
    for (said, expected) in [
        (&b""[..], "HTTP/1.1 503 "),
        (interim, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 "),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "HTTP/1.1 200 OK\r\ncontent-le"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
        ),
        (
            b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
            "HTTP/1.1 200 OK\r\n\r\nuntil the end",
        ),
        (b"no answer\r\n\r\nat all", ""),
    ] {
        run(async move {
            let mut server = Server::start();
            after_head(&mut server, async move |mut stream, _| {
                stream.write_all(said).await.unwrap();
            });
            let mut stream = server.connect().await;
            send(&mut stream, request("GET", "/other", "")).await;
            if expected.ends_with("503 ") {
                let answer = read_until(&mut stream, "}}").await;
                assert!(answer.starts_with(expected), "{answer}");
                send(&mut stream, last("POST", "/echo", "next")).await;
                assert!(read_all(&mut stream).await.ends_with("next"));
            } else {
                assert_eq!(read_all(&mut stream).await, expected);
            }
            drop(stream);
            server.all_gone().await;
        });
    }
}

#[test]
fn responses_without_body_are_proxied() {
    run(async {
        for (method, answer) in [
            ("HEAD", &b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n"[..]),
            ("GET", b"HTTP/1.1 204 No Content\r\ncontent-length: 3\r\n\r\n"),
            (
                "GET",
                b"HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n",
            ),
            (
                "GET",
                b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            ),
        ] {
            let mut server = Server::start();
            after_head(&mut server, async move |mut stream, _| {
                stream.write_all(answer).await.unwrap();
                let _ = stream.read_u8().await; // the connection stays open
            });
            let sent = [request(method, "/other", ""), last("POST", "/echo", "next")].concat();
            let found = server.exchange(sent.as_bytes()).await;
            let rest = found.strip_prefix(std::str::from_utf8(answer).unwrap()).unwrap();
            assert!(rest.starts_with("HTTP/1.1 200 OK\r\ndate: ") && rest.ends_with("next"));
        }
    });
}

#[test]
fn server_sees_the_clients_disconnect() {
    run(async {
        let mut server = Server::start();
        after_head(&mut server, async move |mut stream, fallback| {
            fallback.received.borrow_mut().push(Vec::new());
            let _ = stream.read_to_end(&mut Vec::new()).await;
            fallback.ended.set(fallback.ended.get() + 1);
        });
        let odd = "GET /echo HTTP/1.0\r\n\r\n".to_owned();
        let half = "POST /other HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhalf".to_owned();
        for (index, sent) in [request("GET", "/other", ""), odd, half].iter().enumerate() {
            for is_reset in [true, false] {
                let mut stream = server.connect().await;
                stream.write_all(sent.as_bytes()).await.unwrap();
                until(|| server.fallback.received.borrow().len() == 2 * index + 1 + usize::from(!is_reset)).await;
                if is_reset {
                    stream.set_zero_linger().unwrap();
                }
                drop(stream);
                until(|| server.fallback.ended.get() == server.fallback.received.borrow().len()).await;
                server.all_gone().await;
            }
        }
    });
}

#[test]
fn half_closed_client_gets_the_servers_response() {
    run(async {
        let mut server = Server::start();
        after_head(&mut server, async move |mut stream, _| {
            let _ = stream.read_to_end(&mut Vec::new()).await; // the client closes
            stream.write_all(OK).await.unwrap();
        });
        for sent in [request("GET", "/other", ""), "GET / HTTP/1.0\r\n\r\n".to_owned()] {
            assert!(server.exchange_half(sent.as_bytes()).await.ends_with("\r\n\r\nok"));
        }
        let sent = [request("POST", "/echo", "1"), request("GET", "/other", "")].concat();
        assert!(server.exchange_half(sent.as_bytes()).await.ends_with("\r\n\r\nok"));
        server.all_gone().await;
    });
}

#[test]
fn large_bodies_beyond_the_budget_are_proxied() {
    run(async {
        let server = Server::with_fallback(OK);
        server.options.bodies.set_max(150_000);
        let mut first = server.connect().await;
        send(&mut first, request("POST", "/wait", &"a".repeat(100_000))).await;
        until(|| server.answers.waiting.get() == 1).await;
        assert_eq!(server.options.bodies.used(), 100_000);
        let large = server
            .exchange(last("POST", "/echo", &"a|".repeat(50_000)).as_bytes())
            .await;
        assert!(large.ends_with("\r\n\r\nok"));
        let small = "a".repeat(60_000);
        assert!(
            server
                .exchange(last("POST", "/echo", &small).as_bytes())
                .await
                .ends_with(&small)
        );
        server.answers.go_on.notify_one();
        read_until(&mut first, "aaa").await;
        server.answers.writers.borrow_mut().clear();
        until(|| server.options.bodies.used() == 0).await;
        let large = "a".repeat(100_000);
        assert!(
            server
                .exchange(last("POST", "/echo", &large).as_bytes())
                .await
                .ends_with(&large)
        );
        assert_eq!(server.options.counts.proxied.get(), 1);
        let over = server
            .exchange(last("POST", "/small", "more than that|").as_bytes())
            .await;
        assert!(over.ends_with("\r\n\r\nok"));
    });
}
