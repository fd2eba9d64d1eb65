"""Joining the processes of a run into one world, on whatever device DeepSpeed's accelerator finds."""

import logging
import os
import socket
import warnings
from datetime import timedelta

import torch.distributed as dist

from megatron.cluster.rendezvous import Address, connect_processes
from megatron.config import Config, ConfigError, LoggingConfig

# Said once per process at import on a machine without GPU; the start banner says which device is used.
_ACCELERATOR_NOTICE = "Setting accelerator to CPU"


def is_main_process() -> bool:
    """Whether this is global rank 0, by the launcher's variables: the processes need not have met."""
    return os.environ.get("RANK", "0") == "0"


def configure_logging(logging_config: LoggingConfig) -> None:
    """Applies --log-level (global rank 0) and --log-level-replica (others). To be called before DeepSpeed is
    imported, which logs while it is imported."""
    name = logging_config.log_level if is_main_process() else logging_config.log_level_replica
    level = getattr(logging, name.upper())
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno >= level and _ACCELERATOR_NOTICE not in record.getMessage()

    # DeepSpeed gathers activations over tensor ranks through a name that PyTorch is about to change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed_logger = logging.getLogger("DeepSpeed")
    deepspeed_logger.addFilter(wanted)
    if level < logging.WARNING:
        deepspeed_logger.setLevel(level)


def init_distributed(config: Config) -> int:
    """Makes the default process group; returns this process's global rank.

    The launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) say who is who; a
    process started without a launcher is a world of one. Raises ConfigError for a backend that the device
    lacks, and what `rendezvous.connect_processes` raises.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from megatron.engine.workarounds import disable_shm_comm_jit

    disable_shm_comm_jit()
    backend = config.parallel.distributed_backend or get_accelerator().communication_backend_name()
    if backend == "nccl" and get_accelerator().device_name() == "cpu":
        raise ConfigError(
            "--distributed-backend nccl needs GPUs and this machine has none: leave the flag out, or say gloo"
        )
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", str(config.parallel.local_rank or 0))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    address = Address.from_environment()
    store = connect_processes(address, config)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    # Some wait long for one that builds index files; a hang is the watchdog's to find.
    longest = timedelta(hours=2)
    dist.init_process_group(
        backend, store=store, rank=address.rank, world_size=address.world_size, timeout=longest
    )
    # DeepSpeed takes over the process group that it finds.
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=longest)
    return address.rank


def device_notes(config: Config) -> list[str]:
    """What to say of flags that this device leaves without effect, one sentence each."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return []
    flags = {
        "--cpu-offload": config.parallel.cpu_offload,
        "--checkpoint-in-cpu": config.training.checkpoint_in_cpu,
    }
    reason = "has nothing to move: the model computes on the CPU, in the host's memory"
    return [f"{flag} {reason}" for flag, given in flags.items() if given]


def destroy_distributed() -> None:
    """Ends the process group, after everyone has arrived."""
    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
