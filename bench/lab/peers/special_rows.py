"""Rows of more than text: vectors, scores, adapters, images; and all rows together."""

from __future__ import annotations

from dataclasses import replace

from .rows import ROWS as TEXT_ROWS
from .rows import Row, Setting

_PEERS = ("foretoken", "transformers", "llama.cpp")
_BASE = "foretoken-base"
_EMBED = Setting("0.6b", mode="embed")
_SCORE = Setting("0.6b", mode="score")
_LORA = Setting("0.6b-lora", mode="lora")
_IMAGE = Setting("smolvlm", mode="image")


def _lora(name: str, title: str, *, adapters: tuple[int, ...], batch: int) -> Row:
    return Row(
        name=name,
        title=title,
        setting=_LORA,
        kind="decode",
        prompt_len=32,
        batch=batch,
        num_new=33,
        adapters=adapters,
        only=_PEERS,
    )


SPECIAL_ROWS = (
    Row(
        name="embed-0.6b-1",
        title="a vector of one text of 32 tokens",
        setting=_EMBED,
        kind="embed",
        prompt_len=32,
        must=1.0,
        stretch=1.5,
        only=_PEERS,
    ),
    Row(
        name="embed-0.6b-32",
        title="vectors of 32 texts of 128 tokens",
        setting=_EMBED,
        kind="embed",
        prompt_len=128,
        batch=32,
        must=1.0,
        stretch=1.5,
        only=_PEERS,
    ),
    Row(
        name="rerank-0.6b-32",
        title="scores of 32 documents of 200 tokens, a query and an instruction of 84, 10 behind",
        setting=_SCORE,
        kind="score",
        prompt_len=84 + 200 + 10,
        num_shared=84,
        batch=32,
        must=1.0,
        stretch=2.0,
        only=_PEERS,
    ),
    replace(
        _lora("lora-0.6b-0", "decode, adapters loaded, none used, batch 1", adapters=(), batch=1),
        only=("foretoken", _BASE),
        against=_BASE,
        must=0.98,
        stretch=1.0,
    ),
    replace(
        _lora("lora-0.6b-1", "decode, one adapter of rank 16, batch 1", adapters=(0,), batch=1),
        only=(*_PEERS, _BASE),
        against=_BASE,
        must=0.95,
        stretch=0.98,
    ),
    replace(
        _lora(
            "lora-0.6b-8x4",
            "decode, 8 requests of 4 adapters of rank 16",
            adapters=(0, 0, 1, 1, 2, 2, 3, 3),
            batch=8,
        ),
        must=2.0,
        stretch=3.0,
    ),
    Row(
        name="image-smolvlm-1",
        title="first token behind an image of 512 x 512 pixels and 64 tokens",
        setting=_IMAGE,
        kind="image",
        prompt_len=64,
        must=1.0,
        stretch=1.2,
        only=_PEERS,
    ),
    Row(
        name="image-smolvlm-again",
        title="first token of the next turn: the same image, 16 tokens of answer, 64 new ones",
        setting=_IMAGE,
        kind="again",
        prompt_len=64,
        num_new=16,
        must=1.0,
        stretch=3.0,
        only=_PEERS,
    ),
)

ROWS = (*TEXT_ROWS, *SPECIAL_ROWS)
