"""MTP layers of models with recurrent states: attention alone, beside the model."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.model.drafting.mtp import count_mtp_layers, load_mtp_layer
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model
from foretoken.core.ops.batch import Segment
from support.checkpoints import make_reference, save
from support.gguf_files import write_gguf
from support.greedy_streams import random_ids

KINDS = {
    "qwen3_5": transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextModel,
    "qwen3_5_moe": transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeTextModel,
    "qwen3_next": transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextModel,
}
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")


def save_with_layer(kind: str, folder: Path, **more: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """A checkpoint with an MTP layer; the model, the layer as a model, and what joins inputs."""
    torch.manual_seed(3)
    reference = make_reference(kind, **more)
    save(reference, folder)
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = type(reference.config)(**reference.config.to_dict() | one_layer)
    one = KINDS[kind](config).eval()
    hidden = config.hidden_size
    for tensor in one.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    joining = {f"mtp.{name}.weight": 0.1 * torch.randn(hidden) for name in NORMS}
    joining["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    stored = load_file(save(one, folder / "one") / "model.safetensors")
    layer = {
        f"mtp.{name.removeprefix('model.')}": value
        for name, value in stored.items()
        if "embed_tokens" not in name
    }
    file = folder / "model.safetensors"
    tensors = load_file(file) | layer | joining
    save_file({name: value.clone() for name, value in tensors.items()}, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"mtp_num_hidden_layers": 1}))
    return reference, one, joining


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm with a weight that 1 is added to."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], 1.0 + weight, eps=1e-6)


@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_computes_what_its_modules_compute(
    kind: str, is_gguf: bool, tmp_path: Path
) -> None:
    """In a GGUF file it lies behind the last layer, as llama.cpp's converter puts it."""
    # what no GGUF file has
    differences = {"mlp_only_layers": []} if kind == "qwen3_next" else {"attention_bias": False}
    reference, one, joining = save_with_layer(kind, tmp_path, **differences)
    path = write_gguf(tmp_path, tmp_path / "model.gguf") if is_gguf else tmp_path
    assert count_mtp_layers(*open_model(path)) == 1
    ids = random_ids(24)
    with torch.no_grad():
        states = reference.model(torch.tensor([ids])).last_hidden_state[0]
        embedded = reference.model.embed_tokens(torch.tensor(ids[1:]))
        pair = zip((embedded, states[:-1]), NORMS, strict=True)
        both = [normed(x, joining[f"mtp.{name}.weight"]) for x, name in pair]
        x = torch.cat(both, dim=-1) @ joining["mtp.fc.weight"].T
        expected = reference.lm_head(one(inputs_embeds=x[None]).last_hidden_state)[0]
    target = load_decoder(path)
    assert isinstance(target, OwnDecoder)
    layer = load_mtp_layer(path, target, keeps_packed=False)
    pool = layer.decoder.make_pool(2, page_size=16)
    assert pool.states is None
    segment = Segment(array("q", ids[1:]), 0, array("q", [1, 0]), len(ids) - 1)
    batch = layer.decoder.batch([segment], page_size=16)
    found = layer.forward(batch, pool, states[:-1]).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_its_drafts_change_no_token(kind: str, temperature: float, tmp_path: Path) -> None:
    """Prompts that share a beginning, over page ends, with hits and what was recomputed."""
    save_with_layer(kind, tmp_path)
    shared = random_ids(40)
    prompts = [[*shared, *random_ids(5 + 7 * index)] for index in range(4)]
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True, seed=5)
    answers, usages = {}, {}
    for draft in ("none", "mtp"):
        speculation = 3 if draft == "mtp" else "off"
        with LLM(
            tmp_path, draft=draft, speculation=speculation, device="cpu", kv_tokens=512
        ) as llm:
            found = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
        answers[draft] = [each.token_ids for each in found]
        usages[draft] = [each.usage for each in found]
    assert answers["mtp"] == answers["none"]
    assert sum(usage.proposed_tokens for usage in usages["mtp"]) > 100
    accepted = sum(usage.accepted_by_source.get("mtp", 0) for usage in usages["mtp"])
    assert accepted > 20 or not temperature  # a random layer knows the noise alone
    assert all(usage.cached_tokens >= 32 for usage in usages["mtp"][4:])
