"""The compiled loops of `helpers.c`, for large indices.

The process that builds an index compiles them in a temporary folder, which takes a tenth of a second. Nothing
is installed, no file is shared between processes or versions, and other processes need no compiler. Without a
compiler the callers use numpy, with equal results.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

logger = logging.getLogger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 60


@cache
def compiled() -> ctypes.CDLL | None:
    """Returns the library with the compiled loops; None if they cannot be compiled."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        logger.info("no C compiler (%s): indices are built by numpy", ", ".join(_COMPILERS))
        return None
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "helpers.so"
        # Without this option, fused operations would round differently from Megatron's tables.
        options = ["-O2", "-ffp-contract=off", "-fPIC", "-shared", "-o", str(library), str(source)]
        try:
            subprocess.run(
                [*compiler.split(), *options], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{error}\n{getattr(error, 'stderr', '')}".strip()
            logger.info("%s does not compile %s: indices are built by numpy\n%s", compiler, source, reason)
            return None


def address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Returns the address of a contiguous, aligned array, as an argument of a compiled loop."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError("a compiled loop needs a contiguous, aligned array")
    return ctypes.c_void_p(array.ctypes.data)


def count(value: int) -> ctypes.c_int64:
    """Returns a number as an argument of a compiled loop."""
    return ctypes.c_int64(value)
