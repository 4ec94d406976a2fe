"""The C kernel of LoRA against matrices, in every variant: any ranks, blocks, rows and threads."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.model.adapters.lora import load_lora
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.adapted import adapted_ops
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.layers import run_layers
from foretoken.core.ops.lora import LoraBlock, LoraUpdate, adapted_rows
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.row_extras import RowExtras
from support.adapters import write_adapter
from support.checkpoints import ModelDriver, make_reference, save
from support.greedy_streams import random_ids
from support.native_variants import every_variant

NUM_ROWS = 23


def make(ranks: list[int], outs: list[int], in_features: int) -> LoraUpdate:
    generator = torch.Generator().manual_seed(sum(ranks))
    a = torch.randn(sum(ranks), in_features, generator=generator)
    blocks, out, rank = [], 3, 0  # the first outputs are not changed
    for num_ranks, num_outs in zip(ranks, outs, strict=True):
        b = torch.randn(num_outs, num_ranks, generator=generator)
        blocks.append(LoraBlock(out, rank, b))
        out, rank = out + num_outs, rank + num_ranks
    return LoraUpdate(a, tuple(blocks), out + 5)


def expected(update: LoraUpdate, x: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(len(x), update.out_features, dtype=torch.float64)
    for block in update.blocks:
        a = update.a[block.first_rank : block.first_rank + block.b.shape[1]].double()
        stop = block.first_out + len(block.b)
        found[:, block.first_out : stop] = x.double() @ a.T @ block.b.double().T
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ranks", "outs", "in_features"),
    [([1], [1], 1), ([4, 7, 3], [64, 40, 65], 64), ([16, 2], [130, 7], 77), ([9], [200], 16)],
)
@pytest.mark.parametrize("variant", every_variant())
def test_updates_of_some_rows(variant, ranks, outs, in_features, dtype) -> None:  # type: ignore[no-untyped-def]
    library = native_library(variant)
    assert library is not None
    ops = NativeOps(library)
    update = make(ranks, outs, in_features)
    update = update._replace(
        a=update.a.to(dtype), blocks=tuple(b._replace(b=b.b.to(dtype)) for b in update.blocks)
    )
    lora = ops.pack_lora(update, dtype)
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(NUM_ROWS, in_features, generator=generator).to(dtype)
    before = torch.randn(NUM_ROWS, update.out_features, generator=generator).to(dtype)
    wanted = before.double() + expected(update, x)
    alone = torch.stack([_added(ops, before, x, [row], lora)[row] for row in range(NUM_ROWS)])
    # products are up to some hundreds, and may cancel in a sum
    rtol, atol = (2**-8, 0.05) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    torch.testing.assert_close(alone, wanted.to(dtype), rtol=rtol, atol=atol)
    for rows in ([0, 2, 3, 5, 7, 11, 13, 22], list(range(NUM_ROWS)), [20, 21, 22]):
        found = _added(ops, before, x, rows, lora)
        others = [row for row in range(NUM_ROWS) if row not in rows]
        assert torch.equal(found[rows], alone[rows])
        assert torch.equal(found[others], before[others])


def _added(ops, before, x, rows, lora):  # type: ignore[no-untyped-def]
    out = before.clone()
    ops.add_lora(out, x, torch.tensor(rows), lora)
    return out


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "lfm2", "qwen3_5", "minimax"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_step_in_one_call_has_the_bits_of_its_operations(kind, threads, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = make_reference(kind)
    decoder = load_decoder(save(model, tmp_path / "base"), backend="native", dtype="bfloat16")
    adapters = [
        load_lora(
            write_adapter(tmp_path / str(n), model, rank=n + 3, seed=n), decoder, max_rank=9
        ).weights
        for n in range(2)
    ]
    decoder.ops.set_threads(threads)
    found = []
    for by_operations in (False, True):
        driver = ModelDriver(decoder)
        sequences = [driver.add(random_ids(count, seed=count)) for count in (9, 1, 4, 6)]
        segments = [
            Segment(each.tokens, 0, each.pages, 1, extras=RowExtras(
                    state=driver._state(each, len(each.tokens)), adapter=adapter))
            for each, adapter in zip(sequences, [*adapters, None, adapters[0]], strict=True)
        ]  # fmt: skip
        batch = decoder.batch(segments, page_size=driver.page_size)
        if by_operations:
            ops = adapted_ops(decoder.ops, adapted_rows(batch), decoder.device)
            plans = decoder.plans(batch, driver.pool)
            found.append(run_layers(ops, decoder.weights, batch.token_ids, plans).hidden)
        else:
            found.append(decoder.forward(batch, driver.pool).hidden)
    assert torch.equal(*found)
