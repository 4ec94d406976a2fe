"""What the torch backend asks of oneDNN, which computes torch's linear layers on x86 CPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

from ..base import Exactness
from ..native.build import cpu_flags

logger = logging.getLogger(__name__)

SETTING = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's variable for the newest instruction set it may use; read once, at its first call."""

WITHOUT_AMX = "AVX512_CORE_BF16"


def keep_rows_exact(
    exact: Exactness,
    flags: frozenset[str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> bool:
    """Forbid oneDNN the AMX instructions where exact rows are asked for; whether that was done.

    With AMX a row's bits change with the number of rows beside it (measured in bfloat16). ``flags``
    are the CPU's, by default this one's. A value that is set already stays. It takes effect only
    before oneDNN's first call in this process.
    """
    flags = cpu_flags() if flags is None else flags
    environ = os.environ if environ is None else environ
    if exact == "off" or "amx_bf16" not in flags or SETTING in environ:
        return False
    environ[SETTING] = WITHOUT_AMX
    logger.info(
        "torch's linear layers do without AMX (%s=%s), so that a row has the same bits in every"
        " batch; --exact off allows it",
        SETTING,
        WITHOUT_AMX,
    )
    return True
