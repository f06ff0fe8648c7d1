//! Typed reading of `config.json`.

use serde_json::{Map, Value};

use crate::model::{error::ContentError, gguf::clip};

/// The object that describes the text model, or one inside it.
#[derive(Clone, Copy)]
pub struct Config<'a> {
    json: &'a Map<String, Value>,
    /// For errors: the object's place, e.g. `rope_scaling.`.
    place: &'a str,
}

impl<'a> Config<'a> {
    #[must_use]
    pub fn new(json: &'a Map<String, Value>) -> Self {
        Self { json, place: "" }
    }

    /// What is wrong with a field.
    pub fn error(&self, key: &str, problem: impl std::fmt::Display) -> ContentError {
        ContentError::Model(format!(
            "config.json: field `{}{}{}` {problem}",
            self.place,
            if self.place.is_empty() { "" } else { "." },
            clip(key)
        ))
    }

    /// A field that is there and not null.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> ContentError {
        self.error(key, format!("is {}; it should be {wanted}", clip(&value.to_string())))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ContentError> {
        self.get(key).map(|value| value.as_str().ok_or_else(|| self.wrong(key, value, "a text"))).transpose()
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ContentError> {
        self.get(key).map(|value| value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false"))).transpose()
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ContentError> {
        Ok(self.boolean(key)?.unwrap_or(default))
    }

    /// A finite number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ContentError> {
        let finite = |value: &Value| value.as_f64().filter(|number| number.is_finite());
        self.get(key).map(|value| finite(value).ok_or_else(|| self.wrong(key, value, "a number"))).transpose()
    }

    /// A number above 0.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, ContentError> {
        match self.float(key)? {
            Some(number) if number <= 0.0 => Err(self.error(key, format!("is {number}; it should be above 0"))),
            number => Ok(number),
        }
    }

    /// A whole number between `least` and `most`.
    pub fn whole(&self, key: &str, least: u64, most: u64) -> Result<Option<usize>, ContentError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number as usize)),
            None => Err(self.wrong(key, value, &format!("a whole number between {least} and {most}"))),
        }
    }

    pub fn size(&self, key: &str, most: u64) -> Result<Option<usize>, ContentError> {
        self.whole(key, 1, most)
    }

    /// The first of several keys that is there: families spell the same differently.
    pub fn first_size(&self, keys: &[&str], most: u64) -> Result<Option<usize>, ContentError> {
        keys.iter().find(|key| self.get(key).is_some()).map_or(Ok(None), |key| self.size(key, most))
    }

    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, ContentError> {
        value.ok_or_else(|| self.error(key, "is missing"))
    }

    pub fn needed_size(&self, key: &str, most: u64) -> Result<usize, ContentError> {
        self.needed(key, self.size(key, most)?)
    }

    /// An object in a field.
    pub fn object(&self, key: &'a str) -> Result<Option<Config<'a>>, ContentError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_object() {
            Some(json) => Ok(Some(Config { json, place: key })),
            None => Err(self.wrong(key, value, "an object")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ContentError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let texts = value.as_array().and_then(|array| array.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        texts.map(Some).ok_or_else(|| self.wrong(key, value, "a list of texts"))
    }

    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>, ContentError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = value.as_array().and_then(|array| array.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
        numbers.map(Some).ok_or_else(|| self.wrong(key, value, "a list of numbers"))
    }

    /// A list of whole numbers, or of truth values as 0 and 1.
    pub fn wholes(&self, key: &str) -> Result<Option<Vec<u64>>, ContentError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = |value: &Value| value.as_u64().or_else(|| value.as_bool().map(u64::from));
        let numbers = value.as_array().and_then(|array| array.iter().map(number).collect::<Option<Vec<_>>>());
        numbers.map(Some).ok_or_else(|| self.wrong(key, value, "a list of whole numbers"))
    }
}
