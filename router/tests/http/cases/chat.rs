//! Cases 75 to 86: messages, tools, structured output.

use serde_json::json;

use super::{CHAT, chat, refused};
use crate::site::Site;

#[tokio::test]
async fn case_75_turns_parts_and_roles() {
    let site = Site::start().await;
    let answer = site
        .ask(
            CHAT,
            json!({"messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": "a"},
                {"role": "critic", "content": "hm"},
            ]}),
        )
        .await;
    let prompt = site.ask("/detokenize", json!({"tokens": site.fake.requests.lock()[0].prompt_ids.clone()})).await;
    let expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>critic\nhm<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt["prompt"], expected);
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], site.fake.requests.lock()[0].prompt_ids.len());
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap())
    );
}

#[tokio::test]
async fn case_76_continue_and_begin_exclude_each_other() {
    let site = Site::start().await;
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "On"}]);
    let both = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
    refused(&site, CHAT, both, "continue_final_message").await;
    site.ask(CHAT, json!({"messages": messages, "add_generation_prompt": false})).await;
    let prompt = site.ask("/detokenize", json!({"tokens": site.fake.requests.lock()[0].prompt_ids.clone()})).await;
    assert_eq!(prompt["prompt"], "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nOn<|im_end|>\n");
}

#[tokio::test]
async fn case_78_wrong_tools() {
    let site = Site::start().await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    refused(&site, CHAT, chat(json!({"tools": []})), "tools").await;
    refused(&site, CHAT, chat(json!({"tool_choice": "auto"})), "tool_choice").await;
    for choice in [json!({"type": "function", "function": {"name": "g"}}), json!({}), json!("sometimes"), json!(3)] {
        refused(&site, CHAT, chat(json!({"tools": tools, "tool_choice": choice})), "tool_choice").await;
    }
}

/// Only a grammar can enforce a call, and there is none yet.
#[tokio::test]
async fn case_79_80_forced_calls_are_refused() {
    let site = Site::start().await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "f"}})] {
        refused(&site, CHAT, chat(json!({"tools": tools, "tool_choice": choice})), "tool_choice").await;
    }
}

/// As above.
#[tokio::test]
async fn case_82_to_85_structured_output_is_refused() {
    let site = Site::start().await;
    for format in [json!({"type": "json_object"}), json!({"type": "json_schema"}), json!({"type": "json_schema", "json_schema": {}})] {
        refused(&site, CHAT, chat(json!({"response_format": format})), "response_format").await;
    }
    for field in ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar"] {
        refused(&site, CHAT, chat(json!({field: "a"})), field).await;
    }
    site.ask(CHAT, chat(json!({"response_format": {"type": "text"}}))).await;
    assert_eq!(site.get("/health").await.status, 200);
}
