//! The bytes that Python records (`tests/message/golden_frames.py`), and bytes that nobody should send.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;

fn golden(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/message/golden");
    std::fs::read(folder.join(format!("{name}.bin"))).unwrap()
}

/// The frame without its length.
fn frame(name: &str) -> Vec<u8> {
    let bytes = golden(name);
    assert_eq!(frame_length(&bytes), Ok(Some(bytes.len() - LENGTH_BYTES)));
    bytes[LENGTH_BYTES..].to_vec()
}

fn only(name: &str) -> FromEngine {
    let mut found = decode(&frame(name)).unwrap();
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn add(req_id: i64, tokens: Vec<i32>, sampling: SamplingParams, priority: i64) -> ToEngine {
    ToEngine::AddRequest {
        req_id,
        tokens,
        sampling: Box::new(sampling),
        priority,
        num_generated: 0,
        key: 0,
        background: false,
    }
}

fn prefix(prefix_id: i64, tokens: Vec<i32>, pin: bool) -> ToEngine {
    ToEngine::AddPrefix { prefix_id, tokens, pin }
}

fn every_field() -> SamplingParams {
    SamplingParams {
        max_tokens: Some(70000),
        min_tokens: 3,
        temperature: 0.7,
        top_k: 300,
        top_p: 0.95,
        min_p: 0.05,
        frequency_penalty: -1.5,
        presence_penalty: 2.0,
        repetition_penalty: 1.1,
        logit_bias: vec![(5, -100.0), (151_643, 1.25), (0, 0.1)],
        allowed_token_ids: vec![1, 128, 65536],
        bad_words: vec!["bäd".into(), "漢字".into()],
        bad_token_ids: vec![vec![1, 2], vec![3]],
        seed: Some(i64::MIN),
        n: 128,
        stop: vec!["\n\n".into(), "x".repeat(40), "é".repeat(200)],
        stop_token_ids: vec![7, 255, 256],
        ignore_eos: true,
        logprobs: Some(0),
        prompt_logprobs: Some(20),
        grammar: None,
        embedding: Some("last".into()),
        adapter: 3,
    }
}

#[test]
fn what_is_written_is_what_python_writes() {
    let with_grammar = SamplingParams {
        max_tokens: Some(5),
        seed: Some(0),
        grammar: Some("start: /ä/".into()),
        ..SamplingParams::default()
    };
    let usual = SamplingParams {
        max_tokens: Some(16),
        temperature: 0.0,
        seed: Some(i64::MAX),
        ..SamplingParams::default()
    };
    let stops = SamplingParams {
        max_tokens: Some(200),
        seed: Some(200),
        stop: vec!["\n".into()],
        n: 2,
        ..SamplingParams::default()
    };
    let cases = [
        ("hello", vec![ToEngine::Hello { name: "gateway".into() }]),
        ("add", vec![add(0, vec![], SamplingParams::default(), 0)]),
        (
            "add_every_field",
            vec![ToEngine::AddRequest {
                req_id: ID_LIMIT - 1,
                tokens: vec![0, 1, 151_643, i32::MAX],
                sampling: Box::new(every_field()),
                priority: -3,
                num_generated: 2,
                key: 5,
                background: true,
            }],
        ),
        ("add_grammar", vec![add(3, vec![1], with_grammar, 0)]),
        (
            "add_usual",
            vec![
                add(300, (0..70).collect(), usual, 0),
                add(301, (0..300).collect(), stops, 200),
            ],
        ),
        (
            "abort",
            vec![ToEngine::AbortRequest(128), ToEngine::AbortRequest(65536)],
        ),
        ("finish", vec![ToEngine::FinishRequest(1 << 32)]),
        (
            "prefixes",
            vec![
                prefix(3, vec![1, 70000], true),
                prefix(1 << 40, vec![], false),
                ToEngine::RemovePrefix(3),
                ToEngine::ClearCache,
            ],
        ),
        (
            "adapters",
            vec![
                ToEngine::LoadAdapter {
                    adapter: 3,
                    name: "sql".into(),
                    path: "adapters/ä".into(),
                },
                ToEngine::UnloadAdapter(70000),
            ],
        ),
        (
            "watch",
            vec![ToEngine::Watch {
                steps: true,
                tree: false,
            }],
        ),
        ("shutdown", vec![ToEngine::Shutdown]),
        ("nothing_to_engine", vec![]),
        ("many", (0..17).map(ToEngine::AbortRequest).collect()),
    ];
    for (name, messages) in cases {
        assert_eq!(encode(&messages), golden(name), "{name}");
        assert_eq!(decode_to_engine(&frame(name)), Ok(messages), "{name}");
    }
}

#[test]
fn defaults_are_those_that_python_leaves_out() {
    let bytes = encode(&[add(
        0,
        vec![],
        SamplingParams {
            frequency_penalty: -0.0,
            ..SamplingParams::default()
        },
        0,
    )]);
    assert!(
        String::from_utf8_lossy(&bytes).contains("frequency_penalty"),
        "not the same number"
    );
    let long = encode(&[add(0, vec![7; 20_000], SamplingParams::default(), 0)]);
    assert_eq!(frame_length(&long), Ok(Some(long.len() - LENGTH_BYTES)));
    assert_eq!(long[13..18], [0xc6, 0, 1, 0x38, 0x80]);
}

#[test]
fn steps_are_read() {
    let plain = StepTokens {
        step: 70000,
        req_ids: vec![0, 3, ID_LIMIT - 1],
        tokens: vec![151_643, 0, -1],
        reasons: vec![0, 2, 4],
        ..StepTokens::default()
    };
    assert_eq!(only("step"), FromEngine::StepTokens(plain.clone()));
    assert_eq!(only("stamped"), FromEngine::StepTokens(plain.clone()));
    let logprob = |index, logprob, top_ids, top_logprobs| TokenLogprobs {
        index,
        logprob,
        top_ids,
        top_logprobs,
    };
    let full = StepTokens {
        step: 1,
        admitted: vec![(3, 0), (4, 4096)],
        errors: vec![(ID_LIMIT - 1, "the forward failed".into())],
        logprobs: vec![
            logprob(0, -0.5, vec![1, 70000], vec![-0.5, -1.25]),
            logprob(1, f64::NEG_INFINITY, vec![], vec![]),
        ],
        prompt_logprobs: vec![PromptLogprobs {
            req_id: 3,
            first: 1,
            logprobs: vec![-1.5, -2.5],
            top_ids: vec![vec![5], vec![6]],
            top_logprobs: vec![vec![-0.5], vec![-0.75]],
        }],
        embeddings: vec![Embedding {
            req_id: 4,
            numbers: [0.5_f32, -1.0].map(f32::to_le_bytes).concat(),
        }],
        ..plain
    };
    assert_eq!(only("step_every_field"), FromEngine::StepTokens(full));
}

fn ready() -> EngineReady {
    EngineReady {
        engine: "echo".into(),
        model_dir: None,
        vocab_size: 151_936,
        max_seq_len: 40960,
        eos_ids: vec![151_645, 2],
        num_pages: 4096,
        page_size: 16,
        device: "cpu".into(),
        dtype: "bfloat16".into(),
        cpu_backend: "rust_hotpath".into(),
        kind: "decoder".into(),
        ..EngineReady::default()
    }
}

#[test]
fn what_else_the_engine_says_is_read() {
    let progress = |text: &str, done, total| {
        FromEngine::LoadProgress(LoadProgress {
            text: text.into(),
            done,
            total,
        })
    };
    let beat = |phase, age_s, step| FromEngine::Heartbeat(Heartbeat { phase, age_s, step });
    let lines = vec!["step 1: 2 rows".into(), "step 2".into()];
    assert_eq!(
        decode(&frame("progress")).unwrap(),
        [progress("loading weights", 0, 0), progress("weights: ä", 3, 300)]
    );
    assert_eq!(only("ready"), FromEngine::EngineReady(Box::new(ready())));
    let FromEngine::EngineReady(full) = only("ready_every_field") else {
        panic!()
    };
    assert_eq!(full.model_dir.as_deref(), Some("models/a"));
    assert_eq!(
        (
            full.simulated.as_str(),
            full.engine_details.as_str(),
            full.kind.as_str()
        ),
        ("a profile", "2 ranks", "encoder")
    );
    for (name, num_waiting, num_running) in [("stats", 1, 2), ("stats_every_field", 0, 1)] {
        let load = Box::new(EngineStats {
            num_waiting,
            num_running,
        });
        assert_eq!(only(name), FromEngine::EngineStats(load), "{name}");
    }
    let beats = [beat(Phase::Idle, 0.5, -1), beat(Phase::Forward, 1.25, 17)];
    assert_eq!(decode(&frame("heartbeat")).unwrap(), beats);
    assert_eq!(only("narration"), FromEngine::Narration(lines));
    let changed = |prefix_id, state: &str| FromEngine::PrefixChanged {
        prefix_id,
        state: state.into(),
    };
    assert_eq!(
        decode(&frame("prefix_changed")).unwrap(),
        [changed(3, "ready"), changed(1 << 40, "refused")]
    );
    let adapter = |adapter, state: &str| FromEngine::AdapterChanged {
        adapter,
        state: state.into(),
    };
    assert_eq!(
        decode(&frame("adapter_changed")).unwrap(),
        [adapter(3, "loaded"), adapter(70000, "refused")]
    );
    assert_eq!(only("cleared"), FromEngine::CacheCleared);
    assert_eq!(only("watched"), FromEngine::Watched);
    let FromEngine::EngineSays { engine: 1, messages } = only("says") else {
        panic!("not what engine 1 says");
    };
    assert_eq!(messages[..], frame("stats")[2..]);
    let state = |engine, state: &str, reason: &str| FromEngine::EngineState {
        engine,
        state: state.into(),
        reason: reason.into(),
    };
    assert_eq!(
        decode(&frame("engine_state")).unwrap(),
        [state(0, "ready", ""), state(63, "dead", "exit code -9")]
    );
    assert_eq!(
        only("failed"),
        FromEngine::EngineFailed("out of memory: set --num-pages".into())
    );
    assert_eq!(decode(&frame("loading_to_ready")).unwrap().len(), 4);
    assert_eq!(decode(&frame("nothing_from_engine")), Ok(vec![]));
}

#[test]
fn another_version_is_refused_with_both_named() {
    assert_eq!(
        decode(&frame("foreign_version")),
        Err(MessageError::Version(SCHEMA_VERSION + 1))
    );
    let error = decode(&frame("foreign_version")).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "schema version {}, this side speaks {SCHEMA_VERSION}",
            SCHEMA_VERSION + 1
        )
    );
    assert_eq!(
        decode(&frame("foreign_version_stamped")).unwrap_err().to_string(),
        error
    );
    assert!(matches!(decode(b""), Err(MessageError::Version(0))));
}

/// Fields that a later sender adds at the end are stepped over.
#[test]
fn more_fields_are_stepped_over() {
    let mut body = SCHEMA_VERSION.to_le_bytes().to_vec();
    body.extend(b"\x91\x96\xa6failed\xa1x\x93\x01\x81\xa1a\xc4\x02ab\xcb\0\0\0\0\0\0\0\0\x92\x90\x80\xc0\xd9\x01y");
    assert_eq!(decode(&body), Ok(vec![FromEngine::EngineFailed("x".into())]));
}

#[test]
fn what_does_not_fit_is_refused() {
    let with = |rest: &[u8]| [&SCHEMA_VERSION.to_le_bytes(), rest].concat();
    let refused: [&[u8]; 10] = [
        b"",
        b"\x80",
        b"\x91\xa4step",
        b"\x91\x92\xa4stop\x01",
        b"\x91\x91\xa6failed",
        b"\x91\x92\xa6failed\x01",
        b"\x91\x92\xa6failed\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x90\x00",
        b"\x91\x95\xa4step\x00\xc4\x07abcdefg\xc4\x00\xc4\x00",
    ];
    for bytes in refused {
        assert!(
            matches!(decode(&with(bytes)), Err(MessageError::Malformed(_))),
            "{bytes:?}"
        );
    }
    let uneven = b"\x91\x95\xa4step\x00\xc4\x08\0\0\0\0\0\0\0\0\xc4\x00\xc4\x00";
    assert!(
        decode(&with(uneven))
            .unwrap_err()
            .to_string()
            .contains("different lengths")
    );
    assert!(frame_length(&[0, 0, 0, 0x41]).is_err());
    assert_eq!(frame_length(&[0, 0, 0]), Ok(None));
}

proptest! {
    /// Neither a cut nor a changed frame may do worse than be refused.
    #[test]
    fn broken_frames_do_no_harm(
        name in prop::sample::select(vec!["step_every_field", "ready_every_field", "stats_every_field", "progress"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        end in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let mut bytes = frame(name);
        let is_changed = !changes.is_empty(); // maybe to a shorter one, which is whole when it is cut
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut {
            bytes.truncate(end.index(bytes.len()));
            prop_assert!(decode(&bytes).is_err() || is_changed);
        } else {
            let _ = decode(&bytes);
        }
    }
}
