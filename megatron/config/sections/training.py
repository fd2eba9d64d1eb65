"""The length of the run, evaluation, exits, recomputation, and modes of running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.errors import ConfigError
from megatron.config.fields import Section, flag

# Those that can be handled and that nothing else here is for.
EXIT_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """The length of the run, when to evaluate, when to stop, and modes of running."""

    group: ClassVar[str] = "training"

    train_iters: int | None = flag(
        None, at_least=1, help="optimizer steps over all runs; or give --train-samples"
    )
    train_samples: int | None = flag(None, at_least=1, help="samples over all runs; or give --train-iters")
    train_tokens: int | None = flag(
        None, at_least=1, help="stop after this many tokens, where that comes earlier"
    )
    eval_interval: int = flag(1000, at_least=1, group="validation", help="steps between two evaluations")
    eval_iters: int = flag(
        100, at_least=0, group="validation", help="batches per evaluation; 0: no evaluation is made"
    )
    exit_interval: int | None = flag(
        None,
        at_least=1,
        help="save and exit when the step is a multiple of this, for jobs that follow each other",
    )
    exit_duration_in_mins: int | None = flag(None, at_least=1, help="save and exit after this many minutes")
    exit_signal: tuple[str, ...] = flag(
        ("SIGUSR2", "SIGTERM"),
        nargs="*",
        metavar="SIGNAL",
        help="save and exit on these signals, with exit code 75; no name: on none",
    )
    kill_switch_path: str | None = flag(
        None, metavar="FILE", help="save and exit as soon as this file exists"
    )
    hang_timeout: float = flag(
        540.0,
        at_least=0,
        metavar="SECONDS",
        help="longest time for a step, an evaluation or a checkpoint; then the run is given up as hung, "
        "with the stacks of all threads; 0: never (from 600 on torch's transport gives up first)",
    )
    no_preflight: bool = flag(
        False, help="start without looking for nodes that differ, lack memory or do not see the files"
    )
    seed: int = flag(
        1234,
        at_least=0,
        at_most=2**32 - 1,
        group="initialization",
        help="seed of the weights, the sample order and the dropout",
    )
    no_train: bool = flag(
        False, aliases=("--eval-only",), metavar="1", help="evaluate only; old scripts give it the value 1"
    )
    checkpoint_activations: bool = flag(
        False,
        help="keep only the inputs of transformer layers, and recompute the rest in the backward pass: the "
        "same as --recompute-granularity full",
    )
    checkpoint_num_layers: int = flag(
        1, at_least=1, help="layers that --checkpoint-activations recomputes together, of one kept input"
    )
    recompute_granularity: str | None = flag(
        None,
        choices=("selective", "full"),
        help="what the backward pass recomputes. full: whole transformer layers, as --checkpoint-activations "
        "does; selective: softmax and dropout of attention only, which are most of a layer's memory with "
        "--attention-dropout",
    )
    partition_activations: bool = flag(
        False,
        help="of the inputs that --checkpoint-activations keeps, each of the processes that share a layer "
        "keeps its part (through DeepSpeed)",
    )
    checkpoint_in_cpu: bool = flag(
        False,
        help="the inputs that --checkpoint-activations keeps wait in the CPU's memory (through DeepSpeed)",
    )
    compile: bool = flag(
        False,
        help="compile transformer layers with torch.compile (needs a C++ compiler); the first step, and the "
        "first evaluation, then take up to a minute longer, less where PyTorch's cache knows the layers",
    )
    loss_implementation: str = flag(
        "fused",
        choices=("fused", "plain"),
        help="fused: head and loss a chunk of tokens at a time, so that the logits are never there as a "
        "whole; plain: all logits at once, to compare with",
    )
    z_loss_weight: float = flag(
        0.0,
        at_least=0,
        group="regularization",
        help="the training loss of a token grows by this times log(Z)^2, Z the sum of its exp(logits), which "
        "keeps logits small (PaLM: 1e-4); the logged lm loss includes it, the validation loss does not",
    )
    dry_run: bool = flag(
        False, help="check all flags, print layout, batches and stages, and exit; data is not read"
    )
    deepspeed_config: str | None = flag(
        None,
        aliases=("--deepspeed_config",),
        group="distributed",
        metavar="FILE",
        help="JSON with further settings of DeepSpeed; must not contradict the flags, except for the loss "
        "scale, where the file wins",
    )

    def derive(self) -> dict[str, Any]:
        return {"exit_signal": tuple(map(_signal_name, self.exit_signal))}

    @property
    def recomputes_layers(self) -> bool:
        """Of each group of transformer layers only the input is kept."""
        return self.checkpoint_activations or self.recompute_granularity == "full"

    @property
    def recomputes_attention(self) -> bool:
        """Softmax and dropout of attention are not kept, all else of a transformer layer is."""
        return self.recompute_granularity == "selective"


def _signal_name(text: str) -> str:
    """ "USR2" and "SIGUSR2" are the same, as for Slurm."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in EXIT_SIGNALS:
        raise ConfigError(f"--exit-signal {text}: expected one of {', '.join(EXIT_SIGNALS)}")
    return name
