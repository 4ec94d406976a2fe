"""A server in a process of its own that hangs, stands still, dies or drains, over a real engine."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from support.fake_model import answer
from support.forked import Talking, script

SECONDS = 30
SCRIPT = Path(__file__).parents[2] / "support" / "serve_engine.py"
PROMPT = [1, 2, 3]


class Process:
    """serve_engine.py, with its ready line read."""

    def __init__(self, folder: Path, dump_dir: Path, **options) -> None:
        self.dump_dir = dump_dir
        settings = json.dumps({"dump_dir": str(dump_dir), **options})
        self.process = Talking(script, str(SCRIPT), str(folder), settings)
        self.said = {word: threading.Semaphore(0) for word in ("obeyed", "submitted", "entered")}
        threading.Thread(target=self._listen, daemon=True).start()
        line = self.process.stderr.readline()
        self.url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        self.answers: list[httpx.Response | Exception] = []
        self.askers: list[threading.Thread] = []

    def order(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.wait("obeyed")

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.said[line.strip()].release()

    def wait(self, word: str) -> None:
        """Until the server has said this once more than was waited for."""
        assert self.said[word].acquire(timeout=SECONDS)

    def post(self, path="/v1/completions", **body) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 4, **body}
        return httpx.post(self.url + path, json=body, timeout=SECONDS)

    def ask(self, **body) -> threading.Thread:
        """Post in a thread, until the engine has it; the answer is put into `answers`."""

        def post() -> None:
            try:
                self.answers.append(self.post(**body))
            except httpx.HTTPError as error:
                self.answers.append(error)

        self.askers.append(asker := threading.Thread(target=post))
        asker.start()
        self.wait("submitted")
        return asker

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=SECONDS)

    def wait_for(self, path: str, status: int) -> httpx.Response:
        deadline = time.monotonic() + SECONDS
        while (answer := self.get(path)).status_code != status:
            assert time.monotonic() < deadline
        return answer

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        for asker in self.askers:
            asker.join(SECONDS)
        return code

    def dumps(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.dump_dir.iterdir())]


@pytest.fixture
def start(byte_level_folder, tmp_path):
    started: list[Process] = []

    def launch(**options) -> Process:
        started.append(Process(byte_level_folder, tmp_path, **options))
        return started[-1]

    yield launch
    for each in started:
        each.process.close()


@pytest.fixture
def text(tokenizer):
    """Return a function that decodes the first ``count`` tokens of the answer."""
    return lambda count: tokenizer.decode(answer(PROMPT, count), skip_special_tokens=True)


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["text"]


def test_a_model_thread_that_hangs_fails_its_clients_and_ends_the_process_with_70(start) -> None:
    server = start(step_timeout=1.0)
    server.order("hang")
    server.ask()
    server.wait("entered")
    server.ask()
    assert server.end() == 70
    assert [each.status_code for each in server.answers] == [503, 503]
    assert all(int(each.headers["retry-after"]) >= 1 for each in server.answers)
    (dump,) = server.dumps()
    assert dump["failure"]["kind"] == "StepHung"
    model = next(v for name, v in dump["threads"].items() if name.startswith("foretoken-model"))
    assert any("serve_engine.py" in place for place in model)


@pytest.mark.slow
def test_an_event_loop_that_stands_still_ends_the_process_with_70_and_a_dump(start, text) -> None:
    server = start(step_timeout=2.0)
    assert text_of(server.post()) == text(4)
    server.process.stdin.write("stall\n")
    server.process.stdin.flush()
    assert server.end() == 70
    (dump,) = server.dumps()
    assert dump["reason"] == "the event loop did not run for --step-timeout seconds"
    assert dump["audit"]["ok"]
    assert "most recent call first" in server.process.stderr.read()


def test_a_server_whose_steps_always_raise_tells_everybody_and_ends_with_1(start) -> None:
    server = start()
    server.order("raise")
    for _ in range(3):
        server.ask().join(SECONDS)
    assert server.end() == 1
    assert [each.status_code for each in server.answers] == [500, 500, 503]
    assert all("forward pass" not in each.text for each in server.answers)
    (dump,) = server.dumps()
    assert dump["failure"]["kind"] == "RuntimeError"


def test_a_long_step_is_alive_but_not_ready_and_a_full_queue_hides_neither(start, text) -> None:
    server = start(ready_step_seconds=0.2)
    assert server.get("/ready").status_code == 200
    server.order("hold")
    server.ask()
    server.wait("entered")
    unready = server.wait_for("/ready", 503)
    assert int(unready.headers["retry-after"]) >= 1
    assert "step" in unready.json()["error"]["message"]
    assert server.get("/health").status_code == 200
    for _ in range(5):  # one more runs, four wait
        server.ask()
    assert server.post().status_code == 429
    assert server.get("/health").status_code == 200
    server.order("go")
    assert server.wait_for("/ready", 200).json() == {"status": "ready"}
    for asker in server.askers:
        asker.join(SECONDS)
    assert [text_of(each) for each in server.answers] == [text(4)] * 6


def test_an_operator_may_ask_for_a_dump_and_for_an_audit_at_any_time(start, text) -> None:
    server = start()
    server.order("hold")
    server.ask()
    server.wait("entered")
    server.process.send_signal(signal.SIGUSR1)
    server.order("go")
    audit = httpx.post(server.url + "/debug/audit", timeout=SECONDS)
    assert audit.status_code == 200
    assert audit.json()["ok"]
    assert audit.json()["pages"]["total"] == 64
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    (dump,) = server.dumps()
    assert dump["reason"] == "SIGUSR1"
    assert len(dump["requests"]) == 1
    assert text_of(server.answers[0]) == text(4)


def test_a_deadline_that_passes_in_the_queue_is_an_error_with_a_code(start) -> None:
    server = start()
    server.order("hold")
    server.ask()
    server.wait("entered")
    server.ask()
    askers = [server.ask(deadline_ms=60_000, stream=stream) for stream in (False, True)]
    server.order("leap")
    server.order("go")
    for asker in askers:
        asker.join(SECONDS)
    late = [each for each in server.answers if "deadline_exceeded" in each.text]
    (plain,) = [each for each in late if each.status_code == 503]
    (stream,) = [each for each in late if each.status_code == 200]
    assert int(plain.headers["retry-after"]) >= 1
    assert stream.text.startswith('data: {"error"')


def test_no_request_takes_longer_than_the_server_allows(start, text) -> None:
    server = start(limits={"max_request_seconds": 60})
    server.order("hold")
    server.ask(deadline_ms=200_000)
    server.wait("entered")
    server.order("leap")
    server.order("go")
    server.askers[0].join(SECONDS)
    (cut,) = server.answers
    assert cut.json()["choices"][0]["stop_reason"] == "deadline"
    assert text_of(cut) == text(1)


def test_a_busy_server_drains_whole_streams_and_turns_others_away(start, text) -> None:
    server = start()
    server.order("hold")
    server.ask(stream=True, max_tokens=30)
    server.wait("entered")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("/ready", 503)
    refused = server.post()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert server.get("/health").status_code == 200
    server.order("go")
    assert server.end() == 0
    (whole,) = server.answers
    events = [line[6:] for line in whole.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    told = [json.loads(each)["choices"][0]["text"] for each in events[:-1]]
    assert "".join(told) == text(30)


def test_a_drain_that_takes_too_long_ends_every_request_once(start) -> None:
    server = start(drain_seconds=0.2)
    server.order("hold")
    for _ in range(4):
        server.ask()
    server.wait("entered")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("/ready", 503)
    time.sleep(0.4)  # it waits no longer
    server.order("go")
    assert server.end() == 0
    assert [each.status_code for each in server.answers] == [503] * 4


# -- what one request breaks on its way in and out ----------------------------------------------

MESSAGE = {"role": "user", "content": "bad"}
WAYS = {  # a verb of the tokenizer -> a request that uses it, with what breaks it
    "encode": ("/v1/completions", {"prompt": "bad", "max_tokens": 2}),
    "render_chat": ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 2}),
    "decode": ("/detokenize", {"tokens": [5, 6]}),
}


@pytest.mark.parametrize("verb", WAYS)
def test_a_tokenizer_or_template_that_raises_fails_its_request_alone(
    server, engine, tokenizer, monkeypatch, verb
) -> None:
    whole = getattr(type(tokenizer), verb)

    def breaks(self, what, *args, **options):
        if "bad" in str(what) or list(what) == [5, 6]:
            raise RuntimeError("a secret of the library")
        return whole(self, what, *args, **options)

    monkeypatch.setattr(type(tokenizer), verb, breaks)
    path, body = WAYS[verb]
    good = json.loads(json.dumps(body).replace("bad", "good").replace("[5, 6]", "[6, 5]"))
    told = [
        httpx.post(server.url + path, json=each, timeout=SECONDS) for each in (good, body, good)
    ]
    assert [each.status_code for each in told] == [200, 500, 200]
    assert "secret" not in told[1].text
    assert not server.do(lambda: dict(engine._live)), "an end takes effect on the loop"
