//! Who may ask, and whose cache a request may share.

use http::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest as _, Sha256};

use crate::error::ApiError;

/// Domain separation between a key's digest and the cache salt made of it.
const SALT_DOMAIN: &[u8] = b"quire.cache_salt.v1";

/// The key of this server, if it has one.
#[derive(Clone)]
pub struct Keys(Option<Key>);

#[derive(Clone)]
struct Key {
    digest: [u8; 32],
    salt: Vec<u8>,
}

impl Keys {
    /// Without a key, everyone may ask.
    #[must_use]
    pub fn new(key: Option<&str>) -> Self {
        Self(key.map(|key| Key { digest: Sha256::digest(key).into(), salt: salt(key) }))
    }

    /// Whether everyone may ask.
    #[must_use]
    pub fn open(&self) -> bool {
        self.0.is_none()
    }

    /// The cache salt of the caller.
    ///
    /// # Errors
    /// [`ApiError::Unauthorized`] unless `Authorization: Bearer KEY` names the key.
    pub fn authorize(&self, headers: &HeaderMap) -> Result<Vec<u8>, ApiError> {
        let Some(key) = &self.0 else { return Ok(Vec::new()) };
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(bearer).ok_or(ApiError::Unauthorized)?;
        let given: [u8; 32] = Sha256::digest(given).into();
        // Digests, all bytes of them: the time taken says nothing of the key.
        let difference = given.iter().zip(key.digest).fold(0, |difference, (left, right)| difference | (left ^ right));
        if difference == 0 { Ok(key.salt.clone()) } else { Err(ApiError::Unauthorized) }
    }
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, key) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

fn salt(key: &str) -> Vec<u8> {
    let mut hasher = Sha256::new();
    hasher.update(SALT_DOMAIN);
    hasher.update(key);
    hasher.finalize()[..16].to_vec()
}

/// The caller's salt with one of the client's choosing: it divides what the caller may share, and never joins callers.
#[must_use]
pub fn mixed_salt(own: &[u8], chosen: &str) -> Vec<u8> {
    let mut hasher = Sha256::new();
    hasher.update(SALT_DOMAIN);
    hasher.update((own.len() as u64).to_le_bytes());
    hasher.update(own);
    hasher.update(chosen);
    hasher.finalize()[..16].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn only_the_key_opens() {
        let keys = Keys::new(Some("secret"));
        assert!(keys.authorize(&headers("Bearer secret")).is_ok());
        assert!(keys.authorize(&headers("bearer  secret ")).is_ok());
        for wrong in ["Bearer secre", "Bearer secret2", "Bearer", "Basic secret", "secret", "Bearer "] {
            assert!(keys.authorize(&headers(wrong)).is_err(), "{wrong}");
        }
        assert!(keys.authorize(&HeaderMap::new()).is_err());
        assert!(!keys.open());
    }

    #[test]
    fn salts_differ_by_key_and_are_not_its_digest() {
        let (one, two) = (salt("a"), salt("b"));
        assert_ne!(one, two);
        assert_ne!(mixed_salt(&one, "x"), mixed_salt(&two, "x"));
        assert_ne!(mixed_salt(&one, "x"), mixed_salt(&one, "y"));
        assert_ne!(one, Sha256::digest("a")[..16].to_vec());
        assert_eq!(Keys::new(None).authorize(&HeaderMap::new()).unwrap(), Vec::<u8>::new());
    }
}
