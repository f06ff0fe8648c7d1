use proptest::prelude::*;
use serde_json::{Value, json};

use super::formats::FORMATS;
use super::*;

/// What all parts of an answer add up to.
#[derive(Clone, Debug, Default, PartialEq)]
struct Whole {
    reasoning: String,
    content: String,
    calls: Vec<(Option<String>, String, String)>,
}

fn add(whole: &mut Whole, parts: Vec<Part>) {
    for part in parts {
        match part {
            Part::Reasoning(text) => whole.reasoning.push_str(&text),
            Part::Content(text) => whole.content.push_str(&text),
            Part::Call { index, id, name } => {
                assert_eq!(index as usize, whole.calls.len(), "calls are numbered in order");
                whole.calls.push((id, name, String::new()));
            }
            Part::Arguments { index, text } => whole.calls[index as usize].2.push_str(&text),
        }
    }
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

fn parse_pieces<'t>(template: &str, with_tools: bool, prompt_end: &str, pieces: impl IntoIterator<Item = &'t str>) -> Whole {
    let tools = with_tools.then(|| Tools::new(&tools()));
    let mut whole = Whole::default();
    let mut parts = Vec::new();
    let Some(mut parser) = OutputParser::new(ChatFormat::of_template(template), tools, prompt_end) else {
        whole.content = pieces.into_iter().collect();
        return whole;
    };
    for piece in pieces {
        parser.push(piece, &mut parts);
        assert!(parts.iter().all(|part| !matches!(part, Part::Content(t) | Part::Reasoning(t) if t.is_empty())), "{parts:?}");
        add(&mut whole, std::mem::take(&mut parts));
    }
    parser.finish(&mut parts);
    add(&mut whole, parts);
    whole
}

fn parse(template: &str, text: &str) -> Whole {
    let whole = parse_pieces(template, true, "", [text]);
    let characters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(parse_pieces(template, true, "", characters.iter().map(String::as_str)), whole, "{text}");
    whole
}

fn call(name: &str, arguments: Value) -> (String, Value) {
    (name.to_owned(), arguments)
}

fn calls(whole: &Whole) -> Vec<(String, Value)> {
    whole.calls.iter().map(|(_, name, arguments)| (name.clone(), serde_json::from_str(arguments).unwrap())).collect()
}

/// One sign of each format, as a template that only it fits.
const HERMES: &str = "<tool_call>";
const LLAMA: &str = "<|start_header_id|>";
const MISTRAL: &str = "[TOOL_CALLS]";
const DEEPSEEK: &str = "<｜tool▁call▁begin｜>";
const GRANITE: &str = "<|tool_call|>";
const FUNCTION_GEMMA: &str = "<start_function_call>";
const GEMMA: &str = "<|tool_call> <channel|>";
const HARMONY: &str = "<|channel|><|message|>";
const KIMI: &str = "<|tool_calls_section_begin|>";
const GENERIC: &str = "tools";
const LLAMA4: &str = "<|header_start|>";

/// Template, what a model says, the content and the calls that are in it.
#[allow(clippy::type_complexity)] // A table of cases.
fn examples() -> Vec<(&'static str, &'static str, &'static str, Vec<(String, Value)>)> {
    let paris = || call("get_weather", json!({"city": "Paris 🗼 日本 e\u{301}"}));
    let two = || vec![call("get_weather", json!({"city": "Ulm", "days": 2})), call("now", json!({}))];
    vec![
        (
            HERMES,
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris 🗼 日本 e\u{301}\"}}\n</tool_call>",
            "",
            vec![paris()],
        ),
        (
            HERMES,
            "Let me see.\n\n<tool_call>{\"arguments\": {\"city\": \"Ulm\", \"days\": 2}, \"name\": \"get_weather\"}</tool_call>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>",
            "Let me see.",
            two(),
        ),
        (
            HERMES,
            "<tool_call>{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call> done",
            "done",
            vec![call("now", json!({"a": 1}))],
        ),
        (
            HERMES,
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"</tool_call>\"}}</tool_call>",
            "",
            vec![call("now", json!({"a": "</tool_call>"}))],
        ),
        (
            HERMES,
            "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"now\", \"arguments\": null}}</tool_call>",
            "",
            vec![call("now", json!({}))],
        ),
        (
            HERMES,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n42\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            vec![call("get_weather", json!({"city": "42", "days": 2}))],
        ),
        (
            HERMES,
            "Yes.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
            "Yes.",
            two(),
        ),
        (
            LLAMA,
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Ulm\", \"days\": 2}}; {\"name\": \"now\", \"parameters\": {}}",
            "",
            two(),
        ),
        (LLAMA, "<|python_tag|>{\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}", "", vec![call("now", json!({}))]),
        (LLAMA, " [get_weather(city='Ulm', days=2), now()]", "", two()),
        (LLAMA4, "<|python_start|>[get_weather(city=\"Ulm\", days=2), now()]<|python_end|>", "", two()),
        (
            LLAMA4,
            "[get_weather(city='a\\'b]', days=[1, {'k': True, 'n': None}, -2.5])]",
            "",
            vec![call("get_weather", json!({"city": "a'b]", "days": [1, {"k": true, "n": null}, -2.5]}))],
        ),
        (
            MISTRAL,
            "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ulm\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"abc\"}]",
            "",
            two(),
        ),
        (MISTRAL, "So:[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{\"city\": \"Ulm\", \"days\": 2}[TOOL_CALLS]now[ARGS]{}", "So:", two()),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Ulm\", \"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            two(),
        ),
        (
            DEEPSEEK,
            "Hm. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Ulm\", \"days\": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Hm.",
            two(),
        ),
        (
            GRANITE,
            "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ulm\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]",
            "",
            two(),
        ),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:get_weather{city:<escape>Ulm<escape>,days:2}<end_function_call><start_function_call>call:now{}<end_function_call>",
            "",
            two(),
        ),
        (GEMMA, "<|tool_call>call:get_weather{city:<|\"|>Ulm<|\"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>", "", two()),
        (
            HARMONY,
            "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Ulm\", \"days\": 2}<|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>",
            "Let me look.",
            two(),
        ),
        (
            KIMI,
            "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Ulm\", \"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "Look.",
            two(),
        ),
        (GENERIC, "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ulm\", \"days\": 2}}, {\"name\": \"now\"}]", "", two()),
        (GENERIC, "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris 🗼 日本 e\u{301}\"}}", "", vec![paris()]),
    ]
}

#[test]
fn every_format_is_read() {
    for (template, text, content, expected) in examples() {
        let whole = parse(template, text);
        assert_eq!((whole.content.as_str(), calls(&whole)), (content, expected), "{text}");
    }
    assert_eq!(parse(KIMI, examples()[20].1).calls[0].0.as_deref(), Some("functions.get_weather:0"), "the model's own id");
    assert_eq!(parse(MISTRAL, "[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}").calls[0].0.as_deref(), Some("x1"));
}

/// A call that is none is the text that it was.
#[test]
fn what_is_no_call_is_text() {
    for (template, text) in [
        (HERMES, "A <tool_call> is a tag."),
        (HERMES, "<tool_call>{\"city\": 5}</tool_call> and so on"),
        (HERMES, "<tool_call>{\"name\": \"get_wea"),
        (HERMES, "<tool_call></tool_call>"),
        (HERMES, "a < b, a <tool, a <tool_call"),
        (HERMES, "<tool_call>not a name!</tool_call>"),
        (LLAMA, "{\"answer\": {\"name\": \"now\"}}"),
        (LLAMA, "{\"name\": \"unknown\", \"parameters\": {}} text"),
        (LLAMA, "{\"name\": 5}"),
        (LLAMA, "{} {\"name\": \"now\"}"),
        (LLAMA, "[1, 2, 3]"),
        (LLAMA, "[unknown(a=1)]"),
        (LLAMA, "[now"),
        (LLAMA, "[now(a=)] b"),
        (LLAMA, "[]"),
        (LLAMA, "["),
        (LLAMA, "  \n "),
        (LLAMA, "So: {\"name\": \"now\", \"parameters\": {}}"),
        (MISTRAL, "[TOOL_CALLS]what is this? [TOOL_CALLS"),
        (MISTRAL, "[1] [2]"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
        (GEMMA, "<|tool_call>call now<tool_call|>"),
        (KIMI, "<|tool_call_begin|> {}"),
        (GENERIC, "🗼"),
    ] {
        assert_eq!(parse(template, text), Whole { content: text.to_owned(), ..Whole::default() }, "{text}");
    }
}

#[test]
fn a_call_that_is_cut_keeps_what_there_is() {
    let whole = parse(HERMES, "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b");
    assert_eq!(whole.calls, [(None, "now".to_owned(), "{\"a\": \"b".to_owned())]);
    let whole = parse(HARMONY, "<|channel|>commentary to=functions.now<|message|>{\"a\"");
    assert_eq!(whole.calls, [(None, "now".to_owned(), "{\"a\"".to_owned())]);
    assert_eq!(parse(HARMONY, "<|channel|>comm"), Whole::default());
}

#[test]
fn long_headers_are_no_headers() {
    let text = format!("[TOOL_CALLS]{}{{}}", "é".repeat(600));
    assert_eq!(parse(MISTRAL, &text).content, text);
    let text = format!("<|channel|>{}<|message|>", "é".repeat(600));
    assert_eq!(parse(HARMONY, &text).content, text);
}

#[test]
fn thoughts_come_apart() {
    const THINK: &str = "<think></think>";
    for (template, prompt_end, text, reasoning, content) in [
        (THINK, "", "<think>\nHm. é\n</think>\n\nYes.\n", "Hm. é", "Yes.\n"),
        (THINK, "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (THINK, "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        (THINK, "", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (THINK, "", "<think>cut off </thin", "cut off </thin", ""),
        (THINK, "", "Say <think>a</think>.", "", "Say <think>a</think>."),
        (THINK, "", "  <thing> ", "", "  <thing> "),
        ("[THINK][/THINK]", "", "[THINK]a[/THINK]b", "a", "b"),
        (GEMMA, "", "<|channel>thought\na<channel|>b", "a", "b"),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes. <|return|>",
            "Hm.",
            "Yes. ",
        ),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>It", " is<|return|>", "", " is"),
        (HARMONY, "<|start|>assistant", "plain words", "", "plain words"),
    ] {
        let whole = parse_pieces(template, false, prompt_end, [text]);
        assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), (reasoning, content), "{text}");
        let characters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(parse_pieces(template, false, prompt_end, characters.iter().map(String::as_str)), whole, "{text}");
    }
    let whole = parse(
        "<think></think><tool_call>",
        "<think>\nI need it.\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
    );
    assert_eq!((whole.reasoning.as_str(), whole.content.as_str(), whole.calls.len()), ("I need it.", "", 1));
}

/// Arguments come as they are made, not at the end.
#[test]
fn arguments_are_streamed() {
    let mut parser = OutputParser::new(ChatFormat::of_template(HERMES), Some(Tools::default()), "").unwrap();
    let mut parts = Vec::new();
    parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", &mut parts);
    let call = Part::Call { index: 0, id: None, name: "f".to_owned() };
    assert_eq!(parts, [call, Part::Arguments { index: 0, text: "{\"a\": \"b".to_owned() }]);
}

#[test]
fn formats_are_told_apart_and_their_markers_too() {
    for (template, name) in [
        (HERMES, "tagged"),
        (LLAMA, "llama3"),
        (LLAMA4, "llama4"),
        (MISTRAL, "mistral"),
        (DEEPSEEK, "deepseek"),
        (GRANITE, "granite"),
        (GEMMA, "gemma4"),
        (FUNCTION_GEMMA, "function-gemma"),
        (HARMONY, "harmony"),
        (KIMI, "kimi"),
        (GENERIC, "generic"),
    ] {
        assert_eq!(ChatFormat::of_template(template).name(), name);
    }
    for format in &FORMATS {
        let markers: Vec<&str> = format.openers.iter().chain(format.closers).copied().collect();
        for one in &markers {
            assert!(markers.iter().all(|other| one == other || !other.contains(one)), "{}: {one} within another", format.name);
        }
    }
    let markers: Vec<_> = ChatFormat::of_template("<tool_call></think>").markers().collect();
    assert_eq!(markers, ["<tool_call>", "</tool_call>", "<think>", "</think>"]);
}

/// Pieces of everything that formats are made of, in any order.
fn scraps() -> impl Strategy<Value = String> {
    let scraps = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "{",
        "}",
        "[",
        "]",
        "\"name\"",
        ": ",
        "\"now\"",
        "\"get_weather\"",
        "\"arguments\"",
        "\"a\\\"\"",
        ", ",
        "; ",
        " ",
        "\n",
        "🗼",
        "日本",
        "e\u{301}",
        "text",
        "[TOOL_CALLS]",
        "[ARGS]",
        "now",
        "get_weather(",
        "city='x'",
        ")",
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|tool_call|>",
        "<|tool_call>",
        "<tool_call|>",
        "call:now{",
        "<|\"|>",
        "<|channel|>",
        "analysis",
        "final",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "assistant",
        " to=functions.now",
        "<|call|>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.now:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|python_tag|>",
        "<|python_start|>",
        "```json\n",
        "function",
        "<function=now>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|channel>thought",
        "<channel|>",
        "{\"name\": \"now\", \"arguments\": {\"a\": [1, \"}\"]}}",
        "1",
        "null",
    ]);
    prop::collection::vec(scraps, 0..14).prop_map(|scraps| scraps.concat())
}

fn cut(text: &str, cuts: &[prop::sample::Index]) -> Vec<String> {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut at: Vec<usize> = cuts.iter().map(|cut| places[cut.index(places.len())]).chain([0, text.len()]).collect();
    at.sort_unstable();
    at.windows(2).map(|pair| text[pair[0]..pair[1]].to_owned()).collect()
}

const TEMPLATES: [&str; 13] = [
    HERMES,
    LLAMA,
    MISTRAL,
    DEEPSEEK,
    GRANITE,
    GEMMA,
    FUNCTION_GEMMA,
    HARMONY,
    KIMI,
    GENERIC,
    LLAMA4,
    "<think></think><tool_call>",
    "<think></think>",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn cuts_do_not_matter_whatever_is_said(
        text in scraps(), template in prop::sample::select(TEMPLATES.to_vec()), with_tools: bool, thinking: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let prompt_end = if thinking { "<think>\n" } else { "" };
        let whole = parse_pieces(template, with_tools, prompt_end, [text.as_str()]);
        let pieces = cut(&text, &cuts);
        prop_assert_eq!(parse_pieces(template, with_tools, prompt_end, pieces.iter().map(String::as_str)), whole);
    }

    #[test]
    fn cuts_do_not_matter_in_calls(index in 0..24_usize, cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20)) {
        let examples = examples();
        let (template, text, content, expected) = &examples[index % examples.len()];
        let pieces = cut(text, &cuts);
        let whole = parse_pieces(template, true, "", pieces.iter().map(String::as_str));
        prop_assert_eq!((whole.content.as_str(), calls(&whole)), (*content, expected.clone()));
    }
}
