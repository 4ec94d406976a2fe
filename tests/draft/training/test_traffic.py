"""Recorded traffic: what is written where, what never is, and how much at most."""

from __future__ import annotations

import json
import stat
from array import array
from dataclasses import replace

import pytest

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.extras.adapter import Adapter
from foretoken.core.interface.extras.request_extras import request_extras
from foretoken.core.interface.request import CacheOptions, Delta, FinishReason, Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.draft.training import traffic
from foretoken.draft.training.records import read_records
from foretoken.draft.training.traffic import TrafficRecorder

STOP = Delta(finish_reason=FinishReason.STOP)


@pytest.fixture
def record(tmp_path):
    """``record(requests, callers=, ...)``: lines by file, written when the recorder is closed."""
    folder = tmp_path / "traffic"

    def run(*served, **options):
        recorder = TrafficRecorder(folder, **options)
        recorder.name("a-model", "its-tokenizer")
        for request, caller, delta in served:
            recorder.expect(request, caller)
            recorder.finish(request, delta)
        recorder.close()
        recorder.close()
        return recorder, {path.name: list(read_records(path)) for path in folder.glob("*")}

    return run


def request(name="r", tokens=(1, 2, 3), *, salt=None, write=True, adapter=None):
    return Request(
        request_id=name,
        tokens=array("q", tokens),
        sampling=SamplingMetadata(
            params=TokenSamplingParams(temperature=0.5), seed=3, prompt_len=len(tokens) - 1
        ),
        namespace=salt,
        cache=CacheOptions(write=write),
        extras=request_extras(adapter, ()),
    )


def test_a_line_holds_token_ids_and_nothing_that_names_anyone(record, tmp_path):
    _, files = record((request("secret-id", salt="acme"), b"key-hash", STOP))
    ((name, (line,)),) = files.items()
    assert (line.tokens, line.prompt_len, line.temperature) == ([1, 2, 3], 2, 0.5)
    assert (line.finish, line.model, line.tokenizer) == ("stop", "a-model", "its-tokenizer")
    assert name == f"{line.namespace}.jsonl"
    file = tmp_path / "traffic" / name
    raw = file.read_text() + name
    assert not any(word in raw for word in ("acme", "key-hash", "secret-id", b"key-hash".hex()))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(json.loads(file.read_text())) <= {
        "v", "model", "tokenizer", "tokens", "prompt_len", "temperature", "namespace", "finish",
    }  # fmt: skip


def test_every_caller_and_every_salt_has_a_file_of_its_own(record):
    served = [
        (request("a", (1, 9)), b"x", STOP),
        (request("b", (2, 9)), b"y", STOP),
        (request("c", (3, 9), salt="s"), b"x", STOP),
        (request("d", (4, 9), salt="s"), b"y", STOP),
        (request("e", (5, 9)), b"x", STOP),
    ]
    _, files = record(*served)
    assert sorted([line.tokens[0] for line in lines] for lines in files.values()) == [
        [1, 5], [2], [3], [4],
    ]  # fmt: skip


def test_only_callers_that_were_named_are_recorded(record):
    served = [
        (request("a", (1, 9)), b"named", STOP),
        (request("b", (2, 9)), b"other", STOP),
        (request("c", (3, 9)), b"", STOP),
    ]
    _, files = record(*served, callers={b"named"})
    assert [line.tokens[0] for lines in files.values() for line in lines] == [1]


def test_what_failed_was_aborted_or_is_private_is_not_recorded(record):
    from foretoken.core.errors import EngineDead

    served = [
        (request("a"), b"", Delta(finish_reason=FinishReason.ABORT)),
        (request("b"), b"", Delta(error=EngineDead("x"))),
        (request("c", write=False), b"", STOP),
        (request("e", adapter=Adapter()), b"", STOP),  # no answer of the model that is named
        (request("d"), b"", Delta(finish_reason=FinishReason.LENGTH)),
    ]
    _, files = record(*served)
    assert [line.finish for lines in files.values() for line in lines] == ["length"]


def test_files_and_the_folder_are_bounded_over_all_runs(record):
    line_bytes = 200
    options = {"max_bytes": 16 * 2 * line_bytes}
    served = [(request(f"r{i}"), b"one", STOP) for i in range(10)]
    recorder, files = record(*served, **options)
    ((_, lines),) = files.items()
    assert 1 <= len(lines) < 10  # a sixteenth of all bytes
    assert recorder.num_left_out == 10 - len(lines)
    recorder, files = record(*served, **options)
    assert recorder.num_recorded == 0
    many = [(request(f"r{i}"), b"%d" % i, STOP) for i in range(100)]
    recorder, files = record(*many, **options)
    assert recorder.num_left_out > 0
    total = sum(len(traffic.write_line(line)) for lines in files.values() for line in lines)
    assert total <= options["max_bytes"]


def test_a_temperature_that_was_left_out_is_recorded_as_the_default(record):
    left_out = request("a")
    default = SamplingParams().temperature
    params = replace(left_out.sampling.params, temperature=default)
    left_out = replace(left_out, sampling=replace(left_out.sampling, params=params))
    recorder, files = record((left_out, b"", STOP), (request("b", (4, 5)), b"", STOP))
    assert [line.temperature for lines in files.values() for line in lines] == [default, 0.5]
    assert (recorder.num_recorded, recorder.num_left_out) == (2, 0)


def test_a_record_that_cannot_be_written_is_told_and_the_next_one_is_written(record, caplog):
    wrong = Delta(finish_reason=FinishReason.STOP)
    bad = request("a", (1, 2))
    unwritable = replace(
        bad,
        sampling=replace(bad.sampling, prompt_len=object()),  # no JSON has it
    )
    recorder, files = record((unwritable, b"", wrong), (request("b", (4, 5)), b"", STOP))
    assert [line.tokens for lines in files.values() for line in lines] == [[4, 5]]
    assert (recorder.num_recorded, recorder.num_left_out) == (1, 1)
    assert "cannot write an answer" in caplog.text


def test_a_thread_that_died_is_told_at_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(traffic.threading.Thread, "start", lambda self: None)
    recorder = TrafficRecorder(tmp_path)
    recorder.expect(request(), b"")
    recorder.finish(request(), STOP)
    with caplog.at_level("INFO"):
        recorder.close()
        recorder.close()
    assert recorder.num_left_out == 1
    assert caplog.text.count("ended early") == 1
    assert "0 answers recorded, 1 skipped" in caplog.text


def test_a_thread_that_is_behind_costs_records_not_time(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "QUEUE_LEN", 2)
    monkeypatch.setattr(traffic.threading.Thread, "start", lambda self: None)
    recorder = TrafficRecorder(tmp_path)
    for index in range(5):
        recorder.expect(request(f"r{index}"), b"")
        recorder.finish(request(f"r{index}"), STOP)
    assert recorder.num_left_out == 3


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="record_traffic"):
        TrafficRecorder(tmp_path / "file")


def test_a_line_that_a_stopped_writer_left_incomplete_costs_no_later_one(record, tmp_path):
    """Without its end, the next line would continue it, and no reader could read the file."""
    _, files = record((request(), b"", STOP))
    (name,) = files
    file = tmp_path / "traffic" / name
    file.write_bytes(file.read_bytes() + b'{"v": 1, "tok')
    recorder, files = record((request(), b"", STOP), (request(), b"", STOP))
    assert [len(lines) for lines in files.values()] == [3]
    assert recorder._sizes[name] == file.stat().st_size
    file.write_bytes(b'{"v": 1, "tok')
    assert [len(lines) for lines in record((request(), b"", STOP))[1].values()] == [1]


def test_a_file_that_was_removed_is_made_again(record, tmp_path):
    _, files = record((request(), b"", STOP))
    file = tmp_path / "traffic" / next(iter(files))
    recorder = TrafficRecorder(tmp_path / "traffic")
    file.unlink()
    recorder.expect(request(), b"")
    recorder.finish(request(), STOP)
    recorder.close()
    assert len(file.read_bytes().splitlines()) == 1
