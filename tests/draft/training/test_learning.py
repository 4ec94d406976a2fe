"""Training of drafts: what is learnt from, the losses, and that runs go on to the bit."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from foretoken.core.errors import InvalidRequest
from foretoken.core.model.loader import load_decoder
from foretoken.draft.heads.block_network import BlockHead
from foretoken.draft.heads.common.losses import kl_overlap_loss, slot_weights
from foretoken.draft.heads.kinds import open_head
from foretoken.draft.proposers.gap_model import FIRST_NUMBERS
from foretoken.draft.training import trainer as run
from foretoken.draft.training.conversations import Conversation
from foretoken.draft.training.evaluator import (
    Evaluator,
    RankedCandidates,
    fit_gaps,
)
from foretoken.draft.training.new_drafts import (
    RECIPES,
    TRAINED,
    Target,
    TrainOptions,
    Weights,
    make_student,
)
from foretoken.draft.training.teacher import Teacher
from foretoken.draft.training.trainer import Trainer
from support.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

KINDS = tuple(TRAINED)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train(target, conversations, tmp_path, monkeypatch):
    """``train(kind, tokens=, name=, ...)``: a trainer over the target's answers; small batches."""
    monkeypatch.setattr(run, "BATCH_TOKENS", 64)
    monkeypatch.setattr(run, "NUM_CHECKS", 2)

    def make(kind, *, tokens=200, name="out", found=conversations, **options):
        chosen = TrainOptions(kind=kind, tokens=tokens, block=3, **options)
        return Trainer(target, found, chosen, tmp_path / name)

    return make


# -- the target's side ----------------------------------------------------------------------------


def test_what_is_taught_is_what_transformers_computes(target):
    from transformers import Qwen3ForCausalLM

    batch = [Conversation([5, 6, 7, 8, 9], 2), Conversation([11, 12, 13], 0)]
    ids = torch.tensor([3, 60, 200, 500])
    taught = Teacher(target.decoder, (1, 6), ids, max_len=16)(batch)
    model = Qwen3ForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    assert taught.rows.tolist() == [[-1, 0, 1, 2, -1], [3, 4, -1, -1, -1]]
    for index, conversation in enumerate(batch):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([conversation.tokens]), output_hidden_states=True)
        first = taught.taps[index, : len(conversation), : target.config.hidden_size]
        torch.testing.assert_close(first, out.hidden_states[1][0], atol=1e-4, rtol=1e-3)
        rows = taught.rows[index]
        expected = out.logits[0].softmax(-1)[: len(conversation)][rows[: len(conversation)] >= 0]
        found = taught.p[rows[rows >= 0]]
        torch.testing.assert_close(found, expected[:, ids], atol=1e-5, rtol=1e-3)
    assert taught.num_tokens == 8


# -- losses ---------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_are_those_of_the_formula():
    torch.manual_seed(0)
    p = torch.randn(4, 50).mul(2).softmax(-1) * 0.8
    rows = torch.tensor([0, 2, 2, 3, 1, 0])
    logits = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6)
    (kl_overlap_loss(logits, p, rows) * weights).sum().backward()
    plain = logits.detach().requires_grad_()
    q, want = plain.softmax(-1), p[rows].double()
    overlap = torch.minimum(want, q).sum(-1)
    share = torch.exp(-3 * overlap).detach()
    kl = (want * (want.log() - plain.log_softmax(-1))).sum(-1)
    loss = share * kl + (1 - share) * (1 - overlap)
    (loss * weights).sum().backward()
    torch.testing.assert_close(kl_overlap_loss(plain, p, rows), loss.float(), check_dtype=False)
    torch.testing.assert_close(logits.grad, plain.grad, atol=1e-6, rtol=1e-4)


def test_the_first_slot_counts_most():
    assert slot_weights(3, 2.0).tolist() == pytest.approx([1.0, 0.60653, 0.36788], abs=1e-5)


# -- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_the_acceptance_of_the_first_position(train, conversations, kind):
    trainer = train(kind, tokens=2500, init=None, layers=1)
    examiner = Evaluator(trainer._teacher, conversations, seed=0)
    before, _ = examiner.acceptance(trainer.student, 1.0, 8)
    trainer.run()
    after, _ = examiner.acceptance(trainer.student, 1.0, 8)
    assert before.num_chains == after.num_chains > 50
    assert after.by_position[0] > before.by_position[0] + 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_to_the_bit(train, kind):
    whole = train(kind, name="whole")
    whole.run()
    half = train(kind, name="parts")
    for _ in range(2):
        half.step()
    half.save_state()
    rest = train(kind, name="parts", resume=True)
    assert rest.progress == half.progress
    rest.run()
    assert rest.progress.tokens == whole.progress.tokens
    ours, theirs = (each.student.module.state_dict() for each in (rest, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    stopped = half.student.module.state_dict()
    assert not all(torch.equal(ours[name], stopped[name]) for name in ours)


@pytest.mark.parametrize("draft_vocab", [None, 64])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_written_head_is_read_to_the_bit(train, target, tmp_path, kind, draft_vocab):
    trainer = train(kind, draft_vocab=draft_vocab)
    trainer.run()
    head = open_head(tmp_path / "out", target.config).load()
    assert type(head) is type(trainer.student.module)
    trained, written = trainer.student.module.state_dict(), head.state_dict()
    assert all(torch.equal(written[name], trained[name].bfloat16()) for name in trained)
    if draft_vocab is not None:
        assert head.draft_ids.tolist() == trainer.student.module.draft_ids.tolist()
    if draft_vocab is not None and RECIPES[kind].brings_output:
        rows = Weights(target.path).output()[head.draft_ids]
        assert torch.equal(written["lm_head.weight"], rows.bfloat16())
    own = json.loads((tmp_path / "out" / "config.json").read_text())["foretoken"]
    assert set(own["odds"]) == {"greedy", "sampled"}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_head_that_began_at_random_reads_taps_as_they_are(
    train, target, conversations, tmp_path, kind
):
    """In training every dimension of its taps has about the same size."""
    trainer = train(kind, init=None)
    trainer.run()
    scale = trainer._teacher.tap_scale
    assert scale.max() > 2 * scale.min()
    plain = Teacher(target.decoder, trainer.student.taps, None, max_len=64)(conversations[:8]).taps
    levelled = trainer._teacher(conversations[:8]).taps
    before, after = (each.square().mean(dim=(0, 1)) for each in (plain, levelled))
    assert after.max() / after.median() < 0.7 * before.max() / before.median()
    written = open_head(tmp_path / "out", target.config).load().float()
    found, trained = written.fc(plain), trainer.student.module.fc(levelled)
    torch.testing.assert_close(
        found, trained, atol=0.05 * float(trained.detach().abs().max()), rtol=0.05
    )


def test_a_written_language_model_is_served(train, target, tmp_path):
    from foretoken.api.build.drafts import texts_between
    from foretoken.core.config import EngineConfig
    from foretoken.core.model.loader import load_decoder

    train("lm", layers=1).run()
    decoder = load_decoder(tmp_path / "out", dtype="float32")
    folder, config = tmp_path / "out", EngineConfig()
    assert texts_between(folder, decoder, target.path, target.decoder, config) is None
    assert decoder.config.num_layers == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_trained_further(train, tmp_path, kind):
    train(kind, draft_vocab=None if kind == "lm" else 80).run()
    folder = tmp_path / "out"
    begun = train(kind, name="more", init=str(folder), layers=2).student.module.state_dict()
    files = load_file(folder / "model.safetensors")
    shared = [name for name in begun if name in files]
    assert len(shared) > len(begun) / 2
    assert all(torch.equal(begun[name], files[name].float()) for name in shared)


def test_a_head_of_another_kind_is_no_beginning(train, tmp_path):
    train("block").run()
    with pytest.raises(InvalidRequest, match="another kind, block"):
        train("eagle3", name="more", init=str(tmp_path / "out"))
    with pytest.raises(InvalidRequest, match="not a folder"):
        train("eagle3", name="more", init=str(tmp_path / "gone"))


def test_an_eagle_head_begins_as_the_targets_last_layer(target):
    student = make_student(target, TrainOptions(kind="eagle3"))
    weights, hidden = Weights(target.path), target.config.hidden_size
    ours = student.module.state_dict()
    theirs = weights(f"model.layers.{target.config.num_layers - 1}.self_attn.q_proj.weight")
    assert torch.equal(ours["midlayer.self_attn.q_proj.weight"][:, hidden:], theirs)
    assert not torch.equal(ours["midlayer.self_attn.q_proj.weight"][:, :hidden], theirs)


def test_a_block_head_begins_with_the_pairs_of_the_data(target):
    pairs = torch.tensor([[5, 9]] * 30 + [[6, 4]] * 30 + [[7, 9], [7, 4], [7, 8]] * 5)
    ids = torch.tensor([4, 5, 6, 7, 8, 9, *range(100, 200)])
    options = TrainOptions(kind="block", block=3)
    head = make_student(target, options, ids, pairs).module
    assert isinstance(head, BlockHead)
    bias, _ = head.markov_head(head.markov_ids(torch.tensor([5, 6])), None, None)
    assert ids[bias.argmax(-1)].tolist() == [9, 4]


# -- a run ----------------------------------------------------------------------------------------


def test_the_folder_of_a_run(train, tmp_path):
    outcome = train("block", tokens=400).run()
    work = tmp_path / "out" / "training"
    lines = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "held_out" in line]) == run.NUM_CHECKS
    report = json.loads((work / "report.json").read_text())
    assert [each["temperature"] for each in report["acceptance"]] == [0.0, 0.7, 1.0]
    assert all(len(each["by_position"]) == 3 for each in report["acceptance"])
    assert report["conversations"] == {"learnt": 15, "held_out": 1}
    assert not outcome.was_stopped
    assert not list(tmp_path.rglob(".saving-*"))


def test_ctrl_c_keeps_a_draft_and_a_checkpoint(train, target, tmp_path, monkeypatch):
    trainer, steps = train("block", tokens=10**6), []

    def step():
        steps.append(Trainer.step(trainer))
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return steps[-1]

    monkeypatch.setattr(trainer, "step", step)
    before = signal.getsignal(signal.SIGINT)
    outcome = trainer.run()
    assert outcome.was_stopped
    assert len(steps) == 2
    assert signal.getsignal(signal.SIGINT) is before
    open_head(tmp_path / "out", target.config).load()
    assert train("block", tokens=10**6, resume=True).progress.step == 2


def test_a_run_is_resumed_as_it_was_begun_only(train):
    trainer = train("block", draft_vocab=64)
    trainer.step()
    trainer.save_state()
    train("block", draft_vocab=64, tokens=900, resume=True)  # a budget may change
    with pytest.raises(InvalidRequest, match="had layers 2, not 1"):
        train("block", draft_vocab=64, layers=1, resume=True)
    with pytest.raises(InvalidRequest, match="no checkpoint"):
        train("block", name="other", resume=True)
    others = [Conversation([1, 2, 511 - index, 510 - index], 1) for index in range(30)]
    with pytest.raises(InvalidRequest, match="data has changed"):
        train("block", draft_vocab=64, found=others, resume=True)


def test_nothing_to_learn_from_is_refused(train):
    with pytest.raises(InvalidRequest, match="no answer"):
        train("block", found=[Conversation([1, 2], 2)])


# -- measuring ------------------------------------------------------------------------------------


class Perfect:
    """A student that knows what the target will choose, but for its second token."""

    taps, depth = (), 2

    def __init__(self, shifted):
        self.module, self._shifted = torch.nn.Module(), shifted

    def chains(self, taught):
        rows = taught.rows[taught.rows >= 0]
        rows = torch.stack((rows[:-1], rows[1:]), dim=1)
        logits = taught.p[rows].log()
        if self._shifted:
            logits[:, 1] = logits[:, 1].roll(1, dims=-1)
        return logits, rows


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draft_that_knows_the_target_is_always_accepted(target, conversations, temperature):
    teacher = Teacher(target.decoder, (), None, max_len=64)
    examiner = Evaluator(teacher, conversations, seed=0)
    found, _ = examiner.acceptance(Perfect(shifted=False), temperature, 3)
    assert found.by_position == [1.0, 1.0]
    assert found.tokens_per_step == 3.0
    found, _ = examiner.acceptance(Perfect(shifted=True), temperature, 3)
    assert found.by_position[0] == 1.0
    assert found.by_position[1] < 0.3
    assert found.tokens_per_step == pytest.approx(2 + found.by_position[1])


def test_a_target_that_chooses_what_a_draft_does_not_know_is_never_met(target, conversations):
    ids = torch.arange(4)  # hardly ever chosen
    examiner = Evaluator(Teacher(target.decoder, (), ids, max_len=64), conversations, seed=0)
    found, _ = examiner.acceptance(Perfect(shifted=False), 1.0, 3)
    assert found.by_position[0] < 0.2


def test_the_gaps_that_made_ranks_are_found_again():
    generator = torch.Generator().manual_seed(1)
    gaps = torch.rand(40_000, 4, generator=generator).cumsum(1)
    gaps -= gaps[:, :1].clone()
    scores = torch.cat((-1.2 * gaps, -0.5 - 0.8 * gaps[:, 1:2]), dim=1)
    ranks = torch.multinomial(scores.softmax(1), 1, generator=generator).squeeze(1)
    found = fit_gaps(
        RankedCandidates(gaps, ranks, torch.ones(len(gaps), dtype=torch.bool)),
        FIRST_NUMBERS[True],
    )
    assert found == pytest.approx((1.2, -0.5, 0.8), abs=0.1)


@pytest.mark.parametrize("kind", ["gemma4", "qwen3_moe"])
@pytest.mark.parametrize("draft", KINDS)
def test_a_draft_does_not_begin_as_layers_that_are_none_of_a_drafts(draft, kind, tmp_path):
    folder = make_checkpoint(tmp_path, kind)
    target = Target(load_decoder(folder), folder)
    with pytest.raises(InvalidRequest, match="gates or heads of several sizes"):
        make_student(target, TrainOptions(kind=draft))
    if draft == "block":
        assert make_student(target, TrainOptions(kind=draft, init=None))
