//! A model's chat template: messages to the text that the model was trained on.
//!
//! Templates are Jinja source from the model's author, written against Hugging Face's environment; this module is that
//! environment. Owns the bound on what a template may cost, and the marks by which special-token text that came from a
//! client is told from what the template wrote.
//!
//! **Marks.** Wrapping each content in brackets would change what templates see (`content.strip()`, `startswith`), so only
//! what could be taken for control is touched: within every string that a client sent, one private character goes in
//! after the first character of each special token's text, and after an unfinished one at the string's end. After
//! rendering the private characters are removed and their places kept: a special token may not span one of them.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::error::ApiError;
use crate::request::ChatPrompt;

/// Work that one rendering may do whatever the prompt's size, and for each of its bytes (about one a template instruction
/// or 64 bytes of text): some hundred milliseconds at most.
const BASE_FUEL: u64 = 2_000_000;
const FUEL_PER_BYTE: u64 = 4;
const NAME: &str = "chat_template";
/// Set by the server; a client's `chat_template_kwargs` can't.
const OWN_VARIABLES: [&str; 7] = ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"];

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

/// A rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Byte offsets, ascending, after characters that came from outside and could begin a special token's text.
    pub marks: Vec<usize>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`ApiError::Internal`]: it isn't valid.
    pub fn new(source: &str, bos_token: String, eos_token: String) -> Result<Self, ApiError> {
        let broken = |error: Error| ApiError::Internal(format!("The model's chat template is not valid: {error}"));
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(broken)?;
        Ok(Self { environment, bos_token, eos_token })
    }

    /// Renders messages. `special_texts`: what must not pass for control within them.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] with the template's own words where it refuses the messages, or costs too much.
    pub fn render(&self, prompt: &ChatPrompt, special_texts: &[String]) -> Result<Rendered, ApiError> {
        if let Some(name) = prompt.template_arguments.keys().find(|name| OWN_VARIABLES.contains(&name.as_str())) {
            return Err(ApiError::invalid("chat_template_kwargs", format!("`{name}` can't be set here.")));
        }
        let mut variables = Map::new();
        variables.extend(prompt.template_arguments.clone());
        variables.insert("messages".to_owned(), Json::Array(prompt.messages.clone()));
        variables.insert("tools".to_owned(), prompt.tools.clone().unwrap_or(Json::Null));
        variables.insert("documents".to_owned(), Json::Null);
        let mut variables = Json::Object(variables);
        let marker = Marker::new(&variables, special_texts)?;
        if let Some(marker) = &marker {
            marker.mark(&mut variables, false);
        }
        let size = text_bytes(&variables);
        if let Json::Object(map) = &mut variables {
            map.insert("add_generation_prompt".to_owned(), Json::Bool(prompt.add_generation_prompt.unwrap_or(true)));
            map.insert("bos_token".to_owned(), Json::String(self.bos_token.clone()));
            map.insert("eos_token".to_owned(), Json::String(self.eos_token.clone()));
        }
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(BASE_FUEL + FUEL_PER_BYTE * size as u64));
        let text =
            environment.get_template(NAME).and_then(|template| template.render(Serde(&variables))).map_err(|error| refused(&error))?;
        Ok(match marker {
            Some(marker) => marker.unmark(&text),
            None => Rendered { text, marks: Vec::new() },
        })
    }
}

fn refused(error: &Error) -> ApiError {
    let reason = match error.kind() {
        ErrorKind::OutOfFuel => "it takes too much work".to_owned(),
        ErrorKind::InvalidOperation => error.detail().map_or_else(|| error.to_string(), str::to_owned),
        _ => error.to_string(),
    };
    ApiError::invalid("messages", format!("The model's chat template can't render these messages: {reason}"))
}

/// Puts marks into what came from a client, and finds them again.
struct Marker<'a> {
    special_texts: &'a [String],
    sign: char,
}

impl<'a> Marker<'a> {
    /// None if nothing in the variables could be taken for control, which is nearly always.
    fn new(variables: &Json, special_texts: &'a [String]) -> Result<Option<Self>, ApiError> {
        let probe = Self { special_texts, sign: '\0' };
        let mut needed = false;
        each_string(variables, &mut |text| needed |= probe.places(text, false).next().is_some());
        if !needed {
            return Ok(None);
        }
        // Noncharacters: of no use in text, and of use here only if the text has none.
        for sign in '\u{fdd0}'..='\u{fdef}' {
            let mut taken = false;
            each_string(variables, &mut |text| taken |= text.contains(sign));
            if !taken {
                return Ok(Some(Self { special_texts, sign }));
            }
        }
        Err(ApiError::invalid("messages", "The messages hold all Unicode noncharacters from U+FDD0 to U+FDEF."))
    }

    /// Where marks go in one string. Templates look for an assistant's thoughts themselves, and thoughts are no control.
    fn places<'t>(&'t self, text: &'t str, assistant: bool) -> impl Iterator<Item = usize> + 't {
        text.char_indices().filter_map(move |(at, first)| {
            let rest = &text[at..];
            let hit = self.special_texts.iter().any(|special| {
                let thought = assistant && matches!(special.as_str(), "<think>" | "</think>");
                // The whole of it, or its beginning at the end of the string, to be finished by what follows there.
                !thought && (rest.starts_with(special.as_str()) || special.starts_with(rest))
            });
            hit.then_some(at + first.len_utf8())
        })
    }

    fn mark(&self, value: &mut Json, assistant: bool) {
        match value {
            Json::String(text) => {
                let places: Vec<usize> = self.places(text, assistant).collect();
                for place in places.into_iter().rev() {
                    text.insert(place, self.sign);
                }
            }
            Json::Array(items) => items.iter_mut().for_each(|item| self.mark(item, assistant)),
            Json::Object(map) => {
                let assistant = assistant || map.get("role").and_then(Json::as_str) == Some("assistant");
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(key, mut value)| {
                        self.mark(&mut value, assistant);
                        let mut key = Json::String(key);
                        self.mark(&mut key, assistant);
                        (key.as_str().unwrap_or_default().to_owned(), value)
                    })
                    .collect();
            }
            _ => {}
        }
    }

    fn unmark(&self, text: &str) -> Rendered {
        let mut rendered = Rendered { text: String::with_capacity(text.len()), marks: Vec::new() };
        for (index, piece) in text.split(self.sign).enumerate() {
            if index > 0 {
                rendered.marks.push(rendered.text.len());
            }
            rendered.text.push_str(piece);
        }
        rendered
    }
}

fn each_string(value: &Json, visit: &mut impl FnMut(&str)) {
    match value {
        Json::String(text) => visit(text),
        Json::Array(items) => items.iter().for_each(|item| each_string(item, visit)),
        Json::Object(map) => map.iter().for_each(|(key, value)| {
            visit(key);
            each_string(value, visit);
        }),
        _ => {}
    }
}

/// Bytes of all strings in a message's value: what a template can put into a prompt.
pub fn text_bytes(value: &Json) -> usize {
    let mut bytes = 0;
    each_string(value, &mut |text| bytes += text.len());
    bytes
}

/// Python's `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> Result<String, Error> {
    use std::fmt::Write;
    let mut out = String::new();
    write!(out, "{}", chrono::Local::now().format(format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {format:?} is no date format")))?;
    Ok(out)
}

/// Python's `json.dumps(value, ensure_ascii=False, …)`, as Hugging Face's environment has it: nothing is escaped for HTML.
fn to_json(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let fail = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"));
    let indent: Option<usize> = arguments.get("indent")?;
    let sort_keys: Option<bool> = arguments.get("sort_keys")?;
    let _: Option<bool> = arguments.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    arguments.assert_all_used()?;
    let mut json = serde_json::to_value(value).map_err(fail)?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    let separators = separators.and_then(|pair| <[String; 2]>::try_from(pair).ok());
    match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            serde::Serialize::serialize(&json, &mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(fail)?;
        }
        None => {
            let [item, key] = separators.unwrap_or_else(|| [", ".to_owned(), ": ".to_owned()]);
            let formatter = Spaced { item: item.into_bytes(), key: key.into_bytes() };
            serde::Serialize::serialize(&json, &mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(fail)?;
        }
    }
    Ok(Value::from(String::from_utf8_lossy(&out).into_owned()))
}

/// Python's separators.
struct Spaced {
    item: Vec<u8>,
    key: Vec<u8>,
}

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(&self.item) }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(&self.item) }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(&self.key)
    }
}

/// `{% generation %}` marks for training what an assistant said; for rendering it is a block without meaning.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        let word = tag.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..start + 2]);
        match replacement {
            Some(replacement) => out.push_str(&tag.replace(word, &format!(" {replacement} "))),
            None => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
