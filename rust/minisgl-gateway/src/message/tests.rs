//! Tests of decoding with the frames that Python recorded (`tests/message/golden_frames.py`), and with invalid bytes.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use proptest::prelude::*;

use super::prepared::{Generation, Parts, Prepared, Shape, Whole};
use super::*;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/message/golden")
}

/// Reads a recorded frame and returns it without its length prefix.
fn frame(name: &str) -> Vec<u8> {
    let bytes = std::fs::read(folder().join(format!("{name}.bin"))).unwrap();
    assert_eq!(frame_length(&bytes), Ok(Some(bytes.len() - LENGTH_BYTES)));
    bytes[LENGTH_BYTES..].to_vec()
}

/// The contents are compared in `tests/message/test_codec_recode.py`, which has Python's codec.
#[test]
fn every_recorded_frame_is_decoded() {
    let names = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let names: Vec<_> = names
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert!(names.len() > 20);
    for name in names {
        let frame = frame(&name);
        let is_read = match name.starts_with("prepared") {
            true => decode_prepared(&frame).is_ok(),
            false => decode(&frame).is_ok() || decode_to_engine(&frame).is_ok(),
        };
        assert_eq!(is_read, !name.starts_with("foreign_version"), "{name}");
    }
    let other = MessageError::Version(SCHEMA_VERSION + 1);
    assert_eq!(decode(&frame("foreign_version_stamped")), Err(other));
}

/// Some messages have more fields than are decoded here, and cannot be encoded again.
#[test]
fn partly_decoded_messages_have_their_known_fields() {
    let beat = |phase, age_s, step| FromEngine::Heartbeat(Heartbeat { phase, age_s, step });
    let beats = [beat(Phase::Idle, 0.5, -1), beat(Phase::Forward, 1.25, 17)];
    assert_eq!(decode(&frame("heartbeat")).unwrap(), beats);
    let adapter = |adapter, state: &str| FromEngine::AdapterChanged {
        adapter,
        state: state.into(),
    };
    let prefix = |prefix_id, state: &str| FromEngine::PrefixChanged {
        prefix_id,
        state: state.into(),
    };
    let adapters = [adapter(3, "loaded"), adapter(70000, "refused")];
    let prefixes = [prefix(3, "ready"), prefix(1 << 40, "refused")];
    assert_eq!(decode(&frame("prefix_changed")).unwrap(), prefixes);
    assert_eq!(decode(&frame("adapter_changed")).unwrap(), adapters);
    for (name, num_waiting, num_running) in [("stats", 1, 2), ("stats_every_field", 0, 1)] {
        let load = Box::new(EngineStats {
            num_waiting,
            num_running,
        });
        assert_eq!(decode(&frame(name)).unwrap(), [FromEngine::EngineStats(load)], "{name}");
    }
}

#[test]
fn pixels_are_once_in_a_frame_and_shared() {
    let messages = decode_to_engine(&frame("add_images")).unwrap();
    let images = messages.iter().flat_map(|message| match message {
        ToEngine::AddRequest(new) => &new.images[..],
        _ => panic!(),
    });
    let images: Vec<&PromptImage> = images.collect();
    assert_eq!(images[1].grid, (2, 140_000));
    assert_eq!((images[0].start, images[0].num_tokens, images[0].grid), (1, 2, (2, 4)));
    for again in &images[2..] {
        assert_eq!(*again, images[0]);
        assert_eq!(again.pixels.as_ptr(), images[0].pixels.as_ptr());
    }
    assert_eq!(encode(&messages)[LENGTH_BYTES..], frame("add_images"));
    let estimate = messages.iter().map(estimate).sum::<usize>();
    assert!(estimate >= frame("add_images").len());
    let ToEngine::AddRequest(mut bare) = messages[0].clone() else {
        panic!()
    };
    bare.images[0].pixels = Vec::new().into();
    let refused = decode_to_engine(&encode(&[ToEngine::AddRequest(bare)])[LENGTH_BYTES..]).unwrap_err();
    assert_eq!(refused.to_string(), "request 3: an image has no pixels");
}

#[test]
fn prepared_results_are_decoded() {
    let prepared = decode_prepared(&frame("prepared_generation")).unwrap();
    let text = str::to_owned;
    let expected = Generation {
        shape: Shape::Chat,
        stream: true,
        include_usage: true,
        shows_logprobs: false,
        id: text("chatcmpl-\u{e4}"),
        created: 1 << 33,
        model: text("a model"),
        prompts: vec![vec![1, 70000], vec![2]],
        sampling: SamplingParams {
            max_tokens: Some(5),
            seed: Some(7),
            n: 2,
            stop: vec![text("\u{e9}")],
            ..SamplingParams::default()
        },
        max_tokens: vec![5, 300],
        parts: Some(Parts {
            tool_format: Some(14),
            thinking: Some(text("qwen3")),
            is_open: None,
            schemas: text(r#"{"get":{"type":"object"}}"#),
            named_call: true,
            shows_thoughts: false,
            think_end: Some(151_668),
            shown: vec![151_657, 151_658],
        }),
        priority: -3,
        key: 2,
        key_name: Some(text("b")),
        shortened_to: Some(text("5,300")),
        timeout_s: Some(2.5),
        request_id: text("req-1"),
        headers: vec![(text("x-request-id"), text("req-1")), (text("vary"), text("Origin"))],
    };
    assert_eq!((expected.num_choices(), expected.num_prompt_tokens()), (4, 3));
    let unknown = |change: fn(&mut Parts)| {
        let mut parts = expected.parts.clone().unwrap();
        change(&mut parts);
        let parts = Some(parts);
        let one = Generation {
            parts,
            ..Generation::default()
        };
        one.check().unwrap_err()
    };
    assert!(unknown(|parts| parts.tool_format = Some(99)).contains("99"));
    assert!(unknown(|parts| parts.thinking = Some("none".to_owned())).contains("none"));
    assert_eq!(prepared, Prepared::Generation(Box::new(expected)));
    let whole = Whole {
        status: 429,
        content_type: text("application/json"),
        headers: vec![(text("retry-after"), text("1"))],
        body: b"{}".to_vec(),
    };
    assert_eq!(
        decode_prepared(&frame("prepared_whole")).unwrap(),
        Prepared::Whole(whole)
    );
    assert_eq!(decode_prepared(&frame("prepared_pass_on")).unwrap(), Prepared::PassOn);
    assert_eq!(decode_prepared(&frame("prepared_read")).unwrap(), Prepared::Read);
    let plain = decode_prepared(&frame("prepared_plain")).unwrap();
    assert!(matches!(plain, Prepared::Generation(one) if one.shape == Shape::Generate && one.parts.is_none()));
}

#[test]
fn default_fields_are_omitted_as_in_python() {
    let add = |tokens, frequency_penalty| {
        let sampling = Box::new(SamplingParams {
            frequency_penalty,
            ..SamplingParams::default()
        });
        encode(&[ToEngine::AddRequest(NewRequest {
            tokens,
            sampling,
            ..NewRequest::default()
        })])
    };
    let bytes = add(vec![], -0.0);
    assert!(
        String::from_utf8_lossy(&bytes).contains("frequency_penalty"),
        "not the same number"
    );
    let long = add(vec![7; 20_000], 0.0);
    assert_eq!(frame_length(&long), Ok(Some(long.len() - LENGTH_BYTES)));
    assert_eq!(long[13..18], [0xc6, 0, 1, 0x38, 0x80]);
}

/// Fields that a later version adds at the end are skipped.
#[test]
fn unknown_trailing_fields_are_skipped() {
    let mut body = SCHEMA_VERSION.to_le_bytes().to_vec();
    body.extend(b"\x91\x96\xa6failed\xa1x\x93\x01\x81\xa1a\xc4\x02ab\xcb\0\0\0\0\0\0\0\0\x92\x90\x80\xc0\xd9\x01y");
    assert_eq!(decode(&body), Ok(vec![FromEngine::EngineFailed("x".into())]));
}

#[test]
fn malformed_frames_are_errors() {
    let with = |rest: &[u8]| [&SCHEMA_VERSION.to_le_bytes(), rest].concat();
    assert_eq!(decode(b""), Err(MessageError::Version(0)));
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
    /// Decoding a truncated or changed frame never panics; at worst it is an error.
    #[test]
    fn broken_frames_do_not_panic(
        name in prop::sample::select(vec![
            "step_every_field", "ready_every_field", "stats_every_field", "progress", "add_images",
        ]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        end in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let mut bytes = frame(name);
        let is_changed = !changes.is_empty(); // a changed length may make a truncated frame complete
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut {
            bytes.truncate(end.index(bytes.len()));
            prop_assert!((decode(&bytes).is_err() && decode_to_engine(&bytes).is_err()) || is_changed);
        } else {
            let _ = (decode(&bytes), decode_to_engine(&bytes));
        }
    }
}
