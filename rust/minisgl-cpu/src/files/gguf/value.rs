//! Values of the metadata. Texts and lists stay where they are in the file.

use super::reader::Reader;
use crate::{Error, Result};

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// Of 8 to 64 bits.
    Unsigned(u64),
    /// Of 8 to 64 bits.
    Signed(i64),
    /// Of 32 or 64 bits.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(&'a str),
    /// A list of one type.
    List(List<'a>),
}

/// Values of one type, one after the other; checked, so that going through them cannot fail.
#[derive(Clone, PartialEq)]
pub struct List<'a> {
    element: Type,
    len: usize,
    bytes: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Type {
    fn read(reader: &mut Reader<'_>, what: &str) -> Result<Self> {
        const ALL: [Type; 13] = [
            Type::U8,
            Type::I8,
            Type::U16,
            Type::I16,
            Type::U32,
            Type::I32,
            Type::F32,
            Type::Bool,
            Type::Text,
            Type::List,
            Type::U64,
            Type::I64,
            Type::F64,
        ];
        let number = reader.u32(what)?;
        let found = ALL.get(number as usize);
        found
            .copied()
            .ok_or_else(|| Error::file(format!("{what}: type {number} is not known")))
    }

    /// Bytes of one value, at least.
    fn least_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Text => 8,
            Self::List => 12,
        }
    }
}

impl<'a> Value<'a> {
    /// Type and value of `key`.
    pub(super) fn read(reader: &mut Reader<'a>, key: &str) -> Result<Self> {
        let what = format!("key {key}");
        match Type::read(reader, &what)? {
            Type::List => Ok(Self::List(List::read(reader, &what)?)),
            one => Self::read_one(reader, one, &what),
        }
    }

    fn read_one(reader: &mut Reader<'a>, kind: Type, what: &str) -> Result<Self> {
        Ok(match kind {
            Type::U8 => Self::Unsigned(u8::from_le_bytes(reader.array(what)?).into()),
            Type::U16 => Self::Unsigned(u16::from_le_bytes(reader.array(what)?).into()),
            Type::U32 => Self::Unsigned(u32::from_le_bytes(reader.array(what)?).into()),
            Type::U64 => Self::Unsigned(u64::from_le_bytes(reader.array(what)?)),
            Type::I8 => Self::Signed(i8::from_le_bytes(reader.array(what)?).into()),
            Type::I16 => Self::Signed(i16::from_le_bytes(reader.array(what)?).into()),
            Type::I32 => Self::Signed(i32::from_le_bytes(reader.array(what)?).into()),
            Type::I64 => Self::Signed(i64::from_le_bytes(reader.array(what)?)),
            Type::F32 => Self::Float(f32::from_le_bytes(reader.array(what)?).into()),
            Type::F64 => Self::Float(f64::from_le_bytes(reader.array(what)?)),
            Type::Bool => match reader.array::<1>(what)?[0] {
                0 => Self::Bool(false),
                1 => Self::Bool(true),
                other => return Err(Error::file(format!("{what}: {other} is not a bool"))),
            },
            Type::Text => Self::Text(reader.text(what)?),
            Type::List => return Err(Error::file(format!("{what}: a list of lists"))),
        })
    }
}

impl<'a> List<'a> {
    fn read(reader: &mut Reader<'a>, what: &str) -> Result<Self> {
        let element = Type::read(reader, what)?;
        if element == Type::List {
            return Err(Error::file(format!("{what}: a list of lists")));
        }
        let count = reader.u64(what)?;
        let most = reader.left() / element.least_bytes();
        let Some(len) = usize::try_from(count).ok().filter(|&len| len <= most) else {
            return Err(Error::file(format!(
                "{what}: it claims {count} values, the file has room for {most}"
            )));
        };
        let rest = reader.rest();
        let start = reader.position();
        if matches!(element, Type::Text | Type::Bool) {
            for _ in 0..len {
                Value::read_one(reader, element, what)?;
            }
        } else {
            reader.take(len * element.least_bytes(), what)?;
        }
        let bytes = &rest[..reader.position() - start];
        Ok(Self { element, len, bytes })
    }

    /// How many values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (mut reader, element) = (Reader::new(self.bytes), self.element);
        (0..self.len).map_while(move |_| Value::read_one(&mut reader, element, "a list").ok())
    }
}

/// Without the values, of which there may be many.
impl std::fmt::Debug for List<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "a list of {} {:?}", self.len, self.element)
    }
}
