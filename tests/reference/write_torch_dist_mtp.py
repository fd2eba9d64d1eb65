"""Writes tests/assets/torch_dist_mtp.tar.gz with Megatron-Core, in an environment that has it:

    pip install megatron-core==0.16.1
    python tests/reference/write_torch_dist_mtp.py FOLDER

A model with two layers for multi-token prediction, after three steps of Adam in fp32 on one process.
`expected.json` has, of these steps and the next ones, the losses of the main model and of each layer. With
`--load FOLDER2` it loads another folder, and prints its losses of the next steps beside these.
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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

STEPS, MORE_STEPS, SEQ, BATCH, VOCAB, LR = 3, 4, 32, 4, 64, 2e-3
ARGS = {
    **{"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 4},
    **{"group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm", "swiglu": True},
    **{"add_bias_linear": False, "position_embedding_type": "rope", "seq_length": SEQ},
    **{"untie_embeddings_and_output_weights": True, "max_position_embeddings": SEQ, "bf16": False},
    **{"global_batch_size": BATCH, "padded_vocab_size": VOCAB, "tensor_model_parallel_size": 1},
    **{"pipeline_model_parallel_size": 1, "norm_epsilon": 1e-5, "rotary_base": 10000, "rotary_percent": 1.0},
    **{"make_vocab_size_divisible_by": VOCAB, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
    **{"weight_decay": 0.0, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
}


class OnCpu(TorchFunctionMode):
    """Gives Megatron-Core tensors on the CPU where it asks for a GPU, and their types as on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def build() -> GPTModel:
    config = TransformerConfig(
        **{name: ARGS[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups")},
        **{name: ARGS[name] for name in ("num_attention_heads", "normalization", "add_bias_linear")},
        **{name: ARGS[name] for name in ("mtp_num_layers", "mtp_loss_scaling_factor")},
        layernorm_epsilon=ARGS["norm_epsilon"],
        gated_linear_unit=True,
        activation_func=F.silu,
        init_method_std=0.1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=ARGS["rotary_base"],
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )


def take_step(model, parallel, optimizer, tokens: torch.Tensor) -> list[float]:
    """Returns the losses: of the main model, and of each layer for multi-token prediction."""
    parallel.zero_grad_buffer()
    optimizer.zero_grad()
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    loss = parallel(inputs, torch.arange(SEQ).expand_as(inputs), mask, labels=labels).float().mean()
    loss.backward()
    parallel.finish_grad_sync()
    optimizer.step()
    tracker = MTPLossLoggingHelper.tracker
    found = [loss.item(), *(tracker["values"]).tolist()]
    MTPLossLoggingHelper.clean_loss_in_tracker()
    return found


def main(folder: Path, loaded: str | None) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29871", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(5)
    model = build()
    parallel = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    betas = {"adam_beta1": 0.9, "adam_beta2": 0.95}
    settings = {"optimizer": "adam", "lr": LR, "min_lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**settings, **betas, params_dtype=torch.float32), [parallel]
    )
    tokens = torch.randint(
        VOCAB, (STEPS + MORE_STEPS, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(7)
    )

    def sharded_state(is_loading: bool) -> dict:
        sharded = {"model": model.sharded_state_dict()}
        sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], is_loading=is_loading)
        return sharded

    if loaded is not None:
        take_step(model, parallel, optimizer, tokens[0])  # other weights and moments: all must be replaced
        state = dist_checkpointing.load(sharded_state(True), loaded)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = LR
        print([take_step(model, parallel, optimizer, batch) for batch in tokens[STEPS:]])
        content = json.loads((folder / "expected.json").read_text())
        print(content["losses"][STEPS:], content["mtp_losses"][STEPS:])
        return
    losses = [take_step(model, parallel, optimizer, batch) for batch in tokens[:STEPS]]
    arguments = Namespace(**ARGS, consumed_train_samples=STEPS * BATCH, iteration=STEPS)
    facts = {"args": arguments, "checkpoint_version": 3.0, "iteration": STEPS}
    dist_checkpointing.save({**sharded_state(False), **facts}, str(folder), ("torch_dist", 1))
    losses += [take_step(model, parallel, optimizer, batch) for batch in tokens[STEPS:]]
    content = {"losses": [loss for loss, *_ in losses], "mtp_losses": [found[1:] for found in losses]}
    content |= {"steps": STEPS, "lr": LR, "tokens": tokens.tolist()}
    (folder / "expected.json").write_text(json.dumps(content))
    print(losses)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.mkdir(exist_ok=True)
    with OnCpu():
        main(path, sys.argv[3] if len(sys.argv) > 3 else None)
