"""HeadThreads: attention of an image tower by several threads, each with some of the heads.

Beside the native kernels torch has one thread, because threads of OpenMP spin while they wait. The
threads here sleep. A head's numbers depend on no other head, so its bits are those of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_HEADS = 1  # the dimension


class HeadThreads(TorchFunctionMode):
    """Inside of it `F.scaled_dot_product_attention` takes ``count`` threads, this one included."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._others = ThreadPoolExecutor(
            max(1, count - 1), "foretoken-tower", initializer=torch.set_num_threads, initargs=(1,)
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call ``func``; attention over the heads in parts."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and len(args) == 3 and _is_even(*args, kwargs):
            return self._attention(args, kwargs)
        return func(*args, **kwargs)

    def _attention(self, qkv: Sequence[Tensor], options: Mapping[str, Any]) -> Tensor:
        count = min(self._count, qkv[0].shape[_HEADS])
        parts = list(zip(*(each.tensor_split(count, _HEADS) for each in qkv), strict=True))
        waiting = [self._others.submit(partial(_attend, *part, **options)) for part in parts[1:]]
        first = _attend(*parts[0], **options)
        return torch.cat([first, *(each.result() for each in waiting)], _HEADS)


@torch.inference_mode()  # of each thread
def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    return F.scaled_dot_product_attention(query, key, value, **options)


def _is_even(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether a part of the heads is computed by the same part of all inputs."""
    mask = options.get("attn_mask")
    heads = {each.shape[_HEADS] if each.dim() == 4 else 0 for each in (query, key, value)}
    is_for_all = mask is None or mask.dim() < 3 or mask.shape[-3] == 1
    return is_for_all and len(heads) == 1 and min(heads) > 1
