//! Tests of valid and damaged folders of safetensors.

use super::*;

#[test]
fn safetensors_folder_lists_and_decodes_its_tensors() {
    let folder = Temporary::new("folder");
    let one = tiny_safetensors(&[("b", "BF16", "[1,2]", BF16_ONE_TWO), ("a", "F16", "[]", &[0, 0x3c])]);
    folder.file("x-1.safetensors", &one);
    folder.file(
        "x-2.safetensors",
        &tiny_safetensors(&[("c", "F32", "[1]", &[0, 0, 0x80, 0x3f])]),
    );
    folder.file("notes.txt", b"");
    let source = open(&folder.0).unwrap();
    assert_eq!(source.names(), ["b", "a", "c"]);
    assert_eq!(source.tensor("b").unwrap().decode(), [1.0, 2.0]);
    assert_eq!(source.tensor("a").unwrap().decode(), [1.0]);
    assert_eq!(source.tensor("c").unwrap().decode(), [1.0]);
    folder.file(
        "model.safetensors.index.json",
        br#"{"weight_map":{"c":"x-2.safetensors"}}"#,
    );
    assert_eq!(open(&folder.0).unwrap().names(), ["c"]);
}

#[test]
fn mxfp4_blocks_are_joined_with_scales_of_another_file() {
    let folder = Temporary::new("mxfp4");
    let blocks: Vec<u8> = (0..32u8).map(|i| i.wrapping_mul(37).wrapping_add(5)).collect();
    let scales = |name| (name, "U8", "[2,1,1]", [127, 120].as_slice());
    let (one, other) = ("1.safetensors", "2.safetensors");
    folder.file(one, &tiny_safetensors(&[("x_blocks", "U8", "[2,1,1,16]", &blocks)]));
    folder.file(other, &tiny_safetensors(&[scales("x_scales")]));
    let source = open(&folder.0).unwrap();
    assert_eq!(source.names(), ["x_blocks"]);
    let found = source.tensor("x_blocks").unwrap();
    assert_eq!((found.shape(), found.kind()), ([2, 1, 32].as_slice(), Kind::MXFP4));
    let floats = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let wanted: Vec<f32> = (0..64)
        .map(|i| {
            let code = usize::from(blocks[i / 2] >> (4 * (i % 2)) & 15);
            let scale = if i < 32 { 1.0 } else { 1.0 / 128.0 };
            scale * if code < 8 { floats[code] } else { -floats[code - 8] }
        })
        .collect();
    assert_eq!(found.decode(), wanted);
    assert_eq!(found.slice(1).unwrap().decode(), wanted[32..]);
    folder.file(other, &tiny_safetensors(&[scales("y_scales")]));
    let error = open(&folder.0).err().unwrap().to_string();
    assert!(
        error.contains("tensor x_blocks: [2, 1, 1, 16]: MXFP4 needs 16 bytes a block"),
        "{error}"
    );
    folder.file(one, &tiny_safetensors(&[("b", "BF16", "[2]", BF16_ONE_TWO)]));
    let error = open(&folder.0).err().unwrap().to_string();
    assert!(error.ends_with("tensor y_scales: has no matching *_blocks"), "{error}");
}

#[cfg(unix)]
#[test]
fn open_follows_symbolic_links() {
    let folder = Temporary::new("hub");
    let (blobs, snapshot) = (folder.0.join("blobs"), folder.0.join("snapshot"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir(&snapshot).unwrap();
    fs::write(
        blobs.join("0a1b"),
        tiny_safetensors(&[("b", "BF16", "[2]", BF16_ONE_TWO)]),
    )
    .unwrap();
    std::os::unix::fs::symlink("../blobs/0a1b", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(open(&snapshot).unwrap().tensor("b").unwrap().k(), 2);
}

#[test]
fn errors_of_a_damaged_folder_name_file_and_tensor() {
    let folder = Temporary::new("bad-folder");
    let error = || open(&folder.0).err().unwrap().to_string();
    assert!(error().ends_with("the folder has no *.safetensors"), "{}", error());
    let b = ("b", "BF16", "[2]", BF16_ONE_TWO);
    folder.file("1.safetensors", &tiny_safetensors(&[b]));
    folder.file("2.safetensors", &tiny_safetensors(&[b]));
    assert_eq!(error(), "2.safetensors: tensor b: also in 1.safetensors");
    folder.file("2.safetensors", &tiny_safetensors(&[("q", "I32", "[1]", BF16_ONE_TWO)]));
    assert_eq!(
        error(),
        "2.safetensors: tensor q: I32: only F32, F16 and BF16 are supported"
    );
    let whole = tiny_safetensors(&[b]);
    for (bytes, expected) in [
        (
            whole[..whole.len() - 1].to_vec(),
            "tensor b: its bytes 0 to 4 exceed the 3 bytes of data in the file",
        ),
        (
            tiny_safetensors(&[("b", "BF16", "[3]", BF16_ONE_TWO)]),
            "tensor b: its bytes 0 to 4 do not fit its shape [3] in BF16",
        ),
        (
            tiny_safetensors(&[("b", "Q7", "[2]", BF16_ONE_TWO)]),
            "tensor b: dtype Q7 is unknown",
        ),
        (
            tiny_safetensors(&[("b", "BF16", "{}", BF16_ONE_TWO)]),
            "tensor b: its entry has no dtype, shape and data_offsets",
        ),
        (vec![0; 7], "header too small"),
    ] {
        folder.file("2.safetensors", &bytes);
        assert!(error().contains(expected), "{}", error());
    }
    for index in [
        "{}",
        "[",
        r#"{"weight_map":{"c":1}}"#,
        r#"{"weight_map":{"c":"../1.safetensors"}}"#,
    ] {
        folder.file("model.safetensors.index.json", index.as_bytes());
        assert!(error().contains("not a safetensors index"), "{}", error());
    }
}

#[test]
fn header_that_does_not_match_its_data_is_rejected() {
    let folder = Temporary::new("bad-header");
    let opened = |bytes: &[u8]| {
        folder.file("model.safetensors", bytes);
        let opened = open(&folder.0).map(|source| source.names().len());
        opened.map_err(|error| error.to_string())
    };
    let file = |head: &str, len: usize| [&(head.len() as u64).to_le_bytes(), head.as_bytes(), &vec![0; len]].concat();
    let a = |rest: &str| format!(r#"{{"a":{{"dtype":"F16",{rest}}}}}"#);
    let two = |a: &str, b: &str| {
        let entry =
            |name: &str, place: &str| format!(r#""{name}":{{"dtype":"F16","shape":[1],"data_offsets":{place}}}"#);
        format!("{{{},{}}}", entry("a", a), entry("b", b))
    };
    let metadata = |value: &str| format!(r#"{{"__metadata__":{value},{}"#, &two("[0,2]", "[2,4]")[1..]);
    for whole in [
        two("[0,2]", "[2,4]") + "  ",
        two("[2,4]", "[0,2]"),
        metadata("null"),
        metadata(r#"{"a":"b"}"#),
    ] {
        assert_eq!(opened(&file(&whole, 4)), Ok(2), "{whole}");
    }
    for (head, expected) in [
        (
            two("[0,2]", "[0,2]"),
            "b: its bytes 0 to 2 do not start where the previous tensor ends, at 2",
        ),
        (
            two("[0,2]", "[3,5]"),
            "b: its bytes 3 to 5 exceed the 4 bytes of data in the file",
        ),
        (
            two("[0,2]", "[1,3]"),
            "b: its bytes 1 to 3 do not start where the previous tensor ends, at 2",
        ),
        (
            two("[1,3]", "[2,4]"),
            "a: its bytes 1 to 3 do not start where the previous tensor ends, at 0",
        ),
        (
            a(r#""shape":[1],"data_offsets":[0,2]"#),
            "bytes 2 to 4 of the data belong to no tensor",
        ),
        ("{}".to_owned(), "bytes 0 to 4 of the data belong to no tensor"),
        (a(r#""shape":[2],"data_offsets":[4,0]"#), "do not fit its shape"),
        (
            a(r#""shape":[2,9223372036854775809],"data_offsets":[0,4]"#),
            "a: its bytes 0 to 4 do not fit",
        ),
        (
            a(r#""shape":[1152921504606846978],"data_offsets":[0,4]"#),
            "a: its bytes 0 to 4 do not fit",
        ),
        (
            a(r#""shape":[2],"data_offsets":[0,18446744073709551615]"#),
            "exceed the 4 bytes",
        ),
        (
            a(r#""shape":[2],"data_offsets":[0,18446744073709551616]"#),
            "a: its entry has no dtype",
        ),
        (a(r#""shape":[-2],"data_offsets":[0,4]"#), "a: its entry has no dtype"),
        (a(r#""shape":[2.0],"data_offsets":[0,4]"#), "a: its entry has no dtype"),
        (a(r#""shape":[2],"data_offsets":[0,4,8]"#), "a: its entry has no dtype"),
        (a(r#""shape":[2]"#), "missing field `data_offsets`"),
        (
            a(r#""dtype":"F16","shape":[2],"data_offsets":[0,4]"#),
            "duplicate field `dtype`",
        ),
        (two("[0,2]", "[2,4]").replace('b', "a"), "a occurs twice"),
        (metadata(r#"{},"__metadata__":{}"#), "__metadata__ occurs twice"),
        (metadata(r#"{"a":1}"#), "invalid JSON in header"),
        (two("[0,2]", "[2,4]") + "x", "invalid JSON in header"),
        ("[".repeat(100_000), "invalid JSON in header"),
        (
            a(&format!(r#""x":{}"#, "[".repeat(100_000))),
            "a: its entry has no dtype",
        ),
        ("{\"\u{fffd}".to_owned(), "invalid JSON in header"),
    ] {
        let error = opened(&file(&head, 4)).unwrap_err();
        assert!(error.contains(expected), "{error}, not {expected}");
    }
    for (size, expected) in [
        (3, "header of 3 bytes: the file has only 2"),
        (u64::MAX, "header too large"),
    ] {
        let error = opened(&[&size.to_le_bytes(), b"{}".as_slice()].concat()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // eight elements of a dtype with n bits take n bytes
    for (bits, dtypes) in [
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "I64 U64 F64 C64"),
    ] {
        for dtype in dtypes.split(' ') {
            let head = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{bits}]}}}}"#);
            let found = opened(&file(&head, bits));
            let is_understood = |error: &String| error.ends_with("are supported");
            assert!(found.as_ref().err().is_none_or(is_understood), "{dtype}: {found:?}");
            let error = opened(&file(&head.replace("[8]", "[9]"), bits)).unwrap_err();
            assert!(error.contains("do not fit its shape"), "{dtype}: {error}");
        }
    }
}

#[test]
fn names_of_transformers_4_and_5_map_to_the_language_model() {
    for (stored, own) in [
        ("language_model.model.norm.weight", Some("model.norm.weight")),
        ("model.language_model.norm.weight", Some("model.norm.weight")),
        ("language_model.lm_head.weight", Some("lm_head.weight")),
        ("lm_head.weight", Some("lm_head.weight")),
        ("model.text_model.norm.weight", Some("model.norm.weight")),
        ("model.connector.modality_projection.proj.weight", None),
        ("vision_tower.ln_pre.weight", None),
        ("model.vision_tower.ln_pre.weight", None),
        ("model.multi_modal_projector.norm.weight", None),
        ("model.audio_tower.norm.weight", None),
        ("model.other_tower.norm.weight", Some("model.other_tower.norm.weight")),
    ] {
        assert_eq!(text_model_name(stored).as_deref(), own, "{stored}");
    }
}
