"""Mistakes in grammars, and calls of tools."""

from __future__ import annotations

from ..mutation import Mutation

MATCHER = "tests/api/test_grammar.py"
JSON_CALLS = "tests/api/output/test_json_formats.py"
OTHER_CALLS = "tests/api/output/test_other_formats.py"
TOOL_CALLS = "tests/api/test_tool_calls.py"

MUTATIONS = (
    Mutation(
        "matcher-keeps-masks-behind-its-place",
        "api/matcher.py",
        "if depth <= last}",
        "if depth <= last + 9}",
        (
            f"{MATCHER}::test_masks_are_those_of_the_path_however_it_was_reached",
            f"{MATCHER}::test_a_refused_tail_does_no_harm",
        ),
        "masks are those of the path, however it was reached",
    ),
    Mutation(
        "matcher-ends-anywhere",
        "api/matcher.py",
        "        if is_complete:\n            mask[self._stops] = True",
        "        mask[self._stops] = True",
        (f"{MATCHER}::test_a_complete_answer_ends_with_any_stop_id_and_with_nothing_else",),
        "an answer ends where it is complete",
    ),
    Mutation(
        "matcher-lets-special-tokens-in",
        "api/matcher.py",
        "for token_id in special[mask[special]].tolist():",
        "for token_id in special[:0].tolist():",
        (f"{MATCHER}::test_padding_and_special_tokens_are_never_allowed",),
        "special tokens are no text",
    ),
    Mutation(
        "matcher-believes-an-impossible-output",
        "api/matcher.py",
        'raise ConstraintFailed("the grammar does not allow the answer so far")',
        "num_new = len(self._tail)",
        (f"{MATCHER}::test_an_output_that_the_grammar_cannot_have_allowed_is_an_error",),
        "an output that the grammar cannot have allowed is an error",
    ),
    Mutation(
        "matcher-rolls-back-too-little",
        "api/matcher.py",
        "self._roll_back(len(self._tail) - same)",
        "self._roll_back(len(self._tail) - same - 1)",
        (f"{MATCHER}::test_masks_are_those_of_the_path_however_it_was_reached",),
        "masks are those of the path, however it was reached",
    ),
    Mutation(
        "matcher-forces-one-of-two-ends",
        "api/matcher.py",
        "return self._stops if len(self._stops) == 1 else ()",
        "return self._stops[:1]",
        (f"{MATCHER}::test_two_ways_to_end_are_not_forced",),
        "two ways to end are not forced",
    ),
    Mutation(
        "matcher-may-take-for-ever",
        "api/matcher.py",
        "if self._seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self._num_sure:",
        "if self._seconds < 0:",
        (f"{MATCHER}::test_an_answer_may_spend_so_much_time_on_its_grammar_and_no_more",),
        "a form made to be expensive ends alone",
    ),
    Mutation(
        "json-call-ends-at-an-inner-brace",
        "api/output/json_calls.py",
        "        if depth == 0:\n            return",
        "        if depth <= 1:\n            return",
        (JSON_CALLS,),
        "arguments are the whole object",
    ),
    Mutation(
        "json-call-misreads-an-escaped-quote",
        "api/output/json_calls.py",
        "            yield CallArguments(source.take(2))",
        "            yield CallArguments(source.take(1))",
        (JSON_CALLS, "tests/api/output/test_chunks.py"),
        "a quote behind a backslash ends no string",
    ),
    Mutation(
        "json-call-of-a-tool-that-is-not-there",
        "api/output/calls.py",
        "if not fits or (self.names is not None and name not in self.names):",
        "if not fits:",
        (JSON_CALLS, OTHER_CALLS),
        "an answer that only looks like a call is words",
    ),
    Mutation(
        "pythonic-writes-python",
        "api/output/pythonic.py",
        "return _CONSTANTS.get(word, word)",
        "return word",
        (OTHER_CALLS,),
        "arguments are JSON",
    ),
    Mutation(
        "pythonic-takes-infinity",
        "api/output/pythonic.py",
        "if not math.isfinite(value):",
        "if value != value:",
        (OTHER_CALLS,),
        "JSON has no infinity",
    ),
    Mutation(
        "qwen-coder-keeps-the-last-line-break",
        "api/output/qwen_coder.py",
        'held = "\\n" if text.endswith("\\n") else ""',
        'held = ""',
        (OTHER_CALLS,),
        "the line break before the tag is not in the value",
    ),
    Mutation(
        "reader-runs-a-call-that-was-cut",
        "api/reader.py",
        "self._num_calls > 0 and not was_cut",
        "self._num_calls > 0",
        (f"{TOOL_CALLS}::test_a_call_that_a_stop_string_cuts_is_not_to_be_run",),
        "a call that a stop string cut is not to be run",
    ),
    Mutation(
        "reader-numbers-calls-from-one",
        "api/reader.py",
        "turned.calls.append(Call(index=self._num_calls, id=call_id, name=name))",
        "turned.calls.append(Call(index=self._num_calls + 1, id=call_id, name=name))",
        (f"{TOOL_CALLS}::test_a_call_arrives_whole_and_as_a_stream",),
        "clients put calls together by their index",
    ),
)
