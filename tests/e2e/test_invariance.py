"""Outputs do not depend on the batch: 32 at a time, preempted, from a warm cache, each request gives what it gives alone, to the last bit."""

import asyncio
import json
import pathlib

import openai
import pytest
from conftest import MODES, post, running

GOLDEN = json.loads((pathlib.Path(__file__).parents[2] / "engine/testdata/golden_smollm2.json").read_text())
TOPICS = ["a lighthouse", "two rivers", "the moon", "an old clock", "a fox", "winter", "the sea", "a violin", "bread", "a small robot", "chess",
          "a library", "thunder", "gardens", "a lost key", "volcanoes", "a postman", "the desert", "mathematics", "a bicycle", "glass", "an owl",
          "trains", "a bridge", "honey", "a map", "salt", "clouds", "a theatre", "iron", "paper", "a ship"]
PROMPTS = [f"Write about {t}. " + "It matters because " * (i % 7) for i, t in enumerate(TOPICS)]


def record(r):
    lp = r.choices[0].logprobs
    return (r.choices[0].text, tuple(lp.tokens), tuple(lp.token_logprobs), tuple(tuple(t.items()) for t in lp.top_logprobs))


async def ask(client, model, prompt, tokens=40):
    return record(await client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=tokens, logprobs=2,
                                                  extra_body={"ignore_eos": True}))


def client_of(server):
    return openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=300)


async def model_of(client):
    return (await client.models.list()).data[0].id


async def alone(server):
    async with client_of(server) as c:
        model = await model_of(c)
        return [await ask(c, model, p) for p in PROMPTS]


async def together(server):
    async with client_of(server) as c:
        model = await model_of(c)
        return await asyncio.gather(*[ask(c, model, p) for p in PROMPTS])


@pytest.fixture(scope="module")
def truth():
    """Each prompt alone, on a server without prefix cache."""
    with running("serve", "--no-prefix-cache") as s:
        return asyncio.run(alone(s))


@pytest.mark.parametrize("mode", MODES)
def test_32_at_a_time(truth, mode):
    with running(mode) as s:
        assert asyncio.run(together(s)) == truth, "cold"
        hits = s.metrics()["quire_prefix_cache_hit_tokens_total"]
        assert asyncio.run(together(s)) == truth, "warm prefix cache"
        assert s.metrics()["quire_prefix_cache_hit_tokens_total"] > hits


@pytest.mark.parametrize("mode", MODES)
def test_preempted(truth, mode):
    with running(mode, "--kv-blocks", "24", "--max-model-len", "256") as s:
        assert asyncio.run(together(s)) == truth
        m = s.metrics()
        assert m["quire_preemptions_total"] > 0 and m["vllm:num_preemptions_total"] == m["quire_preemptions_total"]
        assert m["quire_kv_blocks_used"] == 0


def test_small_steps(truth):
    """Chunked prefill: 8 tokens a step."""
    with running("serve", "--max-num-batched-tokens", "40", "--no-prefix-cache") as s:
        assert asyncio.run(together(s)) == truth


def test_threads(truth):
    with running("serve", "--threads", "1") as s:
        assert asyncio.run(together(s)) == truth


def test_golden(server, client, model):
    """Through the whole stack: prompt ids equal, first log-probability within 0.25 of float32, greedy equal where the margin is clear."""
    worst = 0.0
    for case in GOLDEN["cases"]:
        ids = post(server, "/tokenize", {"model": model, "prompt": case["prompt"], "add_special_tokens": False})[1]["tokens"]
        if case["kind"] == "chat":
            ids_chat = post(server, "/tokenize", {"model": model, "messages": case["messages"]})[1]["tokens"]
            assert ids_chat == case["ids"]
        assert ids == case["ids"]
        r = client.completions.create(model=model, prompt=case["ids"], temperature=0, max_tokens=len(case["greedy"]), logprobs=5,
                                      extra_body={"ignore_eos": True, "return_token_ids": True})
        got = r.choices[0].token_ids
        first_id, first_lp = case["first_top5"][0]
        if got[0] == first_id:
            worst = max(worst, abs(r.choices[0].logprobs.token_logprobs[0] - first_lp))
        for token, (want, _, margin) in zip(got, case["greedy"]):
            if token != want:
                assert margin <= 0.3, (case["prompt"], margin)
                break
    print(f"largest difference of a first log-probability: {worst:.3f}")
    assert worst <= 0.25
