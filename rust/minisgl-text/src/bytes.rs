//! Bytes of a tokenizer's ids.
//!
//! Invariants: an id outside the vocabulary has no bytes.

use super::normalize::Backend;
use serde_json::Value;

/// Method by which a tokenizer's ids become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Byte-level BPE: every id is a byte sequence.
    ByteLevel,
    /// Sentencepiece: an id is a text of its own, or one byte.
    Literal,
    /// Any other tokenizer: the library decodes a few ids at a time.
    Window,
}

const IS_BYTE: u8 = 1;
const IS_SPECIAL: u8 = 2;

/// Bytes of all ids, concatenated, with flags for each id.
pub(super) struct Table {
    pub(super) kind: Kind,
    data: Vec<u8>,
    ends: Vec<u32>,
    flags: Vec<u8>,
}

impl Table {
    pub(super) fn new(backend: &Backend) -> Self {
        let decoder = serde_json::to_value(backend.get_decoder());
        let steps = flat_steps(decoder.unwrap_or_default(), "decoders");
        let kind = kind_of(&steps);
        let falls_back = steps.iter().any(|step| type_of(step) == "ByteFallback");
        let replacements = if kind == Kind::Literal {
            replacements(&steps)
        } else {
            Vec::new()
        };
        let alphabet = char_to_byte();
        let num_ids = backend
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |&last| to_usize(last) + 1);
        let mut table = Self {
            kind,
            data: Vec::new(),
            ends: Vec::new(),
            flags: vec![0; num_ids],
        };
        for id in 0..num_ids {
            if let Some(token) = u32::try_from(id).ok().and_then(|id| backend.id_to_token(id)) {
                let byte = if falls_back { byte_token(&token) } else { None };
                if byte.is_some() {
                    table.flags[id] |= IS_BYTE;
                }
                match kind {
                    Kind::ByteLevel => push_byte_level(&token, &alphabet, &mut table.data),
                    _ => match byte {
                        Some(byte) => table.data.push(byte),
                        None => table.data.extend(replaced(token, &replacements).as_bytes()),
                    },
                }
            }
            table.ends.push(u32::try_from(table.data.len()).unwrap_or(u32::MAX));
        }
        for (id, token) in backend.get_added_tokens_decoder() {
            if let Some(flags) = table.flags.get_mut(to_usize(id)).filter(|_| token.special) {
                *flags |= IS_SPECIAL;
            }
        }
        table
    }

    /// Returns the largest id plus 1.
    pub(super) fn num_ids(&self) -> usize {
        self.ends.len()
    }

    #[inline] // once a token, from another unit of code
    pub(super) fn of(&self, id: i32) -> &[u8] {
        let Some(at) = self.place(id) else { return &[] };
        let begin = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.data[to_usize(begin)..to_usize(self.ends[at])]
    }

    /// Returns true if this id stands for a single byte in a byte-fallback tokenizer.
    pub(super) fn is_byte(&self, id: i32) -> bool {
        self.flag(id, IS_BYTE)
    }

    #[inline]
    pub(super) fn is_special(&self, id: i32) -> bool {
        self.flag(id, IS_SPECIAL)
    }

    /// Returns the ids of special tokens.
    pub(super) fn special_ids(&self) -> impl Iterator<Item = usize> {
        (0..self.flags.len()).filter(|&at| self.flags[at] & IS_SPECIAL != 0)
    }

    fn flag(&self, id: i32, flag: u8) -> bool {
        self.place(id).is_some_and(|at| self.flags[at] & flag != 0)
    }

    fn place(&self, id: i32) -> Option<usize> {
        usize::try_from(id).ok().filter(|&at| at < self.ends.len())
    }
}

pub(super) fn to_usize(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Returns the type name of a tokenizer step, for example "Metaspace"; empty if it has none.
pub fn type_of(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("")
}

/// Returns the steps of a tokenizer component in order, with nested sequences flattened.
pub fn flat_steps(component: Value, inner: &str) -> Vec<Value> {
    let mut flat = Vec::new();
    let mut waiting = vec![component];
    while let Some(mut step) = waiting.pop() {
        if step.is_null() {
            continue;
        }
        if type_of(&step) != "Sequence" {
            flat.push(step);
        } else if let Value::Array(parts) = step[inner].take() {
            waiting.extend(parts.into_iter().rev());
        }
    }
    flat
}

/// Returns the decoding method for a decoder's steps. `Literal` if a token's text does not depend on its neighbours, as
/// in sentencepiece decoders; a strip at the very beginning does not matter in a continued text.
fn kind_of(steps: &[Value]) -> Kind {
    if steps.len() == 1 && type_of(&steps[0]) == "ByteLevel" {
        return Kind::ByteLevel;
    }
    let mut rest = steps;
    let mut skip = |kinds: &[&str], most: usize| {
        let count = rest
            .iter()
            .take(most)
            .take_while(|step| kinds.contains(&type_of(step)))
            .count();
        rest = &rest[count..];
        count
    };
    let replaces = skip(&["Replace", "Metaspace"], usize::MAX);
    skip(&["ByteFallback"], 1);
    if skip(&["Fuse"], 1) == 1 {
        skip(&["Strip"], 1);
    }
    let plain = steps.iter().all(|step| match type_of(step) {
        "Replace" => step["pattern"]["String"].is_string(),
        "Strip" => step["stop"] == 0,
        _ => true,
    });
    if replaces > 0 && rest.is_empty() && plain {
        Kind::Literal
    } else {
        Kind::Window
    }
}

fn replacements(steps: &[Value]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
    let of_step = |step: &Value| match type_of(step) {
        "Metaspace" => Some((text(&step["replacement"]), " ".to_owned())),
        "Replace" => Some((text(&step["pattern"]["String"]), text(&step["content"]))),
        _ => None,
    };
    steps.iter().filter_map(of_step).collect()
}

fn replaced(mut token: String, replacements: &[(String, String)]) -> String {
    for (old, new) in replacements {
        token = token.replace(old.as_str(), new);
    }
    token
}

/// Returns the byte that a token such as `<0x0A>` stands for, or `None`.
pub fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_hex {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

pub(super) fn push_byte_level(token: &str, alphabet: &[Option<u8>; 512], data: &mut Vec<u8>) {
    let begin = data.len();
    for char in token.chars() {
        let Some(byte) = alphabet.get(to_usize(u32::from(char))).copied().flatten() else {
            data.truncate(begin);
            data.extend(token.as_bytes());
            return;
        };
        data.push(byte);
    }
}

/// Returns the alphabet of byte-level BPE (GPT-2), from character to byte: printable Latin-1 bytes map to themselves,
/// the others from U+0100 on.
pub fn char_to_byte() -> [Option<u8>; 512] {
    let mut alphabet = [None; 512];
    let mut next = 256;
    for byte in 0..=u8::MAX {
        let is_printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let at = if is_printable { usize::from(byte) } else { next };
        next += usize::from(!is_printable);
        alphabet[at] = Some(byte);
    }
    alphabet
}
