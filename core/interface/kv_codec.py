"""The KV dtypes: how a pool stores keys and values, and which backends compute them.

This table has no torch, so that the options can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

KvDtype: TypeAlias = Literal["auto", "int8", "fp8"]
KV_DTYPE_HELP = "data type of the KV pool; int8, or fp8 (e4m3) on a GPU, holds twice the tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCodec:
    """How a pool stores a vector: the key or the value of one token, layer and KV head.

    A scaled codec divides the vector by a float32 scale, which is stored beside it, rounds each
    quotient to a number, and stores the number in a byte. The scale is the largest magnitude of
    the vector over ``top``. The backend torch computes every codec by this table alone.
    """

    name: KvDtype
    number: str = ""  # torch dtype of the numbers; empty: items are stored in the model's dtype
    top: float = 0.0  # the largest number
    native_code: int | None = None  # in native/kernels/decoder/kv_codec.h; None: not computed there
    capability: tuple[int, int] = (0, 0)  # the least that the Triton kernels need of a GPU

    @property
    def is_scaled(self) -> bool:
        """Whether vectors are stored as numbers with a scale."""
        return bool(self.number)


KV_CODECS: Mapping[KvDtype, KvCodec] = {
    codec.name: codec
    for codec in (
        KvCodec(name="auto", native_code=0),
        KvCodec(name="int8", number="int8", top=127.0, native_code=1),
        # No CPU multiplies e4m3, and int8 takes as many bytes and is more exact.
        KvCodec(name="fp8", number="float8_e4m3fn", top=448.0, capability=(8, 9)),
    )
}
SCALED = tuple(codec for codec in KV_CODECS.values() if codec.is_scaled)
NATIVE = tuple(codec.name for codec in SCALED if codec.native_code is not None)
