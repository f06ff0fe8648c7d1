"""Starts the real binary with the real model, as one process and as router + worker, and stops it by its own pid.

QUIRE_BIN: the binary (default target/release/quire). QUIRE_MODEL: what to serve (default: the default model, already pulled).
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("QUIRE_BIN", str(ROOT / "target/release/quire"))
MODEL = os.environ.get("QUIRE_MODEL", "smollm2:135m")
MODES = ["serve", "split"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(server, path, body, timeout=60):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    req = urllib.request.Request(server.base + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(req, timeout=timeout) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read() or b"{}")


class Server:
    """One deployment: `serve`, or `worker` and `router` as processes of their own."""

    def __init__(self, mode, *worker_flags, router_flags=(), env=None, model=MODEL):
        self.mode, self.procs, self.log = mode, {}, tempfile.NamedTemporaryFile("w+b", suffix=".log", delete=False)
        self.port, self.admin, self.worker_port, self.worker_admin = (free_port() for _ in range(4))
        self.env = {**os.environ, **(env or {})}
        front = ["--host", "127.0.0.1", "--port", str(self.port), "--admin-port", str(self.admin), *router_flags]
        if mode == "serve":
            self.worker_admin = self.admin
            self._start("serve", ["serve", str(model), *front, *worker_flags])
        else:
            self._start("worker", ["worker", str(model), "--host", "127.0.0.1", "--port", str(self.worker_port),
                                   "--admin-port", str(self.worker_admin), *worker_flags])
            self._start("router", ["router", "--workers", f"127.0.0.1:{self.worker_port}", *front])
        self.base = f"http://127.0.0.1:{self.port}"
        self._wait_ready()

    def _start(self, name, args):
        self.procs[name] = subprocess.Popen([BINARY, *args], env=self.env, stdout=self.log, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL)

    def _wait_ready(self, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            dead = [n for n, p in self.procs.items() if p.poll() is not None]
            if dead:
                break
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/readyz", timeout=5).status == 200:
                    return
            time.sleep(0.05)
        self.stop(check=False)
        raise RuntimeError("not ready; log:\n" + self.output())

    def output(self):
        return pathlib.Path(self.log.name).read_text(errors="replace")[-4000:]

    def metrics(self):
        """Sum over labels of every series that the worker reports, by name."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.worker_admin}/metrics", timeout=10).read().decode()
        out = {}
        for line in text.splitlines():
            if m := re.match(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([-+\w.]+)$", line):
                out[m[1]] = out.get(m[1], 0) + float(m[2])
        return out

    def stop(self, check=True):
        codes = {}
        for name in ("router", "serve", "worker"):
            if proc := self.procs.get(name):
                if proc.poll() is None:
                    proc.send_signal(signal.SIGTERM)
                try:
                    codes[name] = proc.wait(timeout=45)
                except subprocess.TimeoutExpired:
                    proc.kill()
                    codes[name] = "killed"
        if check:
            assert all(c == 0 for c in codes.values()), f"{codes}\n{self.output()}"


@contextlib.contextmanager
def running(mode, *flags, **more):
    server = Server(mode, *flags, **more)
    try:
        yield server
    except BaseException:
        print(server.output())
        server.stop(check=False)
        raise
    server.stop()


@pytest.fixture(scope="session", params=MODES)
def server(request):
    with running(request.param) as s:
        yield s


@pytest.fixture
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=120) as c:
        yield c


@pytest.fixture(scope="session")
def model(server):
    return json.load(urllib.request.urlopen(f"{server.base}/v1/models"))["data"][0]["id"]
