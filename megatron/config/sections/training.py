"""The length of the run, evaluation, exits, recomputation, and modes of running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag
from megatron.config.registries import GPUS
from megatron.errors import ConfigError

# Signals that --exit-signal can name: a process can handle them, and a run does not use them for anything
# else.
EXIT_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")


_RECOMPUTED_LAYERS = {
    "training.checkpoint_activations|training.recompute_granularity=full": "it needs checkpointed activations"
}
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp_act", "moe_act")
_WHOLE_LAYERS = "set --recompute-granularity full, which recomputes whole layers"
_OTHER_MODULES = {
    "mlp": f"{_WHOLE_LAYERS}, or mlp_act",
    "moe": f"{_WHOLE_LAYERS}, or moe_act",
    "shared_experts": f"{_WHOLE_LAYERS}, or mlp_act",
    "mla_up_proj": "it is not implemented; set core_attn, or remove it",
}
"""Modules of Megatron-LM that --recompute-modules rejects -> the alternative."""
_HARNESS = {"training.eval_harness_tasks": ""}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """The length of the run, evaluation, exits, recomputation, and modes of running."""

    group: ClassVar[str] = "training"

    train_iters: int | None = flag(
        None,
        at_least=1,
        help="length of the training in iterations, including the iterations before a resume; alternative "
        "to --train-samples",
        group=COMMON_FLAGS,
    )
    train_samples: int | None = flag(
        None,
        at_least=1,
        help="length of the training in samples, including the samples before a resume; alternative to "
        "--train-iters",
    )
    train_tokens: int | None = flag(
        None,
        at_least=1,
        help="end the training at this number of tokens, including the tokens before a resume, if it is "
        "reached before --train-iters or --train-samples",
    )
    eval_interval: int = flag(
        1000,
        at_least=1,
        group="validation",
        help="iterations between evaluations",
        unused_with=("training.eval_iters=0",),
    )
    eval_iters: int = flag(
        100, at_least=0, group="validation", help="batches per evaluation; 0 disables evaluation"
    )
    eval_harness_tasks: tuple[str, ...] = flag(
        (),
        aliases=("--eval-tasks",),
        nargs="+",
        metavar="TASK",
        group="validation",
        help="tasks of EleutherAI's lm-evaluation-harness (pip install lm_eval) to evaluate during training, "
        "every --eval-harness-interval iterations",
        needs={"training.eval_harness_interval": ""},
        excludes={
            "training.no_train": "--eval-only trains nothing: remove --eval-harness-tasks; "
            "tools/evaluate.py --tasks runs tasks on a checkpoint"
        },
    )
    eval_harness_interval: int | None = flag(
        None,
        at_least=1,
        group="validation",
        help="iterations between evaluations of --eval-harness-tasks",
        needs=_HARNESS,
    )
    eval_harness_tasks_path: str | None = flag(
        None,
        metavar="FOLDER",
        group="validation",
        help="folder with YAML files of additional tasks. These files can run Python code: use only files "
        "that you trust",
        needs=_HARNESS,
    )
    eval_harness_limit: int | None = flag(
        None,
        at_least=1,
        metavar="N",
        group="validation",
        help="evaluate only the first N documents of each task (default: all documents)",
        needs=_HARNESS,
    )
    exit_interval: int | None = flag(
        None, at_least=1, help="save and exit when the iteration is a multiple of N (default: never)"
    )
    exit_duration_in_mins: int | None = flag(
        None, at_least=1, help="save and exit N minutes after the launch (default: never)"
    )
    exit_signal: tuple[str, ...] = flag(
        ("SIGUSR2", "SIGTERM", "SIGHUP"),
        nargs="*",
        metavar="SIGNAL",
        help="save and exit on these signals, with exit code 75 (0 under torch's launcher); without a "
        "value, on no signal. Closing a terminal sends SIGHUP, which nohup ignores. Ctrl-C (SIGINT) saves "
        "and exits with code 130, unless SIGINT is listed; a second Ctrl-C ends the process at once",
    )
    kill_switch_path: str | None = flag(
        None, metavar="FILE", help="save and exit as soon as this file exists"
    )
    hang_timeout: float = flag(
        540.0,
        at_least=0,
        metavar="SECONDS",
        help="seconds without progress (a micro-batch, a step, bytes of a checkpoint) after which the run "
        "prints the stacks of all threads and aborts; 0 disables the limit. The limit is 4 times as long "
        "for a load or save, and 10 times as long for the startup and, with --compile, for the first step "
        "and the first evaluation. It is at least 3 times the median duration of the past steps, "
        "evaluations or saves",
    )
    no_preflight: bool = flag(
        False,
        help="skip the startup checks: that all nodes have equal versions and see the same files, and that "
        "there is enough memory and enough disk space for checkpoints",
    )
    seed: int = flag(
        1234,
        at_least=0,
        at_most=2**32 - 1,
        group="initialization",
        help="random seed of the initialization, the data order and dropout",
    )
    no_train: bool = flag(
        False,
        aliases=("--eval-only",),
        metavar="1",
        help="evaluate the checkpoint in --load without training. --no-train and --no-train 1 are equal",
    )
    checkpoint_activations: bool = flag(
        False,
        help="activation checkpointing: store only the inputs of transformer layers, and recompute the "
        "layers in the backward pass; equivalent to --recompute-granularity full",
        excludes={
            "training.recompute_granularity=selective": "the first flag recomputes whole layers, the second "
            "only attention"
        },
    )
    checkpoint_num_layers: int = flag(
        1,
        at_least=1,
        help="with --checkpoint-activations: number of layers that are recomputed together from one stored "
        "input",
        needs=_RECOMPUTED_LAYERS,
    )
    recompute_granularity: str | None = flag(
        None,
        choices=("selective", "full"),
        help="activations that the backward pass recomputes instead of storing them (default: none)\n"
        "selective: the outputs of --recompute-modules\n"
        "full: whole transformer layers, as with --checkpoint-activations",
    )
    recompute_modules: tuple[str, ...] = flag(
        (),
        nargs="+",
        choices=RECOMPUTE_MODULES,
        rejected=_OTHER_MODULES,
        help="with --recompute-granularity selective: one or several modules whose output is recomputed "
        "(default: core_attn)\n"
        "core_attn: softmax and dropout of the attention, in layers that no fused kernel computes\n"
        "layernorm: outputs of the norms before attention and MLP\n"
        "mlp_act: outputs of the activation of MLPs and shared experts\n"
        "moe_act: outputs of the activation of experts",
        needs={"training.recompute_granularity=selective": "it selects what is recomputed"},
    )
    partition_activations: bool = flag(
        False,
        help="shard the stored inputs of --checkpoint-activations across the tensor-parallel group "
        "(DeepSpeed)",
        needs=_RECOMPUTED_LAYERS,
        excludes={
            "parallel.sequence_parallel": "activations are already sharded along the sequence; remove "
            "--partition-activations"
        },
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    checkpoint_in_cpu: bool = flag(
        False,
        help="keep the stored inputs of --checkpoint-activations in host memory (DeepSpeed)",
        needs=_RECOMPUTED_LAYERS,
    )
    compile: bool = flag(
        False,
        help="compile the transformer layers with torch.compile, which needs a C++ compiler. The first "
        "iteration and the first evaluation take up to a minute longer, or less with a warm compile cache",
    )
    cuda_graph_impl: str = flag(
        "none",
        choices=("none", "local"),
        help="none: no CUDA graph\n"
        "local: capture the forward and backward pass of a micro-batch as one CUDA graph and replay "
        "it. A replay takes one call of the host, so the host does not limit the speed of small models. "
        "Gradients are reduced after the last micro-batch, without overlap",
        excludes={
            "parallel.pipeline_model_parallel_size": "a graph has the passes of one stage",
            "parallel.zero_stage=2|parallel.zero_stage=3": "hooks gather and reduce within the passes; set "
            "--zero-stage 1 or remove --cuda-graph-impl",
            "precision.fp8_recipe": "the host decides when weights are quantized; remove --cuda-graph-impl",
            "model.num_experts": "the host reads the tokens of each expert; remove --cuda-graph-impl",
            "training.compile": "compiled layers may wait for the device",
            "training.checkpoint_in_cpu": "a pass copies to host memory",
            "parallel.tp_comm_overlap": "its chunks were never captured",
            "training.partition_activations": "DeepSpeed copies sizes to the host",
        },
    )
    deterministic_mode: bool = flag(
        False,
        help="use only deterministic algorithms of PyTorch, cuBLAS and NCCL, as in Megatron-LM. Two runs on "
        "equal GPUs and layouts, or a resumed and an uninterrupted run, then have bitwise equal losses. "
        "Steps take longer. Sets NCCL_ALGO=Ring and CUBLAS_WORKSPACE_CONFIG=:4096:8, unless the environment "
        "has different deterministic values",
        excludes={"training.compile": "the compiler chooses kernels by their measured times"},
    )
    require_kernels: bool = flag(
        False,
        help="exit at startup if a rank cannot run the Triton kernels. Without the flag, all ranks then use "
        "PyTorch's operations, and the log names the rank and the reason",
    )
    loss_implementation: str = flag(
        "fused",
        choices=("fused", "plain"),
        help="how the LM head and the loss are computed\n"
        "fused: in chunks of tokens, without storing all logits\n"
        "plain: with all logits in memory, for comparison",
    )
    z_loss_weight: float = flag(
        0.0,
        at_least=0,
        group="regularization",
        help="coefficient of the z-loss log(Z)^2 per token, where Z is the sum of exp(logits); 0: no "
        "z-loss; PaLM used 1e-4. The logged lm loss includes the z-loss, and the validation loss does not",
        excludes={"training.loss_implementation=plain": "only the fused loss supports it"},
    )
    dry_run: bool = flag(
        False,
        help="check all flags, print layout, batch sizes, pipeline stages and planned memory, and exit "
        "without training",
    )
    gpu: str | None = flag(
        None,
        choices=GPUS,
        help="with --dry-run: plan memory and step time for this GPU. The exit code is 2 if the run does "
        "not fit the GPU's memory",
        excludes={"training.device_memory": "both set the memory of a device"},
        used_with=("training.dry_run",),
    )
    device_memory: float | None = flag(
        None,
        metavar="GIB",
        above=0,
        at_most=1_000_000,
        help="with --dry-run: plan for a device with this memory in GiB, instead of --gpu. The exit code is "
        "2 if the run does not fit",
        used_with=("training.dry_run",),
    )
    deepspeed_config: str | None = flag(
        None,
        aliases=("--deepspeed_config",),
        group="distributed",
        metavar="FILE",
        help="JSON file with additional DeepSpeed settings (default: none). The settings must not "
        "contradict the flags, except for the loss scale, for which the file takes precedence",
    )

    def derive(self) -> dict[str, Any]:
        try:
            return {"exit_signal": tuple(map(_signal_name, self.exit_signal))}
        except ConfigError as error:
            return {"exit_signal": error}

    @property
    def has_length(self) -> bool:
        """Returns whether exactly one flag sets the length of the run."""
        return (self.train_iters is None) != (self.train_samples is None)

    @property
    def recomputes_layers(self) -> bool:
        """Returns whether whole transformer layers are recomputed, from the stored input of each group of
        layers."""
        return self.checkpoint_activations or self.recompute_granularity == "full"

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Returns the modules of `RECOMPUTE_MODULES` whose output this run recomputes."""
        return (self.recompute_modules or ("core_attn",)) * (self.recompute_granularity == "selective")

    def recomputes(self, module: str) -> bool:
        """Returns whether the output of a module of `RECOMPUTE_MODULES` is recomputed."""
        return module in self.recomputed_modules

    @property
    def uses_cuda_graph(self) -> bool:
        """Returns whether a CUDA graph executes the passes of a micro-batch. No Python hook runs in these
        passes then."""
        return self.cuda_graph_impl != "none"


def recomputation(modules: tuple[str, ...] = (), layers: bool = False) -> dict[str, Any]:
    """Returns settings ('section.field' -> value) with which a run recomputes only these modules of
    `RECOMPUTE_MODULES`, or whole layers."""
    return {
        "training.checkpoint_activations": layers,
        "training.recompute_granularity": "selective" if modules else None,
        "training.recompute_modules": () if modules == ("core_attn",) else modules,
    }


def _signal_name(text: str) -> str:
    """Returns the full name of a signal. Like Slurm, it accepts 'USR2' for 'SIGUSR2'."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in EXIT_SIGNALS:
        raise ConfigError(f"--exit-signal {text}: expected one of {', '.join(EXIT_SIGNALS)}")
    return name
