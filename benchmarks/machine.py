"""What all benchmarks need: a parser of flags, and a description of the machine, printed with the results."""

import argparse
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help begins with a benchmark's docstring, with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def describe_machine() -> str:
    """Returns processor or GPU, cores, versions and commit, in one line."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return (
        f"{device}, {os.cpu_count()} cores, torch {torch.__version__}, deepspeed {version('deepspeed')}, "
        f"commit {_commit()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")


def _commit() -> str:
    root = Path(__file__).resolve().parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"
