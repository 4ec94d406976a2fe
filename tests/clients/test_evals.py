"""Inspect and lm-eval with a seed for each sample, in an environment of their own.

They bring some hundred packages, so no target of make installs them: `python -m venv
.venv-clients/evals; .venv-clients/evals/bin/pip install inspect-ai openai 'lm-eval[api]'`.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from clients.catalog import ENVIRONMENTS, FOREIGN
from support.server_process import running

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PYTHON = ENVIRONMENTS / "evals" / "bin" / "python"
FLAGS = ["--exact", "batch", "--threads", "1", "--max-model-len", "512", "--no-ui"]


@pytest.mark.skipif(not PYTHON.is_file(), reason="inspect-ai and lm-eval are not installed")
@pytest.mark.parametrize(
    ("example", "num_answers"), [("inspect_seeds.py", 24), ("lm_eval_seeds.py", 12)]
)
def test_answers_depend_on_neither_concurrency_nor_drafts(
    example: str, num_answers: int, tmp_path: Path
) -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    with ExitStack() as servers:
        urls = [
            servers.enter_context(running([*FLAGS, *drafts])).url
            for drafts in ([], ["--draft", "none"])
        ]
        done = subprocess.run(
            [str(PYTHON), str(EXAMPLES / example), *urls],
            capture_output=True, text=True, timeout=300, check=False,
            env=kept | local | {"HOME": str(tmp_path)}, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    lines = [line for line in done.stdout.splitlines() if line.endswith("answers differ")]
    told = f"0 of {num_answers} answers differ"
    assert [line.partition(": ")[2] for line in lines] == [told] * 4, done.stdout
