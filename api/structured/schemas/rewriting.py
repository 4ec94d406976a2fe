"""JSON schemas of any draft, rewritten with keywords that the grammar library supports.

The result allows nothing that the schema forbids, and usually everything that it allows. A keyword
that cannot be rewritten is left out and becomes a `Loss`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

from .disjoint import FORMATS, Disjoint
from .negation import Negation
from .numbers import BOUNDS, bounds
from .references import References
from .regexes import NotRegularError, split_looks, translated
from .walk import Compiles, Path

Schema = Mapping[str, object]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
WITHOUT_IF = ("draft-03", "draft-04", "draft-05", "draft-06")
MAX_BRANCHES = 64
MAX_UNIQUE = 6  # maximum number of listed values of which all subsets are enumerated
MAX_EXACT = 2**53  # largest integer up to which floats are exact
MAX_MULTIPLE = 20_000
MAX_REFERENCES = 8  # maximum length of a chain of references
MAX_SCHEMAS = 50_000  # maximum number of schemas per document
REF = "$ref"
OVERLAP = "oneOf is supported only if its branches exclude each other; use anyOf"


@dataclass(frozen=True, slots=True)
class Loss:
    """A keyword that is not enforced, with its path in the schema and the reason.

    ``is_annotation``: JSON schema validators need not enforce the keyword either.
    """

    path: Path
    reason: str
    is_annotation: bool = False

    @property
    def where(self) -> str:
        """The path as text."""
        return ".".join(map(str, self.path)) or "the schema"


@dataclass(slots=True)
class Rewriter:
    """Rewrites the schemas of one document, including the schemas that they refer to."""

    root: object
    compiles: Compiles
    losses: list[Loss] = field(default_factory=list)
    counts_keys: bool = False  # whether duplicate keys must be rejected, since keys are counted
    _references: References = field(init=False)
    _disjoint: Disjoint = field(init=False)
    _negation: Negation = field(init=False)
    _names: dict[int, str] = field(default_factory=dict)
    _written: dict[str, object] = field(default_factory=dict)
    _left: list[tuple[str, object]] = field(default_factory=list)
    _called: dict[str, str] = field(default_factory=dict)
    _num_schemas: int = 0

    def __post_init__(self) -> None:
        self._references = References(self.root)
        self._disjoint = Disjoint(self._references, self.compiles)
        self._negation = Negation(self._references)

    def document(self) -> object:
        """Return the whole rewritten document. Raises RecursionError for deep nesting."""
        root = self.schema(self.root, ())
        while self._left:
            name, target = self._left.pop()
            self._written[name] = self.schema(target, (self._called[name],))
        if self._written and isinstance(root, Mapping):
            root = {**root, "$defs": self._written}
        return root

    @property
    def references(self) -> dict[str, str]:
        """The author's names of the schemas in ``$defs``, by their new names."""
        return self._called

    def schema(self, schema: object, path: Path) -> object:
        """Return a rewritten schema, including nested schemas."""
        self._num_schemas += 1
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or self._num_schemas > MAX_SCHEMAS:
            self._lose(path, "not a JSON schema" if schema is None else "too many schemas")
            return True
        if REF in schema and self._is_old:
            schema = {REF: schema[REF]}  # old drafts ignore siblings of a reference
        return _One(self, schema, path).written()

    @property
    def draft(self) -> str:
        """The draft of JSON Schema that the document names."""
        found = self.root.get("$schema") if isinstance(self.root, Mapping) else None
        return found if isinstance(found, str) else ""

    @property
    def _is_old(self) -> bool:
        return any(name in self.draft for name in OLD_DRAFTS)

    def _lose(self, path: Path, reason: str, *, is_annotation: bool = False) -> None:
        self.losses.append(Loss(path, reason, is_annotation))

    def has_type(self, schema: object, name: str) -> bool:
        """Whether a schema, or the target of its reference, has exactly this type."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping) or REF not in schema:
                break
            schema = self._references.target(schema[REF])
        return isinstance(schema, Mapping) and schema.get("type") == name

    def refer(self, reference: object, path: Path) -> object:
        """Return a reference to the rewritten form of the schema that ``reference`` refers to."""
        target = self._references.target(reference)
        if target is None:
            self._lose(path, f"{json.dumps(reference)} does not refer to a part of this schema")
            return True
        if isinstance(target, bool):
            return target
        if id(target) not in self._names:
            name = f"d{len(self._names)}"
            self._names[id(target)] = name
            self._called[name] = str(reference)
            self._left.append((name, target))
        return {REF: f"#/$defs/{self._names[id(target)]}"}


class _One:
    """One schema that is being rewritten.

    ``_out`` has its keywords; ``_also`` has additional schemas that a value must match.
    """

    def __init__(self, rewriter: Rewriter, schema: Schema, path: Path) -> None:
        self._all = rewriter
        self._schema = schema
        self._path = path
        self._out: dict[str, object] = {}
        self._also: list[object] = []

    def written(self) -> object:
        """Return the schema, written with supported keywords."""
        for key, value in self._schema.items():
            if (write := _KEYWORDS.get(key)) is not None:
                write(self, key, value)
        if self._also:
            before = self._out.get("allOf", [])
            self._out["allOf"] = [*before, *self._also]  # type: ignore[misc]
        return False if any(each is False for each in self._also) else self._out

    def _lose(self, key: str, reason: str, *, is_annotation: bool = False) -> None:
        self._all._lose((*self._path, key), reason, is_annotation=is_annotation)

    def _inner(self, schema: object, *path: str | int) -> object:
        return self._all.schema(schema, (*self._path, *path))

    def _names(self, key: str) -> list[str]:
        found = self._schema.get(key)
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []

    def _named(self, key: str) -> Schema:
        found = self._schema.get(key)
        return found if isinstance(found, Mapping) else {}

    def _typed(self, schema: Schema) -> Schema:
        """Return an additional schema with the type of this schema, since it compiles faster."""
        name = self._schema.get("type")
        return {"type": name, **schema} if isinstance(name, str) else schema

    def _either(self, branches: Sequence[object]) -> None:
        """Require that a value also matches one of the branches."""
        if len(branches) == 1:
            self._also.append(branches[0])
        elif not any(each is True for each in branches):
            self._also.append({"anyOf": [*branches]} if branches else False)

    # -- any type
    # ------------------------------------------------------------------------------------

    def _type(self, key: str, value: object) -> None:
        names = value if isinstance(value, list) else [value]
        if self._branches_have_type(value):
            return
        if not names or not all(name in TYPES for name in names):
            self._lose(key, f"Invalid type: {', '.join(map(str, names))}")
        else:
            self._out[key] = value

    def _branches_have_type(self, name: object) -> bool:
        """Whether the type can be left out, because every branch of the schema has this type.

        A type next to a reference would have to be merged into the target, which may contain the
        reference itself.
        """
        told = [key for key in self._schema if key in _KEYWORDS]
        if len(told) != 2 or not isinstance(name, str):
            return False
        found = self._schema.get("anyOf", self._schema.get("oneOf", self._schema.get(REF)))
        branches = found if isinstance(found, list) else [{REF: found}]
        return bool(branches) and all(self._all.has_type(each, name) for each in branches)

    def _enum(self, key: str, value: object) -> None:
        values = value if isinstance(value, list) else []
        exact = [each for each in values if _is_exact(each)]
        if not exact:
            self._lose(key, "it lists no supported value")
        else:
            self._out[key] = exact

    def _const(self, key: str, value: object) -> None:
        if _is_exact(value):
            self._out[key] = value
        else:
            self._lose(key, "numbers of more than 15 digits are not supported")

    def _ref(self, key: str, value: object) -> None:
        found = self._all.refer(value, (*self._path, key))
        if found is False or not isinstance(found, Mapping):
            self._also += [] if found else [False]
        elif REF in self._out:
            self._also.append(found)
        else:
            self._out.update(found)

    def _all_of(self, key: str, value: object) -> None:
        schemas = value if isinstance(value, list) else []
        inner = [self._inner(each, key, index) for index, each in enumerate(schemas)]
        self._out[key] = [each for each in inner if each is not True]
        if not self._out[key]:
            del self._out[key]

    def _any_of(self, key: str, value: object) -> None:
        schemas = value if isinstance(value, list) else []
        if not schemas:
            self._lose(key, "it has no branches")
            return
        inner = [self._inner(each, key, index) for index, each in enumerate(schemas)]
        if not any(each is True or each == {} for each in inner):
            self._out[key] = inner

    def _one_of(self, key: str, value: object) -> None:
        schemas = value if isinstance(value, list) else []
        if not schemas:
            self._lose(key, "it has no branches")
            return
        branches = [self._alone(index, schemas) for index in range(len(schemas))]
        if not all(branches):
            self._lose(key, OVERLAP)
            branches = [[each] for each in schemas]
        inner = [
            self._inner(each, key, index)
            for index, found in enumerate(branches)
            for each in found or ()
        ]
        self._also.append({"anyOf": inner})

    def _alone(self, index: int, schemas: Sequence[object]) -> list[object] | None:
        """Return schemas for values that match only the branch at ``index``; None if unknown."""
        schema, parts = schemas[index], []
        for place, other in enumerate(schemas):
            if place == index or self._apart(schema, other):
                continue
            negated = self._all._negation.of(other)
            if negated is None:
                return None
            possible = [each for each in negated if not self._apart(schema, each)]
            if not possible:
                return []
            parts.append({"anyOf": possible} if len(possible) > 1 else possible[0])
        return [{"allOf": [schema, *map(self._typed_as_here, parts)]} if parts else schema]

    def _apart(self, first: object, second: object) -> bool:
        return self._all._disjoint.are(self._typed_as_here(first), self._typed_as_here(second))

    def _typed_as_here(self, schema: object) -> object:
        """Return a branch with the type of this schema."""
        if isinstance(schema, Mapping) and "type" in self._schema and REF not in schema:
            return {"type": self._schema["type"], **schema}
        return schema

    def _not(self, key: str, value: object) -> None:
        branches = self._all._negation.of(value)
        if branches is None:
            self._lose(key, "the schema that it excludes cannot be negated")
        else:
            self._either([self._inner(each, key) for each in branches])

    def _if(self, key: str, value: object) -> None:
        if any(name in self._all.draft for name in WITHOUT_IF):
            return
        then, other = self._schema.get("then", True), self._schema.get("else", True)
        if then is True and other is True:
            return
        branches = self._all._negation.of(value)
        if branches is None:
            self._lose(key, "its condition cannot be negated")
            return
        possible = [each for each in branches if not self._apart(self._schema, each)]
        whole = [{"allOf": [value, then]}, *({"allOf": [each, other]} for each in possible)]
        self._either([self._inner(each, key) for each in whole])

    # -- numbers and texts ------------------------------------------------------------------------

    def _bounds(self, key: str, _: object) -> None:
        if key != next(name for name in self._schema if name in BOUNDS):
            return  # all bounds were written with the first keyword
        names = self._schema.get("type")
        numbers = {"integer", "number"}.intersection(names if isinstance(names, list) else [names])
        self._out.update(bounds(self._schema, is_integer=numbers == {"integer"}))

    def _multiple(self, key: str, value: object) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value <= 0 or value > MAX_MULTIPLE:  # type: ignore[operator]
            self._lose(key, f"it must be a number up to {MAX_MULTIPLE}")
        elif not (value == 1 and self._schema.get("type") == "integer"):
            self._out[key] = value

    def _length(self, key: str, value: object) -> None:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or value < 0:  # type: ignore[operator]
            self._lose(key, "it must be a whole number")
        else:
            self._out[key] = int(value)  # type: ignore[call-overload]

    def _pattern(self, key: str, value: object) -> None:
        if not isinstance(value, str):
            self._lose(key, "it must be a text")
            return
        try:
            patterns, lost = split_looks(value)
            written = [translated(each) for each in patterns]
        except NotRegularError as error:
            self._lose(key, str(error))
            return
        if lost:
            self._lose(key, "look-around is not supported")
        self._out[key] = written[-1]
        self._also += (self._typed({"pattern": each}) for each in written[:-1])

    def _format(self, key: str, value: object) -> None:
        if value in FORMATS:
            self._out[key] = value
        else:
            self._lose(key, f"{json.dumps(value)} is not supported", is_annotation=True)

    # -- arrays -----------------------------------------------------------------------------------

    def _items(self, key: str, value: object) -> None:
        if isinstance(value, list):
            self._prefix("prefixItems", value)
            return
        self._out["items"] = self._inner(value, key)

    def _more_items(self, key: str, value: object) -> None:
        if isinstance(self._schema.get("items"), list):
            self._out["items"] = self._inner(value, key)

    def _prefix(self, key: str, value: object) -> None:
        schemas = value if isinstance(value, list) else []
        self._out[key] = [self._inner(each, key, index) for index, each in enumerate(schemas)]

    def _unique(self, key: str, value: object) -> None:
        most, least = self._schema.get("maxItems"), self._schema.get("minItems", 0)
        if value is not True or most in (0, 1):
            return
        items = self._schema.get("items")
        values = items.get("enum") if isinstance(items, Mapping) else None
        is_plain = "prefixItems" not in self._schema and self._schema.get("type") == "array"
        if not isinstance(values, list) or len(values) > MAX_UNIQUE or not is_plain:
            self._lose(key, 'Unimplemented keys: ["uniqueItems"]')
            return
        sizes = range(least if isinstance(least, int) else 0, len(values) + 1)
        chosen = [
            list(some)
            for size in sizes
            if not isinstance(most, int) or size <= most
            for some in combinations([each for each in values if _is_exact(each)], size)
        ]
        self._also.append({"enum": chosen})

    def _contains(self, key: str, value: object) -> None:
        least = self._schema.get("minContains", 1)
        if least == 0:
            return
        if least != 1 or "maxContains" in self._schema or "prefixItems" in self._schema:
            self._lose(key, "only a minimum of one matching item is supported")
            return
        first = self._inner(value, key)  # stricter than the schema: it may match any item
        self._also.append(self._typed({"prefixItems": [first], "minItems": 1}))

    def _unevaluated(self, key: str, value: object) -> None:
        beside = ("allOf", "anyOf", "oneOf", REF, "if", "$dynamicRef", "not")
        known = "additionalProperties" if key == "unevaluatedProperties" else "items"
        if any(name in self._schema for name in beside):
            self._lose(key, "it is not supported next to other schemas")
        elif known not in self._schema:
            self._out[known] = self._inner(value, key)

    # -- objects ----------------------------------------------------------------------------------

    def _properties(self, key: str, value: object) -> None:
        properties = value if isinstance(value, Mapping) else {}
        self._out[key] = {name: self._inner(v, key, name) for name, v in properties.items()}

    def _patterns(self, key: str, value: object) -> None:
        found: dict[str, object] = {}
        for pattern, each in value.items() if isinstance(value, Mapping) else ():
            try:
                found[translated(pattern)] = self._inner(each, key, pattern)
            except NotRegularError as error:
                self._lose(key, f"{pattern}: {error}")
        if found:
            self._out[key] = found

    def _others(self, key: str, value: object) -> None:
        self._out[key] = self._inner(value, key)

    def _required(self, key: str, _: object) -> None:
        self._out[key] = self._names(key)

    def _key_names(self, key: str, value: object) -> None:
        """Restrict the names of properties by a pattern or a list."""
        if value is True or (isinstance(value, Mapping) and not set(value) - _SAYS_TEXT):
            return
        schema = value if isinstance(value, Mapping) else {}
        if value is False:
            self._also.append(self._typed({"maxProperties": 0}))
            return
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        known = self._named("properties")
        if set(schema) - _SAYS_TEXT <= {"enum", "const"} and isinstance(listed, list):
            names = [name for name in listed if isinstance(name, str)]
            rest = self._schema.get("additionalProperties", True)
            extra = {name: self._inner(rest, "additionalProperties") for name in names}
            allowed: dict[str, object] = {name: True for name in known if name in names}
            inner = {**extra, **allowed}
            self._also.append(self._typed({"properties": inner, "additionalProperties": False}))
            return
        if (pattern := self._key_pattern(key, schema)) is not None:
            kept = {name: _may_match(pattern, name) for name in known}
            self._also.append(
                self._typed({
                    "properties": kept, "patternProperties": {pattern: True},
                    "additionalProperties": False,
                })
            )  # fmt: skip

    def _key_pattern(self, key: str, schema: Schema) -> str | None:
        """Return the pattern of a schema for property names; None if it is not supported."""
        told = set(schema) - _SAYS_TEXT
        try:
            if told == {"pattern"} and isinstance(schema["pattern"], str):
                return translated(schema["pattern"])
        except NotRegularError as error:
            self._lose(key, str(error))
            return None
        if told and told <= {"minLength", "maxLength"}:
            low, high = schema.get("minLength", 0), schema.get("maxLength", "")
            return rf"^[\s\S]{{{low},{high}}}$"
        self._lose(key, "only one pattern, lengths or a list of keys is supported")
        return None

    def _least_keys(self, key: str, value: object) -> None:
        """Require a minimum number of properties, whether the schema names them or not."""
        required, named = self._names("required"), self._named("properties")
        if not isinstance(value, int) or value <= len(set(required)):
            return
        missing = value - len(set(required))
        optional = [name for name in named if name not in required]
        has_others = self._has_others()
        if not optional:
            self._all.counts_keys |= missing > 1
            self._out[key] = value
            return
        if comb(len(optional), missing) > MAX_BRANCHES:
            self._lose(key, "too many combinations of properties reach this number")
            return
        branches: list[object] = [
            self._typed({"required": list(some)}) for some in combinations(optional, missing)
        ]
        if has_others:
            none = dict.fromkeys(optional, False)
            self._all.counts_keys |= missing > 1
            branches.append(self._typed({"properties": none, key: value}))
        self._either(branches)

    def _most_keys(self, key: str, value: object) -> None:
        """Allow a maximum number of properties, whether the schema names them or not."""
        required, named = self._names("required"), self._named("properties")
        if not isinstance(value, int):
            return
        optional = [name for name in named if name not in required]
        room = value - len(set(required))
        has_others = self._has_others()
        if len(optional) <= room and not has_others:
            return
        if not optional or room < 0:
            self._out[key] = value
            return
        if room < len(optional) and comb(len(optional), room) > MAX_BRANCHES:
            self._lose(key, "too many combinations of properties stay within this number")
            return
        gone = combinations(optional, max(0, len(optional) - room))
        closed = {} if not has_others else {"additionalProperties": False, "properties": {}}
        branches: list[object] = []
        for some in gone:
            properties = dict.fromkeys(named, True) if has_others else {}
            branches.append(
                self._typed({**closed, "properties": {**properties, **dict.fromkeys(some, False)}})
            )
        if has_others:
            none = dict.fromkeys(optional, False)
            branches.append(self._typed({"properties": none, key: value}))
        self._either(branches)

    def _has_others(self) -> bool:
        """Whether properties are allowed that the schema does not name."""
        others = self._schema.get("additionalProperties", True)
        return others is not False or bool(self._named("patternProperties"))

    def _dependent(self, key: str, value: object) -> None:
        """Require other properties, or a match of another schema, if a property is present."""
        found = value if isinstance(value, Mapping) else {}
        for name, wanted in found.items():
            absent = self._typed({"properties": {name: False}})
            if isinstance(wanted, list):
                present: object = self._typed({"required": [name, *wanted]})
            else:
                inner = self._inner(wanted, key, name)
                present = {"allOf": [self._typed({"required": [name]}), inner]}
            self._also.append({"anyOf": [present, absent]})


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _is_exact(value: object) -> bool:
    """Whether no number in a value is larger than `MAX_EXACT`."""
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, Mapping):
        return all(map(_is_exact, value.values()))
    return not isinstance(value, int | float) or abs(value) <= MAX_EXACT


_SAYS_TEXT = frozenset(("type", "description", "title", "$comment", "$id", "$schema", "default"))
_KEYWORDS: dict[str, Callable[[_One, str, object], None]] = {
    "type": _One._type, "enum": _One._enum, "const": _One._const,
    "$ref": _One._ref, "$recursiveRef": _One._ref, "$dynamicRef": _One._ref,
    "allOf": _One._all_of, "anyOf": _One._any_of, "oneOf": _One._one_of, "not": _One._not,
    "if": _One._if,
    **dict.fromkeys(BOUNDS, _One._bounds), "multipleOf": _One._multiple,
    "minLength": _One._length, "maxLength": _One._length,
    "pattern": _One._pattern, "format": _One._format,
    "minItems": _One._length, "maxItems": _One._length,
    "items": _One._items, "additionalItems": _One._more_items, "prefixItems": _One._prefix,
    "uniqueItems": _One._unique, "contains": _One._contains,
    "unevaluatedItems": _One._unevaluated, "unevaluatedProperties": _One._unevaluated,
    "properties": _One._properties, "patternProperties": _One._patterns,
    "additionalProperties": _One._others, "required": _One._required,
    "propertyNames": _One._key_names,
    "minProperties": _One._least_keys, "maxProperties": _One._most_keys,
    "dependencies": _One._dependent, "dependentRequired": _One._dependent,
    "dependentSchemas": _One._dependent,
}  # fmt: skip
