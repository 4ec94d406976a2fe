"""Whether Triton can launch anything here: it needs a C compiler and Python's headers to do so."""

from __future__ import annotations

from triton.runtime import driver


def why_not() -> str:
    """What keeps it from the GPU, or nothing. Compiles a little C the first time."""
    try:
        driver.active.get_current_target()
    except Exception as error:  # whatever its driver, the compiler or the linker says
        told = str(error) or type(error).__name__
        return f"Triton cannot use the GPU: {told.splitlines()[0]}"
    return ""
