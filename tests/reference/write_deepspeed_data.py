"""Writes tests/assets/deepspeed_orders.json with the sources of Megatron-DeepSpeed, in this environment:

    git clone https://github.com/bigscience-workshop/Megatron-DeepSpeed bigscience
    git clone https://github.com/deepspeedai/Megatron-DeepSpeed deepspeedai
    tar -xzf tests/assets/core_data.tar.gz
    python tests/reference/write_deepspeed_data.py core_data megatron-deepspeed=bigscience \
        megatron-deepspeed-microsoft=deepspeedai

The modules of the two programs run unchanged (commits 8387ae17 and 4efb479d), with stubs for their imports
from outside `megatron/data`. The file has the digests of their samples in the cases of core_data, and null if
an assertion of the program fails.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist


def stub(name, **attributes):
    module = ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


def load_program(checkout):
    """Makes the modules of a checkout available as `megatron.data`. Returns its gpt_dataset."""
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    of_one = lambda: None  # noqa: E731, the group of all processes
    mpu = stub(
        "megatron.core.mpu", get_data_parallel_group=of_one, get_pipeline_model_parallel_group=of_one,
        get_tensor_model_parallel_group=of_one, get_sequence_parallel_group=of_one,
    )  # fmt: skip
    unset = dict.fromkeys(
        f"train_{name}"
        for name in (
            "data_exact_num_epochs",
            "desc_path",
            "doc_idx_path",
            "sample_idx_path",
            "shuffle_idx_path",
        )
    )
    args = SimpleNamespace(use_dataset_only=False, return_data_index=False, **unset)
    stub("megatron.core", mpu=mpu)
    megatron = stub(
        "megatron", mpu=mpu, print_rank_0=lambda *_: None, is_rank_0=lambda: True, get_args=lambda: args
    )
    megatron.__path__ = [f"{checkout}/megatron"]
    library = f"{tempfile.mkdtemp()}/helpers.so"
    includes = [f"-I{os.path.dirname(torch.__file__)}/include", f"-I{sysconfig.get_paths()['include']}"]
    source = f"{checkout}/megatron/data/helpers.cpp"
    subprocess.run(
        ["g++", "-O3", "-std=c++17", "-shared", "-fPIC", *includes, source, "-o", library], check=True
    )
    gpt_dataset = importlib.import_module("megatron.data.gpt_dataset")
    spec = importlib.util.spec_from_file_location("megatron.data.helpers", library)
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    sys.modules["megatron.data.helpers"] = sys.modules["megatron.data"].helpers = helpers
    return gpt_dataset


def build(program, words, case, seq_length):
    """Returns the data sets of train, valid and test. Without a split they are weighted groups of whole
    prefixes."""
    split, sizes, seed = case["split"], case["sizes"], case["seed"]
    common = ("mmap", split, sizes, seq_length, seed, True)
    if split:
        return program.build_train_valid_test_datasets(words, *common)[:3]
    if hasattr(program, "build_dataset_group"):
        weights, prefixes = words[::2], words[1::2]
        what = prefixes, weights, ["0:1"] * len(prefixes), "mmap", sizes, seq_length, seed, True
        return [program.build_dataset_group(name.upper(), *what, name) for name in ("train", "valid")]
    paths = words if len(words) > 2 else words[1:]
    common = ("mmap", None, [*sizes[:2], 0], seq_length, seed, True)
    return program.build_train_valid_test_datasets(None, *common, paths, paths)[:2]


def digests(datasets, sizes, whole):
    found = []
    for data, size in zip(datasets, sizes, strict=False):
        content = hashlib.sha256()
        for i in range(len(data) if whole else size):
            content.update(np.ascontiguousarray(data[i]["text"], dtype=np.int64).tobytes())
        found.append(content.hexdigest()[:16])
    return found


def main(folder, *programs):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.LongTensor = torch.LongTensor  # for an all-reduce of one number
    np.float = np.float64  # a name of older numpy versions
    with open(f"{folder}/cases.json") as file:
        cases = json.load(file)
    orders = {}
    for argument in programs:
        order, _, checkout = argument.partition("=")
        program, found = load_program(checkout), {"single": [], "blends": []}
        for kind, results in found.items():
            for case in cases[kind]:
                copy = shutil.copytree(
                    folder, f"{tempfile.mkdtemp()}/data"
                )  # the program writes index files beside the data
                blend = case.get("blend", [case.get("data")])
                words = [f"{copy}/{word}" if isinstance(word, str) else str(word) for word in blend]
                is_single = len(words) == 1 or (len(words) == 2 and not case["split"])
                try:
                    data = build(
                        program, words, case["split"], case["sizes"], cases["seq_length"], case["seed"]
                    )
                    results.append(digests(data, case["sizes"], is_single))
                except AssertionError:
                    results.append(None)
                shutil.rmtree(copy)
        orders[order] = found
    with open("tests/assets/deepspeed_orders.json", "w") as file:
        json.dump(orders, file, indent=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
