"""Head checkpoints: what is written is read back to the bit, and surprises have a name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.description.rope import RopeSpec
from foretoken.draft.heads.block_network import BlockHead
from foretoken.draft.heads.common.base import HeadKind
from foretoken.draft.heads.eagle_network import EagleHead
from foretoken.draft.heads.kinds import KINDS, head_kind, open_head, save_head
from foretoken.draft.heads.medusa import MedusaHead
from support.tiny_heads import TARGET, block_config, eagle_config, medusa_config, save_medusa, tiny

CONFIGS = {
    "dspark": block_config(),
    "dflash": block_config(markov_rank=0, predicts_at_anchor=False),
    "gated": block_config(markov_kind="gated"),
    "rnn": block_config(markov_kind="rnn"),
    "reduced": block_config(draft_vocab_size=20, markov_vocab_size=20),
    "windows": block_config(windows=(None, 8)),
    "own output": block_config(owns_output=True, owns_embedding=True),
    "eagle": eagle_config(),
    "eagle, all norms": eagle_config(
        norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True, fc_bias=True
    ),
    "eagle, reduced": eagle_config(draft_vocab_size=24, owns_output=True, owns_embedding=False),
    "yarn": eagle_config(
        rope=RopeSpec(kind="yarn", theta=5e4, factor=4.0, original_max_len=64, beta_fast=30.0)
    ),
}


def make(name: str) -> BlockHead | EagleHead:
    torch.manual_seed(1)
    config = CONFIGS[name]
    head = EagleHead(config) if name.startswith(("eagle", "yarn")) else BlockHead(config)
    if config.is_reduced:
        head.set_draft_ids(torch.arange(config.draft_vocab_size) * 2 + 1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_head_loads_to_the_bit(tmp_path: Path, name: str) -> None:
    head = make(name)
    save_head(head, tmp_path, extra={"odds": {"greedy": [0.9, 2.0, 1.5]}})
    folder = open_head(tmp_path, TARGET)
    found = folder.load()
    expected = head.config
    if isinstance(head, BlockHead) and expected.markov_rank:
        expected = replace(expected, markov_vocab_size=expected.markov_vocab_size or 64)
    assert (
        replace(found.config, windows=expected.windows) == expected
        if isinstance(head, BlockHead) and not any(expected.windows)
        else found.config == expected
    )
    assert folder.shifted_taps is None, "our own taps leave no doubt"
    assert folder.gaps == {False: (0.9, 2.0, 1.5)}
    state, theirs = head.state_dict(), found.state_dict()
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[key], theirs[key]) for key in state)
    if head.draft_ids is not None:
        assert torch.equal(head.draft_ids, found.draft_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_each_kind_is_known_by_its_files(tmp_path: Path, kind: str) -> None:
    head = tiny(kind).make(TARGET)
    tiny(kind).save(head, tmp_path)
    assert head_kind(tmp_path) is KINDS[kind]
    found, expected = open_head(tmp_path, TARGET).load(), head.state_dict()
    assert found.config.taps == head.config.taps
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.state_dict().items())


def test_a_kind_is_known_by_its_words_unless_it_recognises_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = KINDS["medusa"]
    toy = HeadKind(
        name="toy", words=("toy",), parse=shown.parse, load=shown.load, pack=shown.pack
    )  # fmt: skip
    monkeypatch.setitem(KINDS, "toy", toy)
    for architecture, expected in (("ToyHead", toy), ("LlamaForCausalLM", None)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert head_kind(tmp_path) is expected


def change(folder: Path, **keys: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    values |= keys
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if v is not None})
    )


def change_tensors(folder: Path, drop: str = "", **added: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop, None)
    save_file(tensors | added, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("eagle", {"norm_of_ours": True}, "norm_of_ours is not supported"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ("eagle", {"target_hidden_size": 48}, "target_hidden_size is 48"),
        ("eagle", {"vocab_size": 65, "draft_vocab_size": None}, "vocab_size is 65"),
        ("eagle", {"draft_vocab_size": 30}, "there is no tensor d2t"),
        ("dspark", {"mask_token_id": 64}, "mask_token_id is 64"),
        ("dspark", {"mask_token_id": None, "dflash_config": {}}, "mask_token_id is missing"),
        ("dspark", {"markov_head_type": "deep"}, "markov_head_type 'deep' is not supported"),
        ("dspark", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("dspark", {"foretoken": {"kind": "block", "taps": [1, 9]}}, "foretoken.taps names"),
        ("dspark", {"foretoken": {"odds": {"sampled": [1.0, 2.0]}}}, "odds.sampled must be three"),
        ("dspark", {"architectures": ["DFlash2DraftModel"]}, "dflash2 are not supported"),
    ],
)
def test_a_key_that_cannot_be_served_is_named(
    tmp_path: Path, name: str, keys: dict[str, object], message: str
) -> None:
    save_head(make(name), tmp_path)
    change(tmp_path, **keys)
    with pytest.raises(ModelLoadError, match=message):
        open_head(tmp_path, TARGET).load()


def test_tensors_that_the_config_does_not_imply_are_named(tmp_path: Path) -> None:
    save_head(make("dspark"), tmp_path)
    change_tensors(tmp_path, extra=torch.zeros(2))
    with pytest.raises(ModelLoadError, match="has unexpected tensors: extra"):
        open_head(tmp_path, TARGET).load()
    save_head(make("dspark"), tmp_path)
    change_tensors(tmp_path, "fc.weight")
    with pytest.raises(ModelLoadError, match=r"lacks tensors: fc\.weight"):
        open_head(tmp_path, TARGET).load()
    save_head(make("dspark"), tmp_path)
    change_tensors(tmp_path, **{"fc.weight": torch.zeros(3, 3)})
    with pytest.raises(ModelLoadError, match=r"fc\.weight has shape \[3, 3\]"):
        open_head(tmp_path, TARGET).load()
    save_head(make("eagle, reduced"), tmp_path)
    change_tensors(tmp_path, d2t=torch.full((24,), 60))
    with pytest.raises(ModelLoadError, match=r"d2t\[i\] \+ i must be distinct ids below 64"):
        open_head(tmp_path, TARGET).load()


def medusa(**changes: int) -> MedusaHead:
    torch.manual_seed(1)
    return MedusaHead(medusa_config(**changes))


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_heads_load_to_the_bit(tmp_path: Path, blocks: int, pickled: bool) -> None:
    head = medusa(num_blocks=blocks)
    save_medusa(head, tmp_path, pickled=pickled)
    assert head_kind(tmp_path) is KINDS["medusa"]
    found = open_head(tmp_path, TARGET).load()
    assert found.config == head.config
    expected = head.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.state_dict().items())


def test_medusa_heads_under_their_other_name(tmp_path: Path) -> None:
    """Names of a Medusa head's tensors have a prefix where they are part of a checkpoint."""
    head = medusa()
    save_medusa(head, tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    save_file(head.state_dict(), tmp_path / "model.safetensors")
    change(tmp_path, architectures=["MedusaModel"], hidden_size=TARGET.hidden_size)
    found = open_head(tmp_path, TARGET).load()
    assert torch.equal(found.medusa_head[3][1].weight, head.medusa_head[3][1].weight)  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"medusa_num_heads": 5}, r"lacks tensors: medusa_head\.4\.0\.linear\.bias"),
        ({"medusa_num_heads": 3}, r"has unexpected tensors: medusa_head\.3\.0\.linear\.bias"),
        ({"medusa_num_layers": 2}, r"lacks tensors: medusa_head\.0\.1\.linear\.bias"),
        ({"medusa_num_heads": 0}, "medusa_num_heads"),
        ({"hidden_size": 48}, "hidden_size is 48, but the target's is 32"),
        ({"vocab_size": 65}, "vocab_size is 65, but the target's is 64"),
    ],
)
def test_medusa_heads_of_another_shape_are_refused(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    save_medusa(medusa(), tmp_path)
    change(tmp_path, **keys)
    with pytest.raises(ModelLoadError, match=message):
        open_head(tmp_path, TARGET).load()


def test_medusa_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    save_medusa(MedusaHead(replace(medusa_config(), vocab_size=60)), tmp_path)
    with pytest.raises(ModelLoadError, match=r"0\.1\.weight has shape \[60, 32\].* \[64, 32\]"):
        open_head(tmp_path, TARGET).load()


def test_a_folder_without_weights_says_which_it_looked_for(tmp_path: Path) -> None:
    save_medusa(medusa(), tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"none of .*medusa_lm_head\.pt"):
        open_head(tmp_path, TARGET)


def test_a_language_model_is_no_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    assert head_kind(tmp_path) is None
    assert head_kind(tmp_path / "nothing") is None
