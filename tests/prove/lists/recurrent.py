"""Mistakes in the arithmetic of recurrent layers, of latent attention and of MTP layers."""

from __future__ import annotations

from ..mutation import Mutation

_CUTS = "test_states.py::test_bits_of_a_row_are_those_of_any_cut_and_of_any_drafts"
_KEPT = "test_states.py::test_a_kept_state_continues_with_the_same_bits"
_AGAIN = "test_states.py::test_a_decode_step_that_failed_half_way_may_run_again"
_ORACLE = "test_states.py::test_kernels_agree_with_the_oracle"
_LATENT = "test_a_layer_that_keeps_latents_is_that_of_transformers"
_LEVELS = "test_the_logits_of_each_level_are_those_of_transformers"
_HYBRID = "test_hybrids.py::test_logits_equal_transformers_over_300_positions"
_MODULES = "test_module_streams.py::test_drafts_over_page_ends_change_no_token"

_MIXERS = "test_a_decoder_of_both_mixers_has_the_same_bits_in_any_cut"
_TOLD = "test_others_may_work_once_the_device_has_the_graph_and_not_before"

MUTATIONS = (
    Mutation(
        "recurrent-graph-leaves-positions-behind",
        "_Captured.run",
        "            record_positions(batch, states)\n",
        "            pass\n",
        (_MIXERS,),
        "the positions of states move on with a graph's replay",
    ),
    Mutation(
        "recurrent-graph-tells-before-it-is-launched",
        "_Captured.run",
        "        self.graph.replay()\n",
        "        wanted.notify_started()\n        self.graph.replay()\n",
        (_TOLD,),
        "Python's lock is given away behind the launch",
    ),
    Mutation(
        "recurrent-oracle-folds-twice",
        "_Sequence._catch_up",
        "self._write(self._slot, state, self._inputs_before(at), at)",
        "self._write(self._slot, state, self._inputs_before(at), self._at)",
        (_CUTS, _AGAIN),
        "a page is folded into the state once",
    ),
    Mutation(
        "recurrent-kernel-folds-twice",
        "move_tail",
        "    *ft_position_of(inputs, slot) = position;\n",
        "    if (!*ft_position_of(inputs, slot)) *ft_position_of(inputs, slot) = position;\n",
        (_CUTS, _KEPT),
        "a page is folded into the state once",
    ),
    Mutation(
        "recurrent-layers-have-one-position",
        "ft_position_of",
        "slot * inputs->states->num_layers + inputs->layer",
        "slot * inputs->states->num_layers",
        (_AGAIN,),
        "a layer that has folded does not fold again when a step is repeated",
    ),
    Mutation(
        "recurrent-oracle-tail-is-off-by-one",
        "_Sequence.run",
        "tail = around[row + 1 : row + shape.conv_len]",
        "tail = around[row : row + shape.conv_len - 1]",
        (_CUTS, _KEPT),
        "a state has the inputs just before its position",
    ),
    Mutation(
        "recurrent-kernel-tail-is-off-by-one",
        "move_tail",
        "position - count + i",
        "position - count + i - (position > at + i)",
        (_KEPT, _CUTS),
        "a state has the inputs just before its position",
    ),
    Mutation(
        "recurrent-kernel-folds-drafts",
        "run_task",
        "end <= moved ? own : task->space->draft",
        "own",
        ("test_a_rejected_draft_over_page_ends_moves_no_state", _CUTS),
        "a draft that is not accepted leaves no trace in a state",
    ),
    Mutation(
        "recurrent-kernel-tiles-other-heads",
        "read_inputs",
        "delta->is_tiled ? ",
        "!delta->is_tiled ? ",
        (_ORACLE,),
        "value heads read the key heads that the file's order says",
    ),
    Mutation(
        "recurrent-kernel-decay-starts-anew",
        "run_rows",
        "place = ft_max(row, 1)",
        "place = row + 1",
        (_CUTS,),
        "decay adds up from the page's start",
    ),
    Mutation(
        "modules-go-on-behind-refused-drafts",
        "SequenceRun._begin",
        "elif log.stop == self.start and",
        "elif log.stop >= self.start and",
        (_MODULES,),
        "a draft that is not accepted leaves no trace in a state",
    ),
    Mutation(
        "modules-keep-the-state-of-another-end",
        "SequenceRun._find_saved",
        "(self._final_stop - 1) // page_size * page_size",
        "self._final_stop // page_size * page_size",
        ("test_a_state_that_was_kept_is_where_another_sequence_goes_on", _MODULES),
        "a state stands at the last page's end before the last row",
    ),
    Mutation(
        "delta-beta-is-at-most-one",
        "_DeltaSequence._gates",
        "beta.unsqueeze(-1) * self._weights.most_beta, decay",
        "beta.unsqueeze(-1), decay",
        ("test_kernels_agree_with_the_oracle", "test_logits_equal_transformers_over_300_positions"),
        "OLMo Hybrid's beta goes up to 2",
    ),
    Mutation(
        "latent-rows-are-not-normed",
        "LatentWeights._rows",
        "ops.norm(latent.contiguous(), self.kv_norm), key)",
        "latent, key)",
        (_LATENT,),
        "latents in the pages are normed",
    ),
    Mutation(
        "latent-kernel-rows-are-not-normed",
        "make_rows",
        "copy_columns((copy_job){space->latent, last, 1, rank, rank, 0,",
        "copy_columns((copy_job){latents, last, 1, rank, made_row, 0,",
        (_LATENT,),
        "latents in the pages are normed",
    ),
    Mutation(
        "latent-kernel-values-of-one-row-alone",
        "make_values",
        "(copy_job){space->one, space->other, count, rank, count * rank, rank, rank,",
        "(copy_job){space->one, space->other, count, rank, count * rank, rank, 0,",
        (_LATENT,),
        "each row's values are made of what it read",
    ),
    Mutation(
        "latent-positions-are-not-interleaved",
        "_rope_order",
        "interleaved=config.fold.interleaved",
        "interleaved=False",
        (_LATENT,),
        "RoPE turns the pairs that the checkpoint has side by side",
    ),
    Mutation(
        "latent-keys-and-values-change-places",
        "Latent._heads",
        "keys, values = torch.split(up, [shape.nope_dim, shape.value_dim], dim=1)",
        "values, keys = torch.split(up, [shape.value_dim, shape.nope_dim], dim=1)",
        (_LATENT,),
        "of each head the rows of keys come first",
    ),
    Mutation(
        "mtp-hidden-stands-before-the-embedding",
        "MtpLayer.inputs",
        "torch.cat(normed, dim=-1)",
        "torch.cat(normed[::-1], dim=-1)",
        (_LEVELS,),
        "the projection reads the token's embedding, then the state before it",
    ),
    Mutation(
        "mtp-reads-the-state-of-its-own-position",
        "ColumnProposer.write_head_kv",
        "features.roll(1, dims=0)",
        "features.clone()",
        (_LEVELS,),
        "a column has the state before its token",
    ),
    Mutation(
        "mtp-goes-on-from-the-same-state",
        "_ColumnDrafting.score",
        "        self._features = found.features\n",
        "",
        (_LEVELS,),
        "a recursion takes its own output",
    ),
    Mutation(
        "mtp-drafts-the-first-ids-alone",
        "frequent_ids",
        "torch.arange(config.vocab_size - NUM_LAST_IDS, config.vocab_size)",
        "torch.arange(NUM_DRAFT_IDS - NUM_LAST_IDS, NUM_DRAFT_IDS)",
        ("test_of_a_large_vocabulary_the_frequent_ids_alone_are_drafted",),
        "chat templates' tokens are drafted",
    ),
    Mutation(
        "lightning-kernel-does-not-gate",
        "norm_piece",
        "normed = v_mul(normed, v_sigmoid(v_get(z, weights_at + i, n, job->dtype)));",
        "continue;",
        (_ORACLE,),
        "the gate follows the norm",
    ),
    Mutation(
        "lightning-decays-alike-in-all-layers",
        "slopes",
        "    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5\n",
        "    factor = 1.0\n",
        (_HYBRID,),
        "states of later layers decay more slowly",
    ),
    Mutation(
        "stream-is-not-what-the-norm-returned",
        "norm_stream",
        "if (step->decoder->norms_stream)",
        "if (0)",
        (_HYBRID,),
        "outputs are added to what the norm before them returned",
    ),
    Mutation(
        "factor-behind-the-mixer-is-forgotten",
        "_mixer_and_mlp",
        "layer.mlp_norm, layer.factors[0])",
        "layer.mlp_norm)",
        (_HYBRID,),
        "alpha multiplies the stream behind the mixer",
    ),
)
