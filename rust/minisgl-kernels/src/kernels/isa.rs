//! Selection of the instruction set.
//!
//! Invariants: an `Isa` that `detect` returns can run here.

use super::Mode;
use crate::Kind;
use crate::{Error, Result};

/// Instruction set with kernels of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, which defines every result.
    #[default]
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 plus AVX-VNNI byte products: laptop and desktop processors since 2021 without AVX-512.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// AVX-512 and AMX tiles.
    Amx,
    /// ARM NEON (128-bit vectors).
    Neon,
}

impl Isa {
    /// Names in settings (`MINISGL_CPU_ISA`).
    const NAMES: [(&'static str, Self); 6] = [
        ("scalar", Self::Scalar),
        ("avx2", Self::Avx2),
        ("avxvnni", Self::AvxVnni),
        ("avx512", Self::Avx512),
        ("amx", Self::Amx),
        ("neon", Self::Neon),
    ];

    /// Returns the name in settings.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|(_, isa)| *isa == self)
            .map_or("", |(name, _)| name)
    }

    /// Returns the best instruction set of this CPU, or the one named (`MINISGL_CPU_ISA`). Fails if the name is unknown
    /// or the CPU lacks it; the error names the missing features.
    pub fn detect(held_down_by: Option<&str>) -> Result<Self> {
        let Some(name) = held_down_by.filter(|name| !name.is_empty()) else {
            let best_first = [Self::Amx, Self::Avx512, Self::AvxVnni, Self::Avx2, Self::Neon];
            let here = best_first.into_iter().find(|isa| isa.missing().is_empty());
            return Ok(here.unwrap_or(Self::Scalar));
        };
        let Some(&(_, isa)) = Self::NAMES.iter().find(|(known, _)| *known == name) else {
            let known = Self::NAMES.map(|(name, _)| name).join(", ");
            return Err(Error::setting(format!(
                "MINISGL_CPU_ISA is {name:?}; it must be one of {known}"
            )));
        };
        let missing = isa.missing();
        if missing.is_empty() {
            return Ok(isa);
        }
        Err(Error::setting(format!(
            "MINISGL_CPU_ISA is {name:?}, but this CPU has no {}",
            missing.join(", ")
        )))
    }

    /// Returns every instruction set that can run here.
    #[must_use]
    pub fn here() -> Vec<Self> {
        let all = Self::NAMES.into_iter().map(|(_, isa)| isa);
        all.filter(|isa| isa.missing().is_empty()).collect()
    }

    /// Returns true if matmuls of that kind have the bits of the scalar kernel. AMX bf16 tiles sum in an order of their
    /// own, which is the same for every number of rows.
    #[must_use]
    pub const fn sums_as_scalar(self, kind: Kind, mode: Mode) -> bool {
        !matches!(self, Self::Amx) || mode.int8_with(kind)
    }

    /// Returns the features that the CPU (or this build) lacks for this instruction set.
    fn missing(self) -> Vec<&'static str> {
        match self {
            Self::Scalar => Vec::new(),
            Self::Avx2 => missing_avx2(),
            Self::AvxVnni => missing_avxvnni(),
            Self::Avx512 => missing_avx512(),
            Self::Amx => missing_amx(),
            Self::Neon if cfg!(target_arch = "aarch64") => Vec::new(),
            Self::Neon => vec![self.name()],
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn missing_avx2() -> Vec<&'static str> {
    let has = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
    ];
    lacking(&has)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn missing_avxvnni() -> Vec<&'static str> {
    let mut missing = missing_avx2();
    missing.extend(lacking(&[("avxvnni", is_x86_feature_detected!("avxvnni"))]));
    missing
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn missing_avx512() -> Vec<&'static str> {
    let mut missing = missing_avx2();
    missing.extend(lacking(&[
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
    ]));
    missing
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn missing_amx() -> Vec<&'static str> {
    let mut missing = missing_avx512();
    missing.extend(super::amx::missing());
    missing
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn missing_amx() -> Vec<&'static str> {
    vec!["amx"]
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn lacking(has: &[(&'static str, bool)]) -> Vec<&'static str> {
    has.iter().filter(|(_, here)| !here).map(|&(name, _)| name).collect()
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn missing_avx2() -> Vec<&'static str> {
    vec!["avx2"]
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn missing_avxvnni() -> Vec<&'static str> {
    vec!["avxvnni"]
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn missing_avx512() -> Vec<&'static str> {
    vec!["avx512f"]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detected_isa_can_be_requested_by_name() {
        let best = Isa::detect(None).unwrap();
        assert_eq!(Isa::detect(Some(best.name())), Ok(best));
        assert_eq!(Isa::detect(Some("scalar")), Ok(Isa::Scalar));
        assert!(Isa::here().contains(&best));
    }

    #[test]
    fn an_unavailable_isa_is_named_in_the_error() {
        let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
        let text = Isa::detect(Some(foreign)).unwrap_err().to_string();
        assert!(text.contains(foreign) && text.contains("no "), "{text}");
        let text = Isa::detect(Some("mmx")).unwrap_err().to_string();
        assert!(text.contains("one of scalar"), "{text}");
    }
}
