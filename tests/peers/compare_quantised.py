#!/usr/bin/env python3
"""Quantises a model with `quire quantize`, then runs each file in Quire and in llama.cpp: perplexity and greedy text.

    python compare_quantised.py --quire BINARY --llama-bin FOLDER MODEL.gguf --types q8_0,q4_k_m [--prompts golden.json]

FOLDER holds llama-perplexity and llama-server. Both score the second half of windows of 512 tokens of the same text (llama.cpp
leaves the last of each half out: 255 tokens to our 256). Greedy text is 32 tokens after each prompt (token ids), compared up to the first
difference. There float32 arithmetic on the same dequantised weights (Quire's reference backend, float32 cache) says by what margin of
log-probability it prefers one of the two tokens: whoever drew the other one is off by that much. Ends with 1 where perplexities are more
than 0.5 % apart, or Quire drew what float32 puts more than 0.25 below.
Without llama.cpp it says so and ends with 0. Needs nothing but Python.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from compare_tokenizers import Server, free_port, post

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = ROOT / "src/bench/alice.txt"
PROMPTS = ROOT / "engine/testdata/golden_smollm2.json"
LENGTH = 32


def output(command):
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {run.returncode}\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def perplexities(arguments, model):
    ours = output([arguments.quire, "bench", "perplexity", model, "--threads", arguments.threads])
    theirs = output([arguments.llama_bin / "llama-perplexity", "-m", model, "-f", TEXT, "-c", "512", "-t", arguments.threads,
                     *arguments.llama_args])
    ours = re.search(r"^cpu \(.*?\) +\w+ +\d+ +[\d.]+ +([\d.]+)", ours, re.M) or sys.exit(f"no perplexity in: {ours}")
    theirs = re.search(r"Final estimate: PPL = ([\d.]+)", theirs) or sys.exit(f"no perplexity in: {theirs}")
    return float(ours[1]), float(theirs[1])


def continuation(port, ids, length, ends):
    """What Quire draws, and the twenty likeliest tokens before each draw."""
    # llama.cpp's `ignore_eos` bans these tokens; ours goes on after them, so they are banned here as well.
    body = {"model": "m", "prompt": ids, "max_tokens": length, "temperature": 0, "logprobs": 20, "ignore_eos": True,
            "logit_bias": {end: -100 for end in ends}, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = post(f"http://127.0.0.1:{port}/v1/completions", body)["choices"][0]
    tops = choice["logprobs"]["top_logprobs"]
    return choice["token_ids"], [{int(name.removeprefix("token_id:")): x for name, x in top.items()} for top in tops]


def reference_continuation(port, ids):
    """What llama.cpp draws."""
    body = {"prompt": ids, "n_predict": LENGTH, "temperature": 0, "n_probs": 1, "ignore_eos": True, "cache_prompt": False}
    return [step["id"] for step in post(f"http://127.0.0.1:{port}/completion", body)["completion_probabilities"]]


def quire(arguments, model, *flags):
    port, admin = free_port(), free_port()
    command = [arguments.quire, "serve", model, "--alias", "m", "--max-model-len", "2048", "--port", str(port), "--admin-port", str(admin), *flags]
    return port, Server(command, f"http://127.0.0.1:{port}/health")


def greedy(arguments, model, prompts):
    """How many texts are equal; and by how much float32 prefers llama.cpp's token where Quire drew another, or the other way round."""
    ends = arguments.end_tokens.split(",")
    ours_port, ours = quire(arguments, model)
    exact_port, exact = quire(arguments, model, "--backend", "reference", "--kv-type", "f32")
    theirs_port = free_port()
    theirs = Server([arguments.llama_bin / "llama-server", "-m", model, "-c", "2048", "-np", "1", "-t", arguments.threads, "--no-webui",
                     "--host", "127.0.0.1", "--port", str(theirs_port), *arguments.llama_args], f"http://127.0.0.1:{theirs_port}/health")
    equal, ours_off, theirs_off = 0, [0.0], [0.0]
    with ours, exact, theirs:
        for ids in prompts:
            a, b = continuation(ours_port, ids, LENGTH, ends)[0], reference_continuation(theirs_port, ids)
            first = next((i for i in range(LENGTH) if a[i] != b[i]), None)
            if first is None:
                equal += 1
                continue
            top = continuation(exact_port, ids + a[:first], 1, ends)[1][0]
            # A token that is not among float32's twenty likeliest is at least so far below.
            margin = top.get(b[first], min(top.values())) - top.get(a[first], min(top.values()))
            (ours_off if margin > 0 else theirs_off).append(abs(margin))
    return equal, ours_off, theirs_off


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quire", default=os.environ.get("QUIRE_BIN", ROOT / "target/release/quire"))
    parser.add_argument("--llama-bin", type=pathlib.Path, default=pathlib.Path(os.environ.get("LLAMA_BIN", "/nonexistent")))
    parser.add_argument("--types", default="q8_0,q6_k,q5_k_m,q4_k_m,q4_0,iq4_xs")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--llama-args", type=shlex.split, default=[], help="more flags of llama.cpp, e.g. `--llama-args=--no-repack` where its AMX path dies")
    parser.add_argument("--end-tokens", default="0,2", help="ids that end a text, banned on both sides (default: SmolLM2's)")
    parser.add_argument("--prompts", type=pathlib.Path, default=PROMPTS, help="JSON with `cases`, each with `ids`")
    parser.add_argument("model", metavar="MODEL.gguf")
    arguments = parser.parse_args()
    if not (arguments.llama_bin / "llama-server").is_file():
        print(f"skipped: there is no llama.cpp in `{arguments.llama_bin}` (--llama-bin)")
        return 0
    prompts = [case["ids"] for case in json.loads(arguments.prompts.read_text())["cases"]]
    prompts = [ids for ids in prompts if len(ids) + LENGTH <= 2048]
    failed = False
    print("| type | MB | perplexity: Quire | llama.cpp | apart | greedy texts equal | Quire off: partings, largest | llama.cpp off |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in arguments.types.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / f"{name}.gguf"
            output([arguments.quire, "quantize", arguments.model, path, "--type", name])
            ours, theirs = perplexities(arguments, path)
            equal, ours_off, theirs_off = greedy(arguments, path, prompts)
            print(f"| {name} | {path.stat().st_size / 1e6:.1f} | {ours:.4f} | {theirs:.4f} | {100 * (ours / theirs - 1):+.2f} % "
                  f"| {equal} of {len(prompts)} | {len(ours_off) - 1}, {max(ours_off):.3f} | {len(theirs_off) - 1}, {max(theirs_off):.3f} |", flush=True)
            failed |= abs(ours / theirs - 1) > 0.005 or max(ours_off) > 0.25
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
