//! Typed access to a JSON body that knows where a value stands, so that every refusal names its field.
//!
//! `null` counts as absent, as clients that serialise optional fields expect; unknown fields are not looked at.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// A JSON object and its path in the body.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub fn root(value: &'a Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: String::new() }),
            other => Err(ApiError::Invalid { message: format!("The body must be a JSON object, not {}.", kind(other)), param: None }),
        }
    }

    /// An object that stands at `path`.
    pub fn at(value: &'a Value, path: String) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(wrong(&path, "an object", other)),
        }
    }

    /// Path of one of its fields.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The fields as they are.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// A value, unless it is absent or null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        #[cfg(test)]
        if self.path.is_empty() {
            SEEN.with_borrow_mut(|seen| seen.insert(name.to_owned()));
        }
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "a boolean", Value::as_bool)
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn object(&self, name: &str) -> Result<Option<Self>, ApiError> {
        self.get(name).map(|value| Self::at(value, self.path(name))).transpose()
    }

    /// A number that an `f32` holds.
    pub fn float(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.get(name).map(|value| float(value, &self.path(name))).transpose()
    }

    pub fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.get(name).map(|value| integer(value, &self.path(name))).transpose()
    }

    /// An integer from 0 to 2³² − 1.
    pub fn unsigned(&self, name: &str) -> Result<Option<u32>, ApiError> {
        self.get(name).map(|value| unsigned(value, &self.path(name))).transpose()
    }

    /// A list of token ids.
    pub fn ids(&self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        ids(list, &self.path(name)).map(Some)
    }

    fn read<T>(&self, name: &str, wanted: &str, reader: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        reader(value).map(Some).ok_or_else(|| wrong(&self.path(name), wanted, value))
    }
}

#[cfg(test)]
thread_local! {
    /// Names of a body's fields that were looked for, for the test that the API's description tells of all of them.
    pub static SEEN: std::cell::RefCell<std::collections::BTreeSet<String>> = const { std::cell::RefCell::new(std::collections::BTreeSet::new()) };
}

/// A finite number at `path`.
pub fn float(value: &Value, path: &str) -> Result<f32, ApiError> {
    let number = value.as_f64().ok_or_else(|| wrong(path, "a number", value))?;
    let narrow = number as f32;
    if narrow.is_finite() { Ok(narrow) } else { Err(ApiError::invalid(path, format!("`{path}` is out of range: {value}."))) }
}

/// An integer at `path`; `5.0` is one.
pub fn integer(value: &Value, path: &str) -> Result<i64, ApiError> {
    if let Some(number) = value.as_i64() {
        return Ok(number);
    }
    match value.as_f64() {
        // Above 2⁵³ a float no longer says which integer is meant.
        Some(number) if number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0 => Ok(number as i64),
        Some(number) if number.fract() == 0.0 => {
            Err(ApiError::invalid(path, format!("`{path}` is out of range: {value} does not fit 64 bits.")))
        }
        _ => Err(wrong(path, "an integer", value)),
    }
}

/// An integer from 0 to 2³² − 1 at `path`.
pub fn unsigned(value: &Value, path: &str) -> Result<u32, ApiError> {
    let number = integer(value, path)?;
    u32::try_from(number).map_err(|_| ApiError::invalid(path, format!("`{path}` must be between 0 and {}, not {number}.", u32::MAX)))
}

/// Token ids; `path` is the list's.
pub fn ids(list: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    list.iter().enumerate().map(|(index, value)| unsigned(value, &format!("{path}[{index}]"))).collect()
}

/// "`temperature` must be a number, not a string."
pub fn wrong(path: &str, wanted: &str, value: &Value) -> ApiError {
    ApiError::invalid(path, format!("`{path}` must be {wanted}, not {}.", kind(value)))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn param(error: ApiError) -> String {
        match error {
            ApiError::Invalid { param, .. } => param.unwrap_or_default(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn null_is_absent_and_wrong_types_name_their_path() {
        let body = json!({"a": null, "b": "x", "c": {"d": 3.5, "e": [1, -1]}});
        let root = Fields::root(&body).unwrap();
        assert_eq!(root.string("a").unwrap(), None);
        assert_eq!(root.string("b").unwrap(), Some("x"));
        assert_eq!(param(root.float("b").unwrap_err()), "b");
        let inner = root.object("c").unwrap().unwrap();
        assert_eq!(param(inner.integer("d").unwrap_err()), "c.d");
        assert_eq!(inner.float("d").unwrap(), Some(3.5));
        assert_eq!(param(inner.ids("e").unwrap_err()), "c.e[1]");
        assert_eq!(param(root.object("b").err().unwrap()), "b");
    }

    #[test]
    fn integers_keep_64_bits_and_refuse_more() {
        let body = json!({"max": i64::MAX, "over": u64::MAX, "whole": 5.0, "huge": 1e30, "wide": 4_294_967_296_u64});
        let root = Fields::root(&body).unwrap();
        assert_eq!(root.integer("max").unwrap(), Some(i64::MAX));
        assert_eq!(param(root.integer("over").unwrap_err()), "over");
        assert_eq!(root.integer("whole").unwrap(), Some(5));
        assert_eq!(param(root.integer("huge").unwrap_err()), "huge");
        assert_eq!(param(root.unsigned("wide").unwrap_err()), "wide");
        assert_eq!(param(root.float("huge_absent").map(|_| ApiError::invalid("none", "")).unwrap()), "none");
    }

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        assert!(Fields::root(&json!([1])).is_err());
        assert!(Fields::root(&json!("x")).is_err());
    }
}
