//! Instruction set levels, found at run time.
//!
//! Owns the decision which level runs. Never computes. Arithmetic may differ between levels (in rounding only), so the
//! level's name is part of the numerics fingerprint.

use crate::KernelError;

/// Forces a level: `portable`, `avx2` or `avx512`.
pub const ISA_VARIABLE: &str = "QUIRE_CPU_ISA";

/// A level of instructions, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, any architecture.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
}

impl Isa {
    /// All levels, ascending.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512Vnni];

    /// The highest level that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Self::Portable)
    }

    /// [`Isa::detect`], unless the environment variable [`ISA_VARIABLE`] forces a level.
    ///
    /// # Errors
    /// The variable names no level, or one that this machine lacks.
    pub fn from_environment() -> Result<Self, KernelError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) => Self::named(&name),
            Err(std::env::VarError::NotPresent) => Ok(Self::detect()),
            Err(error) => Err(KernelError::Unsupported(format!("{ISA_VARIABLE}: {error}"))),
        }
    }

    /// The level with this name, if this machine has it.
    ///
    /// # Errors
    /// No level has this name, or this machine lacks it.
    pub fn named(name: &str) -> Result<Self, KernelError> {
        let isa = Self::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| KernelError::Unsupported(format!("instruction set {name:?} (known: portable, avx2, avx512)")))?;
        if isa.available() { Ok(isa) } else { Err(KernelError::Unsupported(format!("instruction set {name}, which this machine lacks,"))) }
    }

    /// Can it run here?
    #[must_use]
    pub fn available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Self::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The levels that this machine has, ascending.
    #[must_use]
    pub fn all_available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.available()).collect()
    }

    /// `portable`, `avx2`, `avx512`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512Vnni => "avx512",
        }
    }
}

/// Turns the matrix unit off: `off`. Results don't change, only speed.
pub const AMX_VARIABLE: &str = "QUIRE_CPU_AMX";

/// May this process use AMX tiles of bytes? A faster way to the same bits at the level [`Isa::Avx512Vnni`]. Asks the system for
/// permission at the first call, which holds for all threads.
#[must_use]
pub fn matrix_tiles() -> bool {
    static ALLOWED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *ALLOWED.get_or_init(|| std::env::var_os(AMX_VARIABLE).is_none_or(|value| value != "off") && ask_for_tiles())
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn ask_for_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// From the kernel's interface: ask for a processor state, here number 18, tile data.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    if !Isa::Avx512Vnni.available() || __cpuid(0).eax < 7 {
        return false;
    }
    // AMX-TILE and AMX-INT8.
    let has = __cpuid_count(7, 0).edx >> 24 & 3 == 3;
    // SAFETY: changes nothing but what this process may use; an older system refuses.
    has && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn ask_for_tiles() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_unknown_ones_refused() {
        assert_eq!(Isa::named("portable").unwrap(), Isa::Portable);
        let error = Isa::named("sse9").unwrap_err().to_string();
        assert!(error.contains("sse9") && error.contains("avx512"), "{error}");
        for isa in Isa::ALL {
            assert_eq!(Isa::named(isa.name()).is_ok(), isa.available(), "{}", isa.name());
        }
    }

    #[test]
    fn detection_gives_the_highest_available() {
        let found = Isa::detect();
        assert!(found.available());
        assert!(Isa::ALL.into_iter().all(|isa| !isa.available() || isa <= found));
        assert!(Isa::Portable < Isa::Avx2 && Isa::Avx2 < Isa::Avx512Vnni);
    }
}
