"""/v1/files, /v1/batches with OpenAI's own client, and `foretoken run-batch`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import sqlite3
import time
from collections import Counter as Tally
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import msgspec
import openai
import pytest

from foretoken import AsyncLLM, DeadlineExceeded, EngineDead, InvalidRequest, Unavailable
from foretoken.api.cli import commands
from foretoken.api.dialects.batches import database, lines, store
from foretoken.api.dialects.batches.bodies import BatchBody, Counts, FileBody, OutputLine
from foretoken.api.dialects.batches.lines import INTERACTIVE_DIVISOR
from foretoken.api.dialects.batches.routes import SHARE_DIVISOR
from foretoken.api.server.app import create_app
from foretoken.api.serving.errors import ApiError
from foretoken.api.serving.limits import Limits
from foretoken.api.serving.settings import Settings

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


def test_all_batches_together_have_a_share_and_people_find_room(serve, engine, say):
    say("Hello")
    engine.limits.max_running, engine.limits.max_queued = 16, 0
    engine.by_hand = True
    server = serve()
    with client_of(server) as client:
        file = upload(client, *(line(f"r{index}") for index in range(30)))
        for _ in range(5):
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for _ in range(2):
            assert engine.submitted.acquire(timeout=20)
        assert server.do(lambda: len(engine._live)) == 16 // SHARE_DIVISOR
        engine.by_hand = False
        server.do(engine._work.set)
        messages = [{"role": "user", "content": "Hello"}]
        assert client.chat.completions.create(model=NAME, messages=messages)


def test_the_share_of_batches_is_a_setting_and_is_less_beside_people(serve, engine, say):
    say("Hello")
    engine.by_hand = True
    server = serve(batch_running=8)
    with client_of(server) as client, ThreadPoolExecutor(1) as person:
        messages = [{"role": "user", "content": "Hello"}]
        waiting = person.submit(client.chat.completions.create, model=NAME, messages=messages)
        assert engine.submitted.acquire(timeout=20)
        file = upload(client, *(line(f"r{index}") for index in range(30)))
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for _ in range(8 // INTERACTIVE_DIVISOR):
            assert engine.submitted.acquire(timeout=20)
        assert server.do(lambda: len(engine._live)) == 1 + 8 // INTERACTIVE_DIVISOR
        engine.by_hand = False
        server.do(engine._work.set)
        assert waiting.result(20).choices


def test_callers_take_turns_however_many_batches_one_has(serve, engine, say):
    say("Hello")
    engine.by_hand = True
    server = serve(api_keys=("a", "b"), batch_running=1)
    with client_of(server, "a") as one, client_of(server, "b") as other:
        for client, count in ((one, 4), (other, 1)):
            file = upload(client, *(line(f"r{index}") for index in range(9)))
            for _ in range(count):
                client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        tenants = []
        for _ in range(12):
            assert engine.submitted.acquire(timeout=20)
            tenants.append(engine.requests[-1].tenant)
            for _ in engine.answers(None):
                server.do(engine.step)
        counts = Tally(tenants[4:])
        assert sorted(counts.values()) == [4, 4]
        engine.by_hand = False


def test_an_engine_that_cannot_take_a_request_now_gets_it_later(client, engine, say):
    say("Hello")
    refused = []

    def refuse_first(request):
        if len(refused) < 3:
            refused.append(request.request_id)
            raise Unavailable("no replica is connected", retry_after=0.01)
        return submit(request)

    submit, engine.submit = engine.submit, refuse_first
    file = upload(client, line("a"), line("b"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    counts = wait(client, batch.id, "completed").request_counts
    assert (counts.completed, counts.failed, len(refused)) == (2, 0, 3)


def test_a_request_that_waited_for_all_its_time_waits_again_unless_it_set_that_itself(
    client, engine, say
):
    say("Hello")
    late = []

    def refuse_once(request):
        if request.request_id not in late and len(late) < 2:
            late.append(request.request_id)
            raise DeadlineExceeded("too late", retry_after=0.01)
        return submit(request)

    submit, engine.submit = engine.submit, refuse_once
    file = upload(client, line("a"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert wait(client, batch.id, "completed").request_counts.completed == 1
    late.clear()
    file = upload(client, line("a", deadline_ms=60_000))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = wait(client, batch.id, "completed")
    (failed,) = content(client, done.error_file_id)
    assert failed["response"]["status_code"] == 503


def test_a_request_that_ends_replicas_is_an_error_of_its_own(client, engine, say):
    say("Hello")
    engine.row_error = EngineDead("the request was ended: 3 replicas were lost")
    batch = client.batches.create(
        input_file_id=upload(client, line("a")).id, endpoint=CHAT, completion_window="24h"
    )
    done = wait(client, batch.id, "completed")
    (failed,) = content(client, done.error_file_id)
    assert failed["response"]["status_code"] == 503


@pytest.fixture
def small_disk(monkeypatch):
    """A disk that has no room beyond a number of pages of a database."""
    opened = []
    before = database._open

    def on_small_disk(file):
        connection = before(file)
        opened.append(connection)
        return connection

    monkeypatch.setattr(database, "_open", on_small_disk)
    return lambda num_pages: opened[0].execute(f"PRAGMA max_page_count={num_pages}").fetchone()


def test_an_upload_to_a_full_disk_gets_507_and_leaves_nothing(client, small_disk):
    kept = upload(client, line("a"))
    small_disk(50)
    answer = httpx.post(
        f"{client.base_url}files",
        files={"file": ("a", b"x" * 2**20)},
        data={"purpose": "batch"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
    assert [each.id for each in client.files.list()] == [kept.id]
    assert client.files.content(kept.id).content == jsonl(line("a"))


def test_a_disk_that_fills_up_ends_a_batch_with_the_answers_so_far(
    client, server, engine, say, small_disk
):
    say("Hello")
    engine.by_hand = True
    file = upload(client, *(line(f"r{index}") for index in range(200)))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert engine.submitted.acquire(timeout=20)
    (num_pages,) = small_disk(1)  # no less than it has
    small_disk(num_pages + 8)
    engine.by_hand = False
    server.do(engine._work.set)
    failed = wait(client, batch.id, "failed")
    assert [each.code for each in failed.errors.data] == ["disk_full"]
    outputs = content(client, failed.output_file_id)
    assert 0 < len(outputs) == failed.request_counts.completed < 200
    with pytest.raises(openai.BadRequestError, match="is failed"):
        client.batches.cancel(batch.id)


def test_a_full_disk_has_room_for_the_end_of_a_batch_and_keeps_it_again(tmp_path):
    spare = tmp_path / database.SPARE

    def end(_connection):
        if spare.exists():
            error = sqlite3.OperationalError("full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return "written"

    async def body():
        opened = database.Database(tmp_path)
        await opened.run(lambda connection: None)
        with pytest.raises(ApiError, match="full"):
            await opened.run(end)
        assert await opened.run_at_last(end) == "written"
        assert spare.stat().st_size == database.SPARE_BYTES
        await opened.close()

    asyncio.run(body())


def test_nothing_is_written_to_a_batch_that_has_ended(tmp_path):
    async def body():
        kept_files = store.BatchStore(database.Database(tmp_path), Limits())
        file = FileBody(
            id="file-a", bytes=2, created_at=1, filename="a", purpose="batch", expires_at=2**40
        )
        await kept_files.add_file(file, b"me", io.BytesIO(b"{}"))
        batch = BatchBody(
            id="batch_a", endpoint=CHAT, input_file_id="file-a", created_at=1, expires_at=2**40,
            request_counts=Counts(),
        )  # fmt: skip
        await kept_files.add_batch(store.KeptBatch(b"me", batch))
        await kept_files.end(store.KeptBatch(b"me", batch), "completed")
        await kept_files.mark(batch, "cancelling")
        assert (await kept_files.find(BatchBody, b"me", "batch_a")).status == "completed"
        await kept_files.close()

    asyncio.run(body())


def test_a_batch_whose_end_was_not_written_can_be_cancelled(client, server, engine, say):
    say("Hello")
    engine.by_hand = True
    file = upload(client, *(line(f"r{index}") for index in range(9)))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert engine.submitted.acquire(timeout=20)
    server.do(
        lambda: [task.cancel() for task in asyncio.all_tasks() if "BatchJobs._run" in repr(task)]
    )
    assert engine.was_aborted.acquire(timeout=20)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert wait(client, batch.id, "cancelled").cancelled_at


def test_files_and_ended_batches_are_bounded_in_number_and_in_time(serve, engine, say, monkeypatch):
    say("Hello")
    server = serve(max_files=3, max_batches=2, file_seconds=7200)
    with client_of(server) as client:
        file = upload(client, line("a"))
        assert file.expires_at == file.created_at + 7200
        batches = []
        for _ in range(3):
            created = client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            batches.append(wait(client, created.id, "completed", "failed").id)
        assert [each.id for each in client.batches.list()] == batches[:0:-1]
        with pytest.raises(openai.APIStatusError) as refused:
            upload(client, line("a"))
        assert refused.value.status_code == 413
        engine.by_hand = True
        for _ in range(2):
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.RateLimitError, match="running batches is reached"):
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        outputs = [each.id for each in client.files.list() if each.id != file.id]
        later = SimpleNamespace(time=lambda: time.time() + 7300)
        monkeypatch.setattr(store, "time", later)
        for each in (file.id, *outputs):
            with pytest.raises(openai.NotFoundError):
                client.files.content(each)
        assert not client.files.list().data
        assert len(client.batches.list().data) == 2  # they are under way
        for _ in range(2):
            upload(client, line("a"))  # what has expired made room,
        with pytest.raises(openai.APIStatusError, match="max-files"):
            upload(client, line("a"))  # but for the file that they read
        engine.by_hand = False
        server.do(engine._work.set)
        for each in client.batches.list():
            assert wait(client, each.id, "completed").request_counts.completed == 1  # of their file


def test_a_caller_may_have_files_expire_earlier(serve, say):
    say("Hello")
    with client_of(serve()) as client:
        given = {"anchor": "created_at", "seconds": 3600}
        file = client.files.create(
            file=("a", jsonl(line("a"))), purpose="batch", expires_after=given
        )
        assert file.expires_at == file.created_at + 3600
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h",
            output_expires_after={**given, "seconds": 7200},
        )  # fmt: skip
        done = wait(client, batch.id, "completed")
        output = client.files.retrieve(done.output_file_id)
        assert output.expires_at == output.created_at + 7200
        for wrong in ({**given, "seconds": 1}, {**given, "anchor": "now"}):
            with pytest.raises(openai.BadRequestError) as info:
                client.files.create(file=("a", b"{}"), purpose="batch", expires_after=wrong)
            assert info.value.param == "expires_after"


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


def test_files_that_arrive_have_no_room_for_others(serve):
    server = serve(max_files_bytes=3000)
    body = PURPOSE + HEAD + b"x" * 2000
    head = f"POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-type: {FORM['content-type']}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as arriving:
        arriving.sendall(f"{head}content-length: 9999\r\n\r\n".encode() + body)
        deadline = time.monotonic() + 20
        while (answer := httpx.post(f"{server.url}/v1/files", **SMALL)).status_code == 200:
            httpx.delete(f"{server.url}/v1/files/{answer.json()['id']}")  # it was faster
            assert time.monotonic() < deadline
        assert answer.status_code == 413
    while httpx.post(f"{server.url}/v1/files", **SMALL).status_code != 200:
        assert time.monotonic() < deadline


SMALL = {"files": {"file": ("a", b"x" * 1200)}, "data": {"purpose": "batch"}}


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


HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FORM = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"--x", b"--x\r\n\r\n--x--", b"--x\r\nA: b\r\n\r\nc\r\n--x--", PURPOSE + HEAD + b"{}",
        PURPOSE + HEAD + b"{}\r\n--x", PURPOSE + HEAD + b"{}\r\n" + HEAD + b"{}\r\n--x--",
        PURPOSE * 20 + b"--x--", PURPOSE.replace(b"batch", b"b" * 5000) + b"--x--",
    ],
    ids=range(9),
)  # fmt: skip
def test_a_broken_form_is_refused(body, server):
    answer = httpx.post(f"{server.url}/v1/files", content=body, headers=FORM)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("file", "purpose")


@pytest.mark.parametrize("times", [1, 1000], ids=["small", "on the disk"])
def test_a_file_keeps_its_bytes(times, server):
    data = (bytes(range(256)) + b"\r\n--y\r\n\n") * times
    body = PURPOSE + HEAD + data + b"\r\n--x--\r\n"
    file = httpx.post(f"{server.url}/v1/files", content=body, headers=FORM).json()
    assert (file["bytes"], file["filename"]) == (len(data), "a")
    assert httpx.get(f"{server.url}/v1/files/{file['id']}/content").content == data


# -- another server -------------------------------------------------------------------------------


def test_a_batch_goes_on_in_the_next_server(serve, engine, say, tmp_path):
    say("Hello")
    folder = tmp_path / "batches"
    server = serve(batch_dir=str(folder), batch_running=4)
    with client_of(server) as client:
        file = upload(client, *(line(f"r{index}") for index in range(12)))
        engine.by_hand = True
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for _ in range(4):
            assert engine.submitted.acquire(timeout=20)
        for _ in engine.answers(None):  # to the ends of these four
            server.do(engine.step)
        wait_for_count(client, batch.id, 4)
        assert engine.submitted.acquire(timeout=20)
    server.stop()
    engine.by_hand = engine.draining = False
    num_before = len(engine.requests)
    with client_of(serve(batch_dir=str(folder))) as client:
        assert client.files.retrieve(file.id).filename == "in.jsonl"
        done = wait(client, batch.id, "completed")
        ids = [each["custom_id"] for each in content(client, done.output_file_id)]
        assert done.request_counts.completed == 12
    assert sorted(ids) == sorted(f"r{index}" for index in range(12))
    assert len(engine.requests) - num_before == 12 - 4


def wait_for_count(client, batch_id, completed):
    deadline = time.monotonic() + 20
    while client.batches.retrieve(batch_id).request_counts.completed < completed:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # as a client polls


def test_what_was_answered_before_a_server_ended_is_not_what_it_cut_off(
    serve, engine, say, tmp_path
):
    say("Hello")
    folder = tmp_path / "batches"
    server = serve(batch_dir=str(folder))
    with client_of(server) as client:
        engine.by_hand = True
        file = upload(client, line("a"))
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert engine.submitted.acquire(timeout=20)
        server.do(engine.step)  # one token of the answer
    server.stop()
    engine.by_hand = engine.draining = False
    with client_of(serve(batch_dir=str(folder))) as client:
        done = wait(client, batch.id, "completed")
        (answer,) = content(client, done.output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello"


def test_a_folder_has_one_server_at_a_time_and_the_next_one_takes_over(serve, tmp_path):
    first = serve(batch_dir=str(tmp_path))
    with client_of(first) as client:
        file = upload(client, line("a"))
    second = serve(batch_dir=str(tmp_path))
    with client_of(second) as client:
        with pytest.raises(openai.InternalServerError, match="another server") as refused:
            client.files.list()
        assert refused.value.response.headers["retry-after"] == "1"
        first.stop()
        assert client.files.retrieve(file.id).bytes == file.bytes


def test_a_folder_that_cannot_be_used_ends_the_start_with_one_line(tmp_path, built):
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / database.NAME).write_bytes(b"no database" * 100)
    for name in ("file", "damaged"):
        with pytest.raises(InvalidRequest, match=f"batch_dir: {tmp_path / name}: "):
            create_app(AsyncLLM.from_built(built), Settings(batch_dir=str(tmp_path / name)))


def test_files_of_an_earlier_version_are_left_alone_and_named(tmp_path, built, caplog):
    old = tmp_path / "file-ab.json"
    old.write_text("{}")
    create_app(AsyncLLM.from_built(built), Settings(batch_dir=str(tmp_path)))
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        f"{tmp_path} contains batch files of an earlier version of foretoken; they are ignored"
    ]
    assert old.read_text() == "{}"


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
    assert "6 answered before, 1 of them with errors" in capsys.readouterr().err
    source.write_bytes(b"\n" + jsonl(line("a", url="/nothing"), line("a")))
    assert commands.main(["run-batch", str(source), str(tmp_path / "new")]) == 2
    assert "line 2: url /nothing" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_run_batch_after_a_model_that_was_misspelt_needs_no_resume(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(line("a")))
    for _ in range(2):
        assert commands.main(["run-batch", str(source), str(target), "/no/such/model"]) == 2
        assert "not a folder" in capsys.readouterr().err


def test_an_answer_is_written_wholly_to_a_disk_that_takes_parts(monkeypatch):
    written = bytearray()

    def takes_seven(_descriptor: int, data: bytes) -> int:
        written.extend(data[:7])
        return len(data[:7])

    monkeypatch.setattr(lines.os, "write", takes_seven)
    answer = OutputLine(id="x", custom_id="a", response=None)
    lines.write_line(1, answer)
    assert written == msgspec.json.encode(answer) + b"\n"
