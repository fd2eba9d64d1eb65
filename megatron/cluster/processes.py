"""Starts the processes of a tool, connects the processes of a run, and creates their default process group.

The device is the one that DeepSpeed's accelerator selects.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.child_processes import end_with_parent, python_path
from megatron.cluster.devices import check_gpus, choose_device, device_id, set_max_connections
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.exit_status import USER_ERROR_EXIT_CODE, is_own_error, sentence_of
from megatron.cluster.launch import temporary_environment
from megatron.cluster.rendezvous import Address, connect_processes
from megatron.config import Config, LoggingConfig, ParallelConfig
from megatron.errors import UserError, print_error

# DeepSpeed logs this line in every process without a GPU. It is suppressed, because the run report names the
# device.
_ACCELERATOR_NOTICE = "Setting accelerator to CPU"

# Timeout of collectives. It is long because ranks wait for a rank that builds index files or writes a
# checkpoint. The watchdog detects hangs.
_MAX_WAIT = timedelta(hours=2)
# After rank 0 has ended, the other ranks must end within this time.
_GRACE_S = 30.0
# Rank 0 prints a user's mistake that another rank has reported within this time.
_REASON_S = 5.0
# The exit of a rank is noticed within this time after rank 0 has lost the connection to the rank.
_LOST_RANK_S = 2 * _REASON_S
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")


def is_main_process() -> bool:
    """Returns whether this is global rank 0 according to the launcher's variables. Needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def configure_logging(logging_config: LoggingConfig) -> None:
    """Applies --log-level (on global rank 0) and --log-level-replica (on other ranks). Must be called before
    the import of DeepSpeed, which logs."""
    name = logging_config.log_level if is_main_process() else logging_config.log_level_replica
    level = getattr(logging, name.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno >= level and _ACCELERATOR_NOTICE not in record.getMessage()

    # DeepSpeed gathers activations with a function that PyTorch has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed_logger = logging.getLogger("DeepSpeed")
    deepspeed_logger.addFilter(wanted)
    if level < logging.WARNING:
        deepspeed_logger.setLevel(level)


def connect(config: Config) -> dist.Store:
    """Selects the device, waits until all processes of the run have connected, and returns their store.

    Reads the launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). A process that
    was started without a launcher has world size 1. Raises the errors of `rendezvous.connect_processes`, and
    UserError for GPUs that cannot be used, and for a backend that the device does not support.
    """
    from deepspeed.accelerator import get_accelerator

    check_gpus()
    accelerator = get_accelerator()
    _check_backend(config.parallel, on_cpu=accelerator.device_name() == "cpu")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", str(config.parallel.local_rank or 0))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    address = Address.from_environment()
    device = choose_device(max(accelerator.device_count(), 1))
    store = connect_processes(address, config, device_id(accelerator, device))
    # NCCL exchanges its ids through the store, for which a rank may be as late as for a collective.
    store.set_timeout(_MAX_WAIT)
    return store


def _check_backend(parallel: ParallelConfig, on_cpu: bool) -> None:
    if parallel.distributed_backend == "nccl" and on_cpu:
        raise UserError(
            "--distributed-backend nccl needs GPUs and this machine has none: remove the flag, or set gloo"
        )
    if parallel.distributed_backend == "gloo" and not on_cpu and parallel.pipeline_model_parallel_size > 1:
        raise UserError(
            "--distributed-backend gloo cannot send tensors of a GPU to another pipeline stage: remove the "
            "flag, or set --pipeline-model-parallel-size 1"
        )


def init_distributed(config: Config, store: dist.Store | None = None) -> int:
    """Creates the default process group and returns the global rank of this process. store: the store that
    `connect` returned; None to connect first."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # The import is late, because DeepSpeed takes seconds to import.
    from megatron.engine.workarounds import disable_shm_comm_jit, set_default_group_timeout

    store = connect(config) if store is None else store
    disable_shm_comm_jit()
    set_default_group_timeout(_MAX_WAIT)
    set_max_connections(config.parallel)  # pretrain_gpt.py has already called it, benchmarks have not
    use_exact_products()
    if config.training.deterministic_mode:
        _use_deterministic_algorithms()
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    backend = config.parallel.distributed_backend or accelerator.communication_backend_name()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_MAX_WAIT)
    # DeepSpeed uses the existing process group.
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=_MAX_WAIT
    )
    return rank


def use_device_alone() -> None:
    """Prepares the device for a program of a single process. Raises UserError for GPUs that cannot be
    used."""
    check_gpus()
    use_exact_products()


def use_exact_products() -> None:
    """Makes fp32 products exact to fp32 (no TF32), and makes cuBLAS add the parts of 16-bit products
    (split-K) in fp32.

    How a product is split depends on its shape, and so on the layout. An imported library may have allowed
    TF32.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _use_deterministic_algorithms() -> None:
    """Applies --deterministic-mode to PyTorch. An operation without a deterministic implementation then
    raises RuntimeError. The flash and memory-efficient backward passes of `scaled_dot_product_attention` add
    in a fixed order, and cuDNN's attention is not selected."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Filling new tensors with NaN costs time, and no operation reads a tensor before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def device_notes(config: Config) -> list[str]:
    """Returns a sentence for each flag that has no effect on this device, and for an environment variable
    that slows the device."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return [note] if (note := set_max_connections(config.parallel)) else []
    flags = {
        "--cpu-offload": config.parallel.cpu_offload,
        "--checkpoint-in-cpu": config.training.checkpoint_in_cpu,
    }
    reason = "has no effect: the model computes on the CPU, in host memory"
    return [f"{flag} {reason}" for flag, given in flags.items() if given]


def destroy_distributed() -> None:
    """Destroys the process groups, after a barrier."""
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextmanager
def start_other_ranks(program: Sequence[str], world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of `world_size` processes in the block, and starts the other ranks with
    `python *program`.

    Sets the environment variables that a launcher would set. The processes share the cores of this host. If
    another rank fails, this process ends with the exit code of that rank. If this process ends, it ends the
    other ranks.
    """
    variables = {
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    if "OMP_NUM_THREADS" not in os.environ:
        count = max(len(os.sched_getaffinity(0)) // world_size, 1)  # a job may have only some of the cores
        variables["OMP_NUM_THREADS"] = str(count)
        torch.set_num_threads(count)  # this process has read the variable already
    # The children do not inherit the variables that a launcher or srun has set for this process alone.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    variables["PYTHONPATH"] = python_path(os.environ)
    with ExitStack() as stack:
        stack.enter_context(temporary_environment({**variables, "RANK": "0", "LOCAL_RANK": "0"}))
        others = [
            subprocess.Popen(
                [sys.executable, *program],
                env={**inherited, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,
            )
            for rank in range(1, world_size)
        ]
        ended = threading.Event()
        for rank, process in enumerate(others, 1):
            threading.Thread(target=_follow, args=(rank, process, ended, others), daemon=True).start()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, UserError | RunStopped) and not is_own_error(sentence_of(error)):
                time.sleep(_LOST_RANK_S)  # `_follow` names the rank that is lost, and ends this process
            ended.set()
            for process in others:
                process.kill()
            raise
        for process in others:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                ended.set()
                process.kill()


def _follow(
    rank: int, process: subprocess.Popen[bytes], ended: threading.Event, others: list[subprocess.Popen[bytes]]
) -> None:
    """Waits for the end of another rank, and ends all processes if this rank has failed, because rank 0 would
    wait for it. If the failed rank has reported a user's mistake to rank 0, rank 0 first gets time to print
    the mistake and to exit."""
    code = process.wait()
    if code == 0 or ended.wait(_REASON_S if code == USER_ERROR_EXIT_CODE else 0.0):
        return
    ended.set()
    print_error(f"error: rank {rank} has ended with exit code {code}")
    for other in others:
        other.kill()
    os._exit(code if code > 0 else 128 - code)


def _end_with_parent() -> None:
    """Makes this child process end with its parent. After Ctrl-C the parent ends the child; if the parent was
    killed, the kernel ends the child (on Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
