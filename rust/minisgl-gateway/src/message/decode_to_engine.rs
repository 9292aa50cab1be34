//! What front ends send, for who stands in for an engine process.

use super::decode::{Fields, body};
use super::reader::{Read, Reader, malformed};
use super::{ID_LIMIT, MessageError, SamplingParams, ToEngine};

/// The messages of a frame, given without its length. Ids are in their range; the engine itself
/// refuses a request whose sampling parameters are not in theirs.
pub fn decode_to_engine(frame: &[u8]) -> Result<Vec<ToEngine>, MessageError> {
    let mut reader = Reader::new(body(frame)?);
    let found = reader.list(message)?;
    if !reader.is_empty() {
        return Err(malformed("bytes are left behind the messages"));
    }
    Ok(found)
}

fn message(reader: &mut Reader<'_>) -> Read<ToEngine> {
    let mut fields = Fields::of(reader)?;
    let found = match fields.next()?.str()? {
        "hello" => ToEngine::Hello { name: fields.text()? },
        "add" => add(&mut fields)?,
        "abort" => ToEngine::AbortRequest(request_id(&mut fields)?),
        "finish" => ToEngine::FinishRequest(request_id(&mut fields)?),
        "add_prefix" => ToEngine::AddPrefix {
            prefix_id: fields.next()?.int()?,
            tokens: fields.next()?.int32s()?,
            pin: fields.or(false, Reader::bool)?,
        },
        "remove_prefix" => ToEngine::RemovePrefix(fields.next()?.int()?),
        "clear_cache" => ToEngine::ClearCache,
        "load_adapter" => ToEngine::LoadAdapter {
            adapter: fields.next()?.int()?,
            name: fields.text()?,
            path: fields.text()?,
        },
        "unload_adapter" => ToEngine::UnloadAdapter(fields.next()?.int()?),
        "watch" => ToEngine::Watch {
            steps: fields.next()?.bool()?,
            tree: fields.next()?.bool()?,
        },
        "shutdown" => ToEngine::Shutdown,
        other => return Err(malformed(format!("unknown message {other:?}"))),
    };
    fields.end(found)
}

fn request_id(fields: &mut Fields<'_, '_>) -> Read<i64> {
    let req_id = fields.next()?.int()?;
    if !(0..ID_LIMIT).contains(&req_id) {
        let range = format!("ids are at least 0 and below {ID_LIMIT}");
        return Err(malformed(format!("request id {req_id} is out of range: {range}")));
    }
    Ok(req_id)
}

fn add(fields: &mut Fields<'_, '_>) -> Read<ToEngine> {
    let req_id = request_id(fields)?;
    let bytes = fields.next()?.bin()?;
    let (tokens, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(malformed(format!(
            "the tokens of request {req_id} are no multiple of 4 bytes"
        )));
    }
    let found = ToEngine::AddRequest {
        req_id,
        tokens: tokens.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect(),
        sampling: Box::new(sampling(fields.next()?)?),
        priority: fields.or(0, Reader::int)?,
        num_generated: fields.or(0, Reader::int)?,
        key: fields.or(0, Reader::int)?,
    };
    Ok(found)
}

/// Fields that this side does not know are stepped over.
fn sampling(reader: &mut Reader<'_>) -> Read<SamplingParams> {
    let mut found = SamplingParams::default();
    let p = &mut found;
    for _ in 0..reader.map()? {
        match reader.str()? {
            "max_tokens" => p.max_tokens = reader.optional_int()?,
            "min_tokens" => p.min_tokens = reader.int()?,
            "temperature" => p.temperature = reader.float()?,
            "top_k" => p.top_k = reader.int()?,
            "top_p" => p.top_p = reader.float()?,
            "min_p" => p.min_p = reader.float()?,
            "frequency_penalty" => p.frequency_penalty = reader.float()?,
            "presence_penalty" => p.presence_penalty = reader.float()?,
            "repetition_penalty" => p.repetition_penalty = reader.float()?,
            "logit_bias" => p.logit_bias = biases(reader)?,
            "allowed_token_ids" => p.allowed_token_ids = reader.list(Reader::int)?,
            "bad_words" => p.bad_words = reader.list(text)?,
            "bad_token_ids" => p.bad_token_ids = reader.list(|reader| reader.list(Reader::int))?,
            "seed" => p.seed = reader.optional_int()?,
            "n" => p.n = reader.int()?,
            "stop" => p.stop = reader.list(text)?,
            "stop_token_ids" => p.stop_token_ids = reader.list(Reader::int)?,
            "ignore_eos" => p.ignore_eos = reader.bool()?,
            "logprobs" => p.logprobs = reader.optional_int()?,
            "prompt_logprobs" => p.prompt_logprobs = reader.optional_int()?,
            "grammar" => p.grammar = Some(text(reader)?),
            "embedding" => p.embedding = Some(text(reader)?),
            "adapter" => p.adapter = reader.int()?,
            _ => reader.skip(1)?,
        }
    }
    Ok(found)
}

fn text(reader: &mut Reader<'_>) -> Read<String> {
    Ok(reader.str()?.to_owned())
}

fn biases(reader: &mut Reader<'_>) -> Read<Vec<(i64, f64)>> {
    let number = reader.map()?;
    let mut found = Vec::with_capacity(reader.room(number));
    for _ in 0..number {
        found.push((reader.int()?, reader.float()?));
    }
    Ok(found)
}
