"""KV dtypes: how a pool stores keys and values, and which backends support them.

This module does not import torch, because the options read its table before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

KvDtype: TypeAlias = Literal["auto", "int8", "fp8"]
KV_DTYPE_HELP = (
    "data type of the KV pool; auto: the model's; int8, or fp8 (e4m3) on a GPU: about twice as "
    "many tokens fit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCodec:
    """Format in which a pool stores a vector: the key or the value of one token, layer and KV head.

    A scaled codec divides the vector by a float32 scale, which is stored with the vector, and
    rounds each quotient to a one-byte number. The scale is the largest magnitude of the vector
    divided by ``top``. The torch backend needs only this table to support a codec.
    """

    name: KvDtype
    number: str = ""  # torch dtype of the stored numbers; empty: the model's dtype
    top: float = 0.0  # largest number that the dtype can represent
    native_code: int | None = None  # code in native/kernels/decoder/kv_codec.h; None: unsupported
    capability: tuple[int, int] = (0, 0)  # minimum compute capability for the Triton kernels

    @property
    def is_scaled(self) -> bool:
        """Whether vectors are stored as numbers with a scale."""
        return bool(self.number)


KV_CODECS: Mapping[KvDtype, KvCodec] = {
    codec.name: codec
    for codec in (
        KvCodec(name="auto", native_code=0),
        KvCodec(name="int8", number="int8", top=127.0, native_code=1),
        # It has no `native_code`: CPUs cannot multiply e4m3, and int8 is as small and more exact.
        KvCodec(name="fp8", number="float8_e4m3fn", top=448.0, capability=(8, 9)),
    )
}
SCALED = tuple(codec for codec in KV_CODECS.values() if codec.is_scaled)
NATIVE = tuple(codec.name for codec in SCALED if codec.native_code is not None)
