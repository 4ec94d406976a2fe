"""Sessions of real agents, sent again: a turn hits all that its session has computed before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foretoken import bench
from foretoken.bench import serve
from support.server_process import running

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).resolve().parents[1] / "support"
RECORDINGS = Path(bench.__file__).parent / "recordings"
PAGE = 16
TURNS = 21


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict]]:
    """Sessions by their names, with the token history and without."""
    folder = tmp_path_factory.mktemp("replay")
    found = {}
    for flags in ((), ("--no-token-history",)):
        out = folder / "out.json"
        own = [sys.executable, str(SUPPORT / "calling_server.py"), str(folder / "log.jsonl")]
        # Idle prefill would compute some of the answers between two turns.
        own += ["--port", "0", "--idle-prefill", "off", *flags]
        with running(started_by=own) as server:
            where = ["--url", server.url, "--out", str(out), "--warmup", "0"]
            sent = ["agents", "--record", str(RECORDINGS), "--output-len", "200"]
            assert serve.main([*sent, *where]) == 0
        (sessions,) = json.loads(out.read_text("utf-8"))["servers"].values()
        found["".join(flags)] = {each["name"]: each for each in sessions}
    return found


@pytest.mark.parametrize("agent", ["claude", "codex", "openai-agents", "pydantic-ai"])
def test_each_turn_hits_all_whole_pages_that_were_computed(replayed, agent: str) -> None:
    turns = replayed[""][agent]["turns"]
    assert len(turns) == TURNS
    assert [turn["goes_on_from"] for turn in turns[1:]] == list(range(TURNS - 1))
    for turn in turns[1:]:
        assert turn["share"] == 1, turn
    assert turns[-1]["spliced_tokens"] > 500


@pytest.mark.parametrize("agent", ["claude", "codex", "openai-agents", "pydantic-ai"])
def test_without_the_history_of_tokens_each_turn_computes_an_answer_again(
    replayed, agent: str
) -> None:
    for turn in replayed["--no-token-history"][agent]["turns"][1:]:
        assert turn["spliced_tokens"] == 0
        assert turn["possible_tokens"] - turn["cached_tokens"] > 2 * PAGE, turn
