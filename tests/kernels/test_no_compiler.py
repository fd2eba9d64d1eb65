"""Without a C compiler for Triton, the first kernel causes one sentence instead of a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.cluster.exit_codes import SharedUserError
from megatron.cluster.preflight import check_kernels
from tests.support import HANG_TIMEOUT_S
from tests.support.pool import run_world

# The simulated device is a CPU with Triton's driver for NVIDIA, which compiles its library before it looks
# for a GPU. The test answers only the search for CUDA's library.
LAUNCH = """
from triton.backends import backends
from triton.runtime import driver


class Driver:
    def __getattr__(self, name):
        return getattr(backends["nvidia"].driver(), name)


driver._default = Driver()
from megatron.kernels.selection import _launch_failure
print(_launch_failure("cpu"))
"""


def test_no_compiler_is_named_with_what_to_install(tmp_path):
    """The launch is real up to the compilation of Triton's library."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    env |= {"PATH": "", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", LAUNCH], env=env, capture_output=True, text=True, timeout=HANG_TIMEOUT_S
    )
    sentence = found.stdout.splitlines()[-1]
    assert sentence.startswith("triton cannot launch a kernel (RuntimeError: Failed to find C compiler"), (
        found
    )
    assert "Python's header files" in sentence and "TRITON_CACHE_DIR" in sentence


def outcome(failing_rank, required, fp8=False):
    """Returns the notes or the error of `check_kernels`, and the variable that turns kernels off. Runs on a
    device 'sim' on which one rank cannot launch kernels."""

    def reason(device_type):
        assert device_type == "sim"
        return "no compiler" if dist.get_rank() == failing_rank else None

    with (
        patch.dict(os.environ),
        patch.object(get_accelerator(), "device_name", lambda: "sim"),
        patch("megatron.cluster.preflight.reason_against_kernels", reason),
    ):
        try:
            found = check_kernels(required, fp8)
        except SharedUserError as error:
            found = str(error)
        return found, os.environ.get("MEGATRON_KERNELS")


def test_fp8_is_not_emulated_on_a_gpu():
    for found, _ in run_world(2, outcome, 1, False, True):
        assert "FP8 needs the Triton kernels: rank 1 on " in found and "remove --fp8-format" in found


def test_no_compiler_on_one_node_means_no_kernels_on_all():
    for found, setting in run_world(2, outcome, 1, False):
        assert len(found) == 1 and "rank 1 on " in found[0] and found[0].count("no compiler") == 1
        assert setting == "pytorch"
    assert run_world(2, outcome, None, True) == [([], None)] * 2


def test_no_compiler_with_require_kernels_is_an_error_on_all_ranks():
    first, second = run_world(2, outcome, 0, True)
    assert first == second
    assert first[0].startswith("--require-kernels: rank 0 on ") and first[0].endswith(": no compiler")
