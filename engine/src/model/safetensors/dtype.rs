//! Element types by their safetensors names.

/// Type of a stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl Dtype {
    const ALL: [(Self, &'static str, usize); 16] = [
        (Self::Bool, "BOOL", 1),
        (Self::U8, "U8", 1),
        (Self::I8, "I8", 1),
        (Self::F8_E4M3, "F8_E4M3", 1),
        (Self::F8_E5M2, "F8_E5M2", 1),
        (Self::F8_E8M0, "F8_E8M0", 1),
        (Self::U16, "U16", 2),
        (Self::I16, "I16", 2),
        (Self::F16, "F16", 2),
        (Self::BF16, "BF16", 2),
        (Self::U32, "U32", 4),
        (Self::I32, "I32", 4),
        (Self::F32, "F32", 4),
        (Self::U64, "U64", 8),
        (Self::I64, "I64", 8),
        (Self::F64, "F64", 8),
    ];

    /// The type that a header names so.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known, _)| *known == name).map(|(dtype, ..)| *dtype)
    }

    fn facts(self) -> (&'static str, usize) {
        // Every variant is in the table; a test says so.
        Self::ALL.iter().find(|(dtype, ..)| *dtype == self).map_or(("?", 1), |(_, name, bytes)| (*name, *bytes))
    }

    /// As a header spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.facts().0
    }

    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.facts().1
    }
}

/// The value of an 8-bit float of this type; 0 for types that are none.
pub(in crate::model) fn decode_f8(dtype: Dtype, byte: u8) -> f32 {
    match dtype {
        Dtype::F8_E4M3 => e4m3(byte),
        Dtype::F8_E5M2 => e5m2(byte),
        _ => 0.0,
    }
}

/// The value of an 8-bit float with four exponent bits (bias 7), three of mantissa, no infinity: `S.1111.111` is NaN.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * (1.0 / 512.0),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of an 8-bit float with five exponent bits (bias 15): the upper half of an f16.
fn e5m2(byte: u8) -> f32 {
    half::f16::from_bits(u16::from(byte) << 8).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_name() {
        for (dtype, name, bytes) in Dtype::ALL {
            assert_eq!((Dtype::from_name(name), dtype.name(), dtype.bytes()), (Some(dtype), name, bytes));
        }
        assert_eq!(Dtype::from_name("F4"), None);
    }

    #[test]
    fn eight_bit_floats() {
        // From the OCP 8-bit floating point specification, table 1.
        assert_eq!([e4m3(0x7e), e4m3(0x08), e4m3(0x07), e4m3(0x01)], [448.0, 2f32.powi(-6), 0.875 * 2f32.powi(-6), 2f32.powi(-9)]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan() && e4m3(0x80) == 0.0 && e4m3(0xb8) == -1.0);
        assert_eq!([e5m2(0x7b), e5m2(0x04), e5m2(0x01)], [57344.0, 2f32.powi(-14), 2f32.powi(-16)]);
        assert!(e5m2(0x7c).is_infinite() && e5m2(0x7d).is_nan());
    }
}
