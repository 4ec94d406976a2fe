"""Rows given as vectors: a decoder computes them as if its embedding had had them."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Segment, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from support.checkpoints import make_checkpoint
from support.native_variants import BACKENDS
from support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE_SIZE = 16
TOKENS = [5, 6, 7, 8, 9, 10, 11]
PLACES = (1, 2, 5)  # of the rows that are given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("given"), "qwen3")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    return str(request.param)


def compute(
    decoder: Decoder, token_ids: list[int], inputs: Tensor | None = None
) -> tuple[ForwardOutput, KVPool]:
    pool = decoder.make_pool(8, page_size=PAGE_SIZE)
    segments = [
        Segment(token_ids, 0, array("q", [3]), 1),
        Segment([token_ids[-1]], 0, array("q", [1]), 1),
    ]
    batch = decoder.batch(segments, page_size=PAGE_SIZE)
    return decoder.forward(batch, pool, Wanted(inputs=inputs)), pool


def given(decoder: Decoder) -> tuple[list[int], Tensor]:
    """Token ids, some of them below 0, and vectors: of the embedding where these are."""
    token_ids = [-at if at in PLACES else token_id for at, token_id in enumerate(TOKENS)]
    vectors = torch.full((len(TOKENS) + 1, decoder.config.hidden_size), 1e30)
    for at in PLACES:
        vectors[at] = decoder.weights.embedding[TOKENS[at]]
    return token_ids, vectors.to(decoder.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vector_in_place_of_an_embedding_changes_no_bit(
    folder: Path, backend: str, dtype: str
) -> None:
    decoder = load_decoder(folder, dtype=dtype, backend=backend)  # type: ignore[arg-type]
    expected, expected_pool = compute(decoder, TOKENS)
    found, pool = compute(decoder, *given(decoder))
    assert torch.equal(found.hidden, expected.hidden)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(pool.data[[1, 3]], expected_pool.data[[1, 3]])


def test_another_vector_shows(folder: Path, backend: str) -> None:
    decoder = load_decoder(folder, dtype="float32", backend=backend)  # type: ignore[arg-type]
    token_ids, vectors = given(decoder)
    vectors[PLACES[-1]] += 1.0
    found, _ = compute(decoder, token_ids, vectors)
    expected, _ = compute(decoder, TOKENS)
    last = PLACES[-1]
    assert torch.equal(found.hidden[:last], expected.hidden[:last])
    assert not torch.allclose(found.hidden[last], expected.hidden[last], atol=1e-2)


def test_token_inputs_of_given_rows_are_those_of_the_first_token(tmp_path: Path) -> None:
    """Layers of Gemma 4 read a second table, which has nothing for a vector."""
    save_tiny(tmp_path, "gemma4_text", hidden_size_per_layer_input=8)
    decoder = load_decoder(tmp_path, dtype="float32", backend="torch")
    assert isinstance(decoder, OwnDecoder)
    table = decoder.weights.embedding.clone()
    changed = [0 if at in PLACES else token_id for at, token_id in enumerate(TOKENS)]
    token_ids, vectors = given(decoder)
    vectors[list(PLACES)] = table[0]
    backends = ["torch"] if native_library() is None else ["torch", "native"]
    for backend in backends:
        twin = load_decoder(tmp_path, dtype="float32", backend=backend)  # type: ignore[arg-type]
        found, _ = compute(twin, token_ids, vectors)
        assert torch.equal(found.logits, compute(twin, changed)[0].logits)


def test_vectors_of_another_shape_are_refused(folder: Path, backend: str) -> None:
    decoder = load_decoder(folder, dtype="float32", backend=backend)  # type: ignore[arg-type]
    token_ids, vectors = given(decoder)
    with pytest.raises(ValueError, match=r"inputs have shape \[7, .*\], but the batch needs \[8, "):
        compute(decoder, token_ids, vectors[:-1])


def test_modules_of_transformers_take_no_vectors(folder: Path) -> None:
    decoder = load_decoder(folder, dtype="float32", impl="transformers")
    with pytest.raises(ValueError, match="accept token ids only"):
        compute(decoder, TOKENS, torch.zeros(8, decoder.config.hidden_size))


def test_rows_may_be_turned_further_than_they_see(folder: Path, backend: str) -> None:
    """RoPE's tables reach the positions of rows whose pages leave out what lies before."""
    decoder = load_decoder(folder, dtype="float32", backend=backend)  # type: ignore[arg-type]
    pool = decoder.make_pool(8, page_size=PAGE_SIZE)
    near = decoder.batch([Segment(TOKENS, 0, array("q", [3]), 1)], page_size=PAGE_SIZE)
    far = moved(near, 400)
    first = decoder.forward(near, pool).hidden
    torch.testing.assert_close(
        decoder.forward(far, pool).hidden, first, atol=1e-4, rtol=1e-4
    )  # scores depend on distances alone


def moved(batch: RaggedBatch, distance: int) -> RaggedBatch:
    positions = batch.positions + distance
    return replace(batch, positions=positions, rope_until=int(positions.max()) + 1)
