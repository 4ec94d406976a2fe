"""Mistakes in LoRA adapters: scales, rows, namespaces, paths."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "lora-scaled-twice",
        "LoraSettings.scale",
        "return alpha / (",
        "return alpha * alpha / (",
        ("test_scales_and_patterns",),
        "an adapter is scaled once",
    ),
    Mutation(
        "lora-rows-of-b-in-the-order-of-the-files",
        "_update",
        "scaled[order[first:stop] - start]",
        "scaled[first - start : stop - start]",
        ("test_logits_are_those_of_the_merged_model",),
        "rows of B go where those of the weight go",
    ),
    Mutation(
        "lora-misses-the-copies-of-a-row",
        "_adapters",
        "stops = [*ends[:-1].tolist(), num_rows]",
        "stops = ends.tolist()",
        ("test_logits_are_those_of_the_merged_model",),
        "copies of a row write the KV of the row",
    ),
    Mutation(
        "lora-namespace-is-the-name",
        "adapter_group",
        "json.dumps([name, number, digest.hex()])",
        "json.dumps([name])",
        ("test_an_adapter_loaded_again_reads_nothing_of_before",),
        "old KV of a name is never read",
    ),
    Mutation(
        "lora-step-ahead-is-the-bases",
        "_next_row",
        "adapter=scheduled.adapter,",
        "adapter=None,",
        ("test_one_call_mixes_adapters_and_the_base",),
        "a step planned ahead has the adapters of the one before",
    ),
    Mutation(
        "lora-branch-of-a-draft-is-the-bases",
        "request_segments",
        """                tail=array("q", ancestors + own),
                adapter=scheduled.adapter,""",
        """                tail=array("q", ancestors + own),""",
        ("test_trees_of_adapted_requests_change_no_token",),
        "all rows of a draft are verified with the request's adapter",
    ),
    Mutation(
        "lora-follows-links",
        "adapter_folder",
        "if any(place.is_symlink() for place in",
        "if any(False for place in",
        ("test_paths_outside_of_the_folder_are_forbidden",),
        "adapters are loaded below one folder",
    ),
    Mutation(
        "lora-unloads-at-once",
        "Adapters._drop",
        "await adapter.unused.wait()",
        "pass",
        ("test_a_request_goes_on_while_its_adapter_is_unloaded",),
        "unloading waits for the adapter's requests",
    ),
)
