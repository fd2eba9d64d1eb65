"""Writes tests/assets/torch_dist_llama.tar.gz with Megatron-Core, in an environment that has it:

    pip install megatron-core==0.16.1
    torchrun --nproc-per-node 4 tests/reference/write_torch_dist.py torch_dist_llama

The folder is a checkpoint of the format `torch_dist`, as Megatron-LM saves it after three steps of Adam with
TP 2 and PP 2. `expected.json` has the losses of these steps and of the next ones, without a load between
them. With a second folder, the processes load it and print the losses of the next steps:

    torchrun --nproc-per-node 4 tests/reference/write_torch_dist.py torch_dist_llama FOLDER

The processes compute on CPUs: stages send with torch.distributed, and dropout is off, so that no CUDA
generator is needed.
"""

import contextlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

STEPS, MORE_STEPS, SEQ, BATCH, VOCAB, HIDDEN = 3, 4, 32, 4, 64, 32
LR = 2e-3
ARGS = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "seq_length": SEQ,
    "max_position_embeddings": SEQ,
    "global_batch_size": BATCH,
    "padded_vocab_size": VOCAB,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
}


class CpuOptimizer(FP32Optimizer):
    """Megatron-Core's fp32 optimizer without its scale, a tensor on a GPU."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        MegatronOptimizer.__init__(self, optimizer, OptimizerConfig(optimizer="adam", lr=LR), lambda *_: None)


def build() -> GPTModel:
    """Returns this rank's part of the model."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def train_step(model: GPTModel, optimizer: CpuOptimizer, tokens: torch.Tensor) -> float:
    """Takes a step on tokens [batch, SEQ + 1]. Returns the loss."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand_as(inputs)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    optimizer.optimizer.zero_grad()
    total = torch.zeros(())
    if rank < half:
        hidden = model(inputs, positions, mask)
        dist.send(hidden.detach().contiguous(), rank + half)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, rank + half)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(SEQ, BATCH, HIDDEN, requires_grad=True)
        dist.recv(hidden.data, rank - half)
        model.set_input_tensor(hidden)
        total = model(None, positions, mask, labels=labels).mean()
        total.backward()
        dist.send(hidden.grad, rank - half)
    optimizer.optimizer.step()
    total = total.detach().clone()
    dist.broadcast(total, half)
    return float(total)


def load(model: GPTModel, optimizer: CpuOptimizer, folder: Path) -> None:
    """Loads weights, moments and step, as Megatron-LM does."""
    sharded = {"model": model.sharded_state_dict()}
    sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], is_loading=True)
    state = dist_checkpointing.load(sharded, str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main(folder: Path, loaded: Path | None) -> None:
    """Trains, saves, and trains on; or loads and trains on."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, 2)
    # Megatron-Core asks for the current GPU, waits for it, and draws dropout from its generator.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    tracker = tensor_parallel.random.get_cuda_rng_tracker()
    tracker.fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(5)
    model = build()
    # The groups of Megatron-Core's get_megatron_optimizer: without weight decay for norms.
    parameters = {False: [], True: []}
    for parameter in model.parameters():
        parameters[parameter.dim() > 1].append(parameter)
    facts = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    groups = [
        {"params": members, "wd_mult": float(decays), **facts}
        for decays, members in sorted(parameters.items(), reverse=True)
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    optimizer = CpuOptimizer(adam)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (STEPS + MORE_STEPS, BATCH, SEQ + 1), generator=generator)
    if loaded is not None:
        train_step(model, optimizer, tokens[0])  # other weights and moments: all must be replaced
        load(model, optimizer, loaded)
        losses = [train_step(model, optimizer, batch) for batch in tokens[STEPS:]]
        if dist.get_rank() == 0:
            print(losses, json.loads((folder / "expected.json").read_text())["losses"][STEPS:])
        return
    losses = [train_step(model, optimizer, batch) for batch in tokens[:STEPS]]
    sharded = {"model": model.sharded_state_dict()}
    state = {
        **sharded,
        "optimizer": optimizer.sharded_state_dict(sharded["model"]),
        "args": Namespace(**ARGS, consumed_train_samples=STEPS * BATCH, iteration=STEPS),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
    }
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1))
    losses += [train_step(model, optimizer, batch) for batch in tokens[STEPS:]]
    if dist.get_rank() == 0:
        content = {"losses": losses, "steps": STEPS, "tokens": tokens.tolist(), "lr": LR}
        (folder / "expected.json").write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.mkdir(exist_ok=True)
    main(path, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
