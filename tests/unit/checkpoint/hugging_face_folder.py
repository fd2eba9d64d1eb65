"""Tiny models that Hugging Face's classes make, and their logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.importer import HuggingFaceModel
from megatron.checkpoint.record import Checkpoint
from megatron.commands import convert_huggingface
from megatron.errors import USER_ERROR_EXIT_CODE
from megatron.model.inference.single_process import GPTModel
from tests.distributed.test_model_variants import LLAMA, QWEN3
from tests.support.layouts import SEQ, VOCAB
from tests.unit.model.single_process import random_tokens

logging.disable_progress_bar()
TOKENS = random_tokens(2, SEQ)
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
MIXTRAL = {**LLAMA, **EXPERTS, "ffn_hidden_size": 24}
OLMOE = {**QWEN3, **EXPERTS, "ffn_hidden_size": 24, "qk_layernorm_scope": "projection"}
OLMOE["moe_router_pre_softmax"] = True
QWEN3_MOE = {**QWEN3, **EXPERTS, "moe_layer_freq": ("E", "D"), "kv_channels": 16}
GLM4_MOE = {
    **{**LLAMA, **EXPERTS, "moe_layer_freq": ("D", "E", "E", "E"), "kv_channels": 16, "rotary_percent": 0.5},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "add_qkv_bias": True},
    **{"moe_shared_expert_intermediate_size": 48, "moe_router_topk_scaling_factor": 2.5},
}
"""`OLMOE`, `QWEN3_MOE` and `GLM4_MOE` are models of this program with experts and 4 layers, which are
exported as these types."""


def save_hf(
    folder: Path,
    kind: str,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    sizes: tuple[int, int] = (VOCAB, 3),
    **changes: Any,
) -> None:
    """Saves a 'bloom' or 'gpt2' whose biases and norms differ from their initial values. sizes: (vocabulary,
    layers)."""
    torch.manual_seed(3)
    vocab, layers = sizes
    if kind == "bloom":
        config = BloomConfig(vocab_size=vocab, hidden_size=32, n_layer=layers, n_head=4, **changes)
        model = BloomForCausalLM(config)
    else:
        settings = {"n_inner": None, "n_positions": SEQ, **changes}
        config = GPT2Config(vocab_size=vocab, n_embd=32, n_layer=layers, n_head=4, **settings)
        model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)


def weights_of(model: HuggingFaceModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter of a model in a folder, in the dtype of its files."""
    for name, parameter in model.parameters.items():
        yield name, parameter.transform.to_megatron(model.parts(name), model.model.of_layer(parameter.block))


def change_config(folder: Path, **changes: Any) -> None:
    """Changes settings in the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def convert(*flags: object) -> None:
    """Runs tools/convert_huggingface.py."""
    convert_huggingface.main([str(flag) for flag in flags])


def mistake(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    """Returns what `convert` prints about a mistake: one sentence, with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        convert(*flags)
    assert caught.value.code == USER_ERROR_EXIT_CODE
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    return printed


def change_weights(folder: Path, change: Any) -> None:
    """Replaces the weights in the folder by the result of `change`."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def megatron_logits(checkpoint: Checkpoint, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Returns the logits of this program's model in one process."""
    model = GPTModel(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)
    open_reader(checkpoint).load_weights(model)
    return model.eval()(tokens)


@torch.no_grad()
def hf_logits(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Returns the logits of transformers' model, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(tokens).logits
