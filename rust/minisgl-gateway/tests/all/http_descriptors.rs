//! Tests without free file descriptors: new clients wait, others are served. Each runs in a process of its own.

use std::fs::File;
use std::time::{Duration, Instant};

use crate::common::*;
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap())
}

#[test]
fn clients_wait_for_descriptors() {
    alone(concat!(module_path!(), "::clients_wait_for_descriptors"), async {
        let server = Server::start();
        let mut early = server.connect().await;
        send(&mut early, request("POST", "/echo", "a")).await;
        read_until(&mut early, "\r\n\r\na").await;
        let limit = getrlimit(Resource::Nofile);
        setrlimit(
            Resource::Nofile,
            rustix::process::Rlimit {
                current: Some(100),
                ..limit
            },
        )
        .unwrap();
        let mut files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        files.pop(); // for the client's end of the connection
        let late = server.connect().await;
        until(|| !server.log.borrow().is_empty()).await;
        let (began, cpu_before) = (Instant::now(), cpu());
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            send(&mut early, request("POST", "/echo", "b")).await;
            read_until(&mut early, "\r\n\r\nb").await;
        }
        assert!(cpu() - cpu_before < began.elapsed() / 6, "it asks on and on");
        send(&mut early, request("GET", "/other", "")).await; // no descriptor is free for the fallback either
        assert!(read_until(&mut early, "}}").await.starts_with("HTTP/1.1 503 "));
        drop(files);
        let mut late = late;
        send(&mut late, last("POST", "/echo", "late")).await;
        assert!(read_all(&mut late).await.ends_with("\r\n\r\nlate"));
        let log = server.log.borrow();
        assert!(
            log.len() == 1 && log[0].starts_with("cannot accept a new connection: "),
            "{log:?}"
        );
        setrlimit(Resource::Nofile, limit).unwrap();
    });
}

#[test]
fn connection_limit_follows_descriptors() {
    alone(
        concat!(module_path!(), "::connection_limit_follows_descriptors"),
        async {
            let limit = getrlimit(Resource::Nofile);
            let current = Some(116); // 8 connections, 6 for one address
            setrlimit(Resource::Nofile, rustix::process::Rlimit { current, ..limit }).unwrap();
            let server = Server::start();
            tokio::task::yield_now().await; // the server reads the limit
            setrlimit(Resource::Nofile, limit).unwrap();
            let mut open = Vec::new();
            for _ in 0..6 {
                let mut one = server.connect().await;
                send(&mut one, request("POST", "/echo", "a")).await;
                read_until(&mut one, "\r\n\r\na").await;
                open.push(one);
            }
            for _ in 0..2 {
                let answer = read_all(&mut server.connect().await).await;
                let (head, body) = answer.split_once("\r\n\r\n").unwrap();
                assert!(
                    head.starts_with("HTTP/1.1 503 ") && body.contains("too_many_connections"),
                    "{answer}"
                );
                assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
            }
            assert_eq!(server.log.borrow().len(), 1);
            open.pop();
            until(|| server.options.counts.open.get() == 5).await;
            let mut next = server.connect().await;
            send(&mut next, last("POST", "/echo", "b")).await;
            assert!(read_all(&mut next).await.ends_with("\r\n\r\nb"));
        },
    );
}
