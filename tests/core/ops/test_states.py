"""Recurrent states: the bits of a row in any cut, beside any drafts, from any kept state."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from foretoken.core.model.description.fold import mamba_orders
from foretoken.core.ops.base import Ops
from foretoken.core.ops.batch import NOTHING_MORE, Segment, build_batch
from foretoken.core.ops.kv_pool import KvLayer, KVPool
from foretoken.core.ops.layers import run_layers
from foretoken.core.ops.mixers.attention import AttentionWeights
from foretoken.core.ops.mixers.conv import ConvShape
from foretoken.core.ops.mixers.recurrent import Mamba2Weights, RecurrentShape
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.row_extras import RowExtras, SegmentState
from foretoken.core.ops.state_pool import DRAFT_ROOM, StatePool, bytes_per_log, bytes_per_slot
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import (
    DecoderWeights,
    HeadLayout,
    HeadNorm,
    LayerWeights,
    MlpWeights,
    Norm,
    PackedLinear,
)
from support.delta_fixture import (
    CONV_SHAPE,
    MAMBA_SHAPE,
    SHAPE,
    Rows,
    Sequences,
    Weights,
    gates_width,
    make_conv_weights,
    make_lightning_weights,
    make_mamba_weights,
    make_weights,
    row_widths,
)
from support.native_variants import every_variant, slow
from support.rope_fixture import Turns

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 150
SMALL = RecurrentShape(1, 2, key_dim=12, value_dim=20, conv_len=4)
RULES: dict[str, Callable[..., Weights]] = {
    "delta": make_weights,
    "mamba2": make_mamba_weights,
    "lightning": make_lightning_weights,
    "conv": make_conv_weights,
}
KINDS: dict[str, Callable[[], Weights]] = {
    "grouped": make_weights,
    "tiled": lambda: make_weights(SHAPE._replace(is_tiled=True)),
    "three taps": lambda: replace(
        make_weights(RecurrentShape(1, 3, 16, 16, conv_len=3)), most_beta=2.0
    ),
    "real": lambda: make_weights(RecurrentShape(1, 2, 128, 128, conv_len=4)),
    "mamba2": make_mamba_weights,
    "mamba2 without a bias": lambda: make_mamba_weights(
        RecurrentShape(1, 3, 16, 32, conv_len=3), has_bias=False
    ),
    "mamba2 real": lambda: make_mamba_weights(RecurrentShape(1, 2, 128, 64, conv_len=4)),
    "lightning": make_lightning_weights,
    "lightning real": lambda: make_lightning_weights(RecurrentShape(2, 2, 128, 128, conv_len=1)),
    "conv": make_conv_weights,
    "conv without a bias": lambda: make_conv_weights(ConvShape(37, 2), has_bias=False),
    "conv of five taps": lambda: make_conv_weights(ConvShape(64, 5)),
}

# Under Triton's interpreter: a layer of each rule, with more than one head of keys where it counts.
SMALL_KINDS: dict[str, Callable[[], Weights]] = {
    "tiled": lambda: replace(
        make_weights(RecurrentShape(2, 4, 12, 20, conv_len=4, is_tiled=True)), most_beta=2.0
    ),
    "mamba2": lambda: make_mamba_weights(SMALL),
    "lightning": lambda: make_lightning_weights(RecurrentShape(2, 4, 12, 20, conv_len=1)),
    "conv": make_conv_weights,
}


@pytest.fixture(params=[*slow("torch", "triton"), *every_variant()])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    torch.manual_seed(0)
    if request.param == "torch":
        yield TorchOps()
        return
    if request.param == "triton":
        yield from triton_ops()
        return
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


def triton_ops() -> Iterator[Ops]:
    """Under the interpreter, or on the device that is named as for tests/core/ops/triton."""
    pytest.importorskip("triton")
    from foretoken.core.ops.triton.triton_ops import TritonOps
    from support.fake_graph import fake_graphs
    from support.quick_interpreter import quicken

    name = os.environ.get("FORETOKEN_TEST_DEVICE", "cpu")
    if name == "cpu":
        quicken()
        yield TritonOps(exact="batch", graphs=fake_graphs())
        return
    torch.set_default_device(name)
    yield TritonOps(exact="batch")
    torch.set_default_device(None)


@pytest.fixture(params=RULES)
def make(request: pytest.FixtureRequest, ops: Ops) -> Callable[..., Weights]:
    made = RULES[request.param]
    if is_interpreted(ops) and request.param != "conv":
        return partial(made, SMALL)
    return made


def is_interpreted(ops: Ops) -> bool:
    """Whether a row takes much time: then shapes are small and sequences short."""
    return type(ops).__name__ == "TritonOps"


def length_of(ops: Ops) -> int:
    return 66 if is_interpreted(ops) else LENGTH


@pytest.fixture(scope="module")
def known() -> dict[tuple[object, ...], Tensor]:
    """Results of `one_by_one`."""
    return {}


@pytest.fixture
def one_by_one(
    request: pytest.FixtureRequest, known: dict[tuple[object, ...], Tensor]
) -> Callable[[Sequences], Tensor]:
    """Return a function that computes all rows of the first sequence, a pass for each.

    Tests whose weights and inputs are drawn alike compare with the same rows.
    """
    drawn = [request.node.callspec.params[name] for name in ("ops", "make")]

    def compute(sequences: Sequences) -> Tensor:
        key = (*drawn, sequences.length, sequences.page_size, sequences.dtype)
        if key not in known:
            known[key] = sequences.one_by_one()
        sequences.reset()
        return known[key]

    return compute


def random_cuts(chance: random.Random, length: int = LENGTH) -> Iterator[tuple[int, int, int]]:
    """Start, final rows and drafts of passes: chunks, and single rows with drafts."""
    at = 0
    while at < length:
        count = chance.choice((1, 1, 1, 2, 5, 16, chance.randint(1, 60)))
        count = min(count, length - at)
        drafts = chance.choice((0, 1, 7, DRAFT_ROOM)) if count == 1 else 0
        yield at, count, drafts
        at += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 32])
def test_bits_of_a_row_are_those_of_any_cut_and_of_any_drafts(
    page_size: int,
    dtype: torch.dtype,
    make: Callable[..., Weights],
    ops: Ops,
    one_by_one: Callable[[Sequences], Tensor],
) -> None:
    if is_interpreted(ops) and (page_size == 16) != (dtype == torch.float32):
        pytest.skip("takes long: each size and each dtype once")
    length = 40 if is_interpreted(ops) and page_size == 32 else length_of(ops)
    sequences = Sequences(ops, [make()], length=length, page_size=page_size, dtype=dtype)
    expected = one_by_one(sequences)
    for seed in range(1 if is_interpreted(ops) else 6):
        sequences.reset()
        cuts = random_cuts(random.Random(seed), length)
        found = [sequences.run(Rows(0, *cut))[0] for cut in cuts]
        assert torch.equal(torch.cat(found), expected), seed


def test_accepted_drafts_are_not_computed_again(
    make: Callable[..., Weights], ops: Ops, one_by_one: Callable[[Sequences], Tensor]
) -> None:
    """A pass may begin behind rows that were drafts, more than one page end behind the state."""
    length = length_of(ops)
    sequences = Sequences(ops, [make()], length=length)
    expected = one_by_one(sequences)
    sequences.run(Rows(0, 0, 16))
    run_as_drafts(sequences, start=16, count=1, accepted=DRAFT_ROOM)
    (found,) = sequences.run(Rows(0, 17 + DRAFT_ROOM, length - 17 - DRAFT_ROOM))
    assert torch.equal(found, expected[17 + DRAFT_ROOM :])


def run_as_drafts(sequences: Sequences, start: int, count: int, accepted: int) -> None:
    """A pass whose drafts are the rows that follow."""
    draw = sequences.draft_rows
    sequences.draft_rows = lambda sequence, at, n: (
        sequences.mixed[sequence, at : at + n],
        sequences.gates[sequence, at : at + n],
    )
    sequences.run(Rows(0, start, count, accepted))
    sequences.draft_rows = draw


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_the_bits_of_each_of_its_sequences_alone(kind: str, ops: Ops) -> None:
    if is_interpreted(ops) and kind not in SMALL_KINDS:
        pytest.skip("takes long: other kinds are compared with the oracle")
    length, count, kinds = (18, 2, SMALL_KINDS) if is_interpreted(ops) else (80, 3, KINDS)
    sequences = Sequences(ops, [kinds[kind]()], length=length, count=count)
    expected = [sequences.one_by_one(sequence) for sequence in range(count)]
    sequences.reset()
    cuts = [list(random_cuts(random.Random(seed), length)) for seed in range(count)]
    found: list[list[Tensor]] = [[] for _ in range(count)]
    while any(cuts):
        rows = [Rows(index, *each.pop(0)) for index, each in enumerate(cuts) if each]
        for each, out in zip(rows, sequences.run(*rows), strict=True):
            found[each.sequence].append(out)
    for outs, alone in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(outs), alone)


@pytest.mark.parametrize("num_drafts", [0, 20])
def test_a_kept_state_continues_with_the_same_bits(
    num_drafts: int,
    make: Callable[..., Weights],
    ops: Ops,
    one_by_one: Callable[[Sequences], Tensor],
) -> None:
    """Kept within a chunk, at its very end, and at the start of a pass."""
    length = length_of(ops)
    sequences = Sequences(ops, [make()], length=length, num_slots=8)
    expected = one_by_one(sequences)
    sequences.run(Rows(0, 0, 16, 0, ((0, 1), (16, 2))))
    sequences.run(Rows(0, 16, 32, 0, ((16, 3), (32, 4), (48, 5))))
    sequences.run(Rows(0, 48, 15))
    sequences.run(Rows(0, 63, 1, num_drafts, ((64, 6),)))
    assert sequences.states.at[:, 0].tolist() == [48, 0, 16, 16, 32, 48, 64, 0]
    for position, slot in ((0, 1), (16, 2), (16, 3), (32, 4), (48, 5), (64, 6)):
        sequences.states.logs.fill_(255)
        sequences.states.copy_slot(slot, 0)
        stop = min(position + 18, length) if is_interpreted(ops) else length  # over a page end
        (found,) = sequences.run(Rows(0, position, stop - position))
        assert torch.equal(found, expected[position:stop]), position


def test_a_decode_step_that_failed_half_way_may_run_again(
    make: Callable[..., Weights], ops: Ops
) -> None:
    """One layer has folded and written its rows, the other has not."""
    weights = [make(), make(layer=1)]
    sequences = Sequences(ops, weights, length=60)
    sequences.run(Rows(0, 0, 32), layers=(0, 1))
    expected = sequences.run(Rows(0, 32, 1, 20), layers=(0, 1))
    rest = sequences.run(Rows(0, 33, 27), layers=(0, 1))
    sequences.reset()
    sequences.run(Rows(0, 0, 32), layers=(0, 1))
    sequences.run(Rows(0, 32, 1, 20), layers=(0,))
    assert sequences.states.at[0].tolist() == [32, 16]
    for layers in ((0, 1), (1, 0)):
        found = sequences.run(Rows(0, 32, 1, 20), layers=layers)
    sequences.run(Rows(0, 32, 1), layers=(0, 1))
    found = sequences.run(Rows(0, 32, 1), layers=(0, 1))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(sequences.run(Rows(0, 33, 27), layers=(0, 1))[0], rest[0])


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["triton"], indirect=True)
def test_a_layer_that_failed_behind_its_states_may_run_again(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states have moved before there is memory for what the layer gives."""
    from foretoken.core.ops.triton.recurrent import recur

    sequences = Sequences(ops, [make_weights(SMALL)], length=34)
    sequences.run(Rows(0, 0, 32))
    (expected,) = sequences.run(Rows(0, 32, 1, 20))
    sequences.reset()
    sequences.run(Rows(0, 0, 32))
    with monkeypatch.context() as patch:
        patch.setattr(recur, "gated_norm_kernel", NoMemory())
        with pytest.raises(MemoryError):
            sequences.run(Rows(0, 32, 1, 20))
    (found,) = sequences.run(Rows(0, 32, 1))
    assert torch.equal(found, expected)


class NoMemory:
    """A kernel for which none is left."""

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        raise MemoryError


def test_a_rejected_draft_over_page_ends_moves_no_state(ops: Ops) -> None:
    sequences = Sequences(ops, [make_weights()], length=60)
    sequences.run(Rows(0, 0, 30))
    before = sequences.states.slots.clone()
    sequences.run(Rows(0, 30, 1, DRAFT_ROOM))
    assert sequences.states.at[0].tolist() == [16]
    assert torch.equal(sequences.states.slots, before)


class Mixers:
    """A recurrent layer, then one of gated attention, and passes over a pool of both.

    With Mamba-2 each layer is a mixer or an MLP alone.
    """

    HEADS = HeadLayout(2, 1, 16, 0.25)

    def __init__(self, ops: Ops, weights: Weights, dtype: torch.dtype) -> None:
        self.ops, self.dtype, self.shape = ops, dtype, weights.shape
        hidden = 32
        before, behind = row_widths(weights)
        matrices = {"in_proj": self.matrix(before, hidden), "out": self.matrix(hidden, behind)}
        if gates_width(weights):
            matrices["gates"] = self.matrix(gates_width(weights), hidden)
        recurrent = replace(weights, **matrices)
        attention = AttentionWeights(
            qkv=self.matrix((2 + 1 + 1 + 2) * 16, hidden),
            head_norm=HeadNorm(torch.rand(3, 16) + 0.5, 1e-6),
            o=self.matrix(hidden, 2 * 16),
            window=None,
            kv=KvLayer(0, 0),
            gate=2 * 16,
        )
        layers = tuple(
            LayerWeights(
                mixer_norm=self.norm(hidden),
                mixer=mixer,
                mlp_norm=self.norm(hidden),
                mlp=MlpWeights(self.matrix(2 * 48, hidden), self.matrix(hidden, 48)),
                mixer_out_norm=self.norm(hidden) if mixer is recurrent else None,
            )
            for mixer in (recurrent, attention)
        )
        if isinstance(weights, Mamba2Weights):
            layers = tuple(
                replace(layer, mlp_norm=None, **{part: None})
                for layer in layers
                for part in ("mlp", "mixer")
            )
        embedding = torch.randn(50, hidden).to(dtype)
        self.weights = DecoderWeights(embedding, layers, self.norm(hidden), self.matrix(50, hidden))
        self.compiled = ops.compile_forward(self.weights)

    def matrix(self, out_features: int, in_features: int) -> PackedLinear:
        return self.ops.pack_linear(torch.randn(out_features, in_features).to(self.dtype) / 4)

    def norm(self, width: int) -> Norm:
        return Norm((torch.rand(width) + 0.5).to(self.dtype), 1e-6)

    def pool(self) -> KVPool:
        device = torch.get_default_device()
        states = StatePool(2, 1, [self.shape.state], page_size=16, dtype=self.dtype, device=device)
        return KVPool(
            8, num_layers=1, num_kv_heads=1, head_dim=16, page_size=16,
            dtype=self.dtype, device=device, states=states,
        )  # fmt: skip

    def run(
        self, pool: KVPool, start: int, count: int, num_drafts: int, *, at_once: bool
    ) -> Tensor:
        stop = start + count
        tokens = [(7 * position) % 50 for position in range(start, stop)] + [3] * num_drafts
        extras = RowExtras(state=SegmentState(0, 0, stop))
        segment = Segment(tokens, start, array("q", range(8)), 0, extras=extras)
        batch = build_batch([segment], page_size=16, device="cpu", min_rows=self.ops.min_rows)
        plan = self.ops.plan(batch, pool, self.HEADS, Turns(torch.ones(8) / 7, least=128))
        if not at_once:
            token_ids = batch.token_ids.to(torch.get_default_device())
            return run_layers(self.ops, self.weights, token_ids, [plan]).hidden[:count]
        assert self.compiled is not None
        return self.compiled(batch.token_ids, [plan], NOTHING_MORE).hidden[:count].clone()


# Lanes of a tile of attention that has no row are void under Triton's interpreter.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_of_both_mixers_has_the_same_bits_in_any_cut(
    dtype: torch.dtype, make: Callable[..., Weights], ops: Ops, caplog: pytest.LogCaptureFixture
) -> None:
    """Natively in one call, too; on a GPU in one graph."""
    if is_interpreted(ops) and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    mixers, length = Mixers(ops, make(), dtype), 36 if is_interpreted(ops) else 100
    pool = mixers.pool()
    expected = torch.cat([mixers.run(pool, at, 1, 0, at_once=False) for at in range(length)])
    assert expected.isfinite().all()
    for seed, at_once in ((0, False), (1, mixers.compiled is not None)):
        pool, cuts = mixers.pool(), random_cuts(random.Random(seed), length)
        found = [mixers.run(pool, *cut, at_once=at_once) for cut in cuts]
        assert torch.equal(torch.cat(found), expected)
        assert pool.states is not None
        assert pool.states.at[0].tolist() == [(length - 1) // 16 * 16]
    assert "CUDA graph" not in caplog.text, "each pass fits one that could be captured"


def test_native_threads_change_no_bits() -> None:
    library = native_library()
    if library is None:
        pytest.skip("no native kernels on this machine")
    sequences = Sequences(NativeOps(library), [make_weights()], length=LENGTH, count=2)
    expected = sequences.one_by_one(1)
    library.set_threads(3)
    try:
        for seed in range(4):
            sequences.reset()
            cuts = list(random_cuts(random.Random(seed)))
            both = [sequences.run(Rows(0, *cut), Rows(1, *cut))[1] for cut in cuts]
            assert torch.equal(torch.cat(both), expected)
    finally:
        library.set_threads(1)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_with_the_oracle(ops: Ops, kind: str) -> None:
    torch.manual_seed(1)
    weights = [KINDS[kind]()]
    oracle, kernels = (Sequences(each, weights, length=70) for each in (TorchOps(), ops))
    expected, found = (each.run(Rows(0, 0, 70))[0] for each in (oracle, kernels))
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)
    for ours, theirs in zip(kernels.states.slot(0, 0), oracle.states.slot(0, 0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)
    assert kernels.states.at[0].tolist() == [64]


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_layer_is_that_of_qwen3_next(ratio: int, ops: Ops) -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=48,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=2 * ratio,
        linear_key_head_dim=24,
        linear_value_head_dim=40,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
    )
    layer = Qwen3NextGatedDeltaNet(config, 0).float().eval()
    layer.norm.weight.data.uniform_(0.5, 1.5)
    layer.dt_bias.data.normal_()
    shape = RecurrentShape(2, 2 * ratio, key_dim=24, value_dim=40, conv_len=4)
    weights = replace(
        make_weights(shape),
        conv=layer.conv1d.weight.data.squeeze(1),
        decay=-layer.A_log.data.exp(),
        dt_bias=layer.dt_bias.data,
        norm=layer.norm.weight.data,
        norm_eps=config.rms_norm_eps,
    )
    length = 50 if is_interpreted(ops) else 90
    x = torch.randn(1, length, 48)
    with torch.no_grad():
        expected = layer(x)[0]
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        )
    sequences = Sequences(ops, [weights], length=length)
    sequences.mixed = torch.cat([each.flatten(2) for each in (q, k, v, z)], dim=2)
    sequences.gates = torch.cat((b, a), dim=2)
    (found,) = sequences.run(Rows(0, 0, length))
    torch.testing.assert_close(layer.out_proj(found).detach(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("taps", [3, 4])
def test_the_layer_is_that_of_nemotron_h(taps: int, ops: Ops) -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=48,
        layers_block_type=["linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=24,
        ssm_state_size=20,
        n_groups=2,
        conv_kernel=taps,
        time_step_min=1e-30,  # which transformers clamps dt to, in prompts alone
    )
    layer = NemotronHMamba2Mixer(config, 0).float().eval()
    for parameter in (layer.norm.weight, layer.D, layer.conv1d.bias, layer.dt_bias):
        parameter.data.uniform_(0.5, 1.5)
    shape = MAMBA_SHAPE._replace(conv_len=taps)
    rows, gates, channels = mamba_orders(shape)
    weights = replace(
        make_mamba_weights(shape),
        conv=layer.conv1d.weight.data.squeeze(1)[channels],
        conv_bias=layer.conv1d.bias.data[channels],
        decay=-layer.A_log.data.exp(),
        dt_bias=layer.dt_bias.data,
        skip=layer.D.data,
        norm=layer.norm.weight.data,
        norm_eps=config.layer_norm_epsilon,
    )
    length = 50 if is_interpreted(ops) else 90
    x = torch.randn(1, length, 48)
    with torch.no_grad():
        expected, projected = layer(x)[0], layer.in_proj(x)
    sequences = Sequences(ops, [weights], length=length)
    sequences.mixed, sequences.gates = projected[..., rows], projected[..., gates]
    (found,) = sequences.run(Rows(0, 0, length))
    torch.testing.assert_close(layer.out_proj(found).detach(), expected, atol=2e-5, rtol=1e-4)


def test_the_layer_is_that_of_lfm2(ops: Ops) -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = Lfm2Config(
        hidden_size=56, num_hidden_layers=1, conv_L_cache=4, conv_bias=True, layer_types=["conv"]
    )
    layer = Lfm2ShortConv(config, 0).float().eval()
    x = torch.randn(1, 90, 56)
    with torch.no_grad():
        expected, projected = layer(x)[0], layer.in_proj(x)
    weights = replace(
        make_conv_weights(ConvShape(56, 4)),
        conv=layer.conv.weight.data.squeeze(1),
        bias=layer.conv.bias.data,
    )
    sequences = Sequences(ops, [weights], length=90)
    sequences.mixed = projected
    (found,) = sequences.run(Rows(0, 0, 90))
    torch.testing.assert_close(layer.out_proj(found).detach(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_weighs_by_its_sigmoid(dtype: torch.dtype, ops: Ops) -> None:
    x, gate = (torch.randn(9, 50).to(dtype) for _ in range(2))
    found = ops.gate(x, gate)
    expected = (x.double() * gate.double().sigmoid()).to(dtype)
    torch.testing.assert_close(
        found, expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 8e-3
    )
    assert torch.equal(ops.gate(x[3:5], gate[3:5]), found[3:5])


def test_states_that_stand_behind_a_pass_are_refused(ops: Ops) -> None:
    sequences = Sequences(ops, [make_weights()], length=100)
    sequences.run(Rows(0, 0, 40))
    with pytest.raises(ValueError, match="the state in slot 0 is at \\[32\\]"):
        sequences.run(Rows(0, 31, 1))
    with pytest.raises(ValueError, match="cannot be advanced to position 81"):
        sequences.run(Rows(0, 81, 1))


def test_a_slot_is_one_blob_that_is_copied_with_its_position_and_reset() -> None:
    shapes = [SHAPE.state, KINDS["real"]().shape.state]
    states = StatePool(3, 2, shapes, page_size=16, dtype=torch.bfloat16, device="cpu")
    assert states.bytes_per_slot == bytes_per_slot(shapes, torch.bfloat16)
    assert states.bytes_per_log == bytes_per_log(shapes, torch.bfloat16, page_size=16)
    assert states.num_bytes == 3 * states.bytes_per_slot + 2 * states.bytes_per_log
    states.slots[0] = 17
    states.at[0] = torch.tensor([32, 16])
    states.copy_slot(0, 2)
    assert torch.equal(states.slots[2], states.slots[0])
    assert states.at.tolist() == [[32, 16], [0, 0], [32, 16]]
    assert not states.slots[1].any()
    states.reset(2)
    assert not states.slots[2].any()
    assert states.at[2].tolist() == [0, 0]


def test_fields_of_slots_and_logs_do_not_overlap() -> None:
    shapes = [KINDS["three taps"]().shape.state, SHAPE.state, CONV_SHAPE.state]
    states = StatePool(1, 1, shapes, page_size=32, dtype=torch.float32, device="cpu")
    views = [
        *(states.slot(0, layer) for layer in (0, 1, 2)),
        *(states.log(0, layer) for layer in (0, 1, 2)),
    ]
    fields = [field for view in views for field in view]
    for number, field in enumerate(fields):
        field.fill_(number + 1)
    assert all(bool((field == number + 1).all()) for number, field in enumerate(fields))


def test_pages_of_other_sizes_are_refused() -> None:
    with pytest.raises(
        ValueError, match="recurrent states need a page size of 16, 32, 64 tokens, not 8"
    ):
        StatePool(1, 1, [SHAPE.state], page_size=8, dtype=torch.float32, device="cpu")
