"""Find the smallest parts of a schema that do not compile, and leave them out.

Unsupported parts of a schema are not known in advance. Each part is compiled separately, from the
outside inwards after a failure. The number of trials is limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .rewriting import Loss
from .walk import Compiles, Path, subschemas

MAX_TRIALS = 300
DEFS = "$defs"
KEYS = (  # keywords to leave out, in this order
    "pattern", "format", "multipleOf", "maxLength", "minLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "maxItems", "minItems", "minProperties",
    "maxProperties", "patternProperties", "enum", "const", "allOf", "anyOf", "prefixItems",
    "items", "additionalProperties", "required", "properties", "$ref",
)  # fmt: skip


@dataclass(slots=True)
class Mender:
    """Leaves out the parts of one document that do not compile.

    ``references``: for each of its ``$defs``, the name that the author gave it.
    """

    compiles: Compiles
    references: Mapping[str, str]
    losses: list[Loss] = field(default_factory=list)
    _defs: dict[str, object] = field(default_factory=dict)
    _num_trials: int = 0

    def mend(self, document: object) -> object:
        """Return a document that compiles and is as similar to ``document`` as possible."""
        if not isinstance(document, Mapping):
            return document if self._problem(document) is None else True
        defs = document.get(DEFS)
        real: dict[str, object] = dict(defs) if isinstance(defs, Mapping) else {}
        root: object = {key: value for key, value in document.items() if key != DEFS}
        self._defs = dict.fromkeys(real, True)  # at first, references accept everything
        for name in real:
            real[name] = self._mended(real[name], (self.references.get(name, name),))
        root = self._mended(root, ())
        self._defs = real
        for name in real:  # now references have their real targets
            real[name] = self._mended(real[name], (self.references.get(name, name),))
        root = self._mended(root, ())
        if self._problem(root) is not None:
            root = self._typed(root, (), "it does not compile as a whole")
        if isinstance(root, Mapping) and real:
            return {**root, DEFS: real}
        return root

    def _problem(self, schema: object) -> str | None:
        """Return why a part does not compile; None if it does or was not tried."""
        if isinstance(schema, bool) and schema:
            return None
        self._num_trials += 1
        if self._num_trials > MAX_TRIALS:
            return None
        whole = schema if isinstance(schema, Mapping) else {"anyOf": [schema]}
        return self.compiles({**whole, DEFS: self._defs})

    def _mended(self, schema: object, path: Path) -> object:
        if self._problem(schema) is None or not isinstance(schema, Mapping):
            return schema
        mended = dict(schema)
        for inner_path, inner in subschemas(schema):
            if inner_path[0] != DEFS and inner is not False:
                _put(mended, inner_path, self._mended(inner, (*path, *inner_path)))
        problem = self._problem(mended)
        if problem is None:
            return mended
        for key in KEYS:
            if key in mended:
                rest = {name: value for name, value in mended.items() if name != key}
                if self._problem(rest) is None:
                    self.losses.append(Loss((*path, key), problem))
                    return rest
        return self._typed(mended, path, problem)

    def _typed(self, schema: object, path: Path, problem: str) -> object:
        """Return a schema with only the type of ``schema``.

        If that does not compile, return a schema that accepts everything.
        """
        self.losses.append(Loss(path, problem))
        kept = {"type": schema["type"]} if isinstance(schema, Mapping) and "type" in schema else {}
        return kept if self._problem(kept) is None else True


def _put(schema: dict[str, object], path: Path, value: object) -> None:
    """Replace the part of a schema at ``path``. The container of the part is copied."""
    key, *rest = path
    if not rest:
        schema[str(key)] = value
        return
    container = schema[str(key)]
    copy: object = dict(container) if isinstance(container, Mapping) else list(container)  # type: ignore[call-overload]
    copy[rest[0]] = value  # type: ignore[index]
    schema[str(key)] = copy
