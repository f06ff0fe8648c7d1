//! The incremental parser.
//!
//! Every decision looks at the text from a place on, and is the same whatever follows: a marker is found when it is
//! complete, and waited for while what is there may be its beginning. So cuts don't matter.

use super::Part;
use super::formats::{Body, ChatFormat, Format, Thoughts};
use super::harmony::{self, Message};
use super::json_call::{ArgumentsScanner, CallScanner};
use super::literals::Tools;
use super::markers::{beginning, first};

/// Bytes of a call's header, at most.
pub(super) const HEADER: usize = 512;

/// Splits one answer into parts.
pub struct OutputParser {
    pub(super) format: &'static Format,
    thoughts: Option<&'static Thoughts>,
    /// None: calls are not looked for.
    pub(super) tools: Option<Tools>,
    pub(super) state: State,
    /// Text that is not decided on.
    pub(super) held: String,
    /// Text since a call's opener, while it may turn out to be none.
    pub(super) raw: String,
    /// White space at the end of content: not part of it if a call follows.
    pub(super) blank: String,
    /// White space at the beginning of a section is left out.
    pub(super) trim: bool,
    /// Whether an answer may still turn out to be a call without opener.
    bare: bool,
    calls: u32,
}

pub(super) enum State {
    /// Nothing but white space came.
    Start,
    Thoughts,
    Content,
    /// Past an opener, or where one would be.
    Opened {
        bare: bool,
    },
    /// A call as a JSON object.
    Object {
        scanner: CallScanner,
        announced: bool,
        bare: bool,
    },
    Header,
    Arguments(ArgumentsScanner),
    /// All up to the closer is needed.
    Whole,
    Python,
    /// Past a call; with `json`, more may follow without an opener.
    Past {
        json: bool,
    },
    Harmony(Message),
}

impl OutputParser {
    /// For an answer to a prompt that ends with `prompt_end`; None if there is nothing to split.
    #[must_use]
    pub fn new(format: ChatFormat, tools: Option<Tools>, prompt_end: &str) -> Option<Self> {
        let harmony = matches!(format.calls.body, Body::Harmony);
        if !harmony && tools.is_none() && format.thoughts.is_none() {
            return None;
        }
        let open = |thoughts: &&Thoughts| prompt_end.trim_end().ends_with(thoughts.open);
        let state = match format.thoughts {
            _ if harmony => State::Harmony(harmony::start(prompt_end)),
            Some(thoughts) if open(&thoughts) => State::Thoughts,
            Some(_) => State::Start,
            None => State::Content,
        };
        let trim = matches!(state, State::Thoughts);
        Some(Self {
            bare: format.calls.bare && tools.is_some(),
            format: format.calls,
            thoughts: format.thoughts,
            tools,
            state,
            held: String::new(),
            raw: String::new(),
            blank: String::new(),
            trim,
            calls: 0,
        })
    }

    /// Takes text, and appends the parts that it decides.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.held.push_str(text);
        while !self.held.is_empty() && self.step(out) {}
    }

    /// The answer has ended.
    pub fn finish(&mut self, out: &mut Vec<Part>) {
        match &self.state {
            State::Start | State::Content => {
                let rest = std::mem::take(&mut self.held);
                self.content(&rest, out);
            }
            State::Thoughts | State::Harmony(Message::Thoughts) => {
                let rest = std::mem::take(&mut self.held);
                self.thought(&rest, out);
                self.blank.clear();
            }
            State::Opened { .. } | State::Header | State::Whole | State::Python | State::Object { announced: false, .. } => {
                let rest = std::mem::take(&mut self.held);
                self.raw.push_str(&rest);
                self.give_up(out);
            }
            State::Arguments(_) | State::Object { .. } | State::Past { .. } => {}
            State::Harmony(Message::Header) if self.held.trim_start().starts_with("<|") => {}
            State::Harmony(Message::Call { .. }) => {
                let rest = std::mem::take(&mut self.held);
                self.arguments(rest, out);
            }
            State::Harmony(Message::Header | Message::Content) => {
                let rest = std::mem::take(&mut self.held);
                self.content(&rest, out);
            }
        }
        self.held.clear();
        if !self.blank.is_empty() {
            say(out, std::mem::take(&mut self.blank));
        }
    }

    /// Whether something was decided, and more may be.
    fn step(&mut self, out: &mut Vec<Part>) -> bool {
        match &self.state {
            State::Start => self.start(),
            State::Thoughts => self.in_thoughts(out),
            State::Content => self.in_content(out),
            State::Opened { bare } => self.opened(*bare, out),
            State::Object { .. } => self.in_object(out),
            State::Header => self.in_header(out),
            State::Arguments(_) => self.in_arguments(out),
            State::Whole => self.in_whole(out),
            State::Python => self.in_python(out),
            State::Past { json } => self.past(*json),
            State::Harmony(Message::Header) => self.harmony_header(out),
            State::Harmony(message) => self.harmony_body(*message, out),
        }
    }

    fn start(&mut self) -> bool {
        let text = self.held.trim_start();
        let Some(thoughts) = self.thoughts.filter(|_| !text.is_empty()) else { return false };
        if let Some(rest) = text.strip_prefix(thoughts.open) {
            self.held = rest.to_owned();
            self.state = State::Thoughts;
            self.trim = true;
        } else if thoughts.open.starts_with(text) {
            return false;
        } else {
            self.state = State::Content;
        }
        true
    }

    fn in_thoughts(&mut self, out: &mut Vec<Part>) -> bool {
        let Some(thoughts) = self.thoughts else { return false };
        let (before, found) = self.until(&[thoughts.close]);
        self.thought(&before, out);
        if let Some(marker) = found {
            self.held.drain(..marker.len());
            self.blank.clear();
            self.trim = true;
            self.state = State::Content;
        }
        found.is_some()
    }

    fn in_content(&mut self, out: &mut Vec<Part>) -> bool {
        if self.tools.is_none() {
            let all = std::mem::take(&mut self.held);
            self.content(&all, out);
            return false;
        }
        if self.bare {
            let text = self.held.trim_start();
            if text.is_empty() {
                return false;
            }
            let blank = self.held.len() - text.len();
            self.bare = false;
            if text.starts_with(['{', '[']) {
                let blank: String = self.held.drain(..blank).collect();
                self.content(&blank, out);
                self.raw.clear();
                self.state = State::Opened { bare: true };
                return true;
            }
        }
        let (before, found) = self.until(self.format.openers);
        self.content(&before, out);
        if let Some(marker) = found {
            self.raw.clear();
            self.take(marker.len());
            self.state = State::Opened { bare: false };
        }
        found.is_some()
    }

    /// Takes what comes before the first of `markers`, or what can't be part of one.
    pub(super) fn until(&mut self, markers: &[&'static str]) -> (String, Option<&'static str>) {
        let found = first(&self.held, markers);
        let end = found.map_or_else(|| self.held.len() - beginning(&self.held, markers), |(at, _)| at);
        (self.held.drain(..end).collect(), found.map(|(_, marker)| marker))
    }

    /// Moves text to what may have to be given back.
    pub(super) fn take(&mut self, length: usize) {
        let length = self.held.ceil_char_boundary(length);
        self.raw.extend(self.held.drain(..length));
    }

    /// What looked like a call is text.
    pub(super) fn give_up(&mut self, out: &mut Vec<Part>) {
        let raw = std::mem::take(&mut self.raw);
        self.content(&raw, out);
        self.state = State::Content;
    }

    pub(super) fn announce(&mut self, id: Option<String>, name: String, out: &mut Vec<Part>) {
        self.raw.clear();
        self.blank.clear();
        out.push(Part::Call { index: self.calls, id, name });
        self.calls += 1;
    }

    pub(super) fn arguments(&mut self, text: String, out: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let number = self.calls.saturating_sub(1);
        match out.last_mut() {
            Some(Part::Arguments { index, text: before }) if *index == number => before.push_str(&text),
            _ => out.push(Part::Arguments { index: number, text }),
        }
    }

    pub(super) fn content(&mut self, text: &str, out: &mut Vec<Part>) {
        if let Some(ready) = self.without_blank(text, self.tools.is_some()) {
            say(out, ready);
        }
    }

    pub(super) fn thought(&mut self, text: &str, out: &mut Vec<Part>) {
        let Some(ready) = self.without_blank(text, true) else { return };
        match out.last_mut() {
            Some(Part::Reasoning(before)) => before.push_str(&ready),
            _ => out.push(Part::Reasoning(ready)),
        }
    }

    /// Text without what is white space at a section's beginning, or may be at its end.
    fn without_blank(&mut self, text: &str, hold: bool) -> Option<String> {
        let text = if self.trim { text.trim_start() } else { text };
        if text.is_empty() {
            return None;
        }
        self.trim = false;
        let end = if hold { text.trim_end().len() } else { text.len() };
        let ready = (end > 0).then(|| std::mem::take(&mut self.blank) + &text[..end]);
        self.blank.push_str(&text[end..]);
        ready
    }
}

fn say(out: &mut Vec<Part>, text: String) {
    match out.last_mut() {
        Some(Part::Content(before)) => before.push_str(&text),
        _ => out.push(Part::Content(text)),
    }
}
