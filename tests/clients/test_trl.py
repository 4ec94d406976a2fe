"""TRL's client and its trainer of GRPO against a real server, in an environment of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clients.catalog import ENVIRONMENTS, FOREIGN
from foretoken.api.build.model_files import BUILTIN
from support.new_weights import FILE
from support.plain_http import get, post
from support.server_process import running

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PYTHON = ENVIRONMENTS / "trl" / "bin" / "python"  # made by `make test-rest`
FLAGS = ["--allow-weight-updates", "--max-model-len", "512", "--kv-tokens", "4096", "--no-ui"]
PROMPT = [40, 41, 42, 43]  # as in run_trl.py
SECONDS = 300


def policy_in(folder: Path) -> Path:
    """A policy in float32, whose log-probabilities both sides compute to some digits."""
    shutil.copytree(BUILTIN / "target", folder)
    tensors = {name: each.float() for name, each in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def prompt_logprobs(url: str) -> list[float]:
    body = {"prompt": PROMPT, "max_tokens": 0, "prompt_token_logprobs": True}
    found: list[float] = post(url, "/v1/completions", body).json["choices"][0][
        "prompt_token_logprobs"
    ]
    return found[1:]


def run_trl(url: str, policy: Path, home: Path) -> dict[str, Any]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    offline = {"HF_HUB_OFFLINE": "1", "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    words = (HERE / "run_trl.py", url, policy, HERE.parents[1] / "examples")
    done = subprocess.run(
        [str(PYTHON), *map(str, words)],
        capture_output=True, text=True, timeout=SECONDS, check=False,
        env=kept | local | offline, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_two_steps_of_grpo_replace_the_served_weights(tmp_path: Path) -> None:
    if not PYTHON.is_file():
        if "CI" in os.environ:
            pytest.fail("TRL is not installed")
        pytest.skip("TRL is not installed: `make test-rest` installs it")
    policy = policy_in(tmp_path / "policy")
    with running([*FLAGS, "--threads", "1"], model=str(policy)) as server:
        before = prompt_logprobs(server.url)
        seen = run_trl(server.url, policy, tmp_path)
        after = prompt_logprobs(server.url)
        version = get(server.url, "/is_paused").json["weight_version"]
    check_client(seen)
    assert seen["steps"] == 2
    assert int(version) >= 2
    torch.testing.assert_close(after, seen["logprobs"], rtol=0, atol=1e-3)
    assert max(abs(x - y) for x, y in zip(before, after, strict=True)) > 1e-2


def check_client(seen: dict[str, Any]) -> None:
    """What TRL's own client read from the answers."""
    generated, scored, refusals = seen["generated"], seen["scored"], seen["refusals"]
    assert generated["prompt_ids"] == [PROMPT, PROMPT[:2]]
    assert len(generated["completion_ids"]) == 6
    for ids, found in zip(generated["completion_ids"], generated["logprob_token_ids"], strict=True):
        assert all(each in top for each, top in zip(ids, found, strict=True))
    assert scored["actual_token_ids"] == [[[each] for each in PROMPT[2:]]]
    assert seen["world"] == 1
    assert "nccl_not_supported" in refusals["init"]
    assert "names" in refusals["update"]
    assert "needs a CUDA device" in refusals["cuda"]
