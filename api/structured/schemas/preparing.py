"""Preparation of a caller's JSON schema: unsupported keywords are replaced or left out.

Options for the preparation, such as the strictness, are stored in the schema itself under the key
`OPTIONS`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ....core.errors import InvalidRequest
from .mending import Mender
from .rewriting import Loss, Rewriter
from .walk import Compiles, json_blocks

logger = logging.getLogger(__name__)
OPTIONS = "x-foretoken"
MAX_TOLD = 4  # maximum number of keywords that a warning lists
Strictness = Literal["strict", "exact", "loose"]
"""The treatment of an unsupported keyword.

``strict``: it is rejected. ``exact``: it is rejected unless it is an annotation for validators,
such as an unknown format. ``loose``: it is left out, as narrowly as possible, and logged.
"""


def with_options(
    schema: Mapping[str, object], strictness: Strictness, *, param: str, name: str = ""
) -> dict[str, object]:
    """Return a schema with options for its preparation.

    ``param``: the field of the request that the schema comes from; ``name``: the part of the field,
    such as the name of a tool. Errors name both.
    """
    return {OPTIONS: {"strictness": strictness, "param": param, "name": name}, **schema}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared schema.

    ``counts_keys``: whether the schema requires a number of properties, so that duplicate keys must
    be rejected.
    """

    schema: object
    counts_keys: bool = False


class Preparer:
    """Prepares schemas for the grammar library.

    ``form`` returns the library's options for the JSON of a schema.
    """

    def __init__(self, compiles: Compiles, form: Callable[[str], Mapping[str, object]]) -> None:
        self._compiles = compiles
        self._form = form

    def prepare(self, schema: object, param: str) -> Prepared:
        """Return a prepared schema.

        Raises `InvalidRequest` for keywords that must not be left out and for invalid schemas.
        """
        options = _Options.of(schema, param)
        rewriter = Rewriter(schema, self._compiles)
        try:
            document = rewriter.document()
            losses = [*rewriter.losses]
            if self._compiles(document) is not None:
                mender = Mender(self._compiles, rewriter.references)
                document = mender.mend(document)
                losses += mender.losses
        except RecursionError:
            raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
        except OverflowError:
            raise InvalidRequest(f"{param} has a number that is too large", param=param) from None
        _settle([*dict.fromkeys(losses)], options)
        return Prepared(document, rewriter.counts_keys)

    def grammar(self, text: str, param: str) -> tuple[str, bool]:
        """Return the text of a grammar in which the schemas with options are prepared.

        Also return whether one of them requires a number of properties (`Prepared.counts_keys`).
        """
        parts, counts_keys, end = [], False, 0
        for schema, begin, after in json_blocks(text):
            if isinstance(schema, Mapping) and OPTIONS in schema:
                prepared = self.prepare(schema, param)
                counts_keys |= prepared.counts_keys
                parts += [text[end:begin], self.block(prepared.schema)]
                end = after
        return "".join([*parts, text[end:]]), counts_keys

    def block(self, schema: object) -> str:
        """Return a prepared schema for use inside a grammar."""
        whole = schema if isinstance(schema, Mapping) else {"anyOf": [schema]}
        return json.dumps({**whole, "x-guidance": self._form(json.dumps(whole))})


@dataclass(frozen=True, slots=True)
class _Options:
    """The options for the preparation of one schema."""

    strictness: Strictness
    param: str
    name: str

    @classmethod
    def of(cls, schema: object, param: str) -> _Options:
        given = schema.get(OPTIONS) if isinstance(schema, Mapping) else None
        told = given if isinstance(given, Mapping) else {}
        strictness = told.get("strictness")
        return cls(
            strictness if strictness in ("strict", "exact", "loose") else "exact",
            str(told.get("param") or param),
            str(told.get("name") or ""),
        )


def _settle(losses: list[Loss], options: _Options) -> None:
    """Raise `InvalidRequest` if a keyword that must be enforced was left out.

    Other keywords that were left out are logged in one line.
    """
    for loss in losses:
        is_refused = not loss.is_annotation or options.strictness == "strict"
        if options.strictness != "loose" and is_refused:
            where = ": ".join(filter(None, (options.name, loss.where)))
            message = f"{options.param}: {loss.reason} ({where})"
            raise InvalidRequest(message, param=options.param)
    if losses and options.strictness == "loose":
        logger.warning(
            "%s: parts of the schema are not enforced: %s",
            ": ".join(filter(None, (options.param, options.name))),
            "; ".join(_told(losses)),
        )


def _told(losses: list[Loss]) -> Iterator[str]:
    yield from (f"{loss.where} ({loss.reason})" for loss in losses[:MAX_TOLD])
    if len(losses) > MAX_TOLD:
        yield f"and {len(losses) - MAX_TOLD} more"
