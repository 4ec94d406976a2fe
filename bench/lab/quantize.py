"""What quantised weights, keys and values cost in quality, on held-out text of the built-in pair.

Perplexity, and the share of positions whose likeliest token is the one that bfloat16 names.
Windows of the standard library's held-out modules are computed as prompts, all logits wanted, in
chunks: keys and values are read back from the pages, as they were kept there.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...api.build.model_files import BUILTIN
from ...core.model import Decoder, load_decoder
from ...core.ops.backends import Backend
from ...core.ops.batch import Segment
from ...core.ops.kv_pool import KvDtype, KVPool
from ...core.ops.native.linear import NativeLinear
from ...core.ops.quantize import Quantize
from ..report import RESULTS, command, machine, table, write_json
from .builtin_pair.data import is_held_out, read_modules
from .builtin_pair.packing import encode
from .builtin_pair.tokenizer import load_tokenizer

WINDOW = 512  # tokens
CHUNK = 128  # tokens of a pass
PAGE_SIZE = 16
KINDS: tuple[tuple[Backend, str, Quantize, KvDtype], ...] = (  # the plain ones first
    ("native", "bfloat16", "none", "auto"),
    ("native", "float32", "none", "auto"),
    ("native", "bfloat16", "int8", "auto"),
    ("native", "bfloat16", "int4", "auto"),
    ("native", "bfloat16", "none", "int8"),
    ("native", "float32", "none", "int8"),
    ("native", "bfloat16", "int8", "int8"),
    ("torch", "bfloat16", "none", "auto"),
    ("torch", "bfloat16", "none", "int8"),
    ("torch", "bfloat16", "none", "fp8"),
)
_OUT = RESULTS / "quantize.json"


@dataclass(frozen=True, slots=True)
class Figure:
    """One model in one kind of weights, keys and values."""

    model: str
    backend: str
    dtype: str
    quantize: str
    kv_cache_dtype: str
    matrix_mb: float  # what a step reads of the matrices, 10^6 bytes
    kv_bytes_per_token: float
    nats_per_token: float
    perplexity: float
    top1_agreement: float  # with bfloat16
    top1_of_full_kv: float  # agreement with the same but keys and values of the model's dtype
    tokens: int


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes JSON to ``--out``."""
    options = _parsed(argv)
    host = machine()
    print(command(), *(f"{key}: {value}" for key, value in host.items()), sep="\n")
    figures = [figure for role in ("target", "draft") for figure in measured(role, options.windows)]
    print(table([asdict(figure) for figure in figures]))
    report = {
        "command": command(),
        "machine": host,
        "window": WINDOW,
        "figures": [asdict(figure) for figure in figures],
    }
    write_json(options.out, report)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.quantize", description=__doc__
    )
    parser.add_argument(
        "--windows", type=int, default=48, help=f"number of windows of {WINDOW} tokens"
    )
    parser.add_argument("--out", type=Path, default=_OUT)
    return parser.parse_args(argv)


def measured(role: str, num_windows: int) -> Iterator[Figure]:
    """The figures of one model of the pair, bfloat16 first."""
    windows = held_out_windows(BUILTIN / role, num_windows)
    plain: dict[tuple[str, str, str], Tensor] = {}
    for backend, dtype, quantize, kv_dtype in KINDS:
        decoder = load_decoder(BUILTIN / role, dtype=dtype, backend=backend, quantize=quantize)
        nats, named = _read(decoder, windows, kv_dtype)
        plain.setdefault((backend, dtype, quantize), named)
        yield Figure(
            model=role,
            backend=backend,
            dtype=dtype,
            quantize=quantize,
            kv_cache_dtype=kv_dtype,
            matrix_mb=_matrix_bytes(decoder) / 1e6,
            kv_bytes_per_token=_make_pool(decoder, kv_dtype).num_bytes / WINDOW,
            nats_per_token=nats,
            perplexity=math.exp(nats),
            top1_agreement=_agreement(named, plain["native", "bfloat16", "none"]),
            top1_of_full_kv=_agreement(named, plain[backend, dtype, quantize]),
            tokens=len(named),
        )


def _agreement(named: Tensor, expected: Tensor) -> float:
    return float((named == expected).float().mean())


def held_out_windows(folder: Path, count: int) -> list[Tensor]:
    """Windows ``[WINDOW + 1]`` of token ids, from as many held-out modules in turn as there are."""
    modules = read_modules(Path(sysconfig.get_paths()["stdlib"]))
    texts = [module.text for module in modules if is_held_out(module.name)]
    documents = [torch.from_numpy(ids) for ids in encode(load_tokenizer(folder), texts)]
    cut = [d.unfold(0, WINDOW + 1, WINDOW) for d in documents if len(d) > WINDOW]
    in_turn = [rows[i] for i in range(max(map(len, cut))) for rows in cut if i < len(rows)]
    return in_turn[:count]


def _make_pool(decoder: Decoder, kv_dtype: KvDtype) -> KVPool:
    return decoder.make_pool(WINDOW // PAGE_SIZE, page_size=PAGE_SIZE, kv_dtype=kv_dtype)


def _read(decoder: Decoder, windows: Sequence[Tensor], kv_dtype: KvDtype) -> tuple[float, Tensor]:
    """Mean nats per token, and the likeliest token after every position."""
    pool = _make_pool(decoder, kv_dtype)
    pages = array("q", range(WINDOW // PAGE_SIZE))
    losses, named = [], []
    for window in windows:
        ids = array("q", window[:-1].tolist())
        chunks = [Segment(ids[at : at + CHUNK], at, pages, CHUNK) for at in range(0, WINDOW, CHUNK)]
        passes = (decoder.batch([chunk], page_size=PAGE_SIZE) for chunk in chunks)
        logits = torch.cat([decoder.forward(batch, pool).logits for batch in passes])
        losses.append(F.cross_entropy(logits, window[1:]).item())
        named.append(logits.argmax(dim=1))
    return sum(losses) / len(losses), torch.cat(named)


def _matrix_bytes(decoder: Decoder) -> int:
    layers = decoder.weights.layers
    packed = [w for layer in layers for w in layer.linears]
    packed.append(decoder.weights.lm_head)
    return sum(
        w.num_bytes if isinstance(w, NativeLinear) else w.weight.numel() * w.weight.itemsize
        for w in packed
    )


if __name__ == "__main__":
    main()
