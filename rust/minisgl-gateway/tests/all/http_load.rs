//! Tests with many clients, some of them faulty.

use std::rc::Rc;

use crate::common::*;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Returns the number of clients that file descriptors allow, with both ends in this process.
fn clients(most: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    most.min((usize::try_from(limit).unwrap() - 200) / 3)
}

async fn serves(server: &Server) {
    assert!(
        server
            .exchange(last("POST", "/echo", "on").as_bytes())
            .await
            .ends_with("\r\n\r\non")
    );
}

#[test]
fn vanished_clients_are_dropped() {
    alone(concat!(module_path!(), "::vanished_clients_are_dropped"), async {
        let server = Rc::new(Server::with_fallback(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"));
        let mut tasks = JoinSet::new();
        for index in 0..clients(1000) {
            let server = server.clone();
            tasks.spawn_local(async move {
                let mut stream = server.connect().await;
                let body = "x".repeat(2000);
                let sent = match index % 8 {
                    0 => String::new(),
                    1 => request("POST", "/echo", "half")[..20].to_owned(),
                    2 => request("POST", "/echo", "half").replace("half", "h"),
                    3 => request("GET", "/wait", ""),
                    4 => request("GET", "/wait-stream", ""),
                    5 => request("POST", "/big", "5000000"),
                    6 => request("POST", "/other", "no mark"),
                    _ => request("POST", "/stream", &body),
                };
                stream.write_all(sent.as_bytes()).await.unwrap();
                if matches!(index % 8, 4 | 5 | 7) {
                    stream.read_u8().await.unwrap();
                }
                if index % 3 == 0 {
                    stream.set_zero_linger().unwrap();
                }
            });
        }
        while let Some(client) = tasks.join_next().await {
            client.unwrap();
        }
        serves(&server).await;
        server.all_gone().await;
        assert_eq!(server.answers.gone.get(), server.answers.waiting.get());
        assert!(server.answers.gone.get() > 0);
        until(|| server.fallback.ended.get() == server.fallback.received.borrow().len()).await;
        assert_eq!(server.options.bodies.used(), 0);
    });
}

#[test]
fn idle_connections_stay_open() {
    alone(concat!(module_path!(), "::idle_connections_stay_open"), async {
        let server = Server::start();
        let mut idle: Vec<TcpStream> = Vec::new();
        for _ in 0..clients(10_000) {
            let mut stream = server.connect().await;
            send(&mut stream, request("POST", "/echo", "hello")).await;
            idle.push(stream);
        }
        for stream in &mut idle {
            read_until(stream, "hello").await;
        }
        serves(&server).await;
        until(|| server.options.counts.open.get() == idle.len()).await;
        drop(idle);
        server.all_gone().await;
    });
}

#[test]
fn slow_headers_block_no_others() {
    alone(concat!(module_path!(), "::slow_headers_block_no_others"), async {
        let server = Server::with_fallback(b"HTTP/1.1 431 Long\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        let mut slow = Vec::new();
        for _ in 0..100 {
            slow.push(server.connect().await);
        }
        let head = request("GET", "/echo", "");
        for byte in head.trim_end().bytes() {
            for stream in &mut slow {
                stream.write_all(&[byte]).await.unwrap();
            }
            tokio::task::yield_now().await;
        }
        serves(&server).await;
        for stream in &mut slow {
            stream.write_all(b"\r\nx: y\r\n\r\n").await.unwrap();
            read_until(stream, "\r\n\r\n").await;
        }
        let mut endless = server.connect().await;
        endless.write_all(head.trim_end().as_bytes()).await.unwrap();
        endless.write_all(b"\r\nx: ").await.unwrap();
        let mut size = head.trim_end().len() + 5;
        while server.options.counts.tunnelled.get() == 0 {
            endless.write_all(b"aaaaaaaaaaaaaaaaaaa").await.unwrap();
            size += 19;
            tokio::task::yield_now().await;
        }
        assert!((64 * 1024..100 * 1024).contains(&size), "{size}");
        endless.write_all(b"|").await.unwrap();
        assert!(read_until(&mut endless, "\r\n\r\n").await.starts_with("HTTP/1.1 431 "));
        drop((slow, endless));
        server.all_gone().await;
        assert_eq!(server.fallback.received.borrow()[0].len(), size + 1);
    });
}

#[test]
fn flood_is_answered_in_order() {
    alone(concat!(module_path!(), "::flood_is_answered_in_order"), async {
        let server = Server::start();
        let (mut reading, mut writing) = server.connect().await.into_split();
        let count = 5000;
        let writer = tokio::task::spawn_local(async move {
            for index in 0..count {
                let sent = request("POST", "/echo", &format!("<{index}>"));
                writing.write_all(sent.as_bytes()).await.unwrap();
            }
            send(&mut writing, last("POST", "/echo", "<end>")).await;
            writing
        });
        let mut found = String::new();
        reading.read_to_string(&mut found).await.unwrap();
        let bodies: Vec<_> = found
            .split("\r\n\r\n<")
            .skip(1)
            .map(|one| one.split('>').next().unwrap())
            .collect();
        let expected: Vec<_> = (0..count)
            .map(|index| index.to_string())
            .chain(["end".to_owned()])
            .collect();
        assert_eq!(bodies, expected);
        writer.await.unwrap();
    });
}

#[test]
fn input_read_ahead_is_bounded() {
    alone(concat!(module_path!(), "::input_read_ahead_is_bounded"), async {
        let server = Server::start();
        let stream = server.connect().await;
        stream.try_write(request("GET", "/wait", "").as_bytes()).unwrap();
        until(|| server.answers.waiting.get() == 1).await;
        let ahead = request("POST", "/echo", "x").repeat(1000);
        let (mut size, mut refused) = (0, 0);
        while refused < 20 && size < 100 << 20 {
            match stream.try_write(&ahead.as_bytes()[size % ahead.len()..]) {
                Ok(more) => (size, refused) = (size + more, 0),
                Err(_) => {
                    refused += 1;
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
            }
        }
        assert!(size < 50 << 20, "{size}"); // most bytes are in kernel buffers
        stream.set_zero_linger().unwrap();
        drop(stream);
        server.all_gone().await; // although the input is not read any more
        assert_eq!(server.answers.gone.get(), 1);
    });
}

#[test]
fn connection_uses_little_memory() {
    alone(concat!(module_path!(), "::connection_uses_little_memory"), async {
        let server = Server::start();
        let stream = server.connect().await;
        let connection =
            minisgl_gateway::http::serve_connection(stream, server.answers.clone(), server.options.clone());
        assert!(size_of_val(&connection) < 4096, "{}", size_of_val(&connection));
    });
}
