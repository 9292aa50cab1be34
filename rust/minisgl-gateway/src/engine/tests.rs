//! Tests of the connection with a fake engine process, and of the watchdog with a fake clock.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Builder;
use tokio::task::{LocalSet, spawn_local, yield_now};
use tokio::time::timeout;

use super::*;
use crate::message::{
    FromEngine, Heartbeat, LENGTH_BYTES, NewRequest, Phase, SCHEMA_VERSION, StepTokens, ToEngine, encode,
    encode_from_engine, frame_length,
};

const HANG: Duration = Duration::from_secs(60);

fn run(test: impl Future<Output = ()>) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let set = LocalSet::new();
    runtime.block_on(set.run_until(async { timeout(HANG, test).await.expect("hangs") }));
}

fn socket_path() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("engine");
    (folder, path)
}

/// Returns both ends of a connection whose `Hello` was read.
async fn connected() -> (TempDir, EngineLink, UnixStream) {
    let (folder, path) = socket_path();
    let listener = UnixListener::bind(&path).unwrap();
    let link = EngineLink::connect(&path, "gateway").await.unwrap();
    let (mut peer, _) = listener.accept().await.unwrap();
    assert_eq!(next_frame(&mut peer).await, encode(&[hello()]));
    (folder, link, peer)
}

fn hello() -> ToEngine {
    ToEngine::Hello { name: "gateway".into() }
}

async fn next_frame(peer: &mut UnixStream) -> Vec<u8> {
    let mut frame = vec![0; LENGTH_BYTES];
    peer.read_exact(&mut frame).await.unwrap();
    frame.resize(LENGTH_BYTES + frame_length(&frame).unwrap().unwrap(), 0);
    peer.read_exact(&mut frame[LENGTH_BYTES..]).await.unwrap();
    frame
}

/// Returns the frame of a step with one row.
fn step(number: u8) -> Vec<u8> {
    encode_from_engine(&[FromEngine::StepTokens(StepTokens {
        step: number.into(),
        req_ids: vec![1],
        tokens: vec![5],
        reasons: vec![0],
        ..StepTokens::default()
    })])
}

fn steps(messages: &[FromEngine]) -> Vec<i64> {
    let number = |message: &FromEngine| match message {
        FromEngine::StepTokens(StepTokens {
            step, req_ids, tokens, ..
        }) => {
            assert_eq!((req_ids.as_slice(), tokens.as_slice()), (&[1][..], &[5][..]));
            *step
        }
        other => panic!("{other:?}"),
    };
    messages.iter().map(number).collect()
}

#[test]
fn connect_waits_until_the_engine_listens() {
    run(async {
        let (_folder, path) = socket_path();
        let waiting = spawn_local({
            let path = path.clone();
            async move { EngineLink::connect(&path, "gateway").await }
        });
        for _ in 0..10 {
            yield_now().await;
        }
        assert!(!waiting.is_finished());
        let listener = UnixListener::bind(&path).unwrap();
        let (mut peer, _) = listener.accept().await.unwrap();
        assert_eq!(next_frame(&mut peer).await, encode(&[hello()]));
        waiting.await.unwrap().unwrap();
    });
}

#[test]
fn messages_of_one_turn_share_a_frame() {
    run(async {
        let (_folder, link, mut peer) = connected().await;
        let messages: Vec<_> = (0..3).map(ToEngine::AbortRequest).collect();
        messages.iter().for_each(|message| link.send(message.clone()));
        assert_eq!(next_frame(&mut peer).await, encode(&messages));
        link.send(ToEngine::FinishRequest(7));
        assert_eq!(next_frame(&mut peer).await, encode(&[ToEngine::FinishRequest(7)]));
    });
}

#[test]
fn send_never_blocks_and_loses_nothing() {
    run(async {
        let (_folder, link, mut peer) = connected().await;
        let sent = |req_id| {
            ToEngine::AddRequest(NewRequest {
                req_id,
                tokens: (0..300_000).collect(),
                ..NewRequest::default()
            })
        };
        for req_id in 0..3 {
            link.send(sent(req_id)); // more than the socket's buffer holds
            yield_now().await;
        }
        link.send(ToEngine::AbortRequest(3));
        let mut frame = next_frame(&mut peer).await;
        assert_eq!(frame, encode(&[sent(0)]));
        frame = next_frame(&mut peer).await;
        assert_eq!(
            frame,
            encode(&[sent(1), sent(2), ToEngine::AbortRequest(3)]),
            "what waited leaves together"
        );
    });
}

#[test]
fn receive_returns_up_to_eight_complete_frames() {
    run(async {
        let (_folder, link, mut peer) = connected().await;
        let bytes: Vec<u8> = (1..=20).flat_map(step).collect();
        peer.write_all(&bytes).await.unwrap();
        for expected in [1..9, 9..17, 17..21] {
            let mut messages = Vec::new();
            link.receive(&mut messages).await.unwrap();
            assert_eq!(steps(&messages), expected.collect::<Vec<i64>>());
        }
        let piecewise = spawn_local(async move {
            for byte in step(21) {
                peer.write_all(&[byte]).await.unwrap();
                yield_now().await;
            }
            peer
        });
        let mut messages = Vec::new();
        link.receive(&mut messages).await.unwrap();
        assert_eq!(steps(&messages), [21]);
        drop(piecewise.await.unwrap());
    });
}

#[test]
fn frames_stay_in_the_socket_until_receive() {
    run(async {
        let (_folder, link, peer) = connected().await;
        let mut number = 0u8;
        let mut sent = 0;
        loop {
            match peer.try_write(&step(number)) {
                Ok(size) if size == step(number).len() => (number, sent) = (number.wrapping_add(1), sent + 1),
                Ok(_) => panic!("cut"),
                Err(_) => break,
            }
            yield_now().await;
        }
        let mut messages = Vec::new();
        while messages.len() < sent {
            link.receive(&mut messages).await.unwrap();
        }
        assert_eq!(messages.len(), sent);
    });
}

#[test]
fn large_frame_is_received_whole() {
    run(async {
        let (_folder, link, mut peer) = connected().await;
        let failed = FromEngine::EngineFailed("x".repeat(3_000_000));
        let frame = encode_from_engine(std::slice::from_ref(&failed));
        let writing = spawn_local(async move {
            peer.write_all(&frame).await.unwrap();
            peer
        });
        let mut messages = Vec::new();
        link.receive(&mut messages).await.unwrap();
        assert!(messages == [failed]);
        drop(writing.await.unwrap());
    });
}

#[test]
fn fatal_error_is_received_before_the_disconnect() {
    run(async {
        let (_folder, link, mut peer) = connected().await;
        let failed = FromEngine::EngineFailed("gone".into());
        peer.write_all(&encode_from_engine(std::slice::from_ref(&failed)))
            .await
            .unwrap();
        link.send(ToEngine::AbortRequest(1)); // the engine never reads it
        yield_now().await;
        drop(peer);
        let mut messages = Vec::new();
        link.receive(&mut messages).await.unwrap();
        assert_eq!(messages, [failed]);
        let error = link.receive(&mut messages).await.unwrap_err();
        assert_eq!(error, "the engine process died");
    });
}

#[test]
fn invalid_frames_are_errors() {
    for bytes in [
        b"\x02\0\0\0\x07\0".to_vec(),
        b"\xff\xff\xff\xff".to_vec(),
        [b"\x03\0\0\0", &SCHEMA_VERSION.to_le_bytes()[..], b"\x91"].concat(),
    ] {
        run(async {
            let (_folder, link, mut peer) = connected().await;
            peer.write_all(&bytes).await.unwrap();
            let error = link.receive(&mut Vec::new()).await.unwrap_err();
            assert!(
                error.starts_with("a message from the engine cannot be read: "),
                "{error}"
            );
        });
    }
}

// ------------------------------------------------------------------------------------------------------- watchdog

const LIMIT_S: f64 = 10.0;
const TIMES: WatchTimes = WatchTimes {
    interval_s: 0.5,
    silent_s: 1.5,
    silence_s: 3.0,
    loop_timeout_s: 3.0,
};
const HALF: Duration = Duration::from_millis(500);

/// Returns the first failure that a watchdog reports in `seconds`, or "". `beat(t)`: the heartbeat `t` seconds after
/// start.
fn failure(seconds: u32, beat: impl Fn(f64) -> Option<Heartbeat>) -> String {
    let mut watchdog = Watchdog::new(LIMIT_S, TIMES);
    let mut now = Instant::now();
    watchdog.expect(now);
    assert_eq!(watchdog.poll(now), None);
    for turn in 1..=2 * seconds {
        now += HALF;
        if let Some(beat) = beat(f64::from(turn) * 0.5) {
            watchdog.on_heartbeat(beat, now);
        }
        if let Some(reason) = watchdog.poll(now) {
            return reason;
        }
    }
    String::new()
}

fn beat(phase: Phase, age_s: f64) -> Option<Heartbeat> {
    Some(Heartbeat {
        phase,
        age_s,
        step: if phase == Phase::Forward { 17 } else { -1 },
    })
}

#[test]
fn watchdog_accepts_a_working_engine() {
    assert_eq!(failure(1000, |_| beat(Phase::Idle, 1e6)), "");
    assert_eq!(failure(1000, |_| beat(Phase::Working, 1.0)), "");
    assert_eq!(failure(1000, |s| beat(Phase::Forward, s % 9.0)), "");
}

#[test]
fn failure_texts_match_the_python_server() {
    assert_eq!(failure(20, |_| None), "no heartbeat from the engine process for 3.5 s");
    let slow = "the engine process did not finish step 17 in 10.5 s, the limit is 10 (--step-timeout)";
    assert_eq!(failure(20, |s| beat(Phase::Forward, s)), slow);
    let stuck = "the step loop of the engine process has not moved for 3.5 s";
    assert_eq!(failure(20, |s| beat(Phase::Working, s)), stuck);
}

#[test]
fn pause_of_this_process_is_no_failure() {
    let mut watchdog = Watchdog::new(LIMIT_S, TIMES);
    let mut now = Instant::now();
    watchdog.expect(now);
    watchdog.poll(now);
    now += Duration::from_secs(1000);
    assert_eq!(watchdog.poll(now), None);
    watchdog.on_heartbeat(beat(Phase::Forward, 1000.0).unwrap(), now);
    now += HALF;
    assert_eq!(watchdog.poll(now), None);
}
