"""The benches of one GGUF file and of schemas, from their flags to their tables and JSON."""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from foretoken.bench.lab import forms, gguf, servers
from foretoken.bench.load.figures import Record


@pytest.fixture
def measured(server, tmp_path, monkeypatch, capsys):
    """A function that runs the bench of one file, on the fake server in place of each column's."""

    @contextlib.contextmanager
    def started(name, command):
        yield servers.Server(name, server.url, ready=[1.0])

    monkeypatch.setattr(servers, "started", started)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" * 1000)

    def run(*flags: str):
        out = tmp_path / "out.json"
        assert gguf.main([str(file), "--turns", "1", "--out", str(out), *flags]) == 0
        return json.loads(out.read_text(encoding="utf-8"))["rows"], capsys.readouterr().out

    return run


def test_a_file_is_measured_in_every_row_and_column(measured, monkeypatch):
    async def ask(server, path, body):
        times, counts = [2.0, 2.5, 3.0], [4, 6, 10]
        return Record(server.name, due=1.0, times=times, counts=counts, prompt_tokens=700)

    monkeypatch.setattr(servers, "ask", ask)
    rows, printed = measured("--llama-server", "/no/llama-server", "--draft", "/no/draft.gguf")
    assert [*rows] == ["ready, s", *gguf.ROWS, "resident, GB", "peak, GB"]
    columns = {"foretoken", "plain", "foretoken, draft"}
    columns |= {"llama.cpp", "llama.cpp, n-gram", "llama.cpp, draft"}
    assert all({*row} == columns for row in rows.values())
    rates = {name: rows[name]["plain"]["median"] for name in gguf.ROWS}
    assert rates["prompt of 0.7k"] == 700
    assert rates["decode x1"] == rates["edit"] == 16
    assert rates["decode x4"] == rates["four at once"] == 64
    assert rows["ready, s"]["plain"]["median"] == 1
    assert "model.gguf, 0.00 GB" in printed


def test_columns_can_be_chosen_and_a_request_that_is_refused_is_a_cell(
    server, measured, monkeypatch
):
    monkeypatch.setattr(gguf, "ROWS", {"decode x1": gguf.ROWS["decode x1"]})
    server.refused = {"ignore_eos"}
    rows, _ = measured("--only", "plain")
    assert all([*row] == ["plain"] for row in rows.values())
    assert rows["decode x1"]["plain"].startswith("failed: HTTP 400")


def test_no_schema_is_left_unfinished_at_any_limit(tmp_path, capsys):
    number = {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 7}
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": number}}
    person |= {"required": ["name", "age"], "additionalProperties": False}
    refused = {"type": "string", "pattern": "(?<!a)b"}
    for name, schema in (("person", person), ("refused", refused)):
        (tmp_path / f"{name}.json").write_text(json.dumps(schema), encoding="utf-8")
    out = tmp_path / "out" / "forms.json"
    flags = ["--limits", "3", "--model", "builtin", "--out", str(out)]
    forms.main([str(tmp_path), *flags])
    drawn = json.loads(out.read_text(encoding="utf-8"))["drawn"]
    assert {answer["end"] for answer in drawn["answers"]} == {"whole"}
    assert len(drawn["answers"]) == 3
    assert len(drawn["refused"]) == 1
    assert "| unfinished | 0" in re.sub(" +", " ", capsys.readouterr().out)
