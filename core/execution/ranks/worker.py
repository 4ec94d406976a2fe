"""Process of a tensor-parallel rank other than rank 0, which executes the messages of rank 0.

Rank 0 starts ``python -m foretoken.core.execution.ranks.worker FD`` (`ranks.py`) and writes to the
socket ``FD``: first a job in JSON, then messages of 64-bit integers, each a kind and its arguments.
Only rank 0 samples and drafts. A closed socket is the order to stop.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ForetokenError
from ...interface.kv_codec import KvDtype
from ...model.decoder import OwnDecoder
from ...model.loader import load_decoder
from ...ops.batch import RaggedBatch
from ...ops.kv_pool import KVPool
from ...ops.machine.host_memory import map_shared, map_zeros, shared_zeros
from ...ops.parallel import GlooComm

logger = logging.getLogger(__name__)
Ints: TypeAlias = NDArray[np.int64]
PASS, COPY, POOL = 1, 2, 3
HERE, LOADED = b"here", b"loaded"
_KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
_NUM_FIELDS = 7  # number of integers before the arrays in the message of a pass


def pass_message(batch: RaggedBatch) -> Ints:
    """Encode a batch for another rank, without `logit_rows`: only rank 0 computes logits."""
    rows = (batch.token_ids, batch.positions, batch.slots)
    arrays = (
        *(each.numpy() for each in rows),
        batch.starts,
        batch.lens,
        batch.first_rows,
        batch.page_counts,
        batch.tail_lens,
        batch.pages,
        batch.tails,
    )
    sizes = batch.num_rows, len(batch.starts), len(batch.pages), len(batch.tails)
    fields = np.array([PASS, batch.page_size, batch.rope_until, *sizes], dtype=np.int64)
    return np.concatenate((fields, *arrays))


def batch_of(message: Ints) -> RaggedBatch:
    """Decode the batch of a `pass_message`; none of its rows needs logits."""
    _, page_size, rope_until, num_rows, num_segments, num_pages, num_tails = (
        int(field) for field in message[:_NUM_FIELDS]
    )
    counts = [num_rows] * 3 + [num_segments] * 5 + [num_pages, num_tails]
    token_ids, positions, slots, *parts = np.split(message[_NUM_FIELDS:], np.cumsum(counts)[:-1])
    starts, lens, first_rows, page_counts, tail_lens, pages, tails = parts
    return RaggedBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        num_logits=0,
        page_size=page_size,
        starts=starts,
        lens=lens,
        first_rows=first_rows,
        page_counts=page_counts,
        pages=pages,
        tail_lens=tail_lens,
        tails=tails,
        rope_until=rope_until,
    )


def copy_message(sources: Sequence[int], targets: Sequence[int]) -> Ints:
    """Encode copies of the pool's slots: slot ``sources[i]`` is copied to slot ``targets[i]``."""
    return np.array([COPY, *sources, *targets], dtype=np.int64)


def pool_message(
    num_pages: int, page_size: int, kv_dtype: KvDtype, *, is_shared: bool = False
) -> Ints:
    """Encode the order to make a pool, which replaces any previous pool.

    ``is_shared``: rank 0 maps the memory of the pool, too; `send_shared_pool` sends the message.
    """
    fields = [POOL, num_pages, page_size, _KV_DTYPES.index(kv_dtype), is_shared]
    return np.array(fields, dtype=np.int64)


def send_shared_pool(channel: Connection, message: Ints, num_bytes: int) -> Tensor:
    """Send a `pool_message` and a handle of shared memory for the pool; return that memory.

    The memory has ``num_bytes`` bytes. Raises OSError.
    """
    file = shared_zeros(num_bytes)
    try:
        channel.send_bytes(message.tobytes())
        send_handle(channel, file, 0)
    except BaseException:
        os.close(file)
        raise
    return map_shared(file, num_bytes)


@torch.inference_mode()
def serve_rank(channel: Connection, decoder: OwnDecoder) -> None:
    """Execute messages until rank 0 closes ``channel``. Raises the errors of a pass."""
    pool: KVPool | None = None
    while True:
        try:
            # The copy makes the array writable: torch must not wrap read-only memory.
            message = np.frombuffer(bytearray(channel.recv_bytes()), dtype=np.int64)
        except (EOFError, OSError):
            return
        kind = message[0]
        if kind == POOL:
            num_pages, page_size, kv_dtype, is_shared = (int(each) for each in message[1:])
            pool = None  # The old pool is freed before the new one is allocated.
            pool = decoder.pool_over(
                partial(map_shared, recv_handle(channel)) if is_shared else map_zeros,
                num_pages,
                page_size=page_size,
                kv_dtype=_KV_DTYPES[kv_dtype],
            )
            continue
        assert pool is not None, "rank 0 must order a pool before any other work"
        if kind == COPY:
            sources, targets = message[1:].reshape(2, -1).tolist()
            pool.copy_slots(sources, targets)
        else:
            decoder.forward(batch_of(message), pool)


def _end_with(channel: Connection) -> None:
    """Wait until rank 0 closes ``channel``, then end the process.

    The main thread cannot do this: a call that waits for rank 0 there may never return.
    """
    waiting = select.poll()
    waiting.register(channel.fileno(), 0)  # An empty mask waits only for a hang-up.
    waiting.poll()
    os._exit(0)


def _run(channel: Connection) -> None:
    job: dict[str, Any] = json.loads(channel.recv_bytes())
    channel.send_bytes(HERE)
    comm = GlooComm(Path(job["folder"]), job["rank"], job["size"])
    decoder = load_decoder(job["path"], comm=comm, **job["options"])
    assert isinstance(decoder, OwnDecoder), "only foretoken's own decoder can be split over ranks"
    decoder.ops.set_threads(job["threads"])
    if decoder.ops.has_own_threads:
        torch.set_num_threads(1)  # Rank 0 limits torch's threads in the same way.
    channel.send_bytes(LOADED)
    serve_rank(channel, decoder)


def main() -> None:
    """Serve rank 0 on the socket that the first argument names, then end the process."""
    # The whole process group gets these signals, and rank 0 may still complete running requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    code = 1
    try:
        channel = Connection(int(sys.argv[1]))
        threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
        _run(channel)
        code = 0
    except ForetokenError as failure:
        logger.error("a tensor-parallel rank exits: %s", failure)
    except (EOFError, OSError):  # Rank 0 has exited.
        pass
    except BaseException:
        logger.exception("a tensor-parallel rank failed")
    logging.shutdown()
    os._exit(code)  # Other ranks would have to wait for the interpreter's shutdown.


if __name__ == "__main__":
    main()
