"""Forks the tasks of a conversion, as srun starts them.

A victim is a task that kills itself after a given number of parameter blocks. Then the other tasks are
killed, too, as with srun --kill-on-bad-exit, or they take over the victim's parameters. Prints the exit codes
of the tasks to stderr.
"""

import itertools
import json
import os
import signal
import sys

from megatron.checkpoint.formats.native import NativeReader
from megatron.commands import convert_checkpoint, ds_to_universal

num_tasks, victims, ends_others, late = json.loads(sys.argv.pop())
blocks, numbers = NativeReader.read_blocks, itertools.count(1)


def run(rank):
    os.environ |= {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(num_tasks), "SLURM_PROCID": str(rank)}
    last = victims.get(str(rank))

    def then_kill(*args):
        for block in blocks(*args):
            if next(numbers) == last:
                yield block[: len(block) // 2]
                os.kill(os.getpid(), signal.SIGKILL)
            yield block

    NativeReader.read_blocks = then_kill
    command = convert_checkpoint if "--from" in sys.argv else ds_to_universal
    command.main()


tasks = {}
for rank in range(num_tasks - late):
    if (pid := os.fork()) == 0:
        code = 1
        try:
            run(rank)
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            os._exit(code)
    tasks[pid] = rank
codes = {}
while tasks:
    pid, status = os.wait()
    codes[tasks.pop(pid)] = os.waitstatus_to_exitcode(status)
    if status and ends_others:
        for other in tasks:
            os.kill(other, signal.SIGKILL)
if late:
    run(num_tasks - 1)
print(json.dumps(codes), file=sys.stderr)
