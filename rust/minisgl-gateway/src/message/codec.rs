//! Encoding and decoding of messages, by serde and msgspec's rules: a struct is an array of its tag and its fields,
//! integers have their shortest form, a map without its defaults has a long header.
//!
//! Invariants: no memory is reserved for a length that the bytes only claim; a value of another type is an error;
//! unknown fields at the end of a message are skipped.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

use rmp_serde::{Deserializer, Serializer};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Error, IgnoredAny, SeqAccess, Visitor};
use serde::ser::Serialize;

use super::packed::{Packed, PackedVec, unpack};
use super::prepared::Prepared;
use super::types::{
    FromEngine, ID_LIMIT, LENGTH_BYTES, MessageError, NewRequest, PromptImage, SCHEMA_VERSION, STAMPED, SamplingParams,
    StepTokens, ToEngine,
};

/// Maximum nesting depth of a message; a deeper one is an error.
const MAX_DEPTH: usize = 32;

// ------------------------------------------------------------------------------------------------------------ writing

/// Encodes `messages` as one frame with its length prefix. The pixels of an image are sent once in a frame.
#[must_use]
pub fn encode(messages: &[ToEngine]) -> Vec<u8> {
    let mut sent = HashSet::new();
    frame(messages, estimate, |out, message| {
        put_to_engine(out, message, &mut sent)
    })
}

/// Encodes messages of a pool of engines as one frame with its length prefix. Messages of which this side decodes only
/// a part must be forwarded as bytes instead: the other fields would be lost.
#[must_use]
pub fn encode_from_engine(messages: &[FromEngine]) -> Vec<u8> {
    let estimate = |message: &FromEngine| match message {
        FromEngine::StepTokens(step) => 64 + 16 * step.req_ids.len() + 12 * step.admitted.len(),
        FromEngine::EngineSays { messages, .. } => 24 + messages.len(),
        _ => 256,
    };
    frame(messages, estimate, put_from_engine)
}

/// Joins encoded messages to one encoded list of messages.
#[must_use]
pub fn list_of(messages: &[&[u8]]) -> Vec<u8> {
    let mut list = Vec::with_capacity(5 + messages.iter().map(|one| one.len()).sum::<usize>());
    put_array(&mut list, messages.len());
    messages.iter().for_each(|one| list.extend_from_slice(one));
    list
}

/// Estimates the encoded size of `message` in bytes.
pub(crate) fn estimate(message: &ToEngine) -> usize {
    match message {
        ToEngine::AddRequest(NewRequest { tokens, images, .. }) => {
            4 * tokens.len() + 128 + images.iter().map(|image| image.pixels.len() + 64).sum::<usize>()
        }
        ToEngine::AddPrefix { tokens, .. } => 4 * tokens.len() + 128,
        _ => 24,
    }
}

fn frame<'a, M>(
    messages: &'a [M],
    estimate: impl Fn(&M) -> usize,
    mut put: impl FnMut(&mut Vec<u8>, &'a M),
) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + messages.iter().map(estimate).sum::<usize>());
    out.extend([0; LENGTH_BYTES]);
    out.extend(SCHEMA_VERSION.to_le_bytes());
    put_array(&mut out, messages.len());
    for message in messages {
        put(&mut out, message);
    }
    let length = u32::try_from(out.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
    out[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    out
}

/// Appends an encoded value. Writing to memory does not fail, so the result is ignored.
fn put(out: &mut Vec<u8>, value: &impl Serialize) {
    let _ = value.serialize(&mut Serializer::new(out));
}

fn put_array(out: &mut Vec<u8>, length: usize) {
    let _ = rmp::encode::write_array_len(out, u32::try_from(length).unwrap_or(u32::MAX));
}

/// Appends a message; `sent` has the digests of the images whose pixels the frame has already.
fn put_to_engine<'a>(out: &mut Vec<u8>, message: &'a ToEngine, sent: &mut HashSet<&'a [u8]>) {
    match message {
        ToEngine::Hello { name } => put(out, &("hello", name)),
        ToEngine::AddRequest(new) => {
            put_array(out, 9);
            put(out, &"add");
            put(out, &new.req_id);
            put(out, &Packed(&new.tokens));
            put_sampling(out, &new.sampling);
            put(out, &new.priority);
            put(out, &new.num_generated);
            put(out, &new.key);
            put(out, &new.background);
            put_array(out, new.images.len());
            for image in &new.images {
                let pixels: &[u8] = if sent.insert(&image.digest) { &image.pixels } else { &[] };
                let place = (image.start, image.num_tokens, image.grid);
                put(out, &(Packed(&image.digest), place.0, place.1, place.2, Packed(pixels)));
            }
        }
        ToEngine::AbortRequest(req_id) => put(out, &("abort", req_id)),
        ToEngine::FinishRequest(req_id) => put(out, &("finish", req_id)),
        ToEngine::AddPrefix { prefix_id, tokens, pin } => put(out, &("add_prefix", prefix_id, Packed(tokens), pin)),
        ToEngine::RemovePrefix(prefix_id) => put(out, &("remove_prefix", prefix_id)),
        ToEngine::ClearCache => put(out, &("clear_cache",)),
        ToEngine::LoadAdapter { adapter, name, path } => put(out, &("load_adapter", adapter, name, path)),
        ToEngine::UnloadAdapter(adapter) => put(out, &("unload_adapter", adapter)),
        ToEngine::Watch { steps, tree } => put(out, &("watch", steps, tree)),
        ToEngine::Shutdown => put(out, &("shutdown",)),
    }
}

/// Appends sampling parameters, with the 3-byte map header that Python writes: it learns the number of fields last.
fn put_sampling(out: &mut Vec<u8>, params: &SamplingParams) {
    let header = out.len();
    put(out, params);
    if out[header] & 0xf0 == 0x80 {
        let num_fields = out[header] & 0x0f;
        out.splice(header..=header, [0xde, 0, num_fields]);
    }
}

fn put_from_engine(out: &mut Vec<u8>, message: &FromEngine) {
    match message {
        FromEngine::LoadProgress(line) => put_tagged(out, "progress", line),
        FromEngine::EngineReady(ready) => put_tagged(out, "ready", ready),
        FromEngine::EngineStats(stats) => put_tagged(out, "stats", stats),
        FromEngine::Heartbeat(beat) => put(out, &("beat", beat.phase, beat.age_s, beat.step, 0.0, 0)),
        FromEngine::StepTokens(step) => put_step(out, step),
        FromEngine::Narration(lines) => put(out, &("narration", lines)),
        FromEngine::PrefixChanged { prefix_id, state } => put(out, &("prefix", prefix_id, state)),
        FromEngine::CacheCleared => put(out, &("cleared",)),
        FromEngine::AdapterChanged { adapter, state } => put(out, &("adapter", adapter, state)),
        FromEngine::Watched => put(out, &("watched",)),
        FromEngine::EngineSays { engine, messages } => put(out, &("says", engine, Packed(messages))),
        FromEngine::EngineState { engine, state, reason } => put(out, &("engine", engine, state, reason)),
        FromEngine::EngineFailed(text) => put(out, &("failed", text)),
    }
}

/// Appends a struct of fewer than 16 fields as an array of its tag and its fields.
fn put_tagged(out: &mut Vec<u8>, tag: &str, fields: &impl Serialize) {
    let mut encoded = Vec::new();
    put(&mut encoded, fields);
    put_array(out, usize::from(encoded[0] & 0x0f) + 1);
    put(out, &tag);
    out.extend_from_slice(&encoded[1..]);
}

fn put_step(out: &mut Vec<u8>, step: &StepTokens) {
    let (ids, cached): (Vec<i64>, Vec<i32>) = step.admitted.iter().copied().unzip();
    let ends = (&step.errors, &step.logprobs, &step.prompt_logprobs, &step.embeddings);
    let rows = (Packed(&step.req_ids), Packed(&step.tokens), Packed(&step.reasons));
    let (ids, cached) = (Packed(&ids), Packed(&cached));
    let all = (
        "step", step.step, rows.0, rows.1, rows.2, ids, cached, ends.0, ends.1, ends.2, ends.3,
    );
    put(out, &all);
}

// ------------------------------------------------------------------------------------------------------------ reading

/// Decodes the messages of a frame without its length prefix.
pub fn decode(frame: &[u8]) -> Result<Vec<FromEngine>, MessageError> {
    let mut found = Vec::new();
    decode_each(frame, |message, _| found.push(message))?;
    Ok(found)
}

/// Decodes a frame without its length prefix, and passes each message with its bytes to `each`.
pub fn decode_each(frame: &[u8], each: impl FnMut(FromEngine, &[u8])) -> Result<(), MessageError> {
    read_each(frame, each)
}

/// Decodes the messages of a front end, for a process in the place of an engine. Request ids are checked; sampling
/// parameters are not: the engine refuses invalid ones itself.
pub fn decode_to_engine(frame: &[u8]) -> Result<Vec<ToEngine>, MessageError> {
    let mut found = Vec::new();
    read_each(frame, |message, _| found.push(message))?;
    fill_pixels(&mut found)?;
    Ok(found)
}

/// Gives each image without pixels those of an earlier image of the frame that has the same digest.
fn fill_pixels(messages: &mut [ToEngine]) -> Result<(), MessageError> {
    let mut sent = HashMap::new();
    for message in messages {
        let ToEngine::AddRequest(new) = message else { continue };
        for PromptImage { digest, pixels, .. } in &mut new.images {
            if pixels.is_empty() {
                let req_id = new.req_id;
                let missing = || malformed(format!("request {req_id}: an image has no pixels"));
                pixels.clone_from(sent.get(digest).ok_or_else(missing)?);
            } else {
                sent.insert(digest.clone(), pixels.clone());
            }
        }
    }
    Ok(())
}

/// Decodes Python's result, a frame of one message without its length prefix. Fails for unknown tool call or reasoning
/// formats.
pub fn decode_prepared(frame: &[u8]) -> Result<Prepared, MessageError> {
    let mut found = None;
    read_each(frame, |message, _| found = Some(message))?;
    let found = found.ok_or_else(|| malformed("the frame has no message"))?;
    if let Prepared::Generation(one) = &found {
        one.check().map_err(malformed)?;
    }
    Ok(found)
}

fn malformed(error: impl fmt::Display) -> MessageError {
    MessageError::Malformed(error.to_string())
}

fn read_each<M: Message>(frame: &[u8], mut each: impl FnMut(M, &[u8])) -> Result<(), MessageError> {
    let mut rest = body(frame)?;
    let count = rmp::decode::read_array_len(&mut rest).map_err(malformed)?;
    for left in (0..count).rev() {
        // nearly always a frame has one message, whose end is known
        let end = if left == 0 { rest.len() } else { length_of_first(rest)? };
        let (first, after) = rest.split_at(end);
        each(read_one(first)?, first);
        rest = after;
    }
    if rest.is_empty() { Ok(()) } else { Err(trailing_bytes()) }
}

/// Decodes the single message in `bytes`.
fn read_one<M: Message>(bytes: &[u8]) -> Result<M, MessageError> {
    if let Some(found) = M::read_by_hand(bytes) {
        return Ok(found);
    }
    let mut reader = Deserializer::from_read_ref(bytes);
    reader.set_max_depth(MAX_DEPTH);
    let One(message) = One::deserialize(&mut reader).map_err(malformed)?;
    match IgnoredAny::deserialize(&mut reader) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(_)) => Ok(message), // the end of the bytes
        _ => Err(trailing_bytes()),
    }
}

fn length_of_first(bytes: &[u8]) -> Result<usize, MessageError> {
    let mut reader = Deserializer::new(bytes);
    reader.set_max_depth(MAX_DEPTH);
    IgnoredAny::deserialize(&mut reader).map_err(malformed)?;
    Ok(bytes.len() - reader.into_inner().len())
}

fn trailing_bytes() -> MessageError {
    malformed("the frame has bytes after its last message")
}

fn body(frame: &[u8]) -> Result<&[u8], MessageError> {
    let (version, rest) = match frame {
        [low, high, rest @ ..] => (u16::from_le_bytes([*low, *high]), rest),
        [low] => return Err(MessageError::Version((*low).into())),
        [] => return Err(MessageError::Version(0)),
    };
    if version == SCHEMA_VERSION {
        return Ok(rest);
    }
    if version == SCHEMA_VERSION | STAMPED {
        return rest.get(8..).ok_or_else(|| malformed("the frame is truncated"));
    }
    Err(MessageError::Version(version & !STAMPED))
}

trait Message: Sized {
    /// Decodes the fields of the message with this tag.
    fn read<'de, A: SeqAccess<'de>>(tag: &str, fields: &mut A) -> Result<Self, A::Error>;

    /// Decodes a frequent message without serde; `None` if it is another one.
    fn read_by_hand(_bytes: &[u8]) -> Option<Self> {
        None
    }
}

struct One<M>(M);

impl<'de, M: Message> Deserialize<'de> for One<M> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(OneVisitor(PhantomData))
    }
}

struct OneVisitor<M>(PhantomData<M>);

impl<'de, M: Message> Visitor<'de> for OneVisitor<M> {
    type Value = One<M>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<One<M>, A::Error> {
        let tag: &str = next(&mut fields)?;
        let found = M::read(tag, &mut fields)?;
        while fields.next_element::<IgnoredAny>()?.is_some() {}
        Ok(One(found))
    }
}

fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(fields: &mut A) -> Result<T, A::Error> {
    let found = fields.next_element()?;
    found.ok_or_else(|| Error::custom("a field of the message is missing"))
}

/// Decodes a field, or returns its default if the message ends before it.
fn or_default<'de, T: Deserialize<'de> + Default, A: SeqAccess<'de>>(fields: &mut A) -> Result<T, A::Error> {
    Ok(fields.next_element()?.unwrap_or_default())
}

/// Decodes all remaining fields as a struct.
fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(fields: &mut A) -> Result<T, A::Error> {
    T::deserialize(SeqAccessDeserializer::new(fields))
}

impl Message for FromEngine {
    /// Decodes a step that has tokens and admissions only: serde takes half as long again.
    fn read_by_hand(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(b"\x9b\xa4step")?.strip_suffix(b"\x80\x90\x90\x90")?;
        let step = rmp::decode::read_int(&mut rest).ok()?;
        let mut array = || {
            let length = rmp::decode::read_bin_len(&mut rest).ok()?;
            rest.split_off(..length as usize)
        };
        let (req_ids, tokens, reasons) = (unpack(array()?)?, unpack(array()?)?, unpack(array()?)?);
        let admitted = (unpack(array()?)?, unpack(array()?)?);
        rest.is_empty().then_some(())?;
        checked(step, (req_ids, tokens, reasons), admitted).map(Self::StepTokens)
    }

    fn read<'de, A: SeqAccess<'de>>(tag: &str, fields: &mut A) -> Result<Self, A::Error> {
        Ok(match tag {
            "step" => Self::StepTokens(step_tokens(fields)?),
            "beat" => Self::Heartbeat(rest(fields)?),
            "stats" => Self::EngineStats(rest(fields)?),
            "progress" => Self::LoadProgress(rest(fields)?),
            "ready" => Self::EngineReady(rest(fields)?),
            "narration" => Self::Narration(next(fields)?),
            "prefix" => Self::PrefixChanged {
                prefix_id: next(fields)?,
                state: next(fields)?,
            },
            "cleared" => Self::CacheCleared,
            "adapter" => Self::AdapterChanged {
                adapter: next(fields)?,
                state: next(fields)?,
            },
            "watched" => Self::Watched,
            "says" => Self::EngineSays {
                engine: next(fields)?,
                messages: next::<PackedVec<u8>, A>(fields)?.0,
            },
            "engine" => Self::EngineState {
                engine: next(fields)?,
                state: next(fields)?,
                reason: or_default(fields)?,
            },
            "failed" => Self::EngineFailed(next(fields)?),
            other => return Err(unknown(other)),
        })
    }
}

impl Message for Prepared {
    fn read<'de, A: SeqAccess<'de>>(tag: &str, fields: &mut A) -> Result<Self, A::Error> {
        Ok(match tag {
            "generation" => Self::Generation(rest(fields)?),
            "whole" => Self::Whole(rest(fields)?),
            "pass_on" => Self::PassOn,
            "read" => Self::Read,
            other => return Err(unknown(other)),
        })
    }
}

impl Message for ToEngine {
    fn read<'de, A: SeqAccess<'de>>(tag: &str, fields: &mut A) -> Result<Self, A::Error> {
        Ok(match tag {
            "hello" => Self::Hello { name: next(fields)? },
            "add" => {
                let req_id = request_id(fields)?;
                let tokens = next::<PackedVec<i32>, A>(fields);
                Self::AddRequest(NewRequest {
                    req_id,
                    tokens: tokens
                        .map_err(|error| Error::custom(format!("the tokens of request {req_id}: {error}")))?
                        .0,
                    sampling: next(fields)?,
                    priority: or_default(fields)?,
                    num_generated: or_default(fields)?,
                    key: or_default(fields)?,
                    background: or_default(fields)?,
                    images: or_default(fields)?,
                })
            }
            "abort" => Self::AbortRequest(request_id(fields)?),
            "finish" => Self::FinishRequest(request_id(fields)?),
            "add_prefix" => Self::AddPrefix {
                prefix_id: next(fields)?,
                tokens: next::<PackedVec<i32>, A>(fields)?.0,
                pin: or_default(fields)?,
            },
            "remove_prefix" => Self::RemovePrefix(next(fields)?),
            "clear_cache" => Self::ClearCache,
            "load_adapter" => Self::LoadAdapter {
                adapter: next(fields)?,
                name: next(fields)?,
                path: next(fields)?,
            },
            "unload_adapter" => Self::UnloadAdapter(next(fields)?),
            "watch" => Self::Watch {
                steps: next(fields)?,
                tree: next(fields)?,
            },
            "shutdown" => Self::Shutdown,
            other => return Err(unknown(other)),
        })
    }
}

fn unknown<E: Error>(tag: &str) -> E {
    E::custom(format!("unknown message {tag:?}"))
}

fn request_id<'de, A: SeqAccess<'de>>(fields: &mut A) -> Result<i64, A::Error> {
    let req_id = next(fields)?;
    if (0..ID_LIMIT).contains(&req_id) {
        return Ok(req_id);
    }
    let range = format!("ids are at least 0 and below {ID_LIMIT}");
    Err(Error::custom(format!("request id {req_id} is out of range: {range}")))
}

type Rows = (Vec<i64>, Vec<i32>, Vec<i32>);

/// Makes a step of these rows and admissions; `None` if arrays have different lengths.
fn checked(step: i64, (req_ids, tokens, reasons): Rows, (ids, cached): (Vec<i64>, Vec<i32>)) -> Option<StepTokens> {
    let lengths_fit = tokens.len() == req_ids.len() && reasons.len() == req_ids.len() && ids.len() == cached.len();
    lengths_fit.then(|| StepTokens {
        step,
        req_ids,
        tokens,
        reasons,
        admitted: ids.into_iter().zip(cached).collect(),
        ..StepTokens::default()
    })
}

fn step_tokens<'de, A: SeqAccess<'de>>(fields: &mut A) -> Result<StepTokens, A::Error> {
    let step = next(fields)?;
    let req_ids: PackedVec<i64> = next(fields)?;
    let (tokens, reasons): (PackedVec<i32>, PackedVec<i32>) = (next(fields)?, next(fields)?);
    let admitted: (PackedVec<i64>, PackedVec<i32>) = (or_default(fields)?, or_default(fields)?);
    let rows = req_ids.0.len();
    let found = checked(step, (req_ids.0, tokens.0, reasons.0), (admitted.0.0, admitted.1.0));
    let mut found = found.ok_or_else(|| Error::custom("the arrays of a step have different lengths"))?;
    found.errors = or_default(fields)?;
    found.logprobs = or_default(fields)?;
    for one in &found.logprobs {
        if one.index >= rows {
            return Err(Error::custom("log probabilities: index out of range"));
        }
        if one.top_ids.len() != one.top_logprobs.len() {
            return Err(Error::custom(
                "log probabilities: top_ids and top_logprobs have different lengths",
            ));
        }
    }
    found.prompt_logprobs = or_default(fields)?;
    found.embeddings = or_default(fields)?;
    Ok(found)
}
