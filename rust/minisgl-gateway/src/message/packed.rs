//! Arrays that are encoded as raw bytes, and maps that are lists of pairs in Rust.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Error, Visitor};
use serde::ser::Serialize;

/// Array that is encoded as its little-endian bytes.
pub(super) struct Packed<'a, T>(pub &'a [T]);

impl<T: bytemuck::NoUninit> Serialize for Packed<'_, T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(self.0))
    }
}

#[cfg(not(target_endian = "little"))]
compile_error!("numbers travel little-endian");

pub(super) struct PackedVec<T>(pub Vec<T>);

impl<T> Default for PackedVec<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: bytemuck::Pod> Deserialize<'de> for PackedVec<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(PackedVisitor(PhantomData))
    }
}

pub(super) fn unpack<T: bytemuck::Pod>(bytes: &[u8]) -> Option<Vec<T>> {
    let is_whole = bytes.len().is_multiple_of(size_of::<T>());
    is_whole.then(|| bytemuck::allocation::pod_collect_to_vec(bytes))
}

struct PackedVisitor<T>(PhantomData<T>);

impl<T: bytemuck::Pod> Visitor<'_> for PackedVisitor<T> {
    type Value = PackedVec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<PackedVec<T>, E> {
        let size = size_of::<T>();
        if !bytes.len().is_multiple_of(size) {
            return Err(E::custom(format!(
                "{} bytes are no multiple of {size} bytes",
                bytes.len()
            )));
        }
        Ok(PackedVec(bytemuck::allocation::pod_collect_to_vec(bytes)))
    }
}

pub mod bytes {
    use serde::{Deserialize as _, Serialize as _};

    use crate::message::packed::{Packed, PackedVec};

    pub fn serialize<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        Packed(bytes).serialize(serializer)
    }

    pub fn deserialize<'de, T: From<Vec<u8>>, D: serde::Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        Ok(PackedVec::deserialize(deserializer)?.0.into())
    }
}

/// Map with its entries in order, as a list of keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairs<K, V>(pub Vec<(K, V)>);

impl<K, V> Default for Pairs<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Serialize, V: Serialize> Serialize for Pairs<K, V> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Deserialize<'de> for Pairs<K, V> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

struct PairsVisitor<K, V>(PhantomData<(K, V)>);

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Visitor<'de> for PairsVisitor<K, V> {
    type Value = Pairs<K, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut entries: A) -> Result<Pairs<K, V>, A::Error> {
        let mut pairs = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            pairs.push(entry);
        }
        Ok(Pairs(pairs))
    }
}
