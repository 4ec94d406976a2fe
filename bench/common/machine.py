"""Measures the limits of the machine and the sizes of a model, and provides tokens for prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.ops.kv_pool import KVPool
from ...core.ops.native.library import NativeLibrary
from ...core.ops.native.limits import best_seconds, matrix_rate, read_bandwidth
from ...core.ops.native.native_ops import NativeOps
from ...core.ops.native.structs.linear import NativeLinear
from ...core.ops.weights import PackedLinear
from .roofline import Limits, Shape

_SIDE = 1024  # Side of the square matrices that torch multiplies.
_READ_BYTES = 1 << 30


class Meter:
    """Measures the machine with native kernels, or with torch if ``library`` is None."""

    def __init__(self, library: NativeLibrary | None, dtype: torch.dtype, threads: int) -> None:
        self._library = library
        self._dtype = dtype
        self._threads = threads
        self._found: list[tuple[float, float]] = []

    @classmethod
    def of(cls, decoder: Decoder, threads: int) -> Meter:
        """Return a meter that uses the backend and dtype of this model."""
        library = decoder.ops.library if isinstance(decoder.ops, NativeOps) else None
        return cls(library, decoder.dtype, threads)

    @property
    def how(self) -> str:
        """Name of the backend, and its number of threads."""
        by = "torch" if self._library is None else f"native kernels ({self._library.variant})"
        return f"{by}, {self._threads} threads" if self._threads > 1 else f"{by}, 1 thread"

    def measure(self) -> None:
        """Measure once more; call it while the engine is idle."""
        self._found.append(_measured(self._library, self._dtype, self._threads))

    @property
    def limits(self) -> Limits:
        """Best of all measurements, because other load on the machine can only make them slower."""
        reads, rates = ([each[i] for each in self._found] for i in (0, 1))
        drift = max(1 - min(reads) / max(reads), 1 - min(rates) / max(rates))
        dtype = torch.bfloat16 if self._library else self._dtype
        return Limits(
            read=max(reads),
            matrix=max(rates),
            drift=drift,
            dtype=str(dtype).removeprefix("torch."),
            how=self.how,
        )


def _measured(
    library: NativeLibrary | None, dtype: torch.dtype, threads: int
) -> tuple[float, float]:
    """Return bytes read and operations computed per second."""
    if library is None:
        torch.set_num_threads(threads)
        return torch_read_bandwidth(), _torch_multiply(dtype)
    library.set_threads(threads)
    return read_bandwidth(library), matrix_rate(library)


def torch_read_bandwidth() -> float:
    """Return the bytes per second that torch reads from memory with all its threads.

    It is the best of several runs.
    """
    data = torch.ones(_READ_BYTES // 4)
    return data.nbytes / best_seconds(data.sum)


def _torch_multiply(dtype: torch.dtype) -> float:
    a = torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / best_seconds(lambda: a @ a)


def shape_of(decoder: Decoder, pool: KVPool) -> Shape:
    """Return the sizes that decide how long a step of this model takes."""
    config = decoder.config
    return Shape(
        block_params=sum(_layer_params(config, layer) for layer in range(config.num_layers)),
        head_params=config.vocab_size * config.hidden_size,
        query_width=config.num_heads * config.head_dim,
        windows=tuple(layer.window for layer in config.layers),
        weight_bytes=sum(map(_num_bytes, _linears(decoder))),
        kv_bytes=pool.num_bytes / (pool.num_pages * pool.page_size),
    )


def _layer_params(config: DecoderConfig, layer: int) -> int:
    """Return the number of parameters of a layer's attention and MLP."""
    num_heads, num_kv_heads, head_dim = config.heads_of(layer)
    spec, latent = config.layers[layer], config.latent
    num_kv = 0 if spec.kv_of is not None else 2 * num_kv_heads
    matrices = 3 if config.activation.gated else 2
    width = matrices * (spec.width or config.intermediate_size) + 2 * config.token_input_size
    if latent is None:
        return config.hidden_size * ((2 * num_heads + num_kv) * head_dim + width)
    queries = num_heads * latent.query_dim
    up = latent.q_rank * queries + num_heads * latent.rank * (latent.nope_dim + latent.value_dim)
    down = (latent.q_rank or queries) + latent.key_dim + num_heads * latent.value_dim
    return config.hidden_size * (down + width) + up


def _linears(decoder: Decoder) -> Iterator[PackedLinear]:
    """Yield the matrices that a step reads; norms are too small to count.

    Raises TypeError for a model that runs on transformers' modules, whose matrices are not packed.
    """
    if not isinstance(decoder, OwnDecoder):
        raise TypeError(
            f"cannot compute a roofline for {decoder.config.model_type}: it has no native decoder"
        )
    for layer in decoder.weights.layers:
        yield from layer.linears
    yield decoder.weights.lm_head


def _num_bytes(weight: PackedLinear) -> int:
    if isinstance(weight, NativeLinear):
        return weight.num_bytes
    return weight.weight.nbytes + (weight.bias.nbytes if weight.bias is not None else 0)


def largest_cache() -> int:
    """Return the bytes of the processor's largest cache; 0 if the system does not report it."""
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [path.read_text(encoding="ascii").strip() for path in found]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units.get(size[-1], 0) for size in sizes), default=0)


def prompt_text(folder: Path, vocab_size: int, num_tokens: int) -> tuple[list[int], str]:
    """Return token ids to cut prompts from, and a description of their source.

    With a tokenizer they are the sources of the standard library, so that acceptance is realistic;
    without one they are random.
    """
    if not (folder / "tokenizer.json").is_file():
        generator = torch.Generator().manual_seed(1)
        return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist(), "random ids"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(token_ids) >= num_tokens:
            break
        source = path.read_text(encoding="utf-8")
        token_ids += tokenizer(source, add_special_tokens=False, verbose=False).input_ids
    return token_ids[:num_tokens], "sources of Python's standard library"
