"""``foretoken verify``: verdicts on recorded answers, and files that it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.api.cli.commands import main
from support.lora_models import AdaptedModel

PROMPT = "def fibonacci(n):\n"
MESSAGES = [{"role": "user", "content": "a loop"}]
OPTIONS: dict[str, Any] = {"kv_tokens": 4096, "max_model_len": 256, "threads": 1}
FLAGS = ["builtin", "--kv-tokens", "4096", "--max-model-len", "256", "--threads", "1"]


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """A completion with token ids of two choices, and a conversation with its text alone."""
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 20, "temperature": 2.0}
    with LLM("builtin", **OPTIONS) as llm:
        text = llm.generate(PROMPT, SamplingParams(**fields, n=2))
        chat = llm.chat(MESSAGES, SamplingParams(**fields))
    texts = [
        {"index": each.index, "token_ids": each.token_ids, "finish_reason": each.finish_reason}
        for each in text.choices
    ]
    message = {"message": {"content": chat.text}, "finish_reason": chat.finish_reason}
    return [
        {
            "request": {"model": "any", "prompt": PROMPT, "stream": True, **fields, "n": 2},
            "response": {"choices": texts},
        },
        {"request": {"messages": MESSAGES, **fields}, "response": {"choices": [message]}},
    ]


def verified(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str | bytes,
    flags: Sequence[str] = FLAGS,
) -> tuple[int, list[str], str]:
    """The exit status, the sorted lines of stdout, and stderr."""
    file = tmp_path / "recorded.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    status = main(["verify", str(file), *flags])
    shown = capsys.readouterr()
    return status, sorted(shown.out.splitlines()), shown.err


def test_recorded_answers_are_verified(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    lines = "\n".join(map(json.dumps, records))
    for text in (lines, json.dumps(records, indent=1)):
        status, shown, _ = verified(capsys, tmp_path, text)
        names = ["record 1, choice 0", "record 1, choice 1", "record 2, choice 0"]
        assert [line.partition(":")[0] for line in shown] == names
        assert all(": verified, " in line for line in shown), shown
        assert status == 0


def test_answers_of_an_adapter_are_verified_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    adapted = AdaptedModel(tmp_path / "adapted")
    folder = adapted.path("sql")
    options = {"kv_tokens": 4096, "threads": 1}
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    records = []
    with LLM(adapted.base, lora={"sql": folder}, **options) as llm:
        for model in ("sql", "any", ["sql"]):
            lora = "sql" if model == "sql" else None
            answer = llm.generate(PROMPT, SamplingParams(**asked, lora=lora))
            choice = {"token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            request = {"model": model, "prompt": PROMPT, **asked}
            records.append({"request": request, "response": {"choices": [choice]}})
    given = [choice["response"]["choices"][0]["token_ids"] for choice in records]
    assert given[0] != given[1]
    flags = [str(adapted.base), "--lora", f"sql={folder}", "--kv-tokens", "4096", "--threads", "1"]
    status, shown, _ = verified(capsys, tmp_path, json.dumps(records), flags)
    assert [": verified, " in line for line in shown] == [True] * 3, shown
    assert status == 0


def test_a_different_answer_and_a_refused_one_give_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    first, second = json.loads(json.dumps(records))
    first["response"]["choices"][1]["token_ids"][6] += 1
    second["request"]["top_p"] = 7
    status, shown, _ = verified(capsys, tmp_path, json.dumps([first, second]))
    assert status == 1
    assert ": verified, " in shown[0]
    assert "choice 1: different at token 6: recorded " in shown[1]
    assert "margin" in shown[1]
    assert "choice 0: not verified: " in shown[2]
    assert "top_p" in shown[2]


def test_a_record_cannot_leave_out_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    (record, _) = json.loads(json.dumps(records))
    record["response"]["choices"] = record["response"]["choices"][:1]
    record["response"]["choices"][0]["token_ids"][2] += 1
    record["request"] |= {"checked_from": 5, "answer": {"token_ids": [1]}, "index": 1}
    status, shown, _ = verified(capsys, tmp_path, json.dumps(record))
    assert status == 1
    assert "different at token 2: recorded " in shown[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def", "is not JSON"),
        ("[]", "has no records"),
        ('{"request": {}}', "response must be an object"),
        ('{"request": {"messages": []}, "response": {"choices": []}}', "record 1: the request"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"request": "\xff"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"request": {}}\n' + "[" * 100_000, "line 2 is not JSON"),
        ('{"request": {}}\n\n{"request": {"mess', "line 3 is not JSON"),
        (
            '{\n "request": {},\n "response": }',
            "recorded.json is not JSON: JSON is malformed: invalid character (byte 31)",
        ),
        (
            '{"request": {"messages": []}, "response": {"choices": [{"message": "Hi."}]}}',
            "record 1, choice 0: message must be an object",
        ),
        (
            '{"request": {"prompt": ""}, "response": {"choices": [{"text": ""}]}}',
            "record 1, choice 0 needs token_ids",
        ),
    ],
)
def test_a_bad_file_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | bytes, message: str
) -> None:
    status, _, error = verified(capsys, tmp_path, text)
    assert status == 2
    assert message in error


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", str(tmp_path / "none"), *FLAGS]) == 1
    assert "none: No such file" in capsys.readouterr().err
