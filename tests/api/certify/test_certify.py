"""`foretoken certify` finds no difference where there is none, else the first one."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.certify import certificate, conditions
from foretoken.api.certify.cases import KINDS
from foretoken.api.certify.certificate import Certifier
from foretoken.api.certify.conditions import DRAFTED, LOOK_UPS
from foretoken.api.certify.records import RecordedRequest
from foretoken.api.certify.report import markdown
from foretoken.api.cli import commands
from support.adapters import write_adapter
from support.tiny_models import save_tiny

OPTIONS = {"threads": 1}


def certified(number, only=None, **options):
    certifier = Certifier("builtin", OPTIONS | options, number=number, only=only)
    return asyncio.run(certifier.run())


@pytest.mark.slow
def test_all_conditions_of_the_built_in_pair_give_the_same_tokens(monkeypatch):
    monkeypatch.setattr(certificate, "BATCHES", (1, 8, 16))
    found = certified(22, kv_cache_dtype="auto")
    assert found.exact
    assert found.differing_tokens == 0
    names = [each.name for each in found.passes]
    drafters = ("off", "radix", "suffix", "ngram", "self", "draft", "auto")
    wanted = [f"auto/{each}/{state}" for each in drafters for state in DRAFTED]
    wanted.remove("auto/off/repeated")
    assert names == [*wanted, "auto/look-ups/preempted", "auto/look-ups/restarted"]
    passes = {each.name: each for each in found.passes}
    for drafter in (*LOOK_UPS, "self"):
        assert passes[f"auto/{drafter}/repeated"].proposed_by_source[drafter] > 0
    assert "no layers for multi-token prediction" in found.skipped["auto/mtp/cold"]
    assert found.kinds.keys() == KINDS.keys()
    assert found.answers == 22 * len(names)
    # Nothing but preemptions depends on how fast the machine is.
    assert [name for name in found.unproven if not name.endswith("preempted")] == []


def test_both_types_of_the_cache_have_their_own_reference():
    found = certified(5, "off/cached")
    assert [each.name for each in found.passes] == ["auto/off/cached", "int8/off/cached"]
    assert found.differing_tokens == 0


def test_small_pages_and_a_small_pool_make_requests_give_way():
    found = certified(3 * len(KINDS), "auto/look-ups/preempted")
    (only,) = found.passes
    assert (only.differing_tokens, found.unproven) == (0, [])
    assert only.preemptions > 0


def test_requests_with_adapters_and_without_are_compared_together(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(BUILTIN / "target")
    folders = {name: write_adapter(tmp_path / name, model, seed=len(name)) for name in ("a", "bc")}
    given = tuple(f"{name}={folder}" for name, folder in folders.items())

    def answers(only, **options):
        certifier = Certifier("builtin", OPTIONS | options, number=21, only=only)
        found = asyncio.run(certifier.run())
        assert (len(found.passes), found.differing_tokens, found.refused) == (1, 0, {})
        return [case.params.lora for case in certifier._cases], certifier._expected

    adapters, adapted = answers("auto/radix/repeated", lora=given)
    _, plain = answers("auto/off/cold")
    assert set(adapters) == {None, "a", "bc"}
    same = {name: [adapted[i] == plain[i] for i in range(21) if adapters[i] == name]
            for name in (None, "a", "bc")}  # fmt: skip
    assert all(same[None])
    assert not any(map(all, (same["a"], same["bc"])))


@pytest.fixture
def other_kv(monkeypatch):
    """An engine that rounds its KV, though the reference does not."""
    honest = conditions.conditions

    def dishonest(*args, **options):
        for each in honest(*args, **options):
            yield replace(each, options={**each.options, "kv_cache_dtype": "int8"})

    monkeypatch.setattr(certificate, "conditions", dishonest)


def test_the_first_difference_has_all_that_repeats_it(other_kv, tmp_path, capsys):
    out = str(tmp_path / "sub" / "found")
    args = ["--requests", "63", "--only", "auto/off/cold", "--threads", "1", "--out", out]
    assert commands.main(["certify", "builtin", *args]) == 1
    assert "tokens differ in" in capsys.readouterr().out
    report = json.loads((tmp_path / "sub" / "found.json").read_text())
    first = report["first_difference"]
    assert first["found"] != first["request"]["tokens"]
    at = first["position"]
    assert first["found"][:at] == first["request"]["tokens"][:at]
    assert "--only auto/off/cold" in first["repeat"]
    assert first["options"]["kv_cache_dtype"] == "int8"
    assert str(first["request"]["prompt"]) in (tmp_path / "sub" / "found.md").read_text()
    # The record is what the reference said, which `replay` computes again.
    line = (tmp_path / "sub" / "found.jsonl").read_bytes()
    record = msgspec.json.decode(line, type=RecordedRequest)
    file = f"{out}.jsonl"
    replay = ["replay", record.id, "--requests", file, "--threads", "1"]
    assert commands.main([*replay, "--kv-cache-dtype", "auto"]) == 0
    assert commands.main([*replay, "--kv-cache-dtype", "int8"]) == 1
    assert f"differ from token {at}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("only", "why"),
    [("/never/", "no pass has '/never/' in its name"), ("auto/mtp/", "mtp")],
)
def test_a_certificate_of_no_pass_is_not_written(only, why, tmp_path, capsys):
    """Once, this was 0 differing tokens, with code 0."""
    args = ["--requests", "2", "--only", only, "--threads", "1", "--out", str(tmp_path / "c")]
    assert commands.main(["certify", "builtin", *args]) == 1
    said = capsys.readouterr()
    assert "the certificate has no results: " in said.err
    assert why in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_told_before_the_passes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("foretoken.api.certify.certificate.Certifier", None)
    (tmp_path / "file").write_text("")
    args = ["certify", "builtin", "--out", str(tmp_path / "file" / "c")]
    assert commands.main(args) == 2
    assert "--out" in capsys.readouterr().err


def test_without_exact_bits_the_reason_is_reported_with_code_3(tmp_path, capsys):
    out = str(tmp_path / "c")
    args = ["certify", "builtin", "--requests", "2", "--threads", "1", "--out", out]
    assert commands.main([*args, "--exact", "off"]) == 3
    assert "exact: false: --exact off" in capsys.readouterr().out
    report = json.loads((tmp_path / "c.json").read_text())
    assert (report["exact"], report["passes"]) == (False, [])
    assert report["weights"][0]["sha256"]


def test_a_model_without_exact_bits_says_why(tmp_path, byte_level_folder):
    """States that transformers' modules keep: chunks and single rows differ in the last bits."""
    model = save_tiny(tmp_path / "model", "mamba")
    for file in byte_level_folder.glob("tok*.json"):
        shutil.copy(file, model)
    options = {"page_size": 16, "kv_tokens": 2048, "max_model_len": 256}
    found = asyncio.run(Certifier(str(model), OPTIONS | options, number=2).run())
    assert (found.exact, found.answers, found.model) == (False, 0, "model")
    assert found.reason.startswith("transformers' modules compute its layers")
    assert f"**exact: false: {found.reason}.**" in markdown(found)


@pytest.mark.parametrize("wrong", ["0", "-1", "many"])
def test_a_number_of_requests_below_one_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as exited:
        commands.main(["certify", "builtin", "--requests", wrong])
    assert exited.value.code == 2
    assert "--requests" in capsys.readouterr().err
