"""Mistakes in images: keys, kept vectors, positions, rows that see each other."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "image-rows-that-see-each-other-are-causal",
        "image_reaches",
        "found[begin:end] = start + end",
        "found[begin:end] += 0",
        ("test_images_give_the_tokens_of_generate_in_chunks_of_any_size",),
        "rows of an image see each other",
    ),
    Mutation(
        "image-reaches-are-not-read-by-the-kernel",
        "line_up_queries",
        "task->job->rule->is_mutual ? task->job->batch->reaches : NULL",
        "NULL",
        ("test_native_kernels_see_what_torch_sees",),
        "rows of an image see each other",
    ),
    Mutation(
        "image-reaches-go-for-layers-that-are-causal",
        "gemma4",
        "is_mutual=each.window is not None",
        "is_mutual=True",
        ("test_images_give_the_tokens_of_generate_in_chunks_of_any_size",),
        "rows of Gemma 4's images see each other in layers with a window alone",
    ),
    Mutation(
        "image-is-cut-by-a-chunk",
        "chunk_stop",
        "return first if start < first else first + count",
        "return stop",
        ("test_no_chunk_ends_among_rows_that_see_each_other",),
        "one step computes all rows of an image that see each other",
    ),
    Mutation(
        "image-is-cut-when-memory-runs-out",
        "_cut",
        "stop = chunk_stop(extras.images, extras.branches, scheduled.start, stop)",
        "stop = int(stop)",
        ("test_an_image_is_not_cut_however_little_memory_there_is",),
        "one step computes all rows of an image that see each other",
    ),
    Mutation(
        "image-positions-have-no-offset-behind-an-image",
        "image_positions",
        "shift += max(lines, columns) - count",
        "shift += 0",
        ("test_images_give_the_tokens_of_generate_in_chunks_of_any_size",),
        "what follows an image goes on behind its longer side",
    ),
    Mutation(
        "image-key-has-no-salt",
        "image_key",
        "mark + named + content",
        "content",
        ("test_two_salts_share_nothing",),
        "cache_salt separates tenants in images",
    ),
    Mutation(
        "image-vectors-are-kept-by-the-place-in-the-prompt",
        "Vision.vectors",
        "kept = self._kept.get(image.key)",
        "kept = next(iter(self._kept.values()), None)",
        ("test_a_changed_pixel_hits_nothing_behind_it",),
        "vectors are kept by the content of an image",
    ),
    Mutation(
        "image-file-is-kept-by-its-url",
        "ImageReader._read",
        'is_fixed = source.url.startswith("data:")',
        "is_fixed = True",
        ("test_files_below_the_media_folder_and_no_others",),
        "images are known by their content, not by their URL",
    ),
)
