//! What a model says, split into what it thinks, what it answers and what it calls, as it comes.
//!
//! One incremental parser over a table of formats ([`formats`]), chosen from the source of the model's chat template. What
//! comes out is a function of the whole text alone: wherever the text is cut on its way in, the parts, joined, are the
//! same. What begins like a call and is none comes out as the text that it was.
//!
//! Never knows a protocol: names of fields, ids of calls and finish reasons are the faces'.

mod calls;
mod formats;
mod harmony;
mod json_call;
mod literals;
mod markers;
mod parser;
#[cfg(test)]
mod tests;

pub use formats::ChatFormat;
pub use literals::Tools;
pub use parser::OutputParser;

/// A piece of what a model says. Pieces of a kind follow one another; joined they are the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Reasoning(String),
    Content(String),
    /// A call begins; calls are numbered from 0. `id` if the model gave one.
    Call {
        index: u32,
        id: Option<String>,
        name: String,
    },
    /// More of a call's arguments, as JSON text.
    Arguments {
        index: u32,
        text: String,
    },
}
