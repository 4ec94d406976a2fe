"""Mistakes in the HTTP routes: fields, errors, streams."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "sse-does-not-watch-the-client",
        "gone",
        'while (await receive())["type"] != "http.disconnect":',
        "while await receive():",
        ("test_a_client_that_leaves_before_the_first_byte_aborts_its_request",),
        "an idle disconnect is noticed",
    ),
    Mutation(
        "errors-tell-what-failed-inside",
        "to_api_error",
        "return ApiError(500, INTERNAL, kind",
        "return ApiError(500, str(error), kind",
        ("test_an_unexpected_exception_tells_nothing",),
        "text of unexpected exceptions never reaches a client",
    ),
)
