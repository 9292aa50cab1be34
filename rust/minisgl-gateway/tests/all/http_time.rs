//! Tests of timeouts with a paused clock: headers, bodies, idle connections, slow and disconnected clients.

use std::time::Duration;

use crate::common::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep};

const PROBE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

/// Connects a client with a small receive buffer.
async fn small_client(server: &Server) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(server.address).await.unwrap()
}

/// Writes until the client's unread bytes pause the stream, and returns the number of bytes written.
fn fill(writer: &minisgl_gateway::http::Writer) -> usize {
    let part = [b'x'; 10_000];
    let mut size = 0;
    while !writer.is_paused() {
        writer.part(&part);
        size += part.len();
    }
    size
}

#[test]
fn slow_header_times_out() {
    run_without_clock(async {
        let server = Server::start();
        let begin = Instant::now();
        let (mut silent, mut slow) = (server.connect().await, server.connect().await);
        let (mut slow_read, mut slow_write) = slow.split();
        let dribble = async {
            for byte in "GET /echo HTTP/1.1\r\nx: ".bytes().chain(std::iter::repeat(b'a')) {
                if slow_write.write_all(&[byte]).await.is_err() {
                    break;
                }
                sleep(Duration::from_millis(500)).await;
            }
        };
        let mut input = Vec::new();
        tokio::select! {
            () = dribble => {}
            found = slow_read.read_to_end(&mut input) => assert_eq!(found.unwrap_or(0), 0), // 0 bytes or a reset
        }
        assert_eq!(begin.elapsed().as_secs(), 60);
        assert_eq!(read_all(&mut silent).await, "");
        assert_eq!(begin.elapsed().as_secs(), 60);
        server.all_gone().await;
    });
}

#[test]
fn idle_connection_is_closed_after_keep_alive() {
    run_without_clock(async {
        let server = Server::start();
        let mut stream = server.connect().await;
        for _ in 0..3 {
            sleep(Duration::from_secs(50)).await;
            send(&mut stream, request("POST", "/echo", "hello")).await;
            read_until(&mut stream, "hello").await;
        }
        let begin = Instant::now();
        assert_eq!(read_all(&mut stream).await, "");
        assert_eq!(begin.elapsed().as_secs(), 75);

        server.options.keep_alive_timeout.set(Duration::from_secs(1000));
        let mut stream = server.connect().await;
        send(&mut stream, request("POST", "/echo", "hello")).await;
        read_until(&mut stream, "hello").await;
        sleep(Duration::from_secs(500)).await;
        let begin = Instant::now();
        stream.write_all(b"POST /ec").await.unwrap(); // a later header has its own timeout
        assert_eq!(read_all(&mut stream).await, "");
        assert_eq!(begin.elapsed().as_secs(), 60);
    });
}

#[test]
fn paused_body_is_proxied() {
    run_without_clock(async {
        let server = Server::with_fallback(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        let mut stream = server.connect().await;
        let sent = request("POST", "/echo", "so far|");
        let (begin, end) = sent.split_at(sent.len() - 3);
        stream.write_all(begin.as_bytes()).await.unwrap();
        sleep(Duration::from_millis(1100)).await;
        assert_eq!(*server.fallback.received.borrow(), [begin.as_bytes()]);
        stream.write_all(end.as_bytes()).await.unwrap();
        read_until(&mut stream, "ok").await;
        assert_eq!(*server.fallback.received.borrow(), [sent.as_bytes()]);
        send(&mut stream, last("POST", "/echo", "next")).await;
        assert!(read_all(&mut stream).await.ends_with("next"));
    });
}

#[test]
fn half_closed_waiting_client_is_probed() {
    run_without_clock(async {
        let server = Server::start();
        let mut stream = server.connect().await;
        send(&mut stream, request("POST", "/wait", "hello")).await;
        stream.shutdown().await.unwrap();
        until(|| server.answers.waiting.get() == 1).await;
        let begin = Instant::now();
        for millis in [1000, 1100, 1300, 1700, 2500] {
            read_until(&mut stream, PROBE).await;
            let passed = begin.elapsed().as_millis();
            assert!((millis - 10..millis + 20).contains(&passed), "{millis} {passed}");
        }
        server.answers.go_on.notify_one();
        let answer = read_all(&mut stream).await;
        assert!(
            answer.starts_with("HTTP/1.1 200 ") && answer.contains("connection: close\r\n"),
            "{answer}"
        );
        assert!(answer.ends_with("hello"));
    });
}

#[test]
fn probe_detects_a_disconnected_client() {
    run_without_clock(async {
        let server = Server::start();
        for behind in ["", &request("POST", "/echo", "behind")] {
            let mut stream = server.connect().await;
            stream
                .write_all((request("POST", "/wait", "hello") + behind).as_bytes())
                .await
                .unwrap();
            until(|| server.options.counts.open.get() == 1).await;
            drop(stream);
            server.all_gone().await;
        }
        assert_eq!(server.answers.gone.get(), server.answers.waiting.get());
        // once the response has begun, a half-closed client counts as disconnected
        let mut stream = server.connect().await;
        send(&mut stream, request("GET", "/wait-stream", "")).await;
        read_until(&mut stream, "begun\r\n").await;
        let begin = Instant::now();
        stream.shutdown().await.unwrap();
        server.all_gone().await;
        assert!(begin.elapsed() < Duration::from_millis(100));
    });
}

#[test]
fn client_that_does_not_read_is_disconnected() {
    run_without_clock(async {
        let server = Server::start();
        let mut stream = small_client(&server).await;
        let begin = Instant::now();
        send(&mut stream, request("POST", "/big", "30000000")).await;
        until(|| server.options.counts.open.get() == 1).await;
        server.all_gone().await;
        assert_eq!(begin.elapsed().as_secs(), 60);
        let line = "a connection: dropped: its client has read nothing for 60.0 s (--slow-client-timeout)";
        assert_eq!(*server.log.borrow(), [line]);
        let mut input = Vec::new();
        assert!(stream.read_to_end(&mut input).await.is_err(), "no reset");
        assert!(input.len() < 30_000_000);
    });
}

#[test]
fn stream_pauses_until_its_client_reads() {
    run(async {
        let server = Server::start();
        let mut stream = small_client(&server).await;
        send(&mut stream, request("GET", "/wait-stream", "")).await;
        until(|| server.answers.waiting.get() == 1).await;
        let writer = server.answers.writers.borrow()[0].clone();
        let resumed = server.answers.resumed.clone();
        let again = resumed.clone();
        writer.on_resume(Box::new(move || again.set(again.get() + 1)));
        let mut expected = fill(&writer);
        assert_eq!(resumed.get(), 0);
        let mut input = Vec::new();
        while resumed.get() == 0 {
            stream.read_buf(&mut input).await.unwrap();
        }
        assert!(!writer.is_paused());
        expected += fill(&writer);
        while resumed.get() == 1 {
            stream.read_buf(&mut input).await.unwrap();
        }
        server.answers.go_on.notify_one();
        while !input.ends_with(b"\r\n0\r\n\r\n") {
            stream.read_buf(&mut input).await.unwrap();
        }
        assert_eq!(input.iter().filter(|byte| **byte == b'x').count() - 1, expected); // one x is in the header
    });
}

#[test]
fn stream_with_a_slow_client_is_disconnected() {
    run_without_clock(async {
        let server = Server::start();
        let mut stream = small_client(&server).await;
        send(&mut stream, request("GET", "/wait-stream", "")).await;
        until(|| server.answers.waiting.get() == 1).await;
        let writer = server.answers.writers.borrow()[0].clone();
        fill(&writer);
        writer.part(&[b'x'; 10_000_000]); // a large part that was ready before
        let begin = Instant::now();
        let mut input = [0; 20_000];
        while stream.read(&mut input).await.is_ok() {
            sleep(Duration::from_secs(1)).await;
        }
        assert!((60..65).contains(&begin.elapsed().as_secs()));
        assert!(server.log.borrow()[0].starts_with("req-test: dropped: its client has read nothing for "));
        assert_eq!(server.answers.gone.get(), 1);
        assert!(writer.is_paused() || server.options.counts.open.get() == 0);
        writer.part(b"late");
    });
}

#[test]
fn slow_reader_of_a_whole_response_is_kept() {
    run_without_clock(async {
        let server = Server::start();
        let mut stream = server.connect().await;
        send(&mut stream, last("POST", "/big", "30000000")).await;
        let begin = Instant::now();
        let (mut size, mut input) = (0, vec![0; 200_000]);
        loop {
            match stream.read(&mut input).await.unwrap() {
                0 => break,
                more => size += more,
            }
            sleep(Duration::from_secs(1)).await;
        }
        assert!(
            size > 30_000_000 && begin.elapsed().as_secs() > 120,
            "{size} {:?}",
            begin.elapsed()
        );
    });
}

#[test]
fn close_waits_for_responses_and_cut_does_not() {
    run_without_clock(async {
        let mut server = Server::start();
        let mut idle = server.connect().await;
        send(&mut idle, request("POST", "/echo", "hello")).await;
        read_until(&mut idle, "hello").await;
        let (mut ends, mut endless) = (server.connect().await, server.connect().await);
        for stream in [&mut ends, &mut endless] {
            send(stream, request("GET", "/wait", "")).await;
        }
        until(|| server.answers.waiting.get() == 2).await;
        server.options.stop.close();
        assert_eq!(read_all(&mut idle).await, "");
        until(|| server.options.counts.open.get() == 2).await;
        assert!(TcpStream::connect(server.address).await.is_err());
        server.answers.go_on.notify_one();
        assert!(read_all(&mut ends).await.contains("connection: close\r\n"));
        until(|| server.options.counts.open.get() == 1).await;
        server.options.stop.cut();
        server.stopped().await;
        let _ = endless.read(&mut [0]).await;
        server.all_gone().await;
        assert_eq!(server.answers.gone.get(), 1);
    });
}
