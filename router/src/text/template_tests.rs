use serde_json::json;

use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>".into(), "</s>".into()).unwrap()
}

fn prompt(messages: Json) -> ChatPrompt {
    ChatPrompt { messages: messages.as_array().unwrap().clone(), ..ChatPrompt::default() }
}

fn render(source: &str, messages: Json) -> String {
    template(source).render(&prompt(messages), &[]).unwrap().text
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
    assert_eq!(
        render("{{ messages[0].content | tojson(separators=(',', ':'), sort_keys=true) }}", value),
        r#"{"a":"é<'&\"","b":[1,2.0,null,true]}"#
    );
}

#[test]
fn what_a_template_raises_reaches_the_client() {
    let error = template("{{ raise_exception('Roles must alternate') }}").render(&prompt(user("x")), &[]).unwrap_err();
    let ApiError::Invalid { message, param } = error else { panic!("{error:?}") };
    assert!(message.ends_with(": Roles must alternate"), "{message}");
    assert_eq!(param.as_deref(), Some("messages"));
    let error = template("{{ messages[0].content.nothing.more }}").render(&prompt(user("x")), &[]).unwrap_err();
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
        let error = template(source).render(&prompt(user("x")), &[]).unwrap_err();
        assert_eq!(error.status(), 400);
        assert!(before.elapsed().as_secs() < 10, "{source}: {:?}", before.elapsed());
    }
}

#[test]
fn a_broken_template_is_an_error_at_load() {
    assert!(ChatTemplate::new("{% for %}", String::new(), String::new()).is_err());
}

#[test]
fn generation_tags_and_loop_controls_are_understood() {
    let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% break %}{% endfor %}";
    assert_eq!(render(source, json!([{"content": "a"}, {"content": "b"}])), "a");
}

#[test]
fn dates_are_formatted_and_bad_formats_refused() {
    assert_eq!(render("{{ strftime_now('%Y')|length }}", user("")), "4");
    assert!(template("{{ strftime_now('%Q%!') }}").render(&prompt(user("")), &[]).is_err());
}

#[test]
fn variables_of_the_server_cannot_be_set() {
    let mut prompt = prompt(user("x"));
    prompt.template_arguments.insert("enable_thinking".into(), json!(false));
    assert_eq!(template("{{ enable_thinking }}").render(&prompt, &[]).unwrap().text, "False");
    prompt.template_arguments.insert("bos_token".into(), json!("x"));
    assert!(template("").render(&prompt, &[]).is_err());
}

#[test]
fn only_special_text_of_clients_is_marked() {
    let specials = vec!["<|im_start|>".to_owned(), "<|im_end|>".to_owned()];
    let source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content|trim + '<|im_end|>' }}{% endfor %}";
    let rendered = template(source).render(&prompt(user(" a<|im_end|>b \u{fdd0}")), &specials).unwrap();
    assert_eq!(rendered.text, "<|im_start|>user\na<|im_end|>b \u{fdd0}<|im_end|>");
    assert_eq!(rendered.marks, [rendered.text.find("a<").unwrap() + 2]);
    assert_eq!(template(source).render(&prompt(user("plain")), &specials).unwrap().marks, Vec::<usize>::new());
    // An unfinished one at the end of a string.
    let rendered = template("{{ messages[0].content }}im_end|>").render(&prompt(user("x<|")), &specials).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.marks.as_slice()), ("x<|im_end|>", &[2_usize][..]));
}

#[test]
fn thoughts_of_an_assistant_stay_whole_for_the_template() {
    let specials = vec!["</think>".to_owned()];
    let source = "{{ messages[0].content.split('</think>')[-1] }}";
    let messages = json!([{"role": "assistant", "content": "hm</think>yes"}]);
    assert_eq!(template(source).render(&prompt(messages), &specials).unwrap().text, "yes");
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
