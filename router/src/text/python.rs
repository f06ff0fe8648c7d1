//! What chat templates take from Python: `json.dumps`, `strftime`, printed values, and methods that the template engine
//! lacks.

use std::fmt::Write;

use chrono::NaiveDateTime;
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::ser::Formatter;

/// Python's `time.strftime(format)`.
pub(super) fn strftime(time: NaiveDateTime, format: &str) -> Result<String, Error> {
    let mut out = String::new();
    write!(out, "{}", time.format(format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {format:?} is no date format")))?;
    Ok(out)
}

/// Python's `json.dumps(value, ensure_ascii=False, …)`, as Hugging Face's environment has it: nothing is escaped for HTML.
pub(super) fn to_json(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let fail = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"));
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: an undefined value is not JSON"));
    }
    let indent: Option<Value> = arguments.get("indent")?;
    let sort_keys: Option<bool> = arguments.get("sort_keys")?;
    let ascii: Option<bool> = arguments.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    arguments.assert_all_used()?;
    let indent = indent.filter(|indent| !indent.is_none() && !indent.is_undefined()).map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(16)),
    });
    let mut json = serde_json::to_value(value).map_err(fail)?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let between = if indent.is_some() { "," } else { ", " };
    let [item, key] =
        separators.and_then(|pair| <[String; 2]>::try_from(pair).ok()).unwrap_or_else(|| [between.to_owned(), ": ".to_owned()]);
    let mut out = Vec::new();
    let formatter = Dumps { item, key, indent, ascii: ascii == Some(true), depth: 0, empty: false };
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(fail)?;
    Ok(Value::from(String::from_utf8_lossy(&out).into_owned()))
}

/// The ways of `json.dumps`.
struct Dumps {
    item: String,
    key: String,
    indent: Option<String>,
    ascii: bool,
    depth: usize,
    /// Nothing was written since the last bracket.
    empty: bool,
}

type Done = std::io::Result<()>;

impl Dumps {
    fn line<W: ?Sized + std::io::Write>(&self, writer: &mut W) -> Done {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }

    fn open<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> Done {
        self.depth += 1;
        self.empty = true;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> Done {
        self.depth -= 1;
        if !std::mem::take(&mut self.empty) {
            self.line(writer)?;
        }
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> Done {
        self.empty = false;
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }
}

impl Formatter for Dumps {
    fn write_f64<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, value: f64) -> Done {
        writer.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, fragment: &str) -> Done {
        if !self.ascii || fragment.is_ascii() {
            return writer.write_all(fragment.as_bytes());
        }
        let mut units = [0; 2];
        for character in fragment.chars() {
            if character.is_ascii() {
                writer.write_all(&[character as u8])?;
            } else {
                for unit in character.encode_utf16(&mut units) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> Done {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> Done {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> Done {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> Done {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> Done {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> Done {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> Done {
        writer.write_all(self.key.as_bytes())
    }
}

/// Python's `repr` of a float: the shortest digits, plain from 1e-4 to 1e16, else with an exponent of at least two digits.
fn float(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 || (1e-4..1e16).contains(&magnitude) {
        let text = value.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// Python's `str(value)`, where it differs from the engine's: of floats, lists, tuples and dicts.
pub(super) fn text_of(value: &Value) -> Option<String> {
    let container = matches!(value.kind(), ValueKind::Seq | ValueKind::Map);
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    if !container && !is_float {
        return None;
    }
    let mut out = String::new();
    represent(value, 0, &mut out);
    Some(out)
}

/// Python's `repr`. What is nested deeper than JSON from a client can be is cut off.
fn represent(value: &Value, depth: usize, out: &mut String) {
    const DEEPEST: usize = 128;
    let items = |out: &mut String, brackets: [&str; 2], write: &dyn Fn(&mut String, &Value)| {
        out.push_str(brackets[0]);
        for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
            out.push_str(if index > 0 { ", " } else { "" });
            write(out, &item);
        }
        out.push_str(brackets[1]);
    };
    match value.kind() {
        _ if depth > DEEPEST => out.push_str("..."),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float));
        }
        ValueKind::Seq => {
            let is_tuple = value.downcast_object_ref::<minijinja::value::Tuple>().is_some();
            let brackets = match (is_tuple, value.len()) {
                (true, Some(1)) => ["(", ",)"],
                (true, _) => ["(", ")"],
                _ => ["[", "]"],
            };
            items(out, brackets, &|out, item| represent(item, depth + 1, out));
        }
        ValueKind::Map => items(out, ["{", "}"], &|out, key| {
            represent(key, depth + 1, out);
            out.push_str(": ");
            represent(&value.get_item(key).unwrap_or_default(), depth + 1, out);
        }),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Jinja's test: what a loop can go over; nothing is, as an undefined value, but `none` isn't.
pub(super) fn is_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::String | ValueKind::Undefined)
}

/// Jinja's test: what has a length and elements.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

/// Methods of Python's values: the engine's own, and what it lacks of those that templates use.
pub(super) fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, name, arguments)
    {
        return result;
    }
    if value.kind() == ValueKind::Map && name == "copy" {
        from_args::<()>(arguments)?;
        return Ok(value.clone());
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

fn string_method(text: &str, name: &str, arguments: &[Value]) -> Option<Result<Value, Error>> {
    let one = || from_args::<(&str,)>(arguments).map(|(argument,)| argument);
    let list = |parts: &[&str]| parts.iter().map(|part| Value::from(*part)).collect::<Value>();
    let three = |found: Option<(&str, &str)>, separator: &str, whole_first: bool| match found {
        Some((before, after)) => list(&[before, separator, after]),
        None if whole_first => list(&[text, "", ""]),
        None => list(&["", "", text]),
    };
    Some(match name {
        "removeprefix" => one().map(|prefix| Value::from(text.strip_prefix(prefix).unwrap_or(text))),
        "removesuffix" => one().map(|suffix| Value::from(text.strip_suffix(suffix).unwrap_or(text))),
        "partition" => one().map(|separator| three(text.split_once(separator), separator, true)),
        "rpartition" => one().map(|separator| three(text.rsplit_once(separator), separator, false)),
        "casefold" => from_args::<()>(arguments).map(|()| Value::from(text.to_lowercase())),
        "rsplit" => from_args::<(&str, Option<usize>)>(arguments).map(|(separator, most)| {
            let mut parts: Vec<&str> = match most {
                Some(most) => text.rsplitn(most.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            list(&parts)
        }),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_in_python() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (123_456.789, "123456.789"),
        ] {
            assert_eq!(float(value), text);
        }
    }
}
