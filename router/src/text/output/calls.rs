//! The states in which the parser reads calls, in every way but harmony's.

use super::Part;
use super::formats::Body;
use super::json_call::{ArgumentsScanner, CallScanner, Found, Status};
use super::literals::{self, Call, Extent};
use super::markers::{first, may_become};
use super::parser::{HEADER, OutputParser, State};

impl OutputParser {
    pub(super) fn opened(&mut self, bare: bool, out: &mut Vec<Part>) -> bool {
        let text = self.held.trim_start();
        let blank = self.held.len() - text.len();
        let format = self.format;
        if text.is_empty() {
            return false;
        }
        if let Some(opener) = format.openers.iter().find(|opener| text.starts_with(**opener)) {
            self.take(blank + opener.len());
            self.state = State::Opened { bare: false };
            return true;
        }
        if may_become(text, format.openers) || may_become(text, format.closers) {
            return false;
        }
        match text.as_bytes()[0] {
            b'{' => {
                self.take(blank + 1);
                self.state = State::Object { scanner: CallScanner::new(bare), announced: false, bare };
                true
            }
            b'[' => {
                let inner = text[1..].trim_start();
                match inner.chars().next() {
                    None => return false,
                    Some('{') => {
                        let length = self.held.len() - inner.len();
                        self.take(length);
                    }
                    Some(c) if format.bare && (c.is_alphabetic() || c == '_') => {
                        self.take(blank);
                        self.state = State::Python;
                    }
                    Some(_) => {
                        self.take(blank + 1);
                        self.give_up(out);
                    }
                }
                true
            }
            _ => {
                self.state = match format.body {
                    Body::Tagged | Body::Braces(_) if !bare => State::Whole,
                    Body::Named(_) if !bare => State::Header,
                    _ => {
                        self.give_up(out);
                        return true;
                    }
                };
                true
            }
        }
    }

    pub(super) fn in_object(&mut self, out: &mut Vec<Part>) -> bool {
        let held = std::mem::take(&mut self.held);
        let mut found = Vec::new();
        for (at, c) in held.char_indices() {
            let State::Object { scanner, announced, bare } = &mut self.state else { break };
            let mut status = scanner.feed(c, &mut found);
            if !*announced {
                self.raw.push(c);
                let name = found.iter().find_map(|found| if let Found::Name { name, .. } = found { Some(name.as_str()) } else { None });
                match name {
                    Some(name) if *bare && !self.tools.as_ref().is_some_and(|tools| tools.has(name)) => status = Status::Failed,
                    Some(_) => *announced = true,
                    None => {}
                }
            }
            match status {
                Status::More => {}
                Status::Done => {
                    self.say_found(&mut found, out);
                    self.held = held[at + c.len_utf8()..].to_owned();
                    self.state = State::Past { json: true };
                    return true;
                }
                Status::Failed => {
                    self.held = held[at + c.len_utf8()..].to_owned();
                    self.give_up(out);
                    return true;
                }
            }
        }
        self.say_found(&mut found, out);
        false
    }

    fn say_found(&mut self, found: &mut Vec<Found>, out: &mut Vec<Part>) {
        for found in found.drain(..) {
            match found {
                Found::Name { id, name } => self.announce(id, name, out),
                Found::Arguments(text) => self.arguments(text, out),
            }
        }
    }

    pub(super) fn in_header(&mut self, out: &mut Vec<Part>) -> bool {
        let window = &self.held[..self.held.floor_char_boundary(HEADER)];
        let brace = window.find('{');
        let closer = self.format.closers.iter().filter(|closer| **closer != "```").filter_map(|closer| window.find(closer)).min();
        let Some(end) = brace.into_iter().chain(closer).min() else {
            // As much as can't be a header any more, and the window is as it will ever be.
            if self.held.len() < HEADER + 4 {
                return false;
            }
            self.take(1);
            self.give_up(out);
            return true;
        };
        let Body::Named(read) = self.format.body else { return false };
        let named = read(&window[..end]).and_then(|(id, name)| Some((id, literals::plain_name(&name)?)));
        let Some((id, name)) = named else {
            self.take(end);
            self.give_up(out);
            return true;
        };
        self.held.drain(..end);
        self.announce(id, name, out);
        if brace == Some(end) {
            self.held.drain(..1);
            self.arguments("{".to_owned(), out);
            self.state = State::Arguments(ArgumentsScanner::new());
        } else {
            self.arguments("{}".to_owned(), out);
            self.state = State::Past { json: false };
        }
        true
    }

    pub(super) fn in_arguments(&mut self, out: &mut Vec<Part>) -> bool {
        let State::Arguments(scanner) = &mut self.state else { return false };
        let end = self.held.char_indices().find(|(_, c)| scanner.feed(*c)).map(|(at, c)| at + c.len_utf8());
        let text: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
        self.arguments(text, out);
        if end.is_some() {
            self.state = State::Past { json: false };
        }
        end.is_some()
    }

    pub(super) fn in_whole(&mut self, out: &mut Vec<Part>) -> bool {
        let Some((at, closer)) = first(&self.held, self.format.closers) else { return false };
        let Some(tools) = &self.tools else { return false };
        let call = match self.format.body {
            Body::Braces(quote) => literals::braces(&self.held[..at], quote),
            _ => literals::tagged(&self.held[..at], tools),
        };
        self.take(at + closer.len());
        match call {
            Some(call) => self.whole_call(call, out),
            None => self.give_up(out),
        }
        true
    }

    pub(super) fn in_python(&mut self, out: &mut Vec<Part>) -> bool {
        let Some(tools) = &self.tools else { return false };
        match literals::python_extent(&self.held, tools) {
            Extent::Open => return false,
            Extent::None => {
                self.take(1);
                self.give_up(out);
            }
            Extent::To(end) => {
                let calls = literals::python(&self.held[..end]);
                self.take(end);
                match calls {
                    Some(calls) => calls.into_iter().for_each(|call| self.whole_call(call, out)),
                    None => self.give_up(out),
                }
            }
        }
        true
    }

    fn whole_call(&mut self, (name, arguments): Call, out: &mut Vec<Part>) {
        self.announce(None, name, out);
        self.arguments(serde_json::Value::Object(arguments).to_string(), out);
        self.state = State::Past { json: false };
    }

    pub(super) fn past(&mut self, json: bool) -> bool {
        let text = self.held.trim_start();
        let blank = self.held.len() - text.len();
        let format = self.format;
        if text.is_empty() {
            return false;
        }
        if let Some(opener) = format.openers.iter().find(|opener| text.starts_with(**opener)) {
            self.raw.clear();
            self.held.drain(..blank);
            self.take(opener.len());
            self.state = State::Opened { bare: false };
        } else if let Some(closer) = format.closers.iter().find(|closer| text.starts_with(**closer)) {
            self.held.drain(..blank + closer.len());
            self.state = State::Past { json: false };
        } else if may_become(text, format.openers) || may_become(text, format.closers) {
            return false;
        } else {
            match text.as_bytes()[0] {
                b',' | b';' | b'[' if json => drop(self.held.drain(..=blank)),
                b']' if json => {
                    self.held.drain(..=blank);
                    self.state = State::Past { json: false };
                }
                b'{' if json => {
                    self.raw.clear();
                    self.held.drain(..blank);
                    self.take(1);
                    self.state = State::Object { scanner: CallScanner::new(format.bare), announced: false, bare: format.bare };
                }
                _ => {
                    self.trim = true;
                    self.state = State::Content;
                }
            }
        }
        true
    }
}
