"""Processes of this node: their limits, whether they run, what they use, and a temporary folder that the
processes of one launch share."""

from __future__ import annotations

import os
import resource
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron.child_processes import process_fields, start_of
from megatron.cluster.launch import has_torch_launcher
from megatron.errors import UserError

# A process of a run opens about 60 files and sockets; with many ranks on its node, some hundreds.
LEAST_OPEN_FILES = 256
# Importing torch and DeepSpeed takes 0.8 GiB; a small model trains on a CPU with 2.5 GB.
LEAST_ADDRESS_SPACE_BYTES = 2 << 30


_LAUNCHER_VARIABLES = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")


def check_limits() -> None:
    """Raises UserError if ulimit allows this process too few open files, or too little memory, for a run. A
    soft limit of open files that is too low is set to the hard limit. Must be called first: libraries report
    an exhausted limit as an unrelated error, or wait forever."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < LEAST_OPEN_FILES:
        raise UserError(
            f"ulimit -Hn {hard}: a process may open {hard} files. Expected at least {LEAST_OPEN_FILES}: "
            "start the run in a shell with a higher limit"
        )
    if 0 <= limit < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= space < LEAST_ADDRESS_SPACE_BYTES:
        raise UserError(
            f"ulimit -v {space // 1024}: a process may use {space / 2**30:.1f} GiB of virtual memory. "
            f"Expected at least {LEAST_ADDRESS_SPACE_BYTES / 2**30:.0f} GiB: raise the limit with ulimit -v "
            "unlimited"
        )


def is_running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process_state(pid) not in ("Z", "X")


def find_launcher(env: Mapping[str, str]) -> tuple[int, str] | None:
    """Returns process id and start time of torch's launcher that started this process; None without one, or
    if it is not in this process-id namespace. A wrapper (numactl, a shell) may be between them."""
    if not has_torch_launcher(env):
        return None
    # Unique per process, unlike the run id.
    variable = next((name for name in _LAUNCHER_VARIABLES if env.get(name)), None)
    if variable is None:
        return None
    given, pid = f"{variable}={env[variable]}".encode(), os.getppid()
    while given in _environment_of(pid):
        pid = int(process_fields(pid)[1])
    start = start_of(pid)
    return None if start is None else (pid, start)


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # of another user, or ended
        return []


def process_state(pid: int) -> str:
    """Returns the state of a process in /proc: 'R', 'S', 'T' (stopped), 'Z' (zombie), ...; '' if unknown."""
    return next(iter(process_fields(pid)), "")


def io_bytes() -> int:
    """Returns the bytes that this process has read and written, in files and sockets; 0 if unknown."""
    try:
        with open("/proc/self/io") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except OSError:
        return 0


def status_bytes(field: str) -> int:
    """Returns a size in /proc/self/status, for example VmRSS or VmHWM, in bytes. Systems without that file
    give only the peak resident memory: macOS in bytes, others in KiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def started_by_living_launcher(folder: Path) -> bool:
    """Returns whether the launcher or shell of the ranks of a `shared_temporary_folder` still runs."""
    pid, _, rest = folder.name.partition("-")
    return pid.isdigit() and start_of(int(pid)) == rest.partition("-")[0]


def earlier_folders(folder: Path) -> list[Path]:
    """Returns the shared folders of other launches on this node, by processes that this process can see."""
    suffix = folder.name[folder.name.rindex("-") :]
    return [path for path in folder.parent.iterdir() if path.name.endswith(suffix) and path != folder]


def shared_temporary_folder(env: Mapping[str, str], node: str) -> str | None:
    """Returns a folder that the ranks of one launch share on this node; None if it cannot be created."""
    base = private_temporary_folder()
    return None if base is None else str(base / f"{_start_key(env)}-{_pid_namespace()}@{node}")


def private_temporary_folder() -> Path | None:
    """Returns this user's folder among the temporary files of this node, which other users cannot write to;
    None if it cannot be created."""
    base = Path(tempfile.gettempdir()) / f"megatron-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return None
    return base


def _start_key(env: Mapping[str, str]) -> str:
    """Returns a name that all processes of one launch on this node share; other launches have other names."""
    if "SLURM_STEP_ID" in env and not has_torch_launcher(env):
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "-".join(["slurm", *(env.get(name, "0") for name in names)])
    # The launcher, or the session of the shell: each process may have a parent of its own (timeout, numactl).
    # Process ids are reused, so the start time is a part of the name.
    starter, start = find_launcher(env) or (os.getsid(0), start_of(os.getsid(0)) or "0")
    port, restart = env.get("MASTER_PORT", "0"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{starter}-{start}-{port}-{restart}"


def _pid_namespace() -> str:
    """Returns the id of the process-id namespace: two namespaces must not share reports."""
    try:
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:
        return "0"
