"""The heads' forward passes against references that go position by position, in plain formulas.

The references share nothing with the modules but their weights, taken by the names of the files.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from foretoken.draft.heads.block_network import BlockHead
from foretoken.draft.heads.eagle_network import EagleHead
from support.tiny_heads import TARGET, block_config, eagle_config

LENGTH = 19
Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight


def turned(x: Tensor, position: int) -> Tensor:
    """RoPE of one vector, pair by pair."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def heads_of(w: Weights, name: str, x: Tensor, position: int | None) -> list[Tensor]:
    """The heads of one projection, normed and rotated as the layer has it."""
    flat = w[f"{name}_proj.weight"] @ x
    out = []
    for part in flat.split(TARGET.head_dim):
        if f"{name}_norm.weight" in w:
            part = norm(part, w[f"{name}_norm.weight"])
        out.append(part if position is None else turned(part, position))
    return out


def attended(queries: list[Tensor], seen: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
    outs = []
    for head, q in enumerate(queries):
        kv = head // (TARGET.num_heads // TARGET.num_kv_heads)
        scores = torch.stack([q @ keys[kv] for keys, _ in seen]) / math.sqrt(TARGET.head_dim)
        weights = scores.softmax(0)
        outs.append(sum(x * values[kv] for x, (_, values) in zip(weights, seen, strict=True)))
    return torch.cat(outs)


def mlp(w: Weights, x: Tensor) -> Tensor:
    gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
    return w["mlp.down_proj.weight"] @ (silu(gate) * up)


def part(state: Weights, prefix: str) -> Weights:
    found = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    return {n.removeprefix("self_attn."): t for n, t in found.items()}


def drawn(head: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random weights; token ids, taps, and the target's embedding and output."""
    torch.manual_seed(5)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    taps = torch.randn(2, LENGTH, 3 * TARGET.hidden_size)
    ids = torch.randint(0, TARGET.vocab_size, (2, LENGTH))
    return ids, taps, *torch.randn(2, TARGET.vocab_size, TARGET.hidden_size).unbind()


def block_reference(
    head: BlockHead, ids: Tensor, taps: Tensor, anchor: int, embedding: Tensor, output: Tensor
) -> list[Tensor]:
    """Logits of one block, each token's bias by the true token before it."""
    state, config = head.state_dict(), head.config
    rows = [embedding[ids[anchor]]] + [embedding[config.mask_token_id]] * (config.block_size - 1)
    context = [
        norm(state["fc.weight"] @ taps[p], state["hidden_norm.weight"]) for p in range(anchor)
    ]
    for index in range(config.num_layers):
        w = part(state, f"layers.{index}.")
        window = (config.windows or (None,) * config.num_layers)[index]
        far = [(heads_of(w, "k", c, p), heads_of(w, "v", c, None)) for p, c in enumerate(context)]
        normed = [norm(x, w["input_layernorm.weight"]) for x in rows]
        near = [
            (heads_of(w, "k", x, anchor + j), heads_of(w, "v", x, None))
            for j, x in enumerate(normed)
        ]
        after = []
        for j, x in enumerate(rows):
            first = 0 if window is None else max(0, anchor + j - window + 1)
            q = heads_of(w, "q", normed[j], anchor + j)
            x = x + w["o_proj.weight"] @ attended(q, far[first:] + near)
            after.append(x + mlp(w, norm(x, w["post_attention_layernorm.weight"])))
        rows = after
    if not config.predicts_at_anchor:
        rows = rows[1:]
    hidden = [norm(x, state["norm.weight"]) for x in rows]
    logits = []
    memory = torch.zeros(config.markov_rank)
    for j, h in enumerate(hidden):
        values = output @ h
        if config.markov_rank:
            m = part(state, "markov_head.")
            w1 = m["markov_w1.weight"][ids[anchor + j]]
            if config.markov_kind == "gated":
                gate = m["gate_proj.weight"] @ torch.cat([h, w1]) + m["gate_proj.bias"]
                w1 = w1 * torch.sigmoid(gate)
            elif config.markov_kind == "rnn":
                joint = m["joint_proj.weight"] @ torch.cat([memory, w1, h]) + m["joint_proj.bias"]
                gate, new, out = joint.chunk(3)
                memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * new.tanh()
                w1 = out.tanh()
            values = values + m["markov_w2.weight"] @ w1
        logits.append(values)
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_rank": 0, "predicts_at_anchor": False},
        {"markov_kind": "gated"},
        {"markov_kind": "rnn"},
        {"windows": (None, 5)},
        {"num_layers": 1, "block_size": 7},
    ],
)
@torch.no_grad()
def test_blocks_are_those_of_the_reference(changes: dict[str, object]) -> None:
    head = BlockHead(block_config(**changes))
    ids, taps, embedding, output = drawn(head)
    head.borrow(embedding, output)
    anchors = torch.tensor([[1, 7, 10], [4, 5, 11]])
    hidden = head(ids, taps, anchors)
    assert hidden.shape == (2, 3, head.config.num_drafted, TARGET.hidden_size)
    before = torch.stack(
        [anchors + j for j in range(head.config.num_drafted)], dim=-1
    )  # [b, n, num]
    before = ids.gather(1, before.flatten(1)).view(before.shape)
    logits = head.logits(hidden, before)
    for row in range(2):
        for n, anchor in enumerate(anchors[row].tolist()):
            expected = torch.stack(
                block_reference(head, ids[row], taps[row], anchor, embedding, output)
            )
            torch.testing.assert_close(logits[row, n], expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(logits[row, n].topk(4).indices, expected.topk(4).indices)


def eagle_reference(
    head: EagleHead, ids: Tensor, taps: Tensor, num_true: int, embedding: Tensor, output: Tensor
) -> Tensor:
    """Logits behind all of ``ids``, of which the target has computed ``num_true``."""
    state, config = head.state_dict(), head.config
    w = part(state, "midlayer.")
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    hidden = torch.empty(0)
    for p in range(1, len(ids)):
        if p - 1 < num_true:
            tapped = taps[p - 1]
            if config.norm_before_fc:
                tapped = norm(tapped, state["input_norm.weight"])
            if config.fc_norm:
                tapped = torch.cat(
                    [
                        norm(each, state[f"fc_norm.{i}.weight"])
                        for i, each in enumerate(tapped.split(TARGET.hidden_size))
                    ]
                )
            feature = state["fc.weight"] @ tapped
            if config.fc_bias:
                feature = feature + state["fc.bias"]
        else:
            feature = norm(hidden, state["norm.weight"]) if config.norm_output else hidden
        normed = norm(feature, w["hidden_norm.weight"])
        x = torch.cat([norm(embedding[ids[p]], w["input_layernorm.weight"]), normed])
        seen.append((heads_of(w, "k", x, p), heads_of(w, "v", x, None)))
        residual = normed if config.norm_before_residual else feature
        hidden = residual + w["o_proj.weight"] @ attended(heads_of(w, "q", x, p), seen)
        hidden = hidden + mlp(w, norm(hidden, w["post_attention_layernorm.weight"]))
    return output @ norm(hidden, state["norm.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "fc_bias": True},
    ],
)
@torch.no_grad()
def test_eagle_passes_are_those_of_the_reference(changes: dict[str, object]) -> None:
    """Pass ``k`` of training is what a chain computes at its ``k``-th token."""
    head = EagleHead(eagle_config(**changes))
    ids, taps, embedding, output = drawn(head)
    head.borrow(embedding, output)
    passes = [head.logits(hidden) for hidden in head(ids, taps, 4)]
    for k, logits in enumerate(passes):
        assert logits.shape == (2, LENGTH - 1 - k, TARGET.vocab_size)
        for row, column in ((0, 0), (0, 6), (1, 3), (1, LENGTH - 2 - k)):
            expected = eagle_reference(
                head, ids[row, : column + 2 + k], taps[row], column + 1, embedding, output
            )
            torch.testing.assert_close(logits[row, column], expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(logits[row, column].topk(4).indices, expected.topk(4).indices)


@torch.no_grad()
def test_a_reduced_head_takes_its_rows_of_what_it_borrows() -> None:
    head = BlockHead(block_config(draft_vocab_size=10, markov_vocab_size=10))
    _, _, embedding, output = drawn(head)
    ids = torch.arange(10) * 5 + 2
    head.set_draft_ids(ids)
    head.borrow(embedding, output)
    hidden = torch.randn(3, TARGET.hidden_size)
    torch.testing.assert_close(head.project(hidden), hidden @ output[ids].T)
    assert head.target_ids(torch.tensor([0, 9])).tolist() == [2, 47]
    assert head.markov_ids(torch.tensor([2, 3, 47])).tolist() == [0, -1, 9]


def test_a_head_that_was_lent_nothing_says_so() -> None:
    head = BlockHead(block_config())
    with pytest.raises(ValueError, match="must use the target's"):
        head.embed(torch.tensor([1]))
    with pytest.raises(ValueError, match="must use the target's"):
        head.project(torch.zeros(1, TARGET.hidden_size))
