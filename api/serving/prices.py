"""Prices of tokens (``--prices``), and the cost of a request in ``usage.cost``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from ...core.config import parse_object
from ...core.errors import InvalidRequest, shown
from ...core.interface.request import Usage

PER = 1_000_000  # number of tokens that a price buys
MAX_PRICE = 1e9  # larger prices would make costs infinite
DIGITS = 12  # decimal places to which a cost is rounded
NAMES = ("input", "cached", "write", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per million tokens, in any currency.

    - ``input``: prompt tokens neither read from nor written to the prefix cache.
    - ``cached``: prompt tokens read from the prefix cache.
    - ``write``: prompt tokens that the request was the first to cache.
    - ``output``: generated tokens.
    """

    input: float
    cached: float
    write: float
    output: float

    @classmethod
    def read(cls, given: str | Mapping[str, float]) -> Prices:
        """Return the prices in a table or in the text of a JSON object.

        ``cached`` and ``write`` default to the price of input.

        Raises `InvalidRequest`, which names the entry, if ``input`` or ``output`` is missing, for
        unknown names, and for values that are no numbers from 0 to `MAX_PRICE`.
        """
        table = parse_object("prices", given)
        for name, price in table.items():
            if name not in NAMES:
                raise _wrong(f"prices: unknown entry {name!r} (known: {', '.join(NAMES)})")
            is_number = isinstance(price, int | float) and not isinstance(price, bool)
            if not is_number or not 0 <= price <= MAX_PRICE:
                limits = f"a number from 0 to {MAX_PRICE:.0f}"
                raise _wrong(f"prices: {name} must be {limits}, not {shown(price)}")
        for name in ("input", "output"):
            if name not in table:
                raise _wrong(f"prices: {name} is missing")
        default = table["input"]
        return cls(
            input=default,
            cached=table.get("cached", default),
            write=table.get("write", default),
            output=table["output"],
        )

    def cost(self, usage: Usage, num_written: int | None = None) -> float:
        """Return the cost of a request.

        ``num_written``: number of tokens written to the cache, if the API counts them in its own
        way; otherwise the engine's count applies.
        """
        written = usage.cache_write_tokens if num_written is None else num_written
        plain = usage.prompt_tokens - usage.cached_tokens - written
        total = (
            plain * self.input
            + usage.cached_tokens * self.cached
            + written * self.write
            + usage.completion_tokens * self.output
        )
        return round(total / PER, DIGITS)


def total_cost(*costs: float | UnsetType) -> float | UnsetType:
    """Return the sum of the costs of requests; UNSET without prices."""
    known = [each for each in costs if not isinstance(each, UnsetType)]
    return round(sum(known), DIGITS) if len(known) == len(costs) else UNSET


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="prices")
