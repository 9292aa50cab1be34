//! Bytes to messages. A struct is an array: its tag, then its fields; those that this side does not know of stand at its
//! end, and are stepped over.

use super::reader::{Read, Reader, malformed};
use super::{
    Embedding, EngineReady, EngineStats, FromEngine, Heartbeat, LoadProgress, MessageError, Phase, PromptLogprobs,
    SCHEMA_VERSION, STAMPED, StepTokens, TokenLogprobs,
};

/// The messages of a frame, given without its length.
pub fn decode(frame: &[u8]) -> Result<Vec<FromEngine>, MessageError> {
    let mut reader = Reader::new(body(frame)?);
    let found = reader.list(message)?;
    if !reader.is_empty() {
        return Err(malformed("bytes are left behind the messages"));
    }
    Ok(found)
}

/// Each message of a frame, given without its length, and its bytes.
pub fn decode_each(frame: &[u8], mut each: impl FnMut(FromEngine, &[u8])) -> Result<(), MessageError> {
    let mut reader = Reader::new(body(frame)?);
    for _ in 0..reader.array()? {
        let begin = reader.rest();
        let found = message(&mut reader)?;
        each(found, &begin[..begin.len() - reader.rest().len()]);
    }
    if !reader.is_empty() {
        return Err(malformed("bytes are left behind the messages"));
    }
    Ok(())
}

pub(super) fn body(frame: &[u8]) -> Read<&[u8]> {
    let (version, rest) = match frame {
        [low, high, rest @ ..] => (u16::from_le_bytes([*low, *high]), rest),
        [low] => return Err(MessageError::Version((*low).into())),
        [] => return Err(MessageError::Version(0)),
    };
    if version == SCHEMA_VERSION {
        return Ok(rest);
    }
    if version == SCHEMA_VERSION | STAMPED {
        return rest.get(8..).ok_or_else(|| malformed("the frame is cut short"));
    }
    Err(MessageError::Version(version & !STAMPED))
}

/// A struct's fields; those that are not there have their defaults.
pub(super) struct Fields<'r, 'a> {
    reader: &'r mut Reader<'a>,
    left: usize,
}

impl<'r, 'a> Fields<'r, 'a> {
    pub(super) fn of(reader: &'r mut Reader<'a>) -> Read<Self> {
        let left = reader.array()?;
        Ok(Self { reader, left })
    }

    pub(super) fn next(&mut self) -> Read<&mut Reader<'a>> {
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| malformed("a message lacks a field"))?;
        Ok(self.reader)
    }

    pub(super) fn or<T>(&mut self, default: T, read: impl FnOnce(&mut Reader<'a>) -> Read<T>) -> Read<T> {
        if self.left == 0 {
            Ok(default)
        } else {
            read(self.next()?)
        }
    }

    pub(super) fn text(&mut self) -> Read<String> {
        Ok(self.next()?.str()?.to_owned())
    }

    fn text_or_none(&mut self) -> Read<String> {
        self.or(String::new(), |reader| Ok(reader.str()?.to_owned()))
    }

    pub(super) fn end<T>(self, found: T) -> Read<T> {
        self.reader.skip(self.left)?;
        Ok(found)
    }
}

fn message(reader: &mut Reader<'_>) -> Read<FromEngine> {
    let mut fields = Fields::of(reader)?;
    let found = match fields.next()?.str()? {
        "step" => FromEngine::StepTokens(step_tokens(&mut fields)?),
        "beat" => FromEngine::Heartbeat(heartbeat(&mut fields)?),
        "stats" => FromEngine::EngineStats(Box::new(stats(&mut fields)?)),
        "progress" => FromEngine::LoadProgress(LoadProgress {
            text: fields.text()?,
            done: fields.or(0, Reader::int)?,
            total: fields.or(0, Reader::int)?,
        }),
        "ready" => FromEngine::EngineReady(Box::new(ready(&mut fields)?)),
        "narration" => FromEngine::Narration(fields.next()?.list(|reader| Ok(reader.str()?.to_owned()))?),
        "prefix" => FromEngine::PrefixChanged {
            prefix_id: fields.next()?.int()?,
            state: fields.text()?,
        },
        "cleared" => FromEngine::CacheCleared,
        "adapter" => FromEngine::AdapterChanged {
            adapter: fields.next()?.int()?,
            state: fields.text()?,
        },
        "watched" => FromEngine::Watched,
        "says" => FromEngine::EngineSays {
            engine: fields.next()?.int()?,
            messages: fields.next()?.bin()?.to_vec(),
        },
        "engine" => FromEngine::EngineState {
            engine: fields.next()?.int()?,
            state: fields.text()?,
            reason: fields.text_or_none()?,
        },
        "failed" => FromEngine::EngineFailed(fields.text()?),
        other => return Err(malformed(format!("unknown message {other:?}"))),
    };
    fields.end(found)
}

fn step_tokens(fields: &mut Fields<'_, '_>) -> Read<StepTokens> {
    let mut found = StepTokens {
        step: fields.next()?.int()?,
        req_ids: fields.next()?.int64s()?,
        tokens: fields.next()?.int32s()?,
        reasons: fields.next()?.int32s()?,
        ..StepTokens::default()
    };
    let ids = fields.or(Vec::new(), Reader::int64s)?;
    let cached = fields.or(Vec::new(), Reader::int32s)?;
    let rows = found.req_ids.len();
    if found.tokens.len() != rows || found.reasons.len() != rows || ids.len() != cached.len() {
        return Err(malformed("arrays of a step have different lengths"));
    }
    found.admitted = ids.into_iter().zip(cached).collect();
    found.errors = fields.or(Vec::new(), |reader| {
        (0..reader.map()?)
            .map(|_| Ok((reader.int()?, reader.str()?.to_owned())))
            .collect()
    })?;
    found.logprobs = fields.or(Vec::new(), |reader| reader.list(|reader| token_logprobs(reader, rows)))?;
    found.prompt_logprobs = fields.or(Vec::new(), |reader| reader.list(prompt_logprobs))?;
    found.embeddings = fields.or(Vec::new(), |reader| reader.list(embedding))?;
    Ok(found)
}

fn token_logprobs(reader: &mut Reader<'_>, rows: usize) -> Read<TokenLogprobs> {
    let mut fields = Fields::of(reader)?;
    let index = usize::try_from(fields.next()?.int()?).unwrap_or(usize::MAX);
    if index >= rows {
        return Err(malformed("log probabilities of a token that is not there"));
    }
    let found = TokenLogprobs {
        index,
        logprob: fields.next()?.float()?,
        top_ids: fields.next()?.list(Reader::int32)?,
        top_logprobs: fields.next()?.list(Reader::float)?,
    };
    if found.top_ids.len() != found.top_logprobs.len() {
        return Err(malformed("log probabilities without their tokens"));
    }
    fields.end(found)
}

fn prompt_logprobs(reader: &mut Reader<'_>) -> Read<PromptLogprobs> {
    let mut fields = Fields::of(reader)?;
    let found = PromptLogprobs {
        req_id: fields.next()?.int()?,
        first: fields.next()?.int()?,
        logprobs: fields.next()?.list(Reader::float)?,
        top_ids: fields.next()?.list(|reader| reader.list(Reader::int32))?,
        top_logprobs: fields.next()?.list(|reader| reader.list(Reader::float))?,
    };
    fields.end(found)
}

fn embedding(reader: &mut Reader<'_>) -> Read<Embedding> {
    let mut fields = Fields::of(reader)?;
    let found = Embedding {
        req_id: fields.next()?.int()?,
        numbers: fields.next()?.bin()?.to_vec(),
    };
    fields.end(found)
}

fn heartbeat(fields: &mut Fields<'_, '_>) -> Read<Heartbeat> {
    let phase = match fields.next()?.str()? {
        "working" => Phase::Working,
        "forward" => Phase::Forward,
        _ => Phase::Idle,
    };
    Ok(Heartbeat {
        phase,
        age_s: fields.next()?.float()?,
        step: fields.or(-1, Reader::int)?,
    })
}

fn stats(fields: &mut Fields<'_, '_>) -> Read<EngineStats> {
    let mut number = || fields.next()?.int();
    Ok(EngineStats {
        num_waiting: number()?,
        num_running: number()?,
        num_pages: number()?,
        num_free_pages: number()?,
        num_evictable_pages: number()?,
        num_protected_pages: number()?,
        num_held_pages: number()?,
        num_retracted_total: number()?,
        num_prompt_tokens_total: number()?,
        num_cached_tokens_total: number()?,
        num_steps_total: number()?,
    })
}

fn ready(fields: &mut Fields<'_, '_>) -> Read<EngineReady> {
    Ok(EngineReady {
        engine: fields.text()?,
        model_dir: fields.next()?.optional_str()?.map(str::to_owned),
        vocab_size: fields.next()?.int()?,
        max_seq_len: fields.next()?.int()?,
        eos_ids: fields.next()?.list(Reader::int32)?,
        num_pages: fields.next()?.int()?,
        page_size: fields.next()?.int()?,
        device: fields.text()?,
        dtype: fields.text()?,
        cpu_backend: fields.text()?,
        cpu_backend_fallback: fields.text_or_none()?,
        simulated: fields.text_or_none()?,
        engine_details: fields.text_or_none()?,
    })
}
