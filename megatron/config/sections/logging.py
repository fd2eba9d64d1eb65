"""What a run logs, and to which outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag

_PROFILE = {"logging.profile": ""}
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Console output, log levels, TensorBoard and Weights & Biases."""

    group: ClassVar[str] = "logging"

    log_interval: int = flag(
        100, at_least=1, help="iterations between two console lines with loss and throughput"
    )
    tensorboard_dir: str | None = flag(
        None, metavar="FOLDER", help="write TensorBoard logs to this folder (default: no TensorBoard logs)"
    )
    tensorboard_queue_size: int = flag(
        1000,
        at_least=1,
        help="number of events that the TensorBoard writer queues before it flushes them",
        used_with=("logging.tensorboard_dir",),
    )
    wandb_project: str | None = flag(
        None,
        metavar="NAME",
        help="log to this Weights & Biases project (needs pip install wandb; default: no log)",
    )
    wandb_name: str | None = flag(
        None,
        metavar="NAME",
        help="name of the Weights & Biases run (default: chosen by wandb)",
        used_with=("logging.wandb_project",),
    )
    wandb_save_dir: str | None = flag(
        None,
        metavar="FOLDER",
        help="folder for the files of Weights & Biases (default: wandb's, WANDB_DIR or ./wandb)",
        used_with=("logging.wandb_project",),
    )
    log_timers_to_tensorboard: bool = flag(
        False,
        help="also log iteration time and throughput (samples, tokens, TFLOPs) to TensorBoard and Weights & "
        "Biases",
        used_with=("logging.tensorboard_dir", "logging.wandb_project"),
    )
    log_batch_size_to_tensorboard: bool = flag(
        False,
        help="also log the batch size to TensorBoard and Weights & Biases",
        used_with=("logging.tensorboard_dir", "logging.wandb_project"),
    )
    log_validation_ppl_to_tensorboard: bool = flag(
        False,
        help="also log the validation perplexity to TensorBoard and Weights & Biases",
        used_with=("logging.tensorboard_dir", "logging.wandb_project"),
    )
    log_bubble: bool = flag(
        False,
        help="with each console line, print the fraction of the last step's passes in which each pipeline "
        "rank was idle",
    )
    log_max_attention_logit: bool = flag(
        False,
        help="log the largest attention logit of training steps (before --attn-logit-softcapping). With "
        "--qk-clip it is always logged",
        unused_with=("optimizer.qk_clip",),
    )
    moe_per_layer_logging: bool = flag(
        False,
        help="with --num-experts: log the metrics of experts for each layer, too",
        used_with=("model.num_experts",),
    )
    profile: bool = flag(
        False,
        help="profile the iterations from --profile-step-start to --profile-step-end: with PyTorch's "
        "profiler if --use-pytorch-profiler is given, otherwise with Nsight Systems (nsys profile "
        "--capture-range=cudaProfilerApi)",
        excludes={"training.no_train": "only training iterations are profiled"},
    )
    profile_step_start: int = flag(
        10,
        at_least=0,
        help="with --profile: the iteration after which the profile starts",
        needs=_PROFILE,
    )
    profile_step_end: int = flag(
        12, at_least=1, help="with --profile: the last iteration of the profile", needs=_PROFILE
    )
    profile_ranks: tuple[int, ...] = flag(
        (0,), nargs="+", at_least=0, help="with --profile: the ranks that are profiled", needs=_PROFILE
    )
    use_pytorch_profiler: bool = flag(
        False,
        help="with --profile: write a trace of each profiled rank to the folder of --tensorboard-dir, and "
        "print the kernels with the most time",
        needs={
            **_PROFILE,
            "logging.tensorboard_dir": "the traces are written to that folder",
        },
    )
    log_path: str | None = flag(
        None, metavar="FILE", help="append the console output to this file, in addition to stdout"
    )
    log_level: str = flag("warning", choices=LOG_LEVELS, help="log level of global rank 0")
    log_level_replica: str = flag("error", choices=LOG_LEVELS, help="log level of all other ranks")

    def is_logged(self, iteration: int, last: int) -> bool:
        """Returns whether a log line follows this iteration. last: last iteration of the run."""
        return iteration % self.log_interval == 0 or iteration == last
