//! Values of msgpack out of a slice, by the types that are expected.
//!
//! Invariants: nothing is reserved for what a length only claims; a value of another type is an error.

use rmp::Marker;

use super::MessageError;

pub(super) type Read<T> = Result<T, MessageError>;

pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

pub(super) fn malformed(what: impl Into<String>) -> MessageError {
    MessageError::Malformed(what.into())
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// What was not read yet.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// As many elements may be reserved for: each takes a byte at least.
    pub(super) fn room(&self, claimed: usize) -> usize {
        claimed.min(self.rest.len())
    }

    fn take(&mut self, length: usize) -> Read<&'a [u8]> {
        let Some((found, rest)) = self.rest.split_at_checked(length) else {
            return Err(malformed("the frame is cut short"));
        };
        self.rest = rest;
        Ok(found)
    }

    fn fixed<const N: usize>(&mut self) -> Read<[u8; N]> {
        let Some((found, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(malformed("the frame is cut short"));
        };
        self.rest = rest;
        Ok(*found)
    }

    fn marker(&mut self) -> Read<Marker> {
        Ok(Marker::from_u8(self.fixed::<1>()?[0]))
    }

    fn len8(&mut self) -> Read<usize> {
        Ok(usize::from(self.fixed::<1>()?[0]))
    }

    fn len16(&mut self) -> Read<usize> {
        Ok(usize::from(u16::from_be_bytes(self.fixed()?)))
    }

    fn len32(&mut self) -> Read<usize> {
        Ok(u32::from_be_bytes(self.fixed()?) as usize)
    }

    pub(super) fn int(&mut self) -> Read<i64> {
        let marker = self.marker()?;
        self.int_of(marker)
    }

    fn int_of(&mut self, marker: Marker) -> Read<i64> {
        Ok(match marker {
            Marker::FixPos(value) => value.into(),
            Marker::FixNeg(value) => value.into(),
            Marker::U8 => u8::from_be_bytes(self.fixed()?).into(),
            Marker::U16 => u16::from_be_bytes(self.fixed()?).into(),
            Marker::U32 => u32::from_be_bytes(self.fixed()?).into(),
            Marker::U64 => {
                i64::try_from(u64::from_be_bytes(self.fixed()?)).map_err(|_| malformed("a number is too large"))?
            }
            Marker::I8 => i8::from_be_bytes(self.fixed()?).into(),
            Marker::I16 => i16::from_be_bytes(self.fixed()?).into(),
            Marker::I32 => i32::from_be_bytes(self.fixed()?).into(),
            Marker::I64 => i64::from_be_bytes(self.fixed()?),
            other => return Err(unexpected("a whole number", other)),
        })
    }

    pub(super) fn int32(&mut self) -> Read<i32> {
        i32::try_from(self.int()?).map_err(|_| malformed("a number is too large"))
    }

    pub(super) fn bool(&mut self) -> Read<bool> {
        match self.marker()? {
            Marker::True => Ok(true),
            Marker::False => Ok(false),
            other => Err(unexpected("true or false", other)),
        }
    }

    pub(super) fn optional_int(&mut self) -> Read<Option<i64>> {
        match self.marker()? {
            Marker::Null => Ok(None),
            other => self.int_of(other).map(Some),
        }
    }

    /// Python may send a whole number for it.
    pub(super) fn float(&mut self) -> Read<f64> {
        match self.marker()? {
            Marker::F64 => Ok(f64::from_be_bytes(self.fixed()?)),
            Marker::F32 => Ok(f32::from_be_bytes(self.fixed()?).into()),
            #[allow(clippy::cast_precision_loss)]
            other => Ok(self.int_of(other).map_err(|_| unexpected("a number", other))? as f64),
        }
    }

    pub(super) fn str(&mut self) -> Read<&'a str> {
        let marker = self.marker()?;
        self.str_of(marker)
    }

    fn str_of(&mut self, marker: Marker) -> Read<&'a str> {
        let length = match marker {
            Marker::FixStr(length) => length.into(),
            Marker::Str8 => self.len8()?,
            Marker::Str16 => self.len16()?,
            Marker::Str32 => self.len32()?,
            other => return Err(unexpected("a text", other)),
        };
        std::str::from_utf8(self.take(length)?).map_err(|_| malformed("a text is not UTF-8"))
    }

    pub(super) fn optional_str(&mut self) -> Read<Option<&'a str>> {
        match self.marker()? {
            Marker::Null => Ok(None),
            other => self.str_of(other).map(Some),
        }
    }

    pub(super) fn bin(&mut self) -> Read<&'a [u8]> {
        let length = match self.marker()? {
            Marker::Bin8 => self.len8()?,
            Marker::Bin16 => self.len16()?,
            Marker::Bin32 => self.len32()?,
            other => return Err(unexpected("bytes", other)),
        };
        self.take(length)
    }

    /// An array that travels as its bytes.
    pub(super) fn int64s(&mut self) -> Read<Vec<i64>> {
        let (values, rest) = self.bin()?.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(malformed("an array is no multiple of 8 bytes"));
        }
        Ok(values.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
    }

    pub(super) fn int32s(&mut self) -> Read<Vec<i32>> {
        let (values, rest) = self.bin()?.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(malformed("an array is no multiple of 4 bytes"));
        }
        Ok(values.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect())
    }

    pub(super) fn array(&mut self) -> Read<usize> {
        match self.marker()? {
            Marker::FixArray(length) => Ok(length.into()),
            Marker::Array16 => self.len16(),
            Marker::Array32 => self.len32(),
            other => Err(unexpected("an array", other)),
        }
    }

    pub(super) fn map(&mut self) -> Read<usize> {
        match self.marker()? {
            Marker::FixMap(length) => Ok(length.into()),
            Marker::Map16 => self.len16(),
            Marker::Map32 => self.len32(),
            other => Err(unexpected("a map", other)),
        }
    }

    pub(super) fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let length = self.array()?;
        let mut found = Vec::with_capacity(self.room(length));
        for _ in 0..length {
            found.push(one(self)?);
        }
        Ok(found)
    }

    /// Step over `number` values of any type.
    pub(super) fn skip(&mut self, number: usize) -> Read<()> {
        let mut left = number;
        while left > 0 {
            left -= 1;
            let (bytes, values) = match self.marker()? {
                Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => (0, 0),
                Marker::U8 | Marker::I8 => (1, 0),
                Marker::U16 | Marker::I16 => (2, 0),
                Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
                Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
                Marker::FixStr(length) => (length.into(), 0),
                Marker::Str8 | Marker::Bin8 => (self.len8()?, 0),
                Marker::Str16 | Marker::Bin16 => (self.len16()?, 0),
                Marker::Str32 | Marker::Bin32 => (self.len32()?, 0),
                Marker::FixArray(length) => (0, length.into()),
                Marker::Array16 => (0, self.len16()?),
                Marker::Array32 => (0, self.len32()?),
                Marker::FixMap(length) => (0, 2 * usize::from(length)),
                Marker::Map16 => (0, 2 * self.len16()?),
                Marker::Map32 => (0, 2 * self.len32()?),
                other => return Err(unexpected("a value", other)),
            };
            self.take(bytes)?;
            left += values;
        }
        Ok(())
    }
}

fn unexpected(wanted: &str, found: Marker) -> MessageError {
    malformed(format!("expected {wanted}, found {found:?}"))
}
