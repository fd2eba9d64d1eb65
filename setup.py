"""Installs the package `megatron`. Versions that are tested together stand in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

source = Path("megatron/__init__.py").read_text()
version = next(line.split('"')[1] for line in source.splitlines() if line.startswith("__version__"))

setup(
    name="megatron-gpt-pretraining",
    version=version,
    description="GPT pretraining, tensor, pipeline and data parallel: the same numbers on every layout",
    python_requires=">=3.10",  # 3.11 is tested; on 3.10 constraints.txt leaves numpy and matplotlib free
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_dir={"": "."},  # an editable installation also finds `benchmarks` and `tests`
    package_data={
        "megatron.planner": ["assets/*"],
        "megatron.training.harness": ["*.yaml"],
    },
    install_requires=[
        # The lowest version whose source was read: GPUs need aten::addmm.dtype_out for CUDA, and a fused
        # AdamW for buffers above 2^31 elements.
        "torch>=2.13",
        # megatron/engine/workarounds.py overrides private methods: newer versions are to be tested first.
        "deepspeed>=0.19.8,<0.20",
        "matplotlib",
        "numpy",
        "regex",
        "safetensors",
        "sentencepiece",
        "tensorboard",
        "tokenizers",
        "tqdm",
        "transformers",
    ],
    extras_require={
        # Kernels compiled at run time, for GPUs without apex. CUDA's torch brings triton along on Linux; this
        # asks for it where torch came without, and triton has no packages for other systems.
        "gpu": ["triton; sys_platform == 'linux'"],
        # 8-bit Adam. NVIDIA's apex is not on the package index: install it from its own repository.
        "bitsandbytes": ["bitsandbytes>=0.50"],
        # tools/evaluate.py --tasks, --eval-harness-tasks: EleutherAI's lm-evaluation-harness.
        "eval": ["lm_eval>=0.4.13"],
        # Tests run the kernels in triton's interpreter and compile them for GPUs; neither needs a GPU.
        # lm_eval's own models, which tests compare with, need accelerate.
        "dev": [
            "accelerate",
            "argcomplete",
            "hypothesis",
            "mypy",
            "psutil",
            "pytest",
            "pytest-xdist",
            "ruff",
            "selenium",
            "triton; sys_platform == 'linux'",
        ],
    },
)
