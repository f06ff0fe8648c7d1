#!/usr/bin/env python3
"""Tokenizes random Unicode strings with Quire and with llama.cpp's server, and shows where they differ.

    python compare_tokenizers.py --quire BINARY --llama-server BINARY [--count 2000] [--seed 1] MODEL.gguf...

Both servers run on loopback, one model at a time. Without a llama.cpp server it says so and ends with 0, having compared
nothing. Differences that `docs/tokenizers.md` lists are counted apart; any other makes it end with 1. Needs nothing but
Python.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
import urllib.error
import urllib.request

# What strings are made of. Each string mixes a few.
ALPHABETS = [
    lambda r: r.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    lambda r: r.choice("  \t\n\r\u00a0\u2003\u3000\u200b"),
    lambda r: " " * r.randint(1, 12),
    lambda r: "\n" * r.randint(1, 6),
    lambda r: r.choice("0123456789"),
    lambda r: str(r.randint(0, 10**12)),
    lambda r: r.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~…“”‘’—–·•§¶"),
    lambda r: r.choice(["'s", "'T", "'re", "'VE", "'m", "'LL", "'d", "don't", "I'M"]),
    lambda r: r.choice(["the", " and", "Once upon a time", " there was", "Hello", " world", "function", "return", "日本語", " Привет"]),
    lambda r: chr(r.randint(0xA1, 0x24F)),  # Latin
    lambda r: chr(r.randint(0x300, 0x36F)),  # marks to combine
    lambda r: r.choice(["é", "e\u0301", "Å", "A\u030a", "ﬁ", "ǅ", "ß", "İ", "ſ", "\u212b", "가", "\u1100\u1161"]),
    lambda r: chr(r.randint(0x370, 0x52F)),  # Greek, Cyrillic
    lambda r: chr(r.randint(0x5D0, 0x6FF)),  # Hebrew, Arabic
    lambda r: chr(r.randint(0x900, 0xDFF)),  # scripts of India
    lambda r: chr(r.randint(0xE01, 0xE5B)),  # Thai
    lambda r: chr(r.randint(0x4E00, 0x9FFF)),
    lambda r: chr(r.randint(0x3041, 0x30FF)),
    lambda r: chr(r.randint(0xAC00, 0xD7A3)),
    lambda r: r.choice(["😀", "👍🏽", "👩‍👩‍👧", "🇨🇭", "❤️", "🏴\U000e0067\U000e0062\U000e007f", "\ufe0f", "\u200d"]),
    lambda r: chr(r.randint(0x1F300, 0x1FAFF)),
    lambda r: r.choice(["\u202e", "\u200f", "\ufeff", "\ufffd", "\u00ad", "\u2028", "\x7f", "\x01", "\x1b"]),
    lambda r: r.choice(["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<0x0A>", "[INST]", "▁"]),
]


def any_character(r):
    while True:
        code = r.choice([r.randint(1, 0x7FF), r.randint(0x800, 0xFFFF), r.randint(0x10000, 0x10FFFF)])
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def strings(count, seed):
    r = random.Random(seed)
    out = []
    while len(out) < count:
        kinds = r.sample(ALPHABETS, r.randint(1, 4)) + ([any_character] if r.random() < 0.2 else [])
        out.append("".join(r.choice(kinds)(r) for _ in range(r.randint(1, 40))))
    return out


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_for(process, url, seconds=180):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server behind {url} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise SystemExit(f"{url} did not answer within {seconds} s")


class Server:
    """A server on loopback that ends with the block."""

    def __init__(self, command, health):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.health = health

    def __enter__(self):
        wait_for(self.process, self.health)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def reference(port, text, add_special):
    """llama.cpp's ids."""
    return post(f"http://127.0.0.1:{port}/tokenize", {"content": text, "add_special": add_special, "parse_special": True})["tokens"]


def quire(port, text, add_special):
    """Quire's ids."""
    return post(f"http://127.0.0.1:{port}/tokenize", {"model": "m", "prompt": text, "add_special_tokens": add_special})["tokens"]


def explained(text, got, add_special, theirs_port, ours_port):
    """Which of the differences in `docs/tokenizers.md` this is, tried out on both, or None."""
    composed = unicodedata.normalize("NFC", text)
    if composed != text and got == reference(theirs_port, composed, add_special):
        return "letters and marks that can be composed"
    # Python 3.11 to 3.13 know Unicode 14 to 15.1; a private character, which no table calls a letter, takes the place of what they don't know.
    plain = "".join("\ue000" if unicodedata.category(c) == "Cn" else c for c in text)
    if plain != text and quire(ours_port, plain, add_special) == reference(theirs_port, plain, add_special):
        return "characters newer than llama.cpp's Unicode table"
    return None


def compare(arguments, model, texts):
    """Unexplained differences, and how many were explained."""
    theirs_port, ours_port, admin_port = free_port(), free_port(), free_port()
    theirs = Server(
        [arguments.llama_server, "-m", model, "-c", "512", "-np", "1", "--no-webui", "--host", "127.0.0.1", "--port", str(theirs_port)],
        f"http://127.0.0.1:{theirs_port}/health",
    )
    ours = Server(
        [arguments.quire, "serve", model, "--alias", "m", "--max-model-len", "512", "--port", str(ours_port), "--admin-port", str(admin_port)],
        f"http://127.0.0.1:{ours_port}/health",
    )
    unexplained, reasons = [], {}
    with theirs, ours:
        for text in texts:
            for add_special in (False, True):
                want = reference(theirs_port, text, add_special)
                got = quire(ours_port, text, add_special)
                if want == got:
                    continue
                reason = explained(text, got, add_special, theirs_port, ours_port)
                if reason:
                    reasons[reason] = reasons.get(reason, 0) + 1
                else:
                    unexplained.append((text, add_special, want, got))
    return unexplained, reasons


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quire", default=os.environ.get("QUIRE_BIN", "target/release/quire"))
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER", "llama-server"))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("models", nargs="*", metavar="MODEL.gguf")
    arguments = parser.parse_args()
    if not (shutil.which(arguments.llama_server) or pathlib.Path(arguments.llama_server).is_file()):
        print(f"skipped: there is no llama.cpp server at `{arguments.llama_server}` (set LLAMA_SERVER)")
        return 0
    if not arguments.models:
        print("skipped: no model was named")
        return 0
    texts = strings(arguments.count, arguments.seed)
    failed = False
    for model in arguments.models:
        unexplained, reasons = compare(arguments, model, texts)
        print(f"{pathlib.Path(model).name}: {len(texts)} strings, with and without special tokens; {len(unexplained)} unexplained differences; explained: {reasons or 'none'}")
        for text, add_special, want, got in unexplained[:20]:
            print(f"  {text!r} add_special={add_special}\n    llama.cpp {want}\n    quire     {got}")
        failed |= bool(unexplained)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
