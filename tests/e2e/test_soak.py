"""A short soak: some thousand requests of every kind; nothing unexpected, nothing lost, nothing left behind.

The long one: `quire bench soak MODEL` (100,000 requests, memory flat within 2 %); its figures are in docs/soak.md.
"""

import json
import os
import pathlib
import subprocess

from conftest import BINARY, MODEL, ROOT

# A tiny model, if there is one: the mix is about requests, not about arithmetic.
TINY = [p for p in (os.environ.get("QUIRE_TINY_MODEL"), ROOT.parent / "shared/models/stories260K.gguf") if p and pathlib.Path(p).is_file()]


def test_soak(tmp_path):
    report = tmp_path / "soak.json"
    model, requests, warmup = (str(TINY[0]), 3000, 500) if TINY else (MODEL, 200, 50)
    # Caches still fill in so short a run: its memory says little.
    done = subprocess.run([BINARY, "bench", "soak", model, "-n", str(requests), "--warmup", str(warmup), "-c", "40", "--max-growth", "300",
                           "--json", str(report)], capture_output=True, text=True, timeout=120)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    said = json.loads(report.read_text())
    assert said["faults"] == [] and said["busy"] == [] and said["arrived"] == said["ended"] > 0
    kinds = said["kinds"]
    assert sum(k["sent"] for k in kinds.values()) == requests + warmup and all(k["unexpected"] == 0 for k in kinds.values())
    assert set(kinds) == {"whole", "stream", "choices", "logprobs", "leave", "hurry", "deadline", "wrong"}
    assert kinds["leave"]["left"] > 0 and kinds["wrong"]["refused"] == kinds["wrong"]["sent"] and said["hit_tokens"] > 0
