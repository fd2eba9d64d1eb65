"""Installs the package `megatron`. Versions that are tested together stand in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

version_line = next(
    line for line in Path("megatron/__init__.py").read_text().splitlines() if line.startswith("__version__")
)

setup(
    name="megatron-gpt-pretraining",
    version=version_line.split('"')[1],
    description="GPT pretraining with tensor, pipeline and data parallelism: the same numbers on every layout",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron", "megatron.*"]),
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19.8",
        "matplotlib",
        "numpy",
        "regex",
        "sentencepiece",
        "tensorboard",
        "tokenizers",
        "tqdm",
        "transformers",
    ],
    extras_require={
        # 8-bit Adam. NVIDIA's apex is not on the package index: install it from its own repository.
        "bitsandbytes": ["bitsandbytes>=0.50"],
        "dev": ["hypothesis", "mypy", "pytest", "ruff"],
    },
)
