"""The tuner of attention's launches, and what the check on a GPU may import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from foretoken.bench.lab.gpu import tune_attention
from foretoken.bench.lab.gpu.tune_attention import Case, Scene, choices
from foretoken.core.ops.triton.attention.launch import NARROW, WIDE, AttentionLaunch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Wherever torch and transformers are installed.
WITH_THEM = {"typing_extensions", "tokenizers", "huggingface_hub", "tqdm", "yaml", "h11", "regex"}
MODULES = {"huggingface-hub": "huggingface_hub", "prometheus-client": "prometheus_client"}
MODULES |= {"PyYAML": "yaml"}
STAGES = ["check", "equality", "decode", "prefill", "speculation", "drafts"]


def test_what_is_in_use_comes_first_and_nothing_twice() -> None:
    for is_narrow, used in ((True, NARROW), (False, WIDE)):
        found = choices(is_narrow, (1, 2, 3))
        assert found[0] == used
        assert len({*found}) == len(found) > 8


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", [Case(2, 70, 2, 4, 2), Case(1, 40, 50, 4, 2)])
def test_launches_of_the_same_tile_of_keys_compute_the_same_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tune_attention, "DTYPE", torch.float32)
    scene = Scene(case, torch.device("cpu"), 1)
    launches = [AttentionLaunch(16, number, 4, 3) for number in (1, 3)]
    found = [scene.run(each) for each in launches]
    assert torch.equal(*found)
    torch.testing.assert_close(scene.run(None), found[0], atol=1e-5, rtol=0)


def test_the_check_imports_no_package_that_it_does_not_ask_for() -> None:
    script = (ROOT / "bench" / "lab" / "gpu_check.sh").read_text()
    asked = set(
        re.findall(r"[a-z0-9_]+", " ".join(re.findall(r'(?:packed|needed)="([^"]+)"', script)))
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    named = [re.split(r"[^\w-]", each)[0] for each in needed]
    blocked = {MODULES.get(name, name) for name in named} - asked - WITH_THEM
    assert {"starlette", "uvicorn"} <= blocked
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib
for stage in {STAGES!r}:
    importlib.import_module("foretoken.bench.lab.gpu." + stage)
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
