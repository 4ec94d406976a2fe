"""Decode and validate the bodies of all APIs; an error names the path of its field.

Two kinds of invalid bodies are accepted: 5.0 for an integer, and list entries of unknown types,
which newer clients send. A struct with ``known_kinds`` is such an entry: if its ``type`` is
unknown, only the type is decoded, since the other fields may have other types there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from ..types.fields import settle
from .errors import bad_json

T = TypeVar("T", bound=Struct)


def decoder(body_type: type[T]) -> Callable[[bytes], T]:
    """Return a function that decodes and checks a body of this type.

    It calls the method ``complete`` of the body, if there is one. It raises `ApiError` 400 for an
    invalid body, and `InvalidRequest` for a refused field.
    """
    decode = msgspec.json.Decoder(body_type).decode
    complete = getattr(body_type, "complete", None)

    def checked(data: bytes) -> T:
        try:
            data.decode()  # msgspec does not check the UTF-8 of fields that it skips.
            body = decode(data)
        except msgspec.ValidationError as error:
            body = _decode_mended(data, body_type, error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise bad_json(error) from None
        settle(body)
        if complete is not None:
            complete(body)
        return body

    return checked


def _decode_mended(data: bytes, body_type: type[T], error: msgspec.ValidationError) -> T:
    """Decode a body after `_mended` has converted it. Raises `ApiError` 400 if it is invalid.

    It runs only after the fast decoder has failed, since few bodies need to be converted.
    """
    try:
        plain = msgspec.json.decode(data)
    except msgspec.MsgspecError:  # a number is out of range; ``error`` names its path
        raise bad_json(error) from None
    try:
        value = _mended(plain, _type_info(body_type))
        return msgspec.json.decode(msgspec.json.encode(value), type=body_type)
    except msgspec.ValidationError as fault:
        raise bad_json(fault) from None
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        raise bad_json(error) from None


_type_info = cache(inspect.type_info)


def _mended(value: Any, kind: inspect.Type) -> Any:  # noqa: ANN401 - JSON
    """Return the value with whole floats as integers, and entries of unknown types reduced to
    their type.
    """
    match kind:
        case inspect.IntType():
            is_whole = isinstance(value, float) and value.is_integer()
            return int(value) if is_whole else value
        case inspect.Metadata():
            return _mended(value, kind.type)
        case inspect.UnionType(types=types):
            if not any(isinstance(_bare(each), inspect.FloatType) for each in types):
                for each in types:
                    value = _mended(value, each)
        case inspect.StructType(cls=struct, fields=fields) if isinstance(value, dict):
            if is_unknown(value, struct):
                return {"type": value["type"]}
            kinds = {each.encode_name: each.type for each in fields}
            return {k: _mended(v, kinds[k]) if k in kinds else v for k, v in value.items()}
        case inspect.ListType(item_type=item) if isinstance(value, list):
            return [_mended(each, item) for each in value]
        case inspect.DictType(value_type=item) if isinstance(value, dict):
            return {name: _mended(each, item) for name, each in value.items()}
    return value


def is_unknown(value: Mapping[str, Any], struct: type[Struct]) -> bool:
    """Whether the value is an entry whose type is not among the ``known_kinds`` of its struct."""
    known, kind = getattr(struct, "known_kinds", None), value.get("type")
    return known is not None and isinstance(kind, str) and kind not in known


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind
