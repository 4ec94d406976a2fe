"""Rows of the table of measurements, with their aims."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...common.real_tasks import KINDS

IMAGE_ROWS = 67
"""Rows of one tile of SmolVLM: two tokens, 64 vectors, one token."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A model in one form. Rows of one setting share the workers, and what these have cached.

    ``mode`` as in `wire.Job`. ``batch``: of rows whose texts no worker may have seen.
    """

    shape: str
    dtype: str = "bf16"
    depth: int = 0
    mode: str = ""
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload. ``must`` and ``stretch``: the aim, in times the best of the others.

    ``kind``: text, tokens a second of all requests together from call to answer, of a task of
    real_tasks.py, ``num_calls`` of them one after another; decode, tokens a second of all requests
    together, the first token aside; prefill, prompt tokens a second; burst, seconds for requests
    that arrive together and share a prefix; cold and warm, seconds to the first token of a prompt
    never seen, and of the same once more; turn, seconds to the first token of the next prompt of a
    conversation, which has the one before, the second half of its answer and as many tokens again;
    embed, tokens a second of texts that become vectors; score, seconds until all documents have
    one; image, seconds to the first token behind a picture never seen; again, to that of the next
    turn, with the same picture.
    ``adapters``: that of each request. ``against``: the engine to compare with; "": the best.
    """

    name: str
    title: str
    setting: Setting
    kind: Literal[
        "text", "decode", "prefill", "burst", "cold", "warm", "turn", "embed", "score", "image",
        "again",
    ]  # fmt: skip
    prompt_len: int
    batch: int = 1
    num_new: int = 1
    num_shared: int = 0
    task: str = ""
    num_calls: int = 1
    must: float | None = None
    stretch: float | None = None
    only: tuple[str, ...] = ()  # engines, where not all are asked
    adapters: tuple[int, ...] = ()
    against: str = ""

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.kind in ("text", "decode", "prefill", "embed")

    @property
    def unit(self) -> str:
        """Unit of the figure."""
        return "tok/s" if self.is_rate else "s"

    @property
    def max_len(self) -> int:
        """Tokens of a request at its end; of a conversation, at the end of its second turn."""
        turns = 2 if self.kind == "again" else 1
        more = self.num_image_rows + (1 if self.kind == "turn" else 0)
        return turns * self.prompt_len + self.num_new + more

    @property
    def num_image_rows(self) -> int:
        """Rows that a picture takes in the prompt, those around it included."""
        return IMAGE_ROWS if self.kind in ("image", "again") else 0


_BF16 = Setting("0.6b")
_INT8 = Setting("0.6b", "int8")
_INT4 = Setting("0.6b", "int4")
_OFF = Setting("450m")
_DRAFT = Setting("450m", depth=4)
_BUILTIN = ("foretoken", "transformers")


def _decode(
    name: str,
    title: str,
    setting: Setting,
    aim: tuple[float, float],
    *,
    batch: int,
    prompt_len: int = 32,
) -> Row:
    must, stretch = aim
    return Row(
        name=name,
        title=title,
        setting=setting,
        kind="decode",
        prompt_len=prompt_len,
        batch=batch,
        num_new=33,
        must=must,
        stretch=stretch,
    )


def _prefill(
    name: str, title: str, setting: Setting, aim: tuple[float, float], *, prompt_len: int
) -> Row:
    must, stretch = aim
    return Row(
        name=name,
        title=title,
        setting=setting,
        kind="prefill",
        prompt_len=prompt_len,
        must=must,
        stretch=stretch,
    )


def _text(batch: int) -> tuple[Row, ...]:
    """Every task of real text by so many requests at once, each engine in its best mode."""
    return tuple(
        Row(
            name=f"{task}-{batch}",
            title=f"{task} x{batch}, SmolLM2",
            setting=Setting("smollm2", mode="auto", batch=batch),
            kind="text",
            task=task,
            prompt_len=640,
            batch=batch,
            num_calls=5 if batch == 1 else 1,
            num_new=160,
            must=1.2,
            stretch=1.5,
        )
        for task in KINDS
    )


def _shape(
    shape: str,
    title: str,
    *,
    prefill: tuple[float, float] = (0.9, 1.0),
    batches: tuple[int, ...] = (1, 8),
) -> tuple[Row, ...]:
    """Rows that measure the kernels with one more shape."""
    setting = Setting(shape)
    decodes = (
        _decode(
            f"{shape}-{batch}",
            f"{title}, decode, batch {batch}",
            setting,
            (1.0, 1.15 if batch == 1 else 1.2),
            batch=batch,
        )
        for batch in batches
    )
    last = _prefill(f"{shape}-512", f"{title}, prefill 512", setting, prefill, prompt_len=512)
    return (*decodes, last)


def _builtin(name: str, title: str, setting: Setting, *only: str) -> Row:
    return Row(
        name=name,
        title=title,
        setting=setting,
        kind="decode",
        prompt_len=256,
        num_new=129,
        only=only,
    )


ROWS = (
    *_text(1),
    *_text(4),
    *_shape("smollm2", "SmolLM2-135M"),
    _prefill(
        "smollm2-2048",
        "SmolLM2-135M, prefill 2048",
        Setting("smollm2"),
        (0.9, 1.1),
        prompt_len=2048,
    ),
    *_shape("qwen2.5-0.5b", "Qwen2.5-0.5B"),
    *_shape("llama-3.2-1b", "Llama-3.2-1B"),
    *_shape("moe-1b", "Qwen3-MoE, 0.9B", prefill=(1.0, 1.2)),
    *_shape("qwen35-0.8b", "Qwen3.5-0.8B", prefill=(0.9, 1.3)),
    _decode(
        "qwen35-0.8b-int4-1",
        "Qwen3.5-0.8B, decode, batch 1, 4 bit",
        Setting("qwen35-0.8b", "int4"),
        (1.0, 1.15),
        batch=1,
    ),
    Row(
        name="qwen35-0.8b-turn",
        title="Qwen3.5-0.8B, first token of turn 2 after 4,096 tokens",
        setting=Setting("qwen35-0.8b", mode="turn"),
        kind="turn",
        prompt_len=4096,
        num_new=64,
        must=1.0,
        stretch=2.0,
    ),
    *_shape("qwen35-moe-1b", "Qwen3.6-MoE, 0.9B", prefill=(1.0, 1.2)),
    *_shape("lfm2-1b", "LFM2-1.2B", prefill=(0.9, 1.2), batches=(1,)),
    *_shape("granite4h-1b", "Granite 4 H 1B", prefill=(0.9, 1.2), batches=(1,)),
    *_shape("mla-1b", "GLM-4.7-Flash, small", prefill=(1.0, 1.15)),
    *(
        _decode(
            f"mla-1b-2048-{batch}",
            f"GLM-4.7-Flash, small, decode behind 2,048 tokens, batch {batch}",
            Setting("mla-1b"),
            (1.0, 1.15),
            batch=batch,
            prompt_len=2048,
        )
        for batch in (1, 8)
    ),
    _decode("decode-1-bf16", "decode, batch 1, bf16", _BF16, (1.0, 1.15), batch=1),
    _decode("decode-8-bf16", "decode, batch 8, bf16", _BF16, (1.0, 1.2), batch=8),
    _prefill("prefill-512-bf16", "prefill 512, bf16", _BF16, (0.9, 1.0), prompt_len=512),
    _prefill("prefill-2048-bf16", "prefill 2048, bf16", _BF16, (0.9, 1.1), prompt_len=2048),
    Row(
        name="burst-16",
        title="16 requests at once, 1,024 shared + 16 own, 32 new",
        setting=_BF16,
        kind="burst",
        prompt_len=1040,
        batch=16,
        num_new=32,
        num_shared=1024,
        must=1.2,
        stretch=2.0,
    ),
    Row(
        name="first-cold",
        title="first token of a 1,040-token prompt, cold",
        setting=_BF16,
        kind="cold",
        prompt_len=1040,
        must=1.0,
        stretch=1.3,
    ),
    Row(
        name="first-warm",
        title="the same prompt once more, warm",
        setting=_BF16,
        kind="warm",
        prompt_len=1040,
        must=1.0,
        stretch=1.3,
    ),
    _decode("decode-1-int8", "decode, batch 1, 8 bit", _INT8, (1.1, 1.4), batch=1),
    _decode("decode-8-int8", "decode, batch 8, 8 bit", _INT8, (1.0, 1.3), batch=8),
    _prefill("prefill-512-int8", "prefill 512, 8 bit", _INT8, (0.9, 1.1), prompt_len=512),
    _decode("decode-1-int4", "decode, batch 1, 4 bit", _INT4, (0.9, 1.1), batch=1),
    replace(
        _decode("draft-off-1", "450M pair, no draft, batch 1, bf16", _OFF, (1.0, 1.15), batch=1),
        must=None,
        stretch=None,
    ),
    replace(
        _decode("draft-off-8", "450M pair, no draft, batch 8, bf16", _OFF, (1.0, 1.2), batch=8),
        must=None,
        stretch=None,
    ),
    _decode("draft-1", "draft LM, k=4, simulated acceptance, batch 1", _DRAFT, (1.1, 1.5), batch=1),
    _decode("draft-8", "draft LM, k=4, simulated acceptance, batch 8", _DRAFT, (1.0, 1.2), batch=8),
    _builtin("builtin", "built-in pair, no draft, batch 1", Setting("builtin"), *_BUILTIN),
    _builtin(
        "builtin-draft",
        "built-in pair, its draft, k=4, batch 1",
        Setting("builtin", depth=4),
        *_BUILTIN,
    ),
    _builtin(
        "builtin-lookup",
        "built-in model, prompt look-up, k=4, batch 1",
        Setting("builtin", depth=4, mode="lookup"),
        *_BUILTIN,
    ),
)


def shrunk(row: Row, shape: str) -> Row:
    """The row on another shape with an eighth of its prompt: for trying things out.

    Rows of text become rows of random tokens: no other shape could read it.
    """
    if row.task:
        row = replace(row, kind="decode", task="", num_calls=1)
    return replace(
        row,
        setting=replace(row.setting, shape=shape),
        prompt_len=max(32, row.prompt_len // 8),
        num_shared=row.num_shared // 8,
        num_new=min(row.num_new, 9),
    )
