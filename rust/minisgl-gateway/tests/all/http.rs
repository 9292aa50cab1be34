//! Tests of requests over real sockets: framing, order, proxied requests, and clients that disconnect.

use crate::common::*;
use tokio::io::AsyncWriteExt;

#[test]
fn whole_response_has_length_and_date() {
    run(async {
        let server = Server::start();
        let answer = server.exchange(last("POST", "/echo", "hello").as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\ndate: "));
        let expected =
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nhello";
        assert_eq!(plain(&answer), expected);
    });
}

#[test]
fn streamed_response_is_chunked() {
    run(async {
        let server = Server::start();
        let answer = server.exchange(last("POST", "/stream", "ab").as_bytes()).await;
        let expected = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nx-kind: stream\r\nconnection: close\r\n\
                        transfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n";
        assert_eq!(plain(&answer), expected);
    });
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    run(async {
        let server = Server::with_fallback(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        let mut sent = String::new();
        for index in 0..12 {
            sent += &match index % 3 {
                0 => request("POST", "/echo", &format!("n{index}")),
                1 => request("POST", "/pass", &format!("{index}|")),
                _ => request("POST", "/other", &format!("{index}|")),
            };
        }
        sent += &last("POST", "/echo", "end");
        let answer = server.exchange(sent.as_bytes()).await;
        let bodies: Vec<_> = answer
            .split("\r\n\r\n")
            .skip(1)
            .map(|one| one.split("HTTP").next().unwrap())
            .collect();
        let expected = [
            "n0", "ok", "ok", "n3", "ok", "ok", "n6", "ok", "ok", "n9", "ok", "ok", "end",
        ];
        assert_eq!(bodies, expected);
        assert_eq!(server.options.counts.proxied.get(), 8);
        server.all_gone().await;
    });
}

#[test]
fn proxied_requests_are_unchanged() {
    run(async {
        let answer =
            b"HTTP/1.1 418 Odd\r\nX-Any:  thing \r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: x\r\n\r\n";
        let server = Server::with_fallback(answer);
        let sent = "POST /other?a=b HTTP/1.1\r\nHOST: x\r\nContent-Length: 3\r\nX-Strange: \t\u{e9}\r\n\r\nab|";
        let mut stream = server.connect().await;
        for _ in 0..2 {
            stream.write_all(sent.as_bytes()).await.unwrap();
            assert_eq!(read_until(&mut stream, "T: x\r\n\r\n").await.as_bytes(), answer);
        }
        drop(stream);
        server.all_gone().await;
        assert_eq!(*server.fallback.received.borrow(), [sent.as_bytes(), sent.as_bytes()]);
    });
}

#[test]
fn odd_connections_are_tunnelled() {
    run(async {
        for odd in [
            "\u{16}\u{3}\u{1}",
            "hello?\r\n\r\n",
            "GET / HTTP/9.9\r\n\r\n",
            "GET /echo HTTP/1.0\r\n\r\n",
            "GET /echo HTTP/1.1\nhost: a\n\n",
            "POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
            "POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\na",
            "POST /echo HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\na",
            "GET /echo HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
            "GET /echo HTTP/1.1\r\nhost: a \r\n\r\n",
            "GET http://a/echo HTTP/1.1\r\nhost: a\r\n\r\n",
            "\r\nGET /echo HTTP/1.1\r\nhost: a\r\n\r\n",
            "CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        ] {
            let server = Server::with_fallback(b"whatever\0 it says");
            let before = request("POST", "/echo", "first");
            let answer = server
                .exchange_half(&[before.as_bytes(), odd.as_bytes(), b"and more"].concat())
                .await;
            assert!(answer.ends_with("\r\n\r\nfirstwhatever\0 it says"), "{odd:?}: {answer}");
            assert_eq!(
                *server.fallback.received.borrow(),
                [[odd.as_bytes(), b"and more"].concat()]
            );
            assert_eq!(server.options.counts.tunnelled.get(), 1);
            server.all_gone().await;
        }
    });
}

#[test]
fn missing_fallback_refuses_only_proxied_requests() {
    run(async {
        let server = Server::start();
        let with_id = request("POST", "/other", "body").replacen("host:", "x-request-id: mine\r\nhost:", 1);
        let sent = [with_id, request("GET", "/other", ""), last("POST", "/echo", "fine")].concat();
        let answer = server.exchange(sent.as_bytes()).await;
        assert_eq!(answer.matches("HTTP/1.1 503 Service Unavailable\r\n").count(), 2);
        assert_eq!(answer.matches("\"code\":\"fallback_unavailable\"").count(), 2);
        assert_eq!(answer.matches("retry-after: 1\r\n").count(), 2);
        assert!(answer.contains("x-request-id: mine\r\n") && answer.contains("x-request-id: req-"));
        assert!(answer.ends_with("fine"));
        assert!(server.exchange(b"odd\r\n\r\n").await.starts_with("HTTP/1.1 503 "));
    });
}

#[test]
fn handler_panic_is_an_error_of_one_request() {
    run(async {
        let server = Server::start();
        let sent = [request("GET", "/panic", ""), last("POST", "/echo", "fine")].concat();
        let answer = server.exchange(sent.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains("internal_error") && answer.ends_with("fine"));
        assert!(
            server
                .exchange(request("GET", "/panic-route", "").as_bytes())
                .await
                .starts_with("HTTP/1.1 500 ")
        );
        assert_eq!(server.options.counts.panics.get(), 2);
    });
}

#[test]
fn disconnect_drops_the_handlers_future() {
    run(async {
        let server = Server::start();
        for target in ["/wait", "/wait-stream"] {
            for behind in ["", &request("POST", "/echo", "behind")] {
                let before = server.answers.gone.get();
                let waiting = server.answers.waiting.get();
                let mut stream = server.connect().await;
                stream
                    .write_all((request("GET", target, "") + behind).as_bytes())
                    .await
                    .unwrap();
                until(|| server.answers.waiting.get() > waiting).await;
                stream.set_zero_linger().unwrap();
                drop(stream);
                until(|| server.answers.gone.get() > before).await;
                server.all_gone().await;
                server.answers.writers.borrow()[0].part(b"into the void");
            }
        }
    });
}

#[test]
fn half_closed_client_gets_its_response() {
    run(async {
        let server = Server::start();
        let answer = server.exchange_half(request("POST", "/echo", "hello").as_bytes()).await;
        assert!(answer.contains("connection: close\r\n") && answer.ends_with("hello"));
        let whole = request("POST", "/echo", "hello");
        for size in [1, 10, whole.len() - 1] {
            assert_eq!(server.exchange_half(&whole.as_bytes()[..size]).await, "");
        }
        server.all_gone().await;
    });
}
