"""``draft=PATH``: a head is recognised, serves beside look-ups and changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams
from foretoken.api.build.drafts import parse_draft
from foretoken.api.build.kv.pools import count_pages, make_pools
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.model.loader import load_decoder
from foretoken.draft.heads.joined import load_head
from foretoken.draft.heads.kinds import KINDS
from support.tiny_heads import random_head, tiny

PROMPTS = ["def quicksort(items):\n", "import os\n\n\nclass Walker:\n    "]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 1.0)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("head")
    head = random_head(request.param, load_decoder(BUILTIN / "target"))
    tiny(request.param).save(head, folder)
    return folder


def served(draft: str, **options: object) -> tuple[list[list[int]], int]:
    """Token ids of all answers, and how many tokens were proposed by the model that drafts."""
    with LLM("builtin", draft=draft, kv_tokens=2000, threads=1, **options) as llm:  # type: ignore[arg-type]
        answers = [llm.generate(prompt, params) for prompt in PROMPTS for params in PARAMS]
    ids = [answer.token_ids for answer in answers]
    by_source = [answer.usage.proposed_by_source for answer in answers]
    return ids, sum(sources.get(name, 0) for sources in by_source for name in KINDS)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return served("none")[0]


def test_a_head_alone_at_a_fixed_depth(folder: Path, plain) -> None:
    answers, num_proposed = served(str(folder), speculation=3)
    assert answers == plain
    assert num_proposed > 50


def test_a_head_beside_the_free_sources(folder: Path, plain) -> None:
    assert served(f"auto,{folder}")[0] == plain


def test_a_head_of_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name] = tensors[name][:, 1:].contiguous()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / file.name)
    with pytest.raises(ModelLoadError, match=rf"{name} has shape"):
        LLM("builtin", draft=str(tmp_path))


def test_a_list_may_hold_auto() -> None:
    spec = parse_draft(EngineConfig(draft="auto,some/head"), own_draft=BUILTIN / "draft")
    assert spec.sources == ("radix", "suffix")
    assert spec.model == "some/head"
    spec = parse_draft(EngineConfig(draft="ngram,auto"), own_draft=BUILTIN / "draft")
    assert spec.sources == ("ngram", "radix", "suffix")
    assert spec.model is None, "a list names its model"


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("auto,none", "'none' cannot be combined"),
        ("radix,,suffix", "empty"),
        ("radix,radix", "lists 'radix' twice"),
        ("a/b,c/d", "one model, not 2: a/b, c/d"),
    ],
)
def test_a_list_that_cannot_be_is_refused(draft: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_draft(EngineConfig(draft=draft), own_draft=None)


def test_a_head_is_refused_for_a_target_of_transformers_modules(folder: Path) -> None:
    target = load_decoder(BUILTIN / "target", impl="transformers")
    with pytest.raises(ModelLoadError, match="use --draft auto or a draft model"):
        load_head(folder, target, lambda: torch.zeros(0))


def test_a_heads_pages_are_paid_for_out_of_the_same_memory(folder: Path) -> None:
    target = load_decoder(BUILTIN / "target")
    joined = load_head(folder, target, target.weights.embedding.clone)
    config = EngineConfig(kv_memory="4MiB", page_size=16)
    sizes = config.sizes("cpu")
    alone = count_pages(target, [], config, sizes)
    num_pages = count_pages(target, [joined], config, sizes)
    keeps_kv = joined.config.kv_shape.num_layers > 0
    assert num_pages < alone if keeps_kv else num_pages == alone
    pools = make_pools(target, [joined], config, sizes)
    spare = pools[1].num_pages - num_pages  # of a block head's passes, beside the budget
    assert pools[0].num_pages == num_pages
    assert 0 <= spare < 8
    num_bytes = sum(pool.num_bytes for pool in pools) - spare * pools[1].data[0].nbytes
    assert 0.9 * 4 * 2**20 < num_bytes <= 4 * 2**20
