//! `/v1/responses`, and the description of all routes.

use serde_json::{Value, json};
use tonic::Status;

use crate::cases::{refused, streamed, with};
use crate::site::{ANSWER, Behaviour, Site, ids};

const PATH: &str = "/v1/responses";
const SAID: &str = "<think>Hm. 日本</think>I look. 🗼<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}</tool_call>";

fn body() -> Value {
    json!({"input": "x", "tools": [{"type": "function", "name": "now", "parameters": {}}]})
}

/// Events: the name must be the type, numbers must run.
async fn events(site: &Site, body: Value) -> Vec<Value> {
    let answer = site.post(PATH, &body).await;
    assert_eq!((answer.status, &answer.headers["content-type"]), (200, &"text/event-stream".parse().unwrap()));
    let text = std::str::from_utf8(&answer.body).unwrap();
    let frame = |(number, frame): (usize, &str)| {
        let (name, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!((data["type"].as_str(), &data["sequence_number"]), (Some(name), &json!(number)));
        data
    };
    text.split("\n\n").filter(|frame| !frame.is_empty()).enumerate().map(frame).collect()
}

/// What differs by chance or by time.
fn settled(mut response: Value) -> Value {
    response["created_at"] = json!(0);
    response["id"] = json!("");
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = json!("");
        if item["type"] == "function_call" {
            item["call_id"] = json!("");
        }
    }
    response
}

#[tokio::test]
async fn a_streamed_response_is_the_whole_one() {
    let site = Site::showing("<tool_call> </think>").await;
    for behaviour in [Behaviour::Say(ids(SAID)), Behaviour::Slowly(ids(SAID))] {
        site.behave(behaviour);
        let whole = site.ask(PATH, body()).await;
        assert_eq!((&whole["object"], &whole["status"], &whole["store"]), (&json!("response"), &json!("completed"), &json!(false)));
        let output = whole["output"].as_array().unwrap();
        assert_eq!(output.iter().map(|item| item["type"].as_str().unwrap()).collect::<Vec<_>>(), ["reasoning", "message", "function_call"]);
        assert_eq!(output[0]["content"][0]["text"], "Hm. 日本");
        assert_eq!(output[1]["content"][0], json!({"type": "output_text", "text": "I look. 🗼", "annotations": [], "logprobs": []}));
        assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("now"), &json!("{\"a\": 1}")));
        assert_eq!(whole["usage"]["output_tokens"], ids(SAID).len() + 1);

        let events = events(&site, streamed(body())).await;
        let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(names[..2], ["response.created", "response.in_progress"]);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        assert_eq!(settled(last["response"].clone()), settled(whole.clone()));
        // Each item: added, its deltas joined are its text, done as it ends up.
        for (index, item) in last["response"]["output"].as_array().unwrap().iter().enumerate() {
            let of = |name: &str| -> Vec<&Value> {
                events.iter().filter(|event| event["type"] == name && event["output_index"] == index).collect()
            };
            assert_eq!((of("response.output_item.added").len(), of("response.output_item.done")[0]["item"].clone()), (1, item.clone()));
            let (name, text) = match item["type"].as_str().unwrap() {
                "message" => ("response.output_text", &item["content"][0]["text"]),
                "reasoning" => ("response.reasoning_text", &item["content"][0]["text"]),
                _ => ("response.function_call_arguments", &item["arguments"]),
            };
            let deltas: String = of(&format!("{name}.delta")).iter().map(|event| event["delta"].as_str().unwrap()).collect();
            assert_eq!(json!(deltas), *text);
            let field = if item["type"] == "function_call" { "arguments" } else { "text" };
            assert_eq!(of(&format!("{name}.done"))[0][field], *text);
        }
    }
}

#[tokio::test]
async fn a_response_may_be_cut_or_fail() {
    let site = Site::start().await;
    let whole = site.ask(PATH, json!({"input": "x", "max_output_tokens": 3})).await;
    assert_eq!((&whole["status"], &whole["incomplete_details"]["reason"]), (&json!("incomplete"), &json!("max_output_tokens")));
    assert_eq!(whole["output"][0]["status"], "incomplete");
    let cut = events(&site, json!({"input": "x", "max_output_tokens": 3, "stream": true})).await;
    assert_eq!(cut.last().unwrap()["type"], "response.incomplete");
    assert_eq!(settled(cut.last().unwrap()["response"].clone()), settled(whole));
    site.behave(Behaviour::Fail(4, Status::internal("broken")));
    let failed = events(&site, json!({"input": "x", "stream": true})).await;
    let last = failed.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["error"]["code"]), (&json!("response.failed"), &json!("internal_error")));
    assert_eq!(site.post(PATH, &json!({"input": "x"})).await.status, 500);
}

#[tokio::test]
async fn conversations_come_with_the_input() {
    let site = Site::start().await;
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]);
    let whole = site.ask(PATH, json!({"input": input, "instructions": "Be brief.", "metadata": {"k": "v"}})).await;
    assert_eq!(whole["output"][0]["content"][0]["text"], ANSWER);
    assert_eq!((&whole["metadata"], &whole["instructions"]), (&json!({"k": "v"}), &json!("Be brief.")));
    let prompt = site.ask("/detokenize", json!({"tokens": site.fake.requests.lock()[0].prompt_ids.clone()})).await;
    assert!(prompt["prompt"].as_str().unwrap().starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>"));
    for (extra, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": []}), "input"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"n": 2}), "n"),
    ] {
        refused(&site, PATH, with(json!({"input": "x"}), extra), param).await;
    }
    let long = site.post(PATH, &json!({"input": "word ".repeat(3000)})).await.json();
    assert_eq!((&long["error"]["code"], &long["error"]["param"]), (&json!("context_length_exceeded"), &json!("input")));
    site.ask(PATH, json!({"input": "word ".repeat(300), "truncation": "auto", "max_output_tokens": 8})).await;
}

/// Every route that is described is there.
#[tokio::test]
async fn the_description_tells_of_routes_that_exist() {
    let site = Site::start().await;
    let document = site.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "tiny");
        let answer = if methods.get("post").is_some() { site.post(&path, &json!({"tokens": "x"})).await } else { site.get(&path).await };
        assert!(![404, 405, 500].contains(&answer.status), "{path}: {}", answer.status);
    }
}
