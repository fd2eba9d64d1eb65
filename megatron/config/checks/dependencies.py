"""Checks that optional packages and programs are installed, skipped in a dry run."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from megatron.config.config import Config
from megatron.config.errors import ConfigError


def check_dependencies(config: Config) -> None:
    """Raise ConfigError if a package or program that the flags need is not installed."""
    if config.optimizer.use_apex:
        _check_apex()
    if config.optimizer.use_bnb_optimizer:
        _check_bitsandbytes()
    if config.training.compile:
        _check_compiler()


def _check_apex() -> None:
    spec = find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not any(
        (folder / "optimizers").is_dir() and (folder / "normalization").is_dir() for folder in folders
    ):
        found = "another package with that name is" if spec else "it is not"
        raise ConfigError(
            f"--use-apex needs NVIDIA apex, and {found} installed: install NVIDIA apex, or remove the flag"
        )


def _check_bitsandbytes() -> None:
    # Not imported: that takes seconds.
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--use-bnb-optimizer needs bitsandbytes, which is not installed: pip install bitsandbytes, or "
            "remove the flag"
        )


def _check_compiler() -> None:
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(which(name) for name in compilers):
        raise ConfigError(
            f"--compile needs a C++ compiler: none of {', '.join(compilers)} is installed: install g++, "
            "or remove the flag"
        )
