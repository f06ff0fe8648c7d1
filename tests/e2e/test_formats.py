"""A Hugging Face folder, whole and in shards, through the real binary: as its golden outputs say."""

import json
import pathlib
import shutil
import struct
import subprocess

import pytest
from conftest import BINARY, MODES, ROOT, post, running

FOLDER = ROOT / "engine/testdata/models/llama-v5-config"
TEMPLATE = ("{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' -}}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}")
GOLDEN = json.loads((FOLDER / "golden.json").read_text())["prompts"]
# The CPU backend rounds what goes into bf16 weights no more than the golden's smallest margin allows over this many tokens.
STEPS = 16


def write_safetensors(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shard(folder):
    """Cuts model.safetensors into three files with an index."""
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8:8 + length]), raw[8 + length:]
    header.pop("__metadata__", None)
    names, places = sorted(header), {}
    for i in range(3):
        file, part, body = f"model-{i + 1:05}-of-00003.safetensors", {}, b""
        for name in names[i::3]:
            start, end = header[name]["data_offsets"]
            part[name] = {**header[name], "data_offsets": [len(body), len(body) + end - start]}
            body += data[start:end]
            places[name] = file
        write_safetensors(folder / file, part, body)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": len(data)}, "weight_map": places}))
    (folder / "model.safetensors").unlink()


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "tiny-llama"
    shutil.copytree(FOLDER, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def greedy(server, ids, **more):
    body = {"prompt": ids, "max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    code, answer = post(server, "/v1/completions", body)
    assert code == 200, answer
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(("mode", "sharded"), [(MODES[0], False), (MODES[1], True)])
def test_a_folder_answers_as_its_goldens(folder, mode, sharded):
    if sharded:
        shard(folder)
    with running(mode, "--kv-type", "f32", model=folder) as server:
        for prompt in GOLDEN:
            assert greedy(server, prompt["ids"]) == prompt["greedy"][:STEPS], prompt["name"]
        # The folder's template and tokenizer, and the end tokens of generation_config.json: 510 and 508.
        messages = [{"role": "user", "content": "Hi <|im_end|>"}]
        body = {"messages": messages, "max_tokens": 64, "temperature": 0, "return_token_ids": True}
        code, answer = post(server, "/v1/chat/completions", body)
        assert code == 200, answer
        ids = answer["prompt_token_ids"]
        # Text of a user that looks like a special token is text: the only ends of turns are the template's.
        assert ids.count(509) == 2 and ids.count(510) == 1, ids
        for end in (508, 510):
            # Biased so that the model draws it first: the answer ends there.
            body = {"prompt": GOLDEN[0]["ids"], "max_tokens": 4, "temperature": 0, "logit_bias": {str(end): 100}}
            code, answer = post(server, "/v1/completions", body)
            assert code == 200 and answer["choices"][0]["finish_reason"] == "stop", (end, answer)


def test_quantised_at_load(folder):
    with running("serve", "--quantize", "q8_0", model=folder) as server:
        ids = greedy(server, GOLDEN[1]["ids"])
        assert len(ids) == STEPS and all(0 <= i < 512 for i in ids)
        # The tiny model's margins are wide for the first few tokens.
        assert ids[:2] == GOLDEN[1]["greedy"][:2]


@pytest.mark.parametrize(("file", "change", "named"), [
    ("config.json", lambda b: b[:100], "config.json"),
    ("config.json", lambda b: b.replace(b'"llama"', b'"lama"'), "model_type"),
    ("config.json", lambda b: b.replace(b'"hidden_size": 48', b'"hidden_size": 47'), "47"),
    ("model.safetensors", lambda b: b[:-10], "model.safetensors"),
    ("model.safetensors", lambda b: b"\xff" * 16 + b[16:], "model.safetensors"),
    ("tokenizer.json", lambda b: b[:1000], "tokenizer.json"),
])
def test_a_broken_folder_is_an_error_that_names_the_field(folder, file, change, named):
    path = pathlib.Path(folder) / file
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    run = subprocess.run([BINARY, "serve", str(folder), "--port", "0", "--admin-port", "0"], capture_output=True, text=True, timeout=30)
    assert run.returncode not in (0, None) and run.returncode > 0, run
    assert named in run.stderr and "panicked" not in run.stderr, run.stderr
