"""The layouts in which others publish heads: the same head comes out of each."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.draft.heads.block_network import BlockHead
from foretoken.draft.heads.eagle_network import EagleHead
from foretoken.draft.heads.joined import lend, load_head, score_taps
from foretoken.draft.heads.kinds import KINDS, head_kind, open_head, save_head
from support.tiny_heads import TARGET, block_config, eagle_config
from support.tiny_pair import write_pair

Json = dict[str, Any]
Tensors = dict[str, Tensor]


def write(folder: Path, config: Json, tensors: Tensors, file: str = "model.safetensors") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / file)


def saved(folder: Path, head: BlockHead | EagleHead) -> tuple[Json, Tensors]:
    """Save a head; return its config without our own part, and its tensors."""
    torch.manual_seed(2)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    save_head(head, folder / "ours")
    config = json.loads((folder / "ours" / "config.json").read_text())
    del config["foretoken"]
    return config, load_file(folder / "ours" / "model.safetensors")


def renamed(tensors: Tensors, change: Callable[[str], str]) -> Tensors:
    return {change(name): each for name, each in tensors.items()}


def check(folder: Path, head: BlockHead | EagleHead, taps: tuple[int, ...]) -> None:
    found = open_head(folder, TARGET).load()
    state = found.state_dict()
    assert found.config.taps == taps
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(state[name], each) for name, each in head.state_dict().items())


SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SHAPE += ("head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size")


def eagle(**changes: Any) -> EagleHead:
    head = EagleHead(eagle_config(draft_vocab_size=24, owns_output=True, **changes))
    head.set_draft_ids(torch.arange(24) * 2 + 1)
    return head


def test_eagle3_as_specforge_writes_it(tmp_path: Path) -> None:
    head = eagle()
    config, tensors = saved(tmp_path, head)
    del config["eagle_config"]  # absent: the default boundaries
    write(tmp_path / "theirs", config, tensors)
    check(tmp_path / "theirs", head, (2, 2, 1))


def test_eagle3_as_its_authors_write_it(tmp_path: Path) -> None:
    """A pickle of tensors, a plain architecture, and a draft vocabulary that gives it away."""
    head = eagle(fc_bias=True)
    config, tensors = saved(tmp_path, head)
    kept = {name: config[name] for name in (*SHAPE, "draft_vocab_size")}
    write(
        tmp_path / "theirs",
        kept | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        tensors,
        "pytorch_model.bin",
    )
    assert head_kind(tmp_path / "theirs") is KINDS["eagle3"]
    check(tmp_path / "theirs", head, (2, 2, 1))


def test_eagle3_as_angelslim_writes_it(tmp_path: Path) -> None:
    """Ids that begin with 1 count layers; prefixes are dropped."""
    head = eagle()
    config, tensors = saved(tmp_path, head)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    own = ("d2t", "t2d", "lm_head.weight")
    write(
        tmp_path / "theirs",
        config,
        renamed(tensors, lambda name: name if name in own else f"model.{name}"),
    )
    check(tmp_path / "theirs", head, (2, 3, 4))
    assert open_head(tmp_path / "theirs", TARGET).shifted_taps == (1, 2, 3)


def test_eagle3_as_speculators_writes_it(tmp_path: Path) -> None:
    head = EagleHead(eagle_config(norm_before_residual=True, fc_norm=True))
    config, tensors = saved(tmp_path, head)
    low = dict(zip(("0", "1", "2"), ("low", "mid", "high"), strict=True))

    def name_of(name: str) -> str:
        if name.startswith("fc_norm."):
            return f"aux_norm_{low[name.split('.')[1]]}.weight"
        return name.replace("midlayer.", "layers.0.")

    theirs: Json = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": {name: config[name] for name in SHAPE},
        "draft_vocab_size": 64,
        "norm_before_residual": True,
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "target_hidden_size": None,
    }
    write(tmp_path / "theirs", theirs, renamed(tensors, name_of))
    check(tmp_path / "theirs", head, (0, 2, 3))
    assert open_head(tmp_path / "theirs", TARGET).shifted_taps == (1, 3, 4)


def test_dflash_as_its_authors_write_it(tmp_path: Path) -> None:
    head = BlockHead(block_config(markov_rank=0, predicts_at_anchor=False))
    config, tensors = saved(tmp_path, head)
    theirs: Json = {name: config[name] for name in SHAPE} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 3]},
        "layer_types": ["full_attention"] * 2,
    }
    aliases = {"fc.weight": "encoder.fc.weight"}
    aliases["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
    write(tmp_path / "theirs", theirs, renamed(tensors, lambda name: aliases.get(name, name)))
    check(tmp_path / "theirs", head, (1, 2, 4))
    found = open_head(tmp_path / "theirs", TARGET).config
    assert not found.predicts_at_anchor  # type: ignore[union-attr]


def test_dspark_as_deepspec_writes_it(tmp_path: Path) -> None:
    """With an embedding, an output and a confidence head, which is not used."""
    head = BlockHead(block_config(owns_embedding=True, owns_output=True, markov_kind="gated"))
    config, tensors = saved(tmp_path, head)
    theirs: Json = {name: config[name] for name in SHAPE} | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 2,
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": [0, 1, 3],
        "markov_rank": 6,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
    }
    more = {"confidence_head.proj.weight": torch.ones(1, 38)}
    write(tmp_path / "theirs", theirs, tensors | more)
    check(tmp_path / "theirs", head, (1, 2, 4))


def test_dspark_as_speculators_writes_it(tmp_path: Path) -> None:
    head = BlockHead(block_config(draft_vocab_size=20, markov_vocab_size=20))
    config, tensors = saved(tmp_path, head)
    theirs: Json = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": {name: config[name] for name in SHAPE}
        | {"num_hidden_layers": 2},
        "draft_vocab_size": 20,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [0, 1, 3],
        "mask_token_id": 3,
        "sample_from_anchor": True,
        "markov_rank": 6,
    }
    write(tmp_path / "theirs", theirs, tensors)
    check(tmp_path / "theirs", head, (1, 2, 4))


def test_a_pickle_that_holds_code_is_refused(tmp_path: Path) -> None:
    config, _ = saved(tmp_path, eagle())

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("run",)

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    torch.save({"x": Evil()}, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="cannot be read as plain tensors"):
        open_head(tmp_path / "theirs", TARGET)


# -- tap ids that can be read in two ways ---------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Decoder:
    """A model that goes by its last token alone, through a shift of its own in the first layer."""
    torch.set_num_threads(1)
    return load_decoder(write_pair(tmp_path_factory.mktemp("pair"), vocab_size=64)[0])


@torch.inference_mode()
def test_the_reading_that_guesses_more_is_taken_with_a_warning(
    target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that passes its last tap on to the target's own output: right at boundary L only.

    It says of token ``i + 2`` what the target says of ``i + 1``; so the target is made to repeat.
    """
    head = EagleHead(eagle_config(target.config, taps=(0, 1, 2)))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        head.fc.weight[:, -head.config.hidden_size :] = torch.eye(head.config.hidden_size)
        head.norm.weight.copy_(target.weights.final_norm.weight)
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["foretoken"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}  # layer 1: boundary 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        joined = load_head(tmp_path, target, lambda: pytest.fail("tied"))
    lend(head, target, lambda: pytest.fail("tied"))
    scores = {taps: score_taps(head, taps, target) for taps in ((0, 0, 1), (1, 1, 2))}
    best = max(scores, key=lambda taps: scores[taps])
    assert scores[0, 0, 1] != scores[1, 1, 2], "the readings differ in what they guess"
    assert joined.config.taps == best
    assert f"so boundaries {list(best)} are used" in caplog.text
