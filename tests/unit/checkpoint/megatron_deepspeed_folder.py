"""Universal checkpoints as Microsoft's Megatron-DeepSpeed and DeepSpeed's ds_to_universal.py make them.

The rules follow Megatron-DeepSpeed's source: the indices of GPTModelPipe and the halves of a gated MLP
(megatron/model/gpt_model.py, transformer.py), the arguments (megatron/arguments.py), and the entries that
`save_checkpoint` adds to DeepSpeed's state (megatron/checkpointing.py). `unpack` extracts files that
Megatron-DeepSpeed itself wrote.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.checkpoint.discovery import find_universal
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.config import Config
from tests.reference.plain_gpt import plain_gpt_logits
from tests.support import assets
from tests.support.layouts import VOCAB

STEP = 5
ASSET_VOCAB = 128
SEQ = 16
_SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "kv_channels": None}
_SIZES |= {"seq_length": SEQ, "max_position_embeddings": SEQ}
ASSET_MODELS: dict[str, dict[str, Any]] = {
    "learned": {**_SIZES, "ffn_hidden_size": 64},
    "swiglu": {**_SIZES, "ffn_hidden_size": 32, "glu_activation": "swiglu"},
    "llama": {
        **_SIZES,
        "ffn_hidden_size": 32,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rotary",
        "normalization": "RMSNorm",
        "glu_activation": "swiglu",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
}
"""Folder in the asset -> fields of ModelConfig."""


def their_name(name: str, layers: int, pipeline: bool = True, untied: bool = False) -> str:
    """Returns Megatron-DeepSpeed's name of a parameter. layers: number of transformer layers. untied: whether
    the LM head has its own weight."""
    number, _, rest = name.partition(".")
    if number == str(layers + 5):
        return (
            f"{layers + 3}.{rest}" if pipeline else f"language_model.output_layer.{rest[len('lm_head.') :]}"
        )
    if untied and pipeline and not number.isdigit():
        return name.replace("tied_modules.embed", "1")
    if not pipeline:
        if not number.isdigit():
            return f"language_model.{name.replace('tied_modules.embed', 'embedding')}"
        part = "final_layernorm" if int(number) == layers + 4 else f"layers.{int(number) - 3}"
        return f"language_model.encoder.{part}.{rest}"
    if not number.isdigit():
        return name
    return f"{layers + 2 if int(number) == layers + 4 else int(number) - 1}.{rest}"


def their_args(config: Config, **changes: Any) -> Namespace:
    """Returns the arguments of a Megatron-DeepSpeed run, with Megatron-DeepSpeed's names and defaults."""
    model = config.model
    rotary = model.position_embedding_type == "rotary"
    args = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "kv_channels": model.kv_channels,
        "layernorm_epsilon": model.layernorm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "add_position_embedding": not rotary,
        "use_rotary_position_embeddings": rotary,
        "rotary_percent": 1.0,
        "rope_theta": int(model.rotary_base),
        "normalization": model.normalization.lower(),
        "apply_layernorm_1p": False,
        "add_bias_linear": not model.disable_bias_linear,
        "bias_gelu_fusion": model.activation == "gelu" and not model.glu_activation,
        "openai_gelu": False,
        "onnx_safe": None,
        "swiglu": model.glu_activation == "swiglu",
        "squared_relu": False,
        "num_experts": [1],
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "seq_length": model.seq_length,
        "global_batch_size": 8,
        "iteration": STEP,
        "consumed_train_samples": 8 * STEP,
        "consumed_train_tokens": 8 * STEP * model.seq_length,
        "params_dtype": torch.float32,
    }
    return Namespace(**{**args, **changes})


def write_as_megatron_deepspeed(
    folder: Path,
    config: Config,
    states: Mapping[str, Mapping[str, torch.Tensor]],
    client_state: Mapping[str, Any] | None = None,
    pipeline: bool = True,
    **changes: Any,
) -> Path:
    """Writes `global_step5_universal` in `folder`, and names it in `latest_universal`.

    states: this program's parameter name -> file ('fp32', 'exp_avg', ...) -> unsharded tensor without
    padding; 'step' is a number. client_state: further entries of the mp_rank file. pipeline: whether the run
    had no --no-pipeline-parallel. changes: arguments of the run that differ from the defaults.
    """
    path = folder / f"global_step{STEP}_universal"
    untied = config.model.untie_embeddings_and_output_weights
    for name, files in states.items():
        parameter = path / "zero" / their_name(name, config.model.num_layers, pipeline, untied)
        parameter.mkdir(parents=True)
        for kind, tensor in files.items():
            if config.model.glu_activation and ".mlp.dense_h_to_4h." in name and tensor.dim():
                value, gate = tensor.chunk(2)
                tensor = torch.cat((gate, value))
            in_blocks = "ds_sequence_parallel_fpdt" in changes and not config.model.group_query_attention
            if in_blocks and ".query_key_value." in name and tensor.dim():
                ranks, heads = changes["tensor_model_parallel_size"], config.model.num_attention_heads
                shape = (ranks, heads // ranks, 3, config.model.kv_channels, *tensor.shape[1:])
                tensor = tensor.reshape(shape).transpose(1, 2).reshape(tensor.shape)
            torch.save(tensor if kind == "step" else {"param": tensor}, parameter / f"{kind}.pt")
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": VOCAB,
        "padded_vocab_size": 128,
        "vocabulary_parameter_patterns": ["tied_modules.embed.word_embeddings.weight"],
    }
    content = {
        "args": their_args(config, **changes),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "universal_checkpoint_info": info,
        **(client_state or {}),
    }
    torch.save(content, path / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(path.name)
    return path


def unpack(folder: Path) -> None:
    """Extracts checkpoints that Megatron-DeepSpeed itself wrote after 3 of 6 steps, of three models with 128
    tokens.

    They were made on a CPU with DeepSpeed 0.19.8 and github.com/deepspeedai/Megatron-DeepSpeed at 4efb479d
    (its attention with `reshape` instead of `view`, which the CPU needs), in fp32 with ZeRO-1, Adam without
    weight decay and a constant learning rate of 1e-2:

        learned/    learned positions, 1 process; also converted by DeepSpeed's ds_to_universal.py
        swiglu/     a gated MLP, tensor-parallel size 2 x pipeline-parallel size 2
        llama/      at commit 6acc370a, before the order of queries, keys and values changed: --swiglu
                    --normalization rmsnorm --disable-bias-linear --use-rotary-position-embeddings
                    --untie-embeddings-and-output-weights --num-key-value-heads 2, tensor-parallel size 2;
                    also converted by DeepSpeed's ds_to_universal.py

    `next_steps.json` has the samples, losses and gradient norms of Megatron-DeepSpeed's steps 4 to 6. The
    vocabulary needs no padding, since Megatron-DeepSpeed includes padded rows in the softmax.
    """
    for name in ("megatron_deepspeed", "megatron_deepspeed_llama"):
        assets.unpack(name, folder)


def plain_loss(folder: Path, name: str, samples: torch.Tensor) -> float:
    """Returns the loss, in plain PyTorch, of the weights in a universal checkpoint of the asset.

    samples: [batch, SEQ + 1].
    """
    reader = UniversalReader(find_universal(folder))
    weights = {key: reader.read(key, "fp32") for key in reader.stored_names}
    model = ASSET_MODELS[name]
    logits = plain_gpt_logits(
        weights,
        samples[:, :-1],
        layers=2,
        heads=model["num_attention_heads"],
        positions=model.get("position_embedding_type", "absolute"),
        glu=model.get("glu_activation"),
        groups=model.get("num_query_groups"),
        rotary={},
        vocab=ASSET_VOCAB,
    )
    return F.cross_entropy(logits.reshape(-1, ASSET_VOCAB), samples[:, 1:].reshape(-1)).item()
