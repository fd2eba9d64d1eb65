"""Converts a checkpoint to a universal checkpoint, and kills itself while it writes a block of parameters."""

import itertools
import os
import signal
import sys

from megatron.checkpoint.formats.native import NativeReader
from megatron.commands.ds_to_universal import main

# Worker threads share the counter, and each number is returned once: exactly one thread sees the last number.
blocks, numbers, last = NativeReader.read_blocks, itertools.count(1), int(sys.argv.pop())


def then_kill(*args):
    for block in blocks(*args):
        is_last = next(numbers) == last
        yield block[: len(block) // 2] if is_last else block
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)


NativeReader.read_blocks = then_kill
main()
