//! A model's chat template: messages to the text that the model was trained on.
//!
//! Templates are Jinja source from the model's author, written against Hugging Face's environment; this module is that
//! environment. Owns the bound on what a template may cost, and which of several templates is used.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use super::marks::{Guarded, Marker, free_sign, text_bytes};
use super::python;
use crate::error::ApiError;
use crate::request::ChatPrompt;

/// Work that one rendering may do whatever the prompt's size, and for each of its bytes (about one a template instruction
/// or 64 bytes of text): some hundred milliseconds at most.
const BASE_FUEL: u64 = 2_000_000;
const FUEL_PER_BYTE: u64 = 4;
/// Names of templates, where a model has several.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// Set by the server; a client's `chat_template_kwargs` can't.
const OWN_VARIABLES: [&str; 7] = ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"];
/// Names under which clients send what an assistant thought, the one that templates read first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The time now, where the model's templates think they are.
pub type Clock = Arc<dyn Fn() -> NaiveDateTime + Send + Sync>;

/// A compiled chat template, or several by name.
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
    /// Compiles templates: Jinja source, or a JSON object of name → source.
    ///
    /// # Errors
    /// [`ApiError::Internal`]: one isn't valid.
    pub fn new(source: &str, bos_token: String, eos_token: String) -> Result<Self, ApiError> {
        Self::with_clock(source, bos_token, eos_token, Arc::new(|| chrono::Local::now().naive_local()))
    }

    /// As [`ChatTemplate::new`]; dates in templates are those of `clock`.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub fn with_clock(source: &str, bos_token: String, eos_token: String, clock: Clock) -> Result<Self, ApiError> {
        let broken = |error: Error| ApiError::Internal(format!("The model's chat template is not valid: {error}"));
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?);
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(|out, state, value| match python::text_of(value) {
            Some(text) => out.write_str(&text).map_err(Error::from),
            None => minijinja::escape_formatter(out, state, value),
        });
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", move |format: &str| python::strftime(clock(), format));
        environment.add_filter("tojson", python::to_json);
        environment
            .add_filter("string", |value: Value| python::text_of(&value).map_or_else(|| Value::from(value.to_string()), Value::from));
        environment.add_test("iterable", python::is_iterable);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
        for (name, source) in named(source) {
            environment.add_template_owned(name, without_generation_tags(&source)).map_err(broken)?;
        }
        Ok(Self { environment, bos_token, eos_token })
    }

    /// Renders messages. `guarded`: what must not pass for control within them.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] with the template's own words where it refuses the messages, or costs too much.
    pub fn render(&self, prompt: &ChatPrompt, guarded: &Guarded) -> Result<Rendered, ApiError> {
        let mut variables = variables(prompt)?;
        let marker = Marker::new(&variables, guarded)?;
        if let Some(marker) = &marker {
            marker.mark(&mut variables, false);
        }
        let end = if prompt.continue_final_message { Some(mark_end(&mut variables)?) } else { None };
        let size = text_bytes(&variables);
        if let Json::Object(map) = &mut variables {
            let asks = prompt.add_generation_prompt.unwrap_or(!prompt.continue_final_message);
            map.insert("add_generation_prompt".to_owned(), Json::Bool(asks));
            map.insert("bos_token".to_owned(), Json::String(self.bos_token.clone()));
            map.insert("eos_token".to_owned(), Json::String(self.eos_token.clone()));
        }
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(BASE_FUEL + FUEL_PER_BYTE * size as u64));
        let template = self.choose(&environment, prompt.tools.is_some())?;
        let mut text = template.render(Serde(&variables)).map_err(|error| refused(&error))?;
        if let Some(end) = end {
            cut(&mut text, end)?;
        }
        let (text, marks) = marker.map_or_else(|| (text.clone(), Vec::new()), |marker| marker.unmark(&text));
        Ok(Rendered { text, marks })
    }

    /// As Hugging Face chooses.
    fn choose<'e>(&self, environment: &'e Environment<'_>, tools: bool) -> Result<minijinja::Template<'e, 'e>, ApiError> {
        let names = if tools { &[TOOL_USE, DEFAULT][..] } else { &[DEFAULT] };
        names.iter().find_map(|name| environment.get_template(name).ok()).ok_or_else(|| {
            let known: Vec<&str> = self.environment.templates().map(|(name, _)| name).collect();
            ApiError::invalid("messages", format!("This model has no default chat template, only: {}.", known.join(", ")))
        })
    }
}

/// Templates by name.
fn named(source: &str) -> BTreeMap<String, String> {
    let several = source.starts_with('{').then(|| serde_json::from_str(source).ok()).flatten();
    several.unwrap_or_else(|| BTreeMap::from([(DEFAULT.to_owned(), source.to_owned())]))
}

/// What a client's part of a template's variables is.
fn variables(prompt: &ChatPrompt) -> Result<Json, ApiError> {
    if let Some(name) = prompt.template_arguments.keys().find(|name| OWN_VARIABLES.contains(&name.as_str())) {
        return Err(ApiError::invalid("chat_template_kwargs", format!("`{name}` can't be set here.")));
    }
    if prompt.continue_final_message && prompt.add_generation_prompt == Some(true) {
        let message = "`continue_final_message` and `add_generation_prompt` exclude each other.";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let mut variables = Map::new();
    variables.extend(prompt.template_arguments.clone());
    variables.insert("messages".to_owned(), prompt.messages.iter().map(message).collect());
    variables.insert("tools".to_owned(), prompt.tools.clone().unwrap_or(Json::Null));
    variables.insert("documents".to_owned(), prompt.documents.clone().unwrap_or(Json::Null));
    Ok(Json::Object(variables))
}

/// A message without nulls, and with an assistant's thoughts under each name that templates read.
fn message(message: &Json) -> Json {
    let Json::Object(fields) = message else { return message.clone() };
    let mut fields: Map<String, Json> = fields.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
    if let Some(reasoning) = REASONING.iter().find_map(|name| fields.get(*name)).cloned() {
        fields.entry("thinking").or_insert_with(|| reasoning.clone());
        fields.insert(REASONING[0].to_owned(), reasoning);
    }
    Json::Object(fields)
}

/// Puts a private character and a space behind the last message's content.
fn mark_end(variables: &mut Json) -> Result<char, ApiError> {
    let sign = free_sign(variables)?;
    let content = variables.get_mut("messages").and_then(|messages| messages.as_array_mut()?.last_mut()?.get_mut("content"));
    match content {
        Some(Json::String(text)) => {
            text.push(sign);
            text.push(' ');
            Ok(sign)
        }
        _ => Err(ApiError::invalid("continue_final_message", "The last message has no text to continue.")),
    }
}

/// Ends a prompt where the last message's content does. If the template trimmed that, so is the prompt.
fn cut(text: &mut String, end: char) -> Result<(), ApiError> {
    let Some(at) = text.rfind(end) else {
        let message = "The model's chat template leaves out the last message, so it can't be continued.";
        return Err(ApiError::invalid("continue_final_message", message));
    };
    let whole = text[at + end.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if !whole {
        text.truncate(text.trim_end().len());
    }
    // It may have been written more than once.
    text.retain(|character| character != end);
    Ok(())
}

fn refused(error: &Error) -> ApiError {
    let reason = match error.kind() {
        ErrorKind::OutOfFuel => "it takes too much work".to_owned(),
        ErrorKind::InvalidOperation => error.detail().map_or_else(|| error.to_string(), str::to_owned),
        _ => error.to_string(),
    };
    ApiError::invalid("messages", format!("The model's chat template can't render these messages: {reason}"))
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
