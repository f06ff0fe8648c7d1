//! A cursor over bytes that may end anywhere.

use super::GgufError;

#[derive(Clone)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `need` bytes; `need` may be any number that a file claims.
    pub fn take(&mut self, need: u64, what: &str) -> Result<&'a [u8], GgufError> {
        match usize::try_from(need) {
            Ok(count) if count <= self.remaining() => {
                let taken = &self.bytes[self.at..self.at + count];
                self.at += count;
                Ok(taken)
            }
            _ => Err(GgufError::Truncated { what: what.to_owned(), at: self.at as u64, need, left: self.remaining() as u64 }),
        }
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        let mut value = [0; 4];
        value.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_le_bytes(value))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        let mut value = [0; 8];
        value.copy_from_slice(self.take(8, what)?);
        Ok(u64::from_le_bytes(value))
    }

    /// A length and that many bytes.
    pub fn string(&mut self, what: &str) -> Result<&'a [u8], GgufError> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A string that must be UTF-8.
    pub fn name(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let at = self.at;
        std::str::from_utf8(self.string(what)?).map_err(|_| GgufError::Header(format!("{what} at byte {at} is not UTF-8")))
    }

    /// A number of things that take at least `least` bytes each, so that it can be no more than the file has room for.
    pub fn count(&mut self, least: u64, what: &str) -> Result<usize, GgufError> {
        let at = self.at as u64;
        let count = self.u64(what)?;
        let left = self.remaining() as u64;
        match count.checked_mul(least) {
            Some(need) if need <= left => Ok(count as usize),
            need => Err(GgufError::Truncated { what: what.to_owned(), at, need: need.unwrap_or(u64::MAX), left }),
        }
    }
}
