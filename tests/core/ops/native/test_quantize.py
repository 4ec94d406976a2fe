"""``quantize`` at load: every matrix packed, near the plain model, refused where it cannot be."""

from __future__ import annotations

from array import array

import pytest
import torch

from foretoken.api.build.model_files import BUILTIN
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.structs.linear import NativeLinear

FOLDER = BUILTIN / "target"
TOKENS = [1, 700, 13, 2500, 99, 4, 4000, 81, 7, 256]


def logits(decoder: Decoder) -> torch.Tensor:
    pool = decoder.make_pool(1, page_size=16)
    segment = Segment(array("q", TOKENS), 0, array("q", [0]), len(TOKENS))
    return decoder.forward(decoder.batch([segment], page_size=16), pool).logits


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    if native_library() is None:
        pytest.skip("no native kernels here")
    return logits(load_decoder(FOLDER, dtype="bfloat16", backend="native"))


@pytest.mark.parametrize(("quantize", "kind", "error"), [("int8", 2, 0.1), ("int4", 3, 0.4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quantised_model_stays_near_the_plain_one(plain, quantize, kind, error, dtype):
    decoder = load_decoder(FOLDER, dtype=dtype, backend="auto", quantize=quantize)
    layer = decoder.weights.layers[0]
    packed = [*layer.linears, decoder.weights.lm_head]
    assert all(isinstance(w, NativeLinear) and w.struct.kind == kind for w in packed)
    found = logits(decoder)
    assert 0 < (found - plain).norm() / plain.norm() < error


def test_quantised_weights_need_the_native_backend():
    with pytest.raises(ModelLoadError, match="quantize int8 needs the native backend"):
        load_decoder(FOLDER, backend="torch", quantize="int8")
    with pytest.raises(InvalidRequest, match="needs the native backend") as caught:
        EngineConfig(quantize="int4", backend="torch")
    assert caught.value.param == "quantize"
    assert EngineConfig(quantize="int4").quantize == "int4"
