"""Writes tests/assets/torch_dist_<kind>.tar.gz with Megatron-Core, in an environment that has it:

    pip install megatron-core==0.16.1      (0.13.1 for model_space, 0.19.2 for hybrid_experts)
    torchrun --nproc-per-node 8 tests/reference/write_torch_dist.py KIND torch_dist_KIND

    llama              fp32 weights, Megatron-Core's FP32Optimizer (--nproc-per-node 4)
    attention          as llama, with sinks, an output gate, and a layer without rotary embeddings
    latent             as llama, with latent attention and YaRN, with the names of --transformer-impl local,
                       and TP 1 (--nproc-per-node 2): with TP 2 and without sequence parallelism,
                       version 0.16.1 does not sum the gradients of the shared key over the ranks
    mtp                as llama, with two layers of multi-token prediction and their losses
                       (`mtp_losses`), on one process (--nproc-per-node 1)
    float16            bf16 weights, Float16OptimizerWithFloat16Params
    reshardable        bf16 weights, DistributedOptimizer, `fully_reshardable`
    model_space        bf16 weights, DistributedOptimizer, `fully_sharded_model_space`, which only
                       versions before 0.14 write
    experts            as reshardable, with experts in all layers, on EP 2 instead of TP 2
                       (--nproc-per-node 4), with the names of --transformer-impl local and of versions
                       that number the optimizers
    experts_mixed      experts in every second layer, with the gated shared expert, groups and the
                       experts' bias, with the names of Transformer Engine (--nproc-per-node 4)
    hybrid             as llama, a HybridModel with the pattern *-*- (--nproc-per-node 4)
    hybrid_experts     as reshardable, a HybridModel with the pattern *-*E*-*E, on EP 2 instead of TP 2
                       (--nproc-per-node 4)

The folder is a checkpoint of the format `torch_dist`, as Megatron-LM saves it after three steps of Adam with
TP 2, PP 2 and DP 2 (llama: DP 1). `expected.json` has the losses of these steps and of the next steps. The
next steps are computed twice without a load between them: in fp32, from the optimizer's main parameters and
moments (`losses`), and in the precision of the weights (`own_losses`). If a second folder is given, the
processes load it into the optimizer of the kind, and print the losses of the next steps beside `own_losses`:

    torchrun --nproc-per-node 8 tests/reference/write_torch_dist.py KIND torch_dist_KIND FOLDER

The processes compute on CPUs: `OnCpu` replaces a GPU for Megatron-Core, stages send with torch.distributed,
and dropout is off, so that no CUDA generator is needed.
"""

import contextlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as gpt_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.overrides import TorchFunctionMode

try:
    from megatron.core.models.hybrid import hybrid_block as hybrid_stack
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    PATTERN_NAME = "hybrid_layer_pattern"
except ImportError:  # until version 0.17
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.ssm import mamba_block as hybrid_stack

    PATTERN_NAME = "hybrid_override_pattern"

STEPS, MORE_STEPS, SEQ, BATCH, VOCAB = 3, 4, 32, 4, 64
KIND = sys.argv[1]
IS_FP32 = KIND in ("llama", "hybrid", "latent", "attention", "mtp")
LR = 2e-3 if IS_FP32 else 2e-2
DTYPE = torch.float32 if IS_FP32 else torch.bfloat16
HIDDEN, FFN = (32, 64) if KIND in ("llama", "latent", "attention") else (16, 32)
PATTERN = {"hybrid": "*-*-", "hybrid_experts": "*-*E*-*E"}.get(KIND, "")
ATTENTION = {"softmax_type": "learnable", "attention_output_gate": True, "no_rope_freq": [0, 1]}
ATTENTION = ATTENTION if KIND == "attention" else {}
SHARDING = {
    **dict.fromkeys(("reshardable", "experts", "experts_mixed", "hybrid_experts"), "fully_reshardable"),
    "model_space": "fully_sharded_model_space",
}.get(KIND)
EXPERTS = {
    **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": 1},
    **{"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
}
MIXED = {
    **{**EXPERTS, "num_layers": 4, "moe_layer_freq": [0, 1, 0, 1], "moe_router_topk": 4},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_bias_update_rate": 0.01, "moe_router_topk_scaling_factor": 2.5},
    **{"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    **{"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
}
LATENT = {
    **{"multi_latent_attention": True, "group_query_attention": False, "num_query_groups": 1},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 6},
    **{"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16},
    **{"qk_layernorm": True, "beta_slow": 0.5, "beta_fast": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3},
}
MOE = {"experts": EXPERTS, "experts_mixed": MIXED, "hybrid_experts": EXPERTS}.get(KIND, {})
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3} if KIND == "mtp" else {}
TP, EP = (1, 2) if MOE else (1 if KIND in ("latent", "mtp") else 2, 1)
PP = 1 if MTP else 2
MTP_LOSSES: list[list[float]] = []  # of all batches in their order, for each layer
# A wrong rotation must change the losses.
INIT_STD = 0.1 if MTP else 0.25 if IS_FP32 or PATTERN else 0.02
METADATA: dict[str, Any] = {} if SHARDING is None else {"distrib_optim_sharding_type": SHARDING}
if KIND == "experts_mixed":  # as the newest versions of Megatron-LM
    METADATA["chained_optim_avoid_prefix"] = True
ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.0}
ARGS = {
    **{"num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": 4},
    **{"group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm", "swiglu": True},
    **{"add_bias_linear": False, "position_embedding_type": "rope", "seq_length": SEQ},
    **{"untie_embeddings_and_output_weights": True, "max_position_embeddings": SEQ},
    **{"global_batch_size": BATCH, "padded_vocab_size": VOCAB, "tensor_model_parallel_size": TP},
    "pipeline_model_parallel_size": PP,
    **{**MOE, **ATTENTION, **MTP, **(LATENT if KIND == "latent" else {}), **ADAM},
    **{"norm_epsilon": 1e-5, "rotary_base": 10000, "rotary_percent": 1.0},
    **{"make_vocab_size_divisible_by": VOCAB // 2, "bf16": not IS_FP32},
}
if PATTERN:  # Megatron-LM counts the layers of the pattern
    ARGS |= {"num_layers": len(PATTERN), PATTERN_NAME: PATTERN}
    ARGS |= {"is_hybrid_model": True} if PATTERN_NAME == "hybrid_override_pattern" else {}


class OnCpu(TorchFunctionMode):
    """Makes Megatron-Core's tensors on the CPU where it requests a GPU. Their types are as on a GPU."""

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


def experts_of(arguments: dict) -> dict:
    """Returns the settings of experts, as Megatron-LM derives them from its arguments."""
    if not arguments.get("num_experts"):
        return {}
    settings = {name: arguments[name] for name in arguments if name.startswith("moe_")}
    return settings | {
        "num_moe_experts": arguments["num_experts"],
        "expert_model_parallel_size": EP,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_dtype": "fp32",
    }


class PlainAttention(torch.nn.Module):
    """Attention with value heads of a different size. Only Transformer Engine has it in Megatron-Core."""

    def __init__(self, *_: Any, softmax_scale: float, **others: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, mask, **_):
        """Computes attention: [seq, batch, heads, size] -> [seq, batch, heads x size of the values]."""
        scores = torch.einsum("ibnd,jbnd->bnij", query, key) * self.scale
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bnij,jbnd->ibnd", weights, value).flatten(2)


def layer_spec(config: TransformerConfig) -> Any:
    if PATTERN:
        return hybrid_spec(config)
    if KIND == "latent":
        latent = {"multi_latent_attention": True, "qk_layernorm": True}
        spec = gpt_specs.get_gpt_layer_local_spec(normalization=config.normalization, **latent)
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
        return spec
    if config.num_moe_experts is None:
        return gpt_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    specs = gpt_specs.get_gpt_decoder_block_spec(config, False, config.normalization)
    if KIND == "experts_mixed":  # Transformer Engine's name of this norm, if it lies before experts
        for layer, has_experts in zip(specs.layer_specs, [0, 1], strict=True):  # the layers of a stage
            if has_experts:
                del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return specs


def hybrid_spec(config: TransformerConfig) -> ModuleSpec:
    """Returns `hybrid_stack_spec` without Transformer Engine, whose modules do not run on CPUs."""
    dense = gpt_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    experts = gpt_specs.get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)

    def layer(module: type, spec: ModuleSpec, keys: dict[str, str], *names: str) -> ModuleSpec:
        parts = {name: getattr(spec.submodules, name) for name in names}
        submodules = TransformerLayerSubmodules(**parts, sharded_state_dict_keys_map=keys)
        return ModuleSpec(module, submodules=submodules)

    norm, mlp = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}, ("mlp", "mlp_bda")
    attention = layer(TransformerLayer, dense, norm, "input_layernorm", "self_attention", "self_attn_bda")
    norm, before_mlp = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}, "pre_mlp_layernorm"
    layers = {"attention_layer": attention, "mlp_layer": layer(MLPLayer, dense, norm, before_mlp, *mlp)}
    layers["moe_layer"] = layer(TransformerLayer, experts, {}, before_mlp, *mlp)
    return ModuleSpec(hybrid_stack.MambaStack, submodules=hybrid_stack.MambaStackSubmodules(**layers))


def build(dtype: torch.dtype) -> GPTModel:
    """Returns this rank's part of the model that the arguments describe, as Megatron-LM reads them."""
    names = {*ATTENTION, *MTP, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"}
    names |= {"normalization", "add_bias_linear", *(LATENT if KIND == "latent" else ())}
    config = (MLATransformerConfig if KIND == "latent" else TransformerConfig)(
        **{name: ARGS[name] for name in names - {"group_query_attention", "num_query_groups"}},
        num_query_groups=ARGS["num_query_groups"] if ARGS["group_query_attention"] else None,
        layernorm_epsilon=ARGS["norm_epsilon"],
        gated_linear_unit=ARGS["swiglu"],
        activation_func=F.silu if ARGS["swiglu"] else F.gelu,
        init_method_std=INIT_STD,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        **experts_of(ARGS),
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    options, spec = {PATTERN_NAME: ARGS[PATTERN_NAME]} if PATTERN else {}, layer_spec(config)
    if MTP:
        options["mtp_block_spec"] = gpt_specs.get_gpt_mtp_block_spec(config, spec, False)
    model = (HybridModel if PATTERN else GPTModel)(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not ARGS["untie_embeddings_and_output_weights"],
        position_embedding_type=ARGS["position_embedding_type"],
        rotary_base=ARGS["rotary_base"],
        rotary_percent=ARGS["rotary_percent"],
        **options,
    )
    model.to(dtype)
    for module in routers(model):
        module._maintain_float32_expert_bias()
    return model


def routers(model: torch.nn.Module) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def update_bias(model: GPTModel) -> None:
    """Changes the experts' bias as `finalize_model_grads` of Megatron-Core does."""
    if MOE.get("moe_router_enable_expert_bias") and routers(model):
        _update_router_expert_bias([model], model.config)
        reset_model_temporary_tensors(model.config, [model])


class Training:
    """The model and its optimizer, as Megatron-LM makes them."""

    def __init__(self) -> None:
        distributed = SHARDING is not None
        self.model = build(DTYPE)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        self.parallel = DistributedDataParallel(self.model.config, ddp_config, self.model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=0.0,
            **ADAM,
            clip_grad=0.0,
            bf16=DTYPE == torch.bfloat16,
            params_dtype=DTYPE,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(config, [self.parallel])

    def step(self, tokens: torch.Tensor) -> float:
        """Takes a step on tokens [batch, SEQ + 1]. Returns the loss."""
        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = loss_and_gradients(self.parallel, self.model, tokens)
        self.parallel.finish_grad_sync()
        update_bias(self.model)
        self.optimizer.step()
        return loss

    def sharded_state(self, loaded: Path | None = None) -> dict:
        """Returns the sharded state dict, to save it or to load a folder."""
        sharded = {"model": self.model.sharded_state_dict()}
        options = {"metadata": METADATA} if METADATA else {}
        if loaded is not None:  # as Megatron-LM does
            options = {"metadata": dist_checkpointing.load_content_metadata(str(loaded)) or {}}
        sharded["optimizer"] = self.optimizer.sharded_state_dict(
            sharded["model"], is_loading=loaded is not None, **options
        )
        return sharded

    def load(self, folder: Path) -> None:
        """Loads weights, moments and step."""
        state = dist_checkpointing.load(self.sharded_state(folder), str(folder))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for entries in inner.optimizer.state.values():  # one tensor, which Adam increments for each
                entries["step"] = entries["step"].clone()
        if "opt_param_scheduler" in state:  # in folders that Paritron wrote
            rates = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1}
            decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1, "wd_incr_style": "constant"}
            scheduler = OptimizerParamScheduler(
                self.optimizer,
                **rates,
                **decay,
                lr_decay_style="linear",
                use_checkpoint_opt_param_scheduler=True,
            )
            scheduler.load_state_dict(state["opt_param_scheduler"])
            assert scheduler.num_steps == state["args"].consumed_train_samples
            for group in self.optimizer.param_groups:
                group["lr"] = LR

    def main_states(self) -> list[dict[str, torch.Tensor]]:
        """Returns the main values, moments and step of each parameter, gathered from the replicas."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        found = []
        for parameter in self.model.parameters():
            inner = optimizers[0 if len(optimizers) == 1 or getattr(parameter, "allreduce", True) else 1]
            start, stop = 0, parameter.numel()
            if SHARDING is None:
                main = getattr(parameter, "main_param", parameter)
                states = {"param": main.detach(), **inner.optimizer.state[main]}
            elif parameter in inner.model_param_gbuf_map:
                owned = inner._get_model_param_range_map(parameter)["param"]
                start, stop = owned.start, owned.end
                states = inner._get_main_param_and_optimizer_states(parameter)
            else:
                states = {}
            step = torch.tensor(float(STEPS))
            whole = {name: torch.zeros(parameter.numel()) for name in ("param", "exp_avg", "exp_avg_sq")}
            for name, values in whole.items():
                if name in states:
                    values[start:stop] = states[name].detach().reshape(-1)
                if SHARDING is not None:
                    dist.all_reduce(values, group=replicas_of(parameter))
            found.append({name: values.view(parameter.shape) for name, values in whole.items()})
            found[-1]["step"] = step
        return found


def set_states_without_step(self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces a method of Megatron-Core's distributed optimizer. That method expects PyTorch's Adam to find
    its step among the loaded tensors, but does not store it there: fused Adam has its step in the groups."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for name, values in {"param": main, **self.optimizer.state[main]}.items():
        if name != "step":
            values.detach().copy_(tensors[name])


def loss_and_gradients(module: torch.nn.Module, model: GPTModel, tokens: torch.Tensor) -> float:
    """Computes the gradients of a batch. module: the model, or its wrapper. Returns the loss of the global
    batch."""
    replicas = parallel_state.get_data_parallel_world_size()
    tokens = tokens.chunk(replicas)[parallel_state.get_data_parallel_rank()]
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand_as(inputs)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    dtype = next(model.parameters()).dtype
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    if PP == 1:
        loss = module(inputs, positions, mask, labels=labels).float().mean()
        loss.backward()
        MTP_LOSSES.append(MTPLossLoggingHelper.tracker["values"].tolist())
        MTPLossLoggingHelper.clean_loss_in_tracker()
        return loss.item()
    total = torch.zeros(())
    if rank < half:
        hidden = module(inputs, positions, mask)
        dist.send(hidden.detach().contiguous(), rank + half)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, rank + half)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(SEQ, len(tokens), HIDDEN, dtype=dtype, requires_grad=True)
        dist.recv(hidden.data, rank - half)
        model.set_input_tensor(hidden)
        total = module(None, positions, mask, labels=labels).float().mean()
        total.backward()
        dist.send(hidden.grad, rank - half)
    total = total.detach().clone()
    dist.all_reduce(total)  # half of the ranks have a loss, and each replica has TP ranks
    return float(total) / half


def replicas_of(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Returns the group whose ranks hold replicas of a parameter. Fewer ranks hold an expert."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group()
    return parallel_state.get_expert_data_parallel_group()


def losses_in_fp32(training: Training, batches: torch.Tensor) -> list[float]:
    """Returns the losses of the next steps from the main values and moments."""
    model, states = build(torch.float32), training.main_states()
    for own, trained in zip(routers(model), routers(training.model), strict=True):
        if own.expert_bias is not None:
            own.expert_bias.copy_(trained.expert_bias)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for parameter, state in zip(model.parameters(), states, strict=True):
        parameter.data.copy_(state.pop("param"))
        adam.state[parameter] = state
    losses = []
    for tokens in batches:
        adam.zero_grad()
        losses.append(loss_and_gradients(model, model, tokens))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=replicas_of(parameter))
            parameter.grad /= parallel_state.get_data_parallel_world_size()
        update_bias(model)
        adam.step()
    return losses


def main(folder: Path, loaded: Path | None) -> None:
    """Trains a new model, saves it and continues to train, or trains from a loaded checkpoint."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(TP, PP, expert_model_parallel_size=EP)
    # Megatron-Core requests the current GPU, waits for it, and draws dropout from its generator.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    torch.cuda.current_stream = lambda *_: None
    hybrid_stack.TENorm = WrappedTorchNorm
    tracker = tensor_parallel.random.get_cuda_rng_tracker()
    tracker.fork = lambda *_: contextlib.nullcontext()
    multi_latent_attention.TELinear = ()  # without Transformer Engine it is None, which isinstance rejects
    moe_utils.te_general_gemm = None  # without Transformer Engine the module lacks the name
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
    if KIND == "model_space":
        numpy.product = numpy.prod  # version 0.13 calls it, and numpy 2 lacks it
    torch.manual_seed(5)
    if loaded is not None:  # as with --use-checkpoint-args
        ARGS.update(vars(torch.load(loaded / "common.pt", weights_only=False)["args"]))
    training = Training()
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (STEPS + MORE_STEPS, BATCH, SEQ + 1), generator=generator)
    if not IS_FP32:  # a batch that is learned: rounded weights change the losses by more than 1e-5
        tokens = tokens[:1].expand_as(tokens)
    if loaded is not None:
        training.step(tokens[0])  # other weights and moments: the load must replace all
        training.load(loaded)
        losses = [training.step(batch) for batch in tokens[STEPS:]]
        if dist.get_rank() == 0:
            expected = json.loads((folder / "expected.json").read_text())
            print(losses, expected["own_losses"])
            print(MTP_LOSSES[1:], expected.get("mtp_losses", [])[STEPS:])
        return
    losses = [training.step(batch) for batch in tokens[:STEPS]]
    state = {
        **training.sharded_state(),
        "args": Namespace(**ARGS, consumed_train_samples=STEPS * BATCH, iteration=STEPS),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
    }
    content = {"content_metadata": METADATA} if METADATA else {}
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1), **content)
    losses += losses_in_fp32(training, tokens[STEPS:])
    own_losses = [training.step(batch) for batch in tokens[STEPS:]]
    if dist.get_rank() == 0:
        content = {"losses": losses, "own_losses": own_losses, "steps": STEPS, "lr": LR}
        content |= {"mtp_losses": MTP_LOSSES[: len(losses)]} if MTP else {}
        (folder / "expected.json").write_text(json.dumps(content | {"tokens": tokens.tolist()}))
        print(losses, own_losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    path = Path(sys.argv[2])
    path.mkdir(exist_ok=True)
    with OnCpu():
        main(path, Path(sys.argv[3]) if len(sys.argv) > 3 else None)
