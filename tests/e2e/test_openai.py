"""The official OpenAI client against the real server."""

import openai
import pytest
from conftest import post

PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def test_models(client, model):
    listed = client.models.list().data
    assert model in [m.id for m in listed]
    one = client.models.retrieve(model)
    assert one.object == "model" and one.created > 0 and one.owned_by
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat(client, model):
    r = client.chat.completions.create(model=model, messages=PARIS, temperature=0, max_tokens=16)
    assert r.object == "chat.completion" and r.id.startswith("chatcmpl-") and r.model
    choice = r.choices[0]
    assert choice.message.role == "assistant" and "Paris" in choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def test_chat_stream_equals_whole(client, model):
    kwargs = dict(model=model, messages=PARIS, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**kwargs)
    chunks = list(client.chat.completions.create(**kwargs, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_completion_and_stream(client, model):
    kwargs = dict(model=model, prompt="The capital of France is", temperature=0, max_tokens=8)
    r = client.completions.create(**kwargs)
    assert r.object == "text_completion" and r.id.startswith("cmpl-")
    assert r.choices[0].text.startswith(" Paris") and r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 8
    assert "".join(c.choices[0].text for c in client.completions.create(**kwargs, stream=True)) == r.choices[0].text


def test_prompts_of_every_kind(client, model, server):
    text = "Water boils at a temperature of"
    r = client.completions.create(model=model, prompt=[text, text], temperature=0, max_tokens=4)
    assert [c.index for c in r.choices] == [0, 1] and r.choices[0].text == r.choices[1].text
    ids = post(server, "/tokenize", {"model": model, "prompt": text})[1]["tokens"]
    for prompt in (ids, [ids, ids]):
        assert client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=4).choices[0].text == r.choices[0].text


def test_logprobs(client, model):
    r = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=3)
    lp = r.choices[0].logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 4
    assert lp.tokens[0] == " Paris" and -0.6 < lp.token_logprobs[0] < -0.05
    for token, value, top in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs):
        assert top[token] == value == max(top.values()) and 3 <= len(top) <= 4
    c = client.chat.completions.create(model=model, messages=PARIS, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2)
    content = c.choices[0].logprobs.content
    assert len(content) == c.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob


def test_echo_with_logprobs(client, model):
    r = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=2, logprobs=1, echo=True)
    lp = r.choices[0].logprobs
    assert r.choices[0].text.startswith("The capital of France is Paris")
    assert len(lp.tokens) == 5 + 2 and lp.token_logprobs[0] is None and all(v <= 0 for v in lp.token_logprobs[1:])


def test_three_choices(client, model):
    kwargs = dict(model=model, messages=[{"role": "user", "content": "Tell me a story."}], n=3, temperature=1.0, max_tokens=24, seed=7)
    a = client.chat.completions.create(**kwargs)
    texts = [c.message.content for c in a.choices]
    assert [c.index for c in a.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert a.usage.completion_tokens == sum(24 if c.finish_reason == "length" else 0 for c in a.choices) or any(
        c.finish_reason == "stop" for c in a.choices)
    assert texts == [c.message.content for c in client.chat.completions.create(**kwargs).choices], "same seed, same choices"
    streamed = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in client.chat.completions.create(**kwargs, stream=True):
        for c in chunk.choices:
            streamed[c.index] += c.delta.content or ""
            ends += [c.index] if c.finish_reason else []
    assert list(streamed.values()) == texts and sorted(ends) == [0, 1, 2]


def test_seed(client, model):
    def ask(seed):
        return client.completions.create(model=model, prompt="Once upon a time", temperature=1.0, max_tokens=16, seed=seed).choices[0].text

    assert ask(1) == ask(1) and ask(1) != ask(2)
    assert ask(2**63 - 1)


def test_stop(client, model):
    base = dict(model=model, prompt="1, 1, 2, 3, 5, 8, 13,", temperature=0, max_tokens=24)
    free = client.completions.create(**base).choices[0].text
    stop = free[5:9]
    r = client.completions.create(**base, stop=stop)
    assert r.choices[0].finish_reason == "stop" and r.choices[0].text == free[: free.index(stop)]
    chunks = list(client.completions.create(**base, stop=["never seen", stop], stream=True))
    assert "".join(c.choices[0].text for c in chunks) == r.choices[0].text and chunks[-1].choices[0].finish_reason == "stop"


def test_emoji_is_never_broken(client, model):
    kwargs = dict(model=model, prompt="🙂 emoji and 日本語 text: 🙂🎉 日本語 中文 한국어 🙂🎉", temperature=0, max_tokens=48)
    parts = [c.choices[0].text for c in client.completions.create(**kwargs, stream=True)]
    whole = client.completions.create(**kwargs).choices[0].text
    assert "".join(parts) == whole
    assert not any("\ufffd" in p for p in parts[:-1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("n", 0), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 100000), ("stop", ""),
        ("logit_bias", {"999999": 1}), ("logit_bias", {"x": 1}), ("top_logprobs", 3), ("seed", "x"), ("temperature", "hot"),
        ("messages", []), ("messages", "hi"), ("stream_options", {"include_usage": True}),
    ],
)
def test_bad_input_names_the_field(client, model, field, value):
    body = {"model": model, "messages": PARIS, field: value}
    with pytest.raises(openai.BadRequestError) as e:
        client.post("/chat/completions", body=body, cast_to=object)
    assert e.value.status_code == 400 and e.value.type == "invalid_request_error"
    assert (e.value.param or "").startswith(field), e.value.body
    assert e.value.message


def test_error_classes(client, model, server):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=PARIS)
    with pytest.raises(openai.BadRequestError, match="context|tokens"):
        client.completions.create(model=model, prompt=[5] * 9000, max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=[999999], max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="")
    # and the server is none the worse for it
    assert client.completions.create(model=model, prompt="A", max_tokens=1).usage.completion_tokens == 1
