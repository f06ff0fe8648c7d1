//! Calls in languages other than JSON, whole: tagged, braces, and Python. Each function reads a complete text, or says
//! that it isn't one.

use serde_json::{Map, Value};

/// Values within values, at most.
const MOST_NESTED: usize = 64;

/// A call's name, and its arguments as a JSON object.
pub(super) type Call = (String, Map<String, Value>);

/// The tools that a model may call: their names, and of what types their parameters are.
#[derive(Clone, Debug, Default)]
pub struct Tools(Vec<(String, Value)>);

impl Tools {
    /// From `tools` of a request.
    #[must_use]
    pub fn new(tools: &Value) -> Self {
        let tool = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            Some((name, function.pointer("/parameters/properties").cloned().unwrap_or(Value::Null)))
        };
        Self(tools.as_array().into_iter().flatten().filter_map(tool).collect())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(known, _)| known == name)
    }

    /// A value that came as bare text: text if the parameter is a string, else JSON if it is that.
    fn typed(&self, function: &str, parameter: &str, text: &str) -> Value {
        let properties = self.0.iter().find(|(name, _)| name == function).map(|(_, properties)| properties);
        let kind = properties.and_then(|properties| properties.get(parameter)).and_then(|schema| schema.get("type"));
        if kind.and_then(Value::as_str) == Some("string") {
            return Value::String(text.to_owned());
        }
        serde_json::from_str(text.trim()).unwrap_or_else(|_| Value::String(text.to_owned()))
    }
}

/// `<function=name><parameter=key>value</parameter></function>`, or `name<arg_key>key</arg_key><arg_value>value</arg_value>`.
pub(super) fn tagged(text: &str, tools: &Tools) -> Option<Call> {
    let text = text.trim();
    let Some(rest) = text.strip_prefix("<function=") else { return keyed(text, tools) };
    let (name, mut rest) = rest.split_once('>')?;
    let name = plain_name(name)?;
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if rest.starts_with("</function>") {
            return Some((name, arguments));
        }
        let (key, after) = rest.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), tools.typed(&name, key, value));
        rest = after;
    }
}

fn keyed(text: &str, tools: &Tools) -> Option<Call> {
    let (name, mut rest) = text.split_at(text.find("<arg_key>").unwrap_or(text.len()));
    let name = plain_name(name)?;
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, after) = rest.trim_start().strip_prefix("<arg_key>")?.split_once("</arg_key>")?;
        let (value, after) = after.trim_start().strip_prefix("<arg_value>")?.split_once("</arg_value>")?;
        arguments.insert(key.to_owned(), tools.typed(&name, key, value));
        rest = after;
    }
    Some((name, arguments))
}

/// A name such as functions have.
pub(super) fn plain_name(text: &str) -> Option<String> {
    let text = text.trim();
    let fine = !text.is_empty() && text.len() <= 256 && text.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c));
    fine.then(|| text.to_owned())
}

/// `call:name{key:value,…}`, strings between two `quote`s.
pub(super) fn braces(text: &str, quote: &'static str) -> Option<Call> {
    let text = text.trim().strip_prefix("call:")?;
    let brace = text.find('{')?;
    let name = plain_name(&text[..brace])?;
    let mut reader = Reader { rest: &text[brace..], quote: Some(quote) };
    let Value::Object(arguments) = reader.value(0)? else { return None };
    reader.rest.trim().is_empty().then_some((name, arguments))
}

/// How far a Python list of calls goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// It has not ended yet.
    Open,
    /// It ends before this byte.
    To(usize),
    /// It is none.
    None,
}

/// Looks at a text that begins with `[`.
pub(super) fn python_extent(text: &str, tools: &Tools) -> Extent {
    let inner = text[1..].trim_start();
    let name_length = inner.find(|c: char| !(c.is_alphanumeric() || "_.-".contains(c))).unwrap_or(inner.len());
    match inner[name_length..].chars().next() {
        None => return Extent::Open,
        Some('(') if tools.has(&inner[..name_length]) => {}
        Some(_) => return Extent::None,
    }
    let (mut depth, mut quote, mut escaped) = (0_usize, None, false);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            _ if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), _) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '(' | '{') => depth += 1,
            (None, ']' | ')' | '}') => {
                depth -= 1;
                if depth == 0 {
                    return Extent::To(at + 1);
                }
            }
            _ => {}
        }
    }
    Extent::Open
}

/// `[name(key=value, …), …]`.
pub(super) fn python(text: &str) -> Option<Vec<Call>> {
    let mut reader = Reader { rest: text.strip_prefix('[')?, quote: None };
    let mut calls = Vec::new();
    loop {
        let open = reader.rest.find('(')?;
        let name = plain_name(&reader.rest[..open])?;
        reader.rest = &reader.rest[open + 1..];
        let mut arguments = Map::new();
        while !reader.eat(')') {
            let (key, after) = reader.rest.split_once('=')?;
            let key = plain_name(key)?;
            reader.rest = after;
            arguments.insert(key, reader.value(0)?);
            if !reader.eat(',') {
                reader.eat(')').then_some(())?;
                break;
            }
        }
        calls.push((name, arguments));
        if reader.eat(']') {
            return reader.rest.trim().is_empty().then_some(calls);
        }
        reader.eat(',').then_some(())?;
    }
}

/// Reads values: Python's literals, or what stands in braces with `quote`s.
struct Reader<'a> {
    rest: &'a str,
    quote: Option<&'static str>,
}

impl<'a> Reader<'a> {
    fn eat(&mut self, c: char) -> bool {
        match self.rest.trim_start().strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MOST_NESTED {
            return None;
        }
        self.rest = self.rest.trim_start();
        if let Some(text) = self.quoted() {
            return Some(Value::String(text));
        }
        if self.eat('[') {
            let mut list = Vec::new();
            while !self.eat(']') {
                list.push(self.value(depth + 1)?);
                if !self.eat(',') {
                    self.eat(']').then_some(())?;
                    break;
                }
            }
            return Some(Value::Array(list));
        }
        if self.eat('{') {
            let mut map = Map::new();
            while !self.eat('}') {
                self.rest = self.rest.trim_start();
                let key = match self.quoted() {
                    Some(key) => key,
                    None => self.until(&[':'])?.trim().to_owned(),
                };
                self.eat(':').then_some(())?;
                map.insert(key, self.value(depth + 1)?);
                if !self.eat(',') {
                    self.eat('}').then_some(())?;
                    break;
                }
            }
            return Some(Value::Object(map));
        }
        let word = self.until(&[',', ']', '}', ')'])?.trim();
        match word {
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            "None" => Some(Value::Null),
            "" => None,
            _ => match serde_json::from_str(word) {
                Ok(value) => Some(value),
                Err(_) => self.quote.map(|_| Value::String(word.to_owned())),
            },
        }
    }

    fn until(&mut self, ends: &[char]) -> Option<&'a str> {
        let (word, rest) = self.rest.split_at(self.rest.find(ends)?);
        self.rest = rest;
        Some(word)
    }

    fn quoted(&mut self) -> Option<String> {
        if let Some(quote) = self.quote {
            let (text, rest) = self.rest.strip_prefix(quote)?.split_once(quote)?;
            self.rest = rest;
            return Some(text.to_owned());
        }
        let quote = self.rest.chars().next().filter(|c| "'\"".contains(*c))?;
        let mut text = String::new();
        let mut characters = self.rest[1..].char_indices();
        while let Some((at, c)) = characters.next() {
            if c == quote {
                self.rest = &self.rest[1 + at + 1..];
                return Some(text);
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            match characters.next()?.1 {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                escape @ ('x' | 'u') => {
                    let digits: String = characters.by_ref().take(if escape == 'x' { 2 } else { 4 }).map(|(_, c)| c).collect();
                    text.push(u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)?);
                }
                other => text.push(other),
            }
        }
        None
    }
}
