"""A worker is killed in the middle of a stream: the router goes on with another one, and the client reads the text that it would have read."""

import contextlib
import json
import signal
import subprocess
import tempfile
import time
import urllib.request

import pytest
from conftest import BINARY, MODEL, free_port

BODY = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 11, "max_tokens": 240, "ignore_eos": True}


class Fleet:
    """Two workers behind a router."""

    def __init__(self):
        self.log = tempfile.NamedTemporaryFile("w+b", suffix=".log", delete=False)
        self.ports, self.admins = [free_port(), free_port()], [free_port(), free_port()]
        self.port, admin = free_port(), free_port()
        self.workers = [self._start("worker", MODEL, "--host", "127.0.0.1", "--port", str(p), "--admin-port", str(a))
                        for p, a in zip(self.ports, self.admins)]
        workers = ",".join(f"127.0.0.1:{p}" for p in self.ports)
        self.router = self._start("router", "--workers", workers, "--host", "127.0.0.1", "--port", str(self.port), "--admin-port", str(admin))
        self.base = f"http://127.0.0.1:{self.port}"
        for port in (*self.admins, admin):
            self._wait(f"http://127.0.0.1:{port}/readyz")
        # The router knows both.
        end = time.monotonic() + 20
        while self._alive() < 2:
            assert time.monotonic() < end, "the router does not find both workers"
            time.sleep(0.1)

    def _start(self, *args):
        return subprocess.Popen([BINARY, *args], stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def _wait(self, url, seconds=60):
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(url, timeout=5).status == 200:
                    return
            assert time.monotonic() < end, f"{url} is not ready"
            time.sleep(0.05)

    def _alive(self):
        """Both get work: two requests at a time land on two workers once the router knows both."""
        before = [started(a) for a in self.admins]
        streams = [self.stream(max_tokens=8) for _ in range(4)]
        for stream in streams:
            stream.read()
        return sum(started(a) > b for a, b in zip(self.admins, before))

    def stream(self, **changes):
        body = json.dumps({**BODY, **changes, "stream": True}).encode()
        return urllib.request.urlopen(urllib.request.Request(f"{self.base}/v1/completions", body, {"content-type": "application/json"}), timeout=120)

    def stop(self):
        for process in (self.router, *self.workers):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self.router, *self.workers):
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()


def figure(admin, name):
    page = urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=10).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name)


def started(admin):
    return figure(admin, "quire_request_choices_count")


def running(admin):
    return figure(admin, "quire_requests_running")


@pytest.fixture
def fleet():
    f = Fleet()
    try:
        yield f
    finally:
        f.stop()


def read(stream, after=None, then=None):
    """The text, the events with text, the finish reason; `then` is called after so many events."""
    text, events, reason = "", 0, None
    for line in stream:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        assert not chunk.get("error"), chunk
        for choice in chunk["choices"]:
            text += choice.get("text") or ""
            reason = choice.get("finish_reason") or reason
        events += 1
        if events == after:
            then()
    return text, events, reason


def test_kill_in_the_middle_of_a_stream(fleet):
    want = read(fleet.stream())
    assert want[2] == "length" and len(want[0]) > 100
    killed = []

    def kill():
        end = time.monotonic() + 10
        while not killed:
            for worker, admin in zip(fleet.workers, fleet.admins):
                if running(admin) > 0:
                    worker.kill()
                    worker.wait()
                    killed.append(admin)
                    break
            assert time.monotonic() < end, "no worker runs the stream"

    got = read(fleet.stream(), after=40, then=kill)
    assert killed, "the stream ended before the kill"
    assert (got[0], got[2]) == (want[0], want[2])
    # Nothing was said twice, and the fleet goes on with the worker that is left.
    assert read(fleet.stream())[0] == want[0]


def test_kill_all_ends_the_stream_with_an_error(fleet):
    text, error = "", None
    for events, line in enumerate(fleet.stream()):
        if events == 20:
            for worker in fleet.workers:
                worker.kill()
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            error = error or chunk.get("error")
            text += "".join(choice.get("text") or "" for choice in chunk.get("choices", []))
    assert text and error and error["message"], (text, error)
