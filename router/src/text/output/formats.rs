//! The formats, as a table: by what a template's source shows of them, and by the markers between which calls and
//! thoughts stand.

/// Reads (id, name) from a header.
pub(super) type Split = fn(&str) -> Option<(Option<String>, String)>;

/// How a call is written after its opener, where it isn't JSON.
pub(super) enum Body {
    /// It is JSON.
    Json,
    /// `<function=…><parameter=…>` or a name with `<arg_key>`, `<arg_value>`, up to the closer.
    Tagged,
    /// A header with the name, then the arguments as JSON. The function reads (id, name) from the header.
    Named(Split),
    /// `call:name{key:value}` up to the closer; strings stand between two of these.
    Braces(&'static str),
    /// Messages with channels and recipients.
    Harmony,
}

/// One way to write calls.
pub(super) struct Format {
    pub name: &'static str,
    /// All of these in a template's source choose it.
    signs: &'static [&'static str],
    pub openers: &'static [&'static str],
    pub closers: &'static [&'static str],
    /// Further markers within calls.
    inner: &'static [&'static str],
    pub body: Body,
    /// An answer that begins with JSON or a Python list of calls is one, if it names a tool that there is.
    pub bare: bool,
}

/// Markers around thoughts at the beginning of an answer.
#[derive(Debug)]
pub(super) struct Thoughts {
    pub open: &'static str,
    pub close: &'static str,
}

const THOUGHTS: [Thoughts; 4] = [
    Thoughts { open: "<think>", close: "</think>" },
    Thoughts { open: "[THINK]", close: "[/THINK]" },
    Thoughts { open: "<|channel>thought", close: "<channel|>" },
    Thoughts { open: "<seed:think>", close: "</seed:think>" },
];

/// Where a message of the harmony format ends.
pub(super) const HARMONY_ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];
pub(super) const HARMONY_MESSAGE: &str = "<|message|>";
pub(super) const HARMONY_CHANNEL: &str = "<|channel|>";
const HARMONY_INNER: [&str; 7] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", HARMONY_MESSAGE, HARMONY_CHANNEL, "<|constrain|>"];

/// The first whose signs are all there is used; the last has none.
pub(super) const FORMATS: [Format; 11] = [
    Format {
        name: "harmony",
        signs: &["<|channel|>", "<|message|>"],
        openers: &[],
        closers: &[],
        inner: &HARMONY_INNER,
        body: Body::Harmony,
        bare: false,
    },
    Format {
        name: "kimi",
        signs: &["<|tool_calls_section_begin|>"],
        openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        closers: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        inner: &[KIMI_ARGUMENTS],
        body: Body::Named(kimi),
        bare: false,
    },
    Format {
        name: "deepseek",
        signs: &["<｜tool▁call▁begin｜>"],
        openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
        closers: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"],
        inner: &[DEEPSEEK_SEPARATOR],
        body: Body::Named(deepseek),
        bare: false,
    },
    Format {
        name: "mistral",
        signs: &["[TOOL_CALLS]"],
        openers: &["[TOOL_CALLS]"],
        closers: &[],
        inner: &[MISTRAL_ARGUMENTS, MISTRAL_ID],
        body: Body::Named(mistral),
        bare: false,
    },
    Format {
        name: "granite",
        signs: &["<|tool_call|>"],
        openers: &["<|tool_call|>"],
        closers: &["<|/tool_call|>"],
        inner: &[],
        body: Body::Json,
        bare: false,
    },
    Format {
        name: "function-gemma",
        signs: &["<start_function_call>"],
        openers: &["<start_function_call>"],
        closers: &["<end_function_call>"],
        inner: &["<escape>"],
        body: Body::Braces("<escape>"),
        bare: false,
    },
    Format {
        name: "gemma4",
        signs: &["<|tool_call>"],
        openers: &["<|tool_call>"],
        closers: &["<tool_call|>"],
        inner: &["<|\"|>"],
        body: Body::Braces("<|\"|>"),
        bare: false,
    },
    Format {
        name: "tagged",
        signs: &["<tool_call>"],
        openers: &["<tool_call>"],
        closers: &["</tool_call>"],
        inner: &[],
        body: Body::Tagged,
        bare: false,
    },
    Format {
        name: "llama4",
        signs: &["<|header_start|>"],
        openers: &["<|python_start|>"],
        closers: &["<|python_end|>"],
        inner: &[],
        body: Body::Json,
        bare: true,
    },
    Format {
        name: "llama3",
        signs: &["<|start_header_id|>"],
        openers: &["<|python_tag|>"],
        closers: &[],
        inner: &[],
        body: Body::Json,
        bare: true,
    },
    Format { name: "generic", signs: &[], openers: &[], closers: &[], inner: &[], body: Body::Json, bare: true },
];

const GENERIC: &Format = &FORMATS[FORMATS.len() - 1];

/// How a model writes thoughts and calls.
#[derive(Clone, Copy)]
pub struct ChatFormat {
    pub(super) calls: &'static Format,
    pub(super) thoughts: Option<&'static Thoughts>,
}

impl ChatFormat {
    /// What the source of a chat template shows.
    #[must_use]
    pub fn of_template(source: &str) -> Self {
        let calls = FORMATS.iter().find(|format| format.signs.iter().all(|sign| source.contains(sign))).unwrap_or(GENERIC);
        let thoughts = THOUGHTS.iter().find(|thoughts| source.contains(thoughts.close));
        Self { calls, thoughts }
    }

    /// The format of calls, by name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.calls.name
    }

    /// Every marker that must stay in the text for it to be read.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let calls = self.calls;
        let thoughts = self.thoughts.into_iter().flat_map(|thoughts| [thoughts.open.trim_end_matches("thought"), thoughts.close]);
        calls.openers.iter().chain(calls.closers).chain(calls.inner).copied().chain(thoughts)
    }
}

impl std::fmt::Debug for ChatFormat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ChatFormat").field("calls", &self.calls.name).field("thoughts", &self.thoughts).finish()
    }
}

const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
const MISTRAL_ID: &str = "[CALL_ID]";

/// `functions.name:0<|tool_call_argument_begin|>`: the id is all of it.
fn kimi(header: &str) -> Option<(Option<String>, String)> {
    let id = header.split(KIMI_ARGUMENTS).next()?.trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
    Some((Some(id.to_owned()), name.to_owned()))
}

/// `function<｜tool▁sep｜>name` and a fence (V3, R1), or `name<｜tool▁sep｜>` (V3.1).
fn deepseek(header: &str) -> Option<(Option<String>, String)> {
    let (first, second) = header.split_once(DEEPSEEK_SEPARATOR)?;
    let name = if first.trim() == "function" { second.lines().next()?.split("```").next()? } else { first };
    Some((None, name.trim().to_owned()))
}

/// `name[ARGS]` or `name[CALL_ID]id[ARGS]`.
fn mistral(header: &str) -> Option<(Option<String>, String)> {
    let header = header.split(MISTRAL_ARGUMENTS).next()?;
    let (name, id) = header.split_once(MISTRAL_ID).map_or((header, None), |(name, id)| (name, Some(id.trim().to_owned())));
    Some((id, name.trim().to_owned()))
}
