"""Tokens chosen by the sampler's kernels, under Triton's interpreter, against the torch oracle."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

import triton
import triton.language as tl

from foretoken.core.ops.triton.graph_inputs import AsyncCopy
from foretoken.core.ops.triton.sampling import gumbel_argmax as race_module
from foretoken.core.ops.triton.sampling import sampler as sampler_module
from foretoken.core.ops.triton.sampling.gumbel_argmax_kernels import ODD_1, ODD_2, gumbel
from foretoken.core.ops.triton.sampling.sampler import TritonSampler
from foretoken.core.sampling.gumbel import _gumbel_of_words
from foretoken.core.sampling.logits_processors import scaled, truncate
from foretoken.core.sampling.sampler import DraftVocab
from foretoken.core.sampling.verifier import NOT_FINITE, Best
from support.sampling_rows import logits_of, random_row, row_of
from support.triton_sampling import ORACLE, SAMPLER, as_on_a_gpu, oracle  # noqa: F401

pytestmark = [pytest.mark.usefixtures("one_thread", "as_on_a_gpu"), pytest.mark.slow]
INF, NAN = math.inf, math.nan
SHAPES = {  # of logits, and their spread
    "normal": 2.0,
    "ties": 2.0,
    "sparse": 2.0,
    "same": 0.0,
    "flat": 0.05,
    "steep": 30.0,
    "huge": 1e38,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [1, 50, 700])
def test_any_mixture_of_parameters_draws_what_torch_draws(vocab: int, shape: str) -> None:
    seed = vocab * 10 + len(shape)
    rng, spread = random.Random(seed), SHAPES[shape]
    logits = logits_of(10, vocab, spread, seed)
    if shape == "ties":
        logits.round_()
    if shape == "sparse":
        logits[logits < 0] = -INF
    rows = [random_row(rng, vocab) for _ in range(10)]
    before = logits.clone()
    assert SAMPLER.sample(logits, rows) == oracle(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("block", [2**26, 50 * 4])
def test_runs_of_tokens_draw_what_their_rows_draw(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "BLOCK", block)
    logits, counts = logits_of(9, 50), [3, 1, 5]
    runs = [row_of(seed, temperature=1.0, top_p=0.9 - 0.2 * (seed % 2)) for seed in range(3)]
    runs[1] = row_of(1, temperature=0.0)
    rows = [
        msgspec.structs.replace(row, draft=(7,) * at)
        for row, count in zip(runs, counts, strict=True)
        for at in range(count)
    ]
    pairs = zip(runs, counts, strict=True)
    last = [msgspec.structs.replace(row, draft=(7,) * (count - 1)) for row, count in pairs]
    drawing = SAMPLER.begin_runs(logits, last, counts)
    assert drawing is not None
    choices = drawing.choices()
    assert choices == SAMPLER.begin(logits, rows).choices()
    assert choices.by_row() == oracle(logits, rows)


def test_runs_with_an_edited_row_are_not_drawn_without_their_drafts() -> None:
    runs = [row_of(0), row_of(1, repetition_penalty=1.3)]
    assert SAMPLER.begin_runs(logits_of(3, 50), runs, [1, 2]) is None


CUTS: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_k": 3, "top_p": 0.7},
    {"top_k": 40},
    {"top_p": 0.55},
    {"top_p": 0.5},
    {"min_p": math.exp(-1)},
    {"top_k": 9, "top_p": 0.6},
    {"top_k": 12, "min_p": math.exp(-1), "top_p": 0.9},
]


@pytest.mark.parametrize("form", CUTS, ids=str)
def test_exactly_the_tokens_that_the_cuts_leave_are_drawn(form: dict[str, Any]) -> None:
    """Among values that tie, at the edge too: those with the lowest ids stay."""
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 3.0, 2.0, 1.0, 2.0] * 7)
    rows = [row_of(seed, **form) for seed in range(6)]
    _, kept = truncate(scaled(values[None], rows[:1]), rows[:1])
    drawn = TritonSampler(tile=32).sample(values.expand(6, -1), rows)
    assert drawn == oracle(values.expand(6, -1), rows)
    assert {choice.token_id for choice in drawn} <= set(kept[0].tolist())


def test_long_lists_of_what_may_stay_are_narrowed_to_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(race_module, "LIST_TILE", 16)  # more than 64 values are many
    form = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01, "top_p": 0.3}, {"top_k": 90}]
    rows = [row_of(seed, **each) for seed, each in enumerate(form * 2)]
    logits = logits_of(8, 200, 0.5).round(decimals=1)
    logits[7, ::2] = -INF
    assert SAMPLER.sample(logits, rows) == oracle(logits, rows)


@triton.jit
def noise_kernel(hashes_ptr, out_ptr, NUM: tl.constexpr):
    places = tl.arange(0, NUM)
    tl.store(out_ptr + places, gumbel(tl.load(hashes_ptr + places), 0))


def hash_of(word: int) -> int:
    """The hash that makes this word of noise, where the key is 0."""
    word = word * pow(ODD_2.value, -1, 2**64) % 2**64
    word = (word ^ (word >> 32)) * pow(ODD_1.value, -1, 2**64) % 2**64
    return word - 2**64 if word >> 63 else word


def test_noise_is_as_accurate_for_the_rarest_words() -> None:
    """The rarest words are far below the last bit of u: one token in millions has such luck."""
    words = [0, 1, -1, 2**63 - 1, -(2**63)]
    words += [sign * (2**bit + 3**bit % 2**bit) for bit in range(2, 63) for sign in (1, -1)][:123]
    hashes, noise = torch.tensor([hash_of(word) for word in words]), torch.empty(128)
    noise_kernel[(1,)](hashes, noise, NUM=128)
    expected = _gumbel_of_words(torch.tensor(words + [0] * (128 - len(words))))
    bound = 5e-7 if noise.device.type == "cpu" else 2e-6  # a GPU divides less exactly
    torch.testing.assert_close(noise[: len(words)], expected[: len(words)], rtol=bound, atol=bound)


# ---- the best few ------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "tile", "shape"), [
    (3, 256, "normal"), (301, 64, "normal"), (301, 64, "ties"), (150, 32, "sparse"),
    (150, 32, "same"), (90, 256, "huge"),
])  # fmt: skip
def test_the_best_are_torchs_by_any_tiles_and_the_first_is_drawn(
    vocab: int, tile: int, shape: str
) -> None:
    """Whatever parameters say: their ids and the gaps of their scores, ties to the lowest id."""
    rng, spread = random.Random(vocab + tile), SHAPES[shape]
    logits = logits_of(14, vocab, spread, vocab)
    if shape == "ties":
        logits.round_()
    if shape == "sparse":
        logits[logits < 1.5 * spread] = -INF
    rows = [random_row(rng, vocab) for _ in range(11)]
    rows += [row_of(1, temperature=0.0), row_of(2), row_of(3, top_k=2, temperature=0.5)]
    sampler = TritonSampler(tile=tile)
    logits[9, 0] = NAN
    found = sampler.best(logits, rows, 4)
    with torch.device("cpu"):
        wanted = ORACLE.best(logits.cpu(), rows, 4)
    drawn = sampler.sample(logits, rows)
    for best, other, choice in zip(found, wanted, drawn, strict=True):
        assert (best.token_ids, best.error) == (other.token_ids, other.error)
        assert best.scores == pytest.approx(other.scores, abs=1e-4, rel=1e-6)
        assert best.token_ids[:1] == ((choice.token_id,) if choice.error is None else ())
    assert sampler.best(logits, rows, 1) == [
        Best(best.token_ids[:1], best.scores[:1], best.error) for best in found
    ]
    assert max(len(best.token_ids) for best in found) == min(4, vocab)


def test_the_best_of_a_greedy_row_are_its_greatest_logits() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0, -1.0], [0.0, NAN, 0.0, 0.0, 0.0]])
    row = row_of(temperature=0.0)
    first, second = TritonSampler(tile=2).best(logits, [row, row], 3)
    assert first == Best((1, 2, 3), (5.0, 5.0, 2.0))
    assert second == Best((), (), NOT_FINITE)
    with pytest.raises(ValueError, match="1 tokens"):
        SAMPLER.best(logits, [row], 3)
    with pytest.raises(ValueError, match="num_best must be at least 1"):
        SAMPLER.best(logits, [row, row], 0)
    assert SAMPLER.best(logits[:0], [], 3) == []


def test_a_part_of_the_vocabulary_races_as_if_all_others_were_banned() -> None:
    rng, vocab = random.Random(2), 301
    draft_vocab = DraftVocab(torch.tensor(sorted(rng.sample(range(vocab), 70))), vocab)
    plain = [row_of(number, **form) for number, form in enumerate([
        {}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.7}, {"temperature": 0.0}, {"min_p": 0.2},
        {"stop_token_ids": (300,)}, {"top_k": 100},  # beyond the columns
    ])]  # fmt: skip
    edited = [random_row(rng, vocab) for _ in range(5)]
    sampler = TritonSampler(tile=32)
    for rows, is_wide in ((plain, False), ([*plain, *edited], True)):
        narrow = logits_of(len(rows), 70)
        wide = draft_vocab.widened(narrow)
        found = sampler.best(narrow, rows, 4, draft_vocab=draft_vocab)
        wanted = ORACLE.best(wide.cpu(), rows, 4)
        for best, other in zip(found, wanted, strict=True):
            assert (best.token_ids, best.error) == (other.token_ids, other.error)
            assert best.scores == pytest.approx(other.scores, abs=1e-4)
        assert (found == sampler.best(wide, rows, 4)) or not is_wide


# ---- a row on its own --------------------------------------------------------------------------


def test_a_row_draws_the_same_alone_in_any_company_and_by_any_tiles() -> None:
    rng, vocab = random.Random(7), 301
    rows, logits = [random_row(rng, vocab) for _ in range(12)], logits_of(12, vocab)
    together = SAMPLER.sample(logits, rows)
    order = rng.sample(range(12), 12)
    assert SAMPLER.sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    for i in range(0, 12, 3):
        assert SAMPLER.sample(logits[i : i + 1], rows[i : i + 1]) == [together[i]]
    assert TritonSampler(tile=512).sample(logits, rows) == together
    assert TritonSampler(tile=64).sample(logits[:6], rows[:6]) == together[:6]


def test_more_rows_than_there_is_space_for_are_done_block_by_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, vocab = random.Random(8), 40
    rows, logits = [random_row(rng, vocab) for _ in range(10)], logits_of(10, vocab)
    rows[7], logits[8, 3] = row_of(logit_bias={vocab: 1.0}), NAN
    together = SAMPLER.sample(logits, rows)
    monkeypatch.setattr(sampler_module, "BLOCK", 3 * vocab)
    assert SAMPLER.sample(logits, rows) == together
    assert [choice.error is None for choice in together[7:9]] == [False, False]


@pytest.mark.parametrize(
    ("form", "num_kernels"), [({}, 2), ({"top_p": 0.9}, 3), ({"presence_penalty": 1.0}, 4)]
)
def test_a_batch_takes_few_kernels_whatever_its_mix(
    monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], num_kernels: int
) -> None:
    launched = []
    for name in ("rank", "gumbel_argmax", "cut", "copy", "edit", "merge_best"):
        kernel = getattr(race_module, f"{name}_kernel")
        monkeypatch.setattr(race_module, f"{name}_kernel", _Counted(kernel, launched))
    rows = [row_of(tokens=(0, 0, 1), **each) for each in ({"temperature": 0.0}, {}, form)]
    SAMPLER.sample(logits_of(3, 20), rows)
    assert len(launched) == num_kernels
    SAMPLER.best(logits_of(3, 20), rows, 4)
    assert len(launched) == num_kernels + num_kernels + 1


class _Counted:
    def __init__(self, kernel: Any, launched: list[Any]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.append(self._kernel)
        return self._kernel[grid]


class _Reads(TorchFunctionMode):
    """Notes whatever would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in (
            "cpu",
            "item",
            "tolist",
            "nonzero",
            "__bool__",
            "__int__",
            "__index__",
        ):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_winners_are_read_at_the_end_and_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("rank", "gumbel_argmax", "cut", "copy", "edit"):
        monkeypatch.setattr(race_module, f"{name}_kernel", _Idle())
    rows = [random_row(random.Random(seed), 50) for seed in range(20)]
    SAMPLER.sample(logits_of(20, 50), rows)
    read = AsyncCopy.read
    with _Reads() as reads:
        noted = lambda reply: (reads.names.append("a reply"), read(reply))[1]  # noqa: E731
        monkeypatch.setattr(AsyncCopy, "read", noted)
        drawing = SAMPLER.begin(logits_of(20, 50), rows)
        assert reads.names == []
        drawing.choices()
    assert reads.names == ["a reply"]


class _Idle:
    """A kernel that leaves nothing but zeros, in its last argument."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **_: arguments[-1].zero_()
