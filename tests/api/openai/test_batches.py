"""/v1/files, /v1/batches with OpenAI's own client, and `foretoken run-batch`."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import msgspec
import openai
import pytest

from foretoken.api.cli import commands
from foretoken.api.openai.batches import lines
from foretoken.api.openai.batches.form import read_form
from foretoken.api.openai.batches.protocol import OutputLine
from foretoken.core.errors import InvalidRequest

NAME = "tiny/model"
CHAT = "/v1/chat/completions"


def line(custom_id, url=CHAT, **body):
    given = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given | body}


def jsonl(*lines):
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


@contextlib.contextmanager
def client_of(server, key="none"):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def upload(client, *lines):
    return client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")


def wait(client, batch_id, *states):
    deadline = time.monotonic() + 20
    while (batch := client.batches.retrieve(batch_id)).status not in states:
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)  # as a client polls
    return batch


def content(client, file_id):
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


# -- a batch --------------------------------------------------------------------------------------


def test_a_batch_answers_each_request_as_its_route_would(client, server, say):
    say("Hello")
    file = upload(client, *(line(f"r{index}") for index in range(20)), line("bad", max_tokens=-1))
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    done = wait(client, batch.id, "completed")
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    outputs = content(client, done.output_file_id)
    assert {each["custom_id"] for each in outputs} == {f"r{index}" for index in range(20)}
    assert {each["response"]["status_code"] for each in outputs} == {200}
    texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in outputs}
    assert texts == {"Hello"}
    (failed,) = content(client, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"
    assert [each.id for each in client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([line("a"), line("a")], "duplicate_custom_id"),
        ([line("a", url="/v1/completions")], "invalid_url"),
        ([{"custom_id": "a"}], "invalid_json_line"),
    ],
    ids=str,
)
def test_an_input_that_is_wrong_fails_the_batch_and_names_the_line(lines, code, client, engine):
    batch = client.batches.create(
        input_file_id=upload(client, *lines).id, endpoint=CHAT, completion_window="24h"
    )
    failed = wait(client, batch.id, "failed")
    (error,) = failed.errors.data
    assert (error.code, error.line) == (code, len(lines))
    assert engine.requests == []


def test_a_full_queue_makes_a_batch_wait(client, engine, say):
    say("Hi")
    engine.limits.max_running, engine.limits.max_queued = 2, 0
    file = upload(client, *(line(f"r{index}") for index in range(9)))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert wait(client, batch.id, "completed").request_counts.completed == 9


def test_a_cancelled_batch_keeps_its_answers(client, server, engine, say):
    say("Hello")
    engine.by_hand = True
    file = upload(client, *(line(f"r{index}") for index in range(30)))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert engine.submitted.acquire(timeout=20)
    with pytest.raises(openai.BadRequestError, match="reads the file"):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait(client, batch.id, "cancelled")
    assert done.request_counts.completed == 0
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)
    assert engine.was_aborted.acquire(timeout=20)


def test_requests_of_a_batch_have_the_lowest_priority_and_their_own_time(client, engine, say):
    say("Hello")
    file = upload(client, line("a"), line("b", priority=-1))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait(client, batch.id, "completed")
    assert sorted(each.priority for each in engine.requests) == [-1, 10]
    assert all(each.deadline > 590 for each in engine.requests)


# -- files ----------------------------------------------------------------------------------------


def test_files_are_listed_read_and_deleted(client):
    files = [upload(client, line(f"r{index}")) for index in range(3)]
    assert [each.id for each in client.files.list(limit=2)] == [each.id for each in files[::-1]]
    assert client.files.retrieve(files[0].id).bytes == len(jsonl(line("r0")))
    assert client.files.content(files[0].id).content == jsonl(line("r0"))
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="No such file"):
        client.files.retrieve(files[0].id)


def test_files_are_listed_by_purpose_and_an_unknown_input_file_is_named(client):
    file = client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    assert [each.id for each in client.files.list(purpose="batch")] == [file.id]
    assert list(client.files.list(purpose="fine-tune")) == []
    with pytest.raises(openai.NotFoundError) as info:
        client.batches.create(input_file_id="x", endpoint=CHAT, completion_window="24h")
    assert info.value.param == "input_file_id"


def test_files_of_one_key_are_unknown_to_another(serve):
    server = serve(api_keys=("a", "b"))
    with client_of(server, "a") as one, client_of(server, "b") as other:
        file = upload(one, line("a"))
        assert one.files.list().data
        assert other.files.list().data == []
        for work in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                work(file.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_files_have_a_limit_each_and_together(serve):
    server = serve(max_file_bytes=1000, max_files_bytes=1200)
    with client_of(server) as client:
        first = client.files.create(file=("a", b"x" * 600), purpose="batch")
        for size in (2000, 700):
            with pytest.raises(openai.APIStatusError) as refused:
                client.files.create(file=("a", b"x" * size), purpose="batch")
            assert refused.value.status_code == 413
        client.files.delete(first.id)
        assert client.files.create(file=("a", b"x" * 700), purpose="batch").bytes == 700


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": b""}, "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": b"a"}, "data": {"purpose": "other"}}, "purpose"),
        ({"files": {"other": b"a"}, "data": {"purpose": "batch"}}, "file"),
        ({"json": {"file": "a"}}, "file"),
    ],
    ids=str,
)
def test_a_bad_upload_is_refused_by_field(form, param, server):
    answer = httpx.post(f"{server.url}/v1/files", **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"--x", b"--x\r\n\r\n--x--", b"--x\r\nA: b\r\n\r\nc\r\n--x--"], ids=str
)
def test_a_broken_form_is_refused(body):
    with pytest.raises(InvalidRequest):
        read_form("multipart/form-data; boundary=x", body)


def test_a_file_keeps_its_bytes():
    data = bytes(range(256)) + b"\r\n--y\r\n\n"
    body = b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n%b\r\n--x--" % data
    assert read_form("multipart/form-data; boundary=x", body)["file"] == (data, "a")


# -- another server -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_whole", [0, 1])
def test_a_batch_goes_on_in_the_next_server(serve, built, engine, say, tmp_path, num_whole):
    say("Hello")
    folder = tmp_path / "batches"
    server = serve(batch_dir=str(folder))
    with client_of(server) as client:
        file = upload(client, *(line(f"r{index}") for index in range(12)))
        engine.by_hand = True
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert engine.submitted.acquire(timeout=20)
    server.stop()
    kept = json.loads((folder / f"{batch.id}.json").read_text())["batch"]
    assert kept["status"] == "in_progress"
    # Perhaps one answer was written, and the next one half.
    part = json.dumps({"id": "x", "custom_id": "r3", "response": None}).encode()
    (folder / f"{batch.id}.output").write_bytes((part + b"\n") * num_whole + part[:10])
    engine.by_hand = engine.draining = False
    engine.requests.clear()
    with client_of(serve(batch_dir=str(folder))) as client:
        assert client.files.retrieve(file.id).filename == "in.jsonl"
        done = wait(client, batch.id, "completed")
        ids = [each["custom_id"] for each in content(client, done.output_file_id)]
    assert sorted(ids) == sorted(f"r{index}" for index in range(12))
    assert len(engine.requests) == 12 - num_whole


def test_run_batch_answers_a_file_without_a_server(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = {"url": "/v1/completions", "model": "builtin", "messages": None, "prompt": "def f("}
    source.write_bytes(
        jsonl(*(line(f"r{index}", **text) for index in range(5)), line("bad", **text, top_p=2))
    )
    args = ["run-batch", str(source), str(target), "builtin", "--threads", "1"]
    assert commands.main(args) == 1
    assert "5 of 6 requests answered, 1 failed" in capsys.readouterr().err
    lines = [json.loads(each) for each in target.read_text().splitlines()]
    assert sorted(each["response"]["status_code"] for each in lines) == [200] * 5 + [400]
    assert commands.main(args) == 2
    assert "--resume" in capsys.readouterr().err
    target.write_text("".join(json.dumps(each) + "\n" for each in lines[:4]))
    assert commands.main([*args, "--resume"]) == 1
    assert len(target.read_text().splitlines()) == 6
    assert commands.main([*args, "--resume"]) == 1  # one of those that were there failed
    assert "6 were there, 1 of them failed" in capsys.readouterr().err
    source.write_bytes(b"\n" + jsonl(line("a", url="/nothing"), line("a")))
    assert commands.main(["run-batch", str(source), str(tmp_path / "new")]) == 2
    assert "line 2: url /nothing" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_run_batch_after_a_model_that_was_misspelt_needs_no_resume(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(line("a")))
    for _ in range(2):
        assert commands.main(["run-batch", str(source), str(target), "/no/such/model"]) == 2
        assert "no such folder" in capsys.readouterr().err


def test_an_answer_is_written_wholly_to_a_disk_that_takes_parts(monkeypatch):
    written = bytearray()

    def takes_seven(_descriptor: int, data: bytes) -> int:
        written.extend(data[:7])
        return len(data[:7])

    monkeypatch.setattr(lines.os, "write", takes_seven)
    answer = OutputLine(id="x", custom_id="a", response=None)
    lines.write_line(1, answer)
    assert written == msgspec.json.encode(answer) + b"\n"
