"""Tiny models of Hugging Face's own making, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from tests.support.layouts import SEQ, VOCAB
from tests.unit.model.single_process import random_tokens

logging.disable_progress_bar()
TOKENS = random_tokens(2, SEQ)


def save_hf(
    folder: Path,
    kind: str,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    sizes: tuple[int, int] = (VOCAB, 3),
    **changes: Any,
) -> None:
    """A 'bloom' or 'gpt2' with biases and norms that are not at their start; sizes: vocabulary, layers."""
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


def change_weights(folder: Path, change: Any) -> None:
    """Replaces the weights in the folder by what `change` makes of them."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def hf_logits(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Of transformers, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(tokens).logits
