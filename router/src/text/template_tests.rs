use serde_json::json;

use super::super::marks::Guarded;
use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>".into(), "</s>".into()).unwrap()
}

fn prompt(messages: Json) -> ChatPrompt {
    ChatPrompt { messages: messages.as_array().unwrap().clone(), ..ChatPrompt::default() }
}

fn render(source: &str, messages: Json) -> String {
    template(source).render(&prompt(messages), &Guarded::default()).unwrap().text
}

fn user(content: &str) -> Json {
    json!([{"role": "user", "content": content}])
}

#[test]
fn whitespace_is_as_in_hugging_face() {
    let source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(source, user("x")), "x\nend");
}

#[test]
fn python_methods_and_slices_work() {
    let source = "{{ messages[0]['content'].strip().upper() }}|{{ messages[-1].role.startswith('us') }}|{{ messages[1:]|length }}|{{ none }}|{{ bos_token }}{{ eos_token }}";
    assert_eq!(render(source, user("  hi ")), "HI|True|0|None|<s></s>");
}

#[test]
fn tojson_is_pythons() {
    let value = json!([{"role": "user", "content": {"b": [1, 2.0, null, true], "a": "é<'&\""}}]);
    assert_eq!(render("{{ messages[0].content | tojson }}", value.clone()), r#"{"b": [1, 2.0, null, true], "a": "é<'&\""}"#);
    assert_eq!(render("{{ messages[0].content.b | tojson(indent=2) }}", value.clone()), "[\n  1,\n  2.0,\n  null,\n  true\n]");
    let nested = json!([{"role": "user", "content": {"e": [], "o": {}, "d": {"k": [{}]}, "u": "ü😀\u{7f}\u{1}"}}]);
    assert_eq!(
        render("{{ messages[0].content | tojson(indent=1, ensure_ascii=true) }}", nested),
        "{\n \"e\": [],\n \"o\": {},\n \"d\": {\n  \"k\": [\n   {}\n  ]\n },\n \"u\": \"\\u00fc\\ud83d\\ude00\u{7f}\\u0001\"\n}"
    );
    assert_eq!(
        render("{{ messages[0].content | tojson(separators=(',', ':'), sort_keys=true) }}", value),
        r#"{"a":"é<'&\"","b":[1,2.0,null,true]}"#
    );
}

#[test]
fn what_a_template_raises_reaches_the_client() {
    let error = template("{{ raise_exception('Roles must alternate') }}").render(&prompt(user("x")), &Guarded::default()).unwrap_err();
    let ApiError::Invalid { message, param } = error else { panic!("{error:?}") };
    assert!(message.ends_with(": Roles must alternate"), "{message}");
    assert_eq!(param.as_deref(), Some("messages"));
    let error = template("{{ messages[0].content.nothing.more }}").render(&prompt(user("x")), &Guarded::default()).unwrap_err();
    assert_eq!(error.status(), 400);
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let sources = [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{{ a + b }}{% endfor %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='xxxxxxxxxxxxxxxx') %}{% for a in range(9999) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ];
    for source in sources {
        let before = std::time::Instant::now();
        let error = template(source).render(&prompt(user("x")), &Guarded::default()).unwrap_err();
        assert_eq!(error.status(), 400);
        assert!(before.elapsed().as_secs() < 10, "{source}: {:?}", before.elapsed());
    }
}

#[test]
fn a_broken_template_is_an_error_at_load() {
    assert!(ChatTemplate::new("{% for %}", String::new(), String::new()).is_err());
}

#[test]
fn one_of_several_templates_is_chosen_by_the_tools() {
    let both = json!({"default": "plain", "tool_use": "{{ tools|length }} tools"}).to_string();
    let mut prompt = prompt(user("x"));
    let render = |source: &str, prompt: &ChatPrompt| template(source).render(prompt, &Guarded::default());
    assert_eq!(render(&both, &prompt).unwrap().text, "plain");
    let only_tools = json!({"tool_use": "T"}).to_string();
    let error = render(&only_tools, &prompt).unwrap_err().to_string();
    assert!(error.contains("no default chat template, only: tool_use"), "{error}");
    prompt.tools = Some(json!([{}]));
    assert_eq!(render(&both, &prompt).unwrap().text, "1 tools");
    assert_eq!(render("{{ tools|length }}", &prompt).unwrap().text, "1");
}

#[test]
fn the_final_message_is_continued() {
    let source =
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let trimming = source.replace("m.content", "m.content|trim");
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon "}]);
    let mut prompt = ChatPrompt { continue_final_message: true, ..prompt(messages) };
    let render = |source: &str, prompt: &ChatPrompt| template(source).render(prompt, &Guarded::default());
    assert_eq!(render(source, &prompt).unwrap().text, "[user]Hi[end][assistant]Once upon ");
    assert_eq!(render(&trimming, &prompt).unwrap().text, "[user]Hi[end][assistant]Once upon");
    let param = |error: ApiError| match error {
        ApiError::Invalid { param, .. } => param.unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(param(render("{{ messages[0].content }}", &prompt).unwrap_err()), "continue_final_message");
    prompt.add_generation_prompt = Some(true);
    assert_eq!(param(render(source, &prompt).unwrap_err()), "continue_final_message");
    // What a client typed is text there too.
    let messages = json!([{"role": "assistant", "content": "a[end]b"}]);
    let prompt = ChatPrompt { continue_final_message: true, messages: messages.as_array().unwrap().clone(), ..ChatPrompt::default() };
    let rendered = template(source).render(&prompt, &Guarded::new(&["[end]".to_owned()])).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.marks.as_slice()), ("[assistant]a[end]b", &[13][..]));
}

#[test]
fn nulls_are_absent_and_thoughts_have_both_names() {
    let source = "{{ messages[0].tool_calls is defined }} {{ messages[0].reasoning_content }} {{ messages[0].thinking }}";
    assert_eq!(render(source, json!([{"role": "assistant", "tool_calls": null, "reasoning": "hm"}])), "False hm hm");
}

#[test]
fn values_are_printed_as_in_python() {
    let source = "{{ messages[0].v }} {{ messages[0].v|string }} {{ messages[0].v.f }}";
    let value = json!([{"role": "user", "v": {"a": [1, "it's", null, true], "b": "\n", "f": 1e-7}}]);
    let printed = r#"{'a': [1, "it's", None, True], 'b': '\n', 'f': 1e-07}"#;
    assert_eq!(render(source, value), format!("{printed} {printed} 1e-07"));
}

#[test]
fn python_methods_that_the_engine_lacks() {
    let source = "{% set s = messages[0].content %}{{ s.removeprefix('a') }} {{ s.removesuffix('c') }} {{ s.rsplit('-', 1) }} {{ s.partition('-')[2] }} {{ s.rpartition('x')[2] }}";
    assert_eq!(render(source, user("a-b-c")), "-b-c a-b- ['a-b', 'c'] b-c a-b-c");
}

#[test]
fn generation_tags_and_loop_controls_are_understood() {
    let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% break %}{% endfor %}";
    assert_eq!(render(source, json!([{"content": "a"}, {"content": "b"}])), "a");
}

#[test]
fn dates_are_formatted_and_bad_formats_refused() {
    assert_eq!(render("{{ strftime_now('%Y')|length }}", user("")), "4");
    assert!(template("{{ strftime_now('%Q%!') }}").render(&prompt(user("")), &Guarded::default()).is_err());
}

#[test]
fn variables_of_the_server_cannot_be_set() {
    let mut prompt = prompt(user("x"));
    prompt.template_arguments.insert("enable_thinking".into(), json!(false));
    assert_eq!(template("{{ enable_thinking }}").render(&prompt, &Guarded::default()).unwrap().text, "False");
    prompt.template_arguments.insert("bos_token".into(), json!("x"));
    assert!(template("").render(&prompt, &Guarded::default()).is_err());
}

#[test]
fn only_special_text_of_clients_is_marked() {
    let guarded = Guarded::new(&["<|im_start|>".to_owned(), "<|im_end|>".to_owned()]);
    let source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content|trim + '<|im_end|>' }}{% endfor %}";
    let rendered = template(source).render(&prompt(user(" a<|im_end|>b \u{fdd0}")), &guarded).unwrap();
    assert_eq!(rendered.text, "<|im_start|>user\na<|im_end|>b \u{fdd0}<|im_end|>");
    assert_eq!(rendered.marks, [rendered.text.find("a<").unwrap() + 2]);
    assert_eq!(template(source).render(&prompt(user("plain")), &guarded).unwrap().marks, Vec::<usize>::new());
    // An unfinished one at the end of a string.
    let rendered = template("{{ messages[0].content }}im_end|>").render(&prompt(user("x<|")), &guarded).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.marks.as_slice()), ("x<|im_end|>", &[2_usize][..]));
}

#[test]
fn thoughts_of_an_assistant_stay_whole_for_the_template() {
    let guarded = Guarded::new(&["</think>".to_owned()]);
    let source = "{{ messages[0].content.split('</think>')[-1] }}";
    let messages = json!([{"role": "assistant", "content": "hm</think>yes"}]);
    assert_eq!(template(source).render(&prompt(messages), &guarded).unwrap().text, "yes");
}

/// The template of SmolLM2, whose rendering by Hugging Face is in the model's golden record.
#[test]
fn a_real_template_renders_as_in_hugging_face() {
    let source = include_str!("../../testdata/smollm2.jinja");
    let system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
    let messages = json!([
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Name three fruits."}
    ]);
    let want = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nHello! How can I help?<|im_end|>\n<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(source, messages), format!("{system}{want}"));
}
