"""Marks of fields in structs that contain their own kind."""

from __future__ import annotations

from typing import Annotated

import pytest
from msgspec import Struct

from foretoken.api.types.fields import Refused, settle
from foretoken.core.errors import InvalidRequest


class Plain(Struct):
    inner: list[Plain] | None = None


class Marked(Struct):
    inner: list[Marked] | None = None
    odd: Annotated[int | None, Refused(0)] = None


class Body(Struct):
    plain: Plain | None = None
    marked: Marked | None = None


def test_a_struct_may_contain_its_own_kind():
    settle(Body(plain=Plain(inner=[Plain()]), marked=Marked(inner=[Marked(odd=0)])))
    with pytest.raises(InvalidRequest) as caught:
        settle(Body(marked=Marked(inner=[Marked(), Marked(inner=[Marked(odd=1)])])))
    assert caught.value.param == "marked.inner[1].inner[0].odd"
