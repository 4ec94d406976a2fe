"""``foretoken train-draft`` and ``serve --record-traffic`` on the command line."""

from __future__ import annotations

import json
import os

import pytest

from foretoken.api.cli import commands
from foretoken.api.server.observation.observability import make_observing
from foretoken.api.serving.settings import ObservingOptions
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.draft.training import trainer as training
from foretoken.draft.training.records import read_records
from support.given import given, listening


def failed(capsys, *args):
    """The exit code and what was said."""
    try:
        code = commands.main(list(args))
    except SystemExit as exited:
        code = exited.code
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


GIVEN = ("train-draft", "--target", "builtin", "--kind", "block")


@pytest.mark.parametrize(
    "args",
    [
        [], ["--data", "DATA"], ["--out", "OUT"], ["--data", "gone", "--out", "OUT"],
        ["--data", "DATA", "--out", "DATA"], ["--data", "DATA", "--out", "OUT", "--kind", "mtp"],
        ["--data", "DATA", "--out", "OUT", "--minutes", "0"],
        ["--data", "DATA", "--out", "OUT", "--minutes", "nan"],
        ["--data", "DATA", "--out", "OUT", "--minutes", "1", "--tokens", "5"],
        ["--data", "DATA", "--out", "OUT", "--tokens", "-5"],
        ["--data", "DATA", "--out", "OUT", "--layers", "0"],
        ["--data", "DATA", "--out", "OUT", "--block", "x"],
        ["--data", "DATA", "--out", "OUT", "--init", "gone"],
        ["--data", "DATA", "--out", "OUT", "--resume"],
        ["--data", "DATA", "--out", "OUT", "--device", "tpu"],
        ["--data", "DATA", "--out", "OUT", "--regenerate", "maybe"],
        ["--data", "DATA", "--out", "OUT", "--kind", "lm", "--draft-vocab", "9"],
        ["--data", "DATA", "--out", "OUT", "--kind", "eagle3", "--layers", "2"],
        ["--data", "DATA", "--out", "OUT", "--kind", "lm", "--block", "7"],
        ["--data", "EMPTY", "--out", "OUT"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_bad_flag_exits_2_with_one_clear_line(args, capsys, tmp_path):
    (tmp_path / "data.txt").write_text("print(1)\n" * 20)
    (tmp_path / "empty").mkdir()
    names = {"DATA": tmp_path / "data.txt", "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    code, err = failed(capsys, *GIVEN, *(str(names.get(arg, arg)) for arg in args))
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("foretoken train-draft: ")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_folder_with_a_run_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "data.txt").write_text("x = 1\n" * 20)
    state = tmp_path / "out" / "training" / "state.pt"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"")
    code, err = failed(
        capsys, *GIVEN, "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "out")
    )
    assert code == 2
    assert "--resume" in err


@pytest.mark.parametrize(
    ("args", "count"), [([], len(os.sched_getaffinity(0))), (["--threads", "3"], 3)]
)
def test_the_target_computes_with_all_threads_unless_told(
    args, count, capsys, tmp_path, monkeypatch
):
    counts = []
    for ops in (NativeOps, TorchOps):
        monkeypatch.setattr(ops, "set_threads", lambda _, count: counts.append(count))
    given = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert failed(capsys, *GIVEN, *given, *args)[0] == 2  # there is no data
    assert counts == [count]


def test_a_draft_is_trained_and_measured_in_service(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "BATCH_TOKENS", 64)
    monkeypatch.setattr("foretoken.api.cli.train_draft.TIMED_TOKENS", 4)
    data = tmp_path / "data.jsonl"
    chats = [{"messages": [{"role": "user", "content": f"hi {index}"}]} for index in range(6)]
    data.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    monkeypatch.setattr("foretoken.api.cli.train_draft.ANSWER_TOKENS", 8)
    out = tmp_path / "head"
    args = ["--kind", "lm", "--data", str(data), "--out", str(out), "--tokens", "300"]
    assert commands.main([*GIVEN, *args, "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "fraction of draft tokens accepted" in shown
    assert "tokens/s before" in shown
    report = json.loads((out / "training" / "report.json").read_text())
    assert set(report["tokens_per_s"]) == {"before", "with it"}
    assert len(list(read_records(out / "training" / "answers.jsonl"))) == 6


def test_data_of_one_text_trains_a_draft_without_a_measure(capsys, tmp_path, monkeypatch):
    """Once, this was a traceback behind the training."""
    monkeypatch.setattr("foretoken.api.cli.train_draft.TIMED_TOKENS", 4)
    data = tmp_path / "data.txt"
    data.write_text("hello world this is text")
    args = ["--kind", "lm", "--data", str(data), "--out", str(tmp_path / "out"), "--tokens", "20"]
    assert commands.main([*GIVEN, *args, "--regenerate", "off", "--threads", "1"]) == 0
    assert "acceptance was not measured" in capsys.readouterr().out


# -- traffic --------------------------------------------------------------------------------------


def recorder_of(*args):
    made = given(*args)
    return make_observing(made.make(ObservingOptions), listening(*args)).recorder


def test_traffic_is_not_recorded_unless_asked_for(tmp_path):
    assert recorder_of() is None
    recorder = recorder_of("--record-traffic", str(tmp_path / "t"))
    assert recorder is not None
    recorder.close()


def test_with_api_keys_only_those_named_are_recorded(tmp_path):
    from foretoken.api.types.request_context import caller_of

    folder = ("--record-traffic", str(tmp_path / "t"))
    for args, expected in (
        (("--api-key", "a"), set()),
        (("--api-key", "a", "--api-key", "b", "--record-key", "b"), {caller_of("b")}),
        ((), None),
    ):
        recorder = recorder_of(*folder, *args)
        assert recorder._callers == expected
        recorder.close()


@pytest.mark.parametrize("flag", [("--record-key", "a"), ("--record-bytes", "1MB")])
def test_flags_of_recording_need_a_folder(capsys, flag):
    assert commands.main(["serve", *flag]) == 2
    assert "--record-traffic" in capsys.readouterr().err
