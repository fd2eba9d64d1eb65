"""A checkpoint on disk, its training state, and the names of its files. This module reads no files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.lineage.identity import LineageEntry, parse_lineage, parse_run_id
from megatron.checkpoint.names import INTEGRITY_KEY
from megatron.config import Config
from megatron.optimizer.batch_schedule import Progress

# Key of `run.json` in checkpoints that a tool converted from another framework's model or checkpoint.
IMPORTED_KEY = "imported"
# Key of `run.json` in imported Hugging Face models: the ids of special tokens that the model's settings name.
TOKEN_IDS_KEY = "token_ids"
RUN_FILE = "run.json"
# Prefix of the folder of a checkpoint that is being written.
SAVING = "saving-"
# Suffix of the folder of a checkpoint while a new one of the same name replaces it.
REPLACED = ".replaced"


@dataclass(frozen=True)
class TrainingState(Progress):
    """The progress of a run, and the recent losses, gradient norms and skips that its next steps depend
    on."""

    skipped_iterations: int = 0
    """Iterations that did not update the weights, for any reason."""
    skips_in_a_row: int = 0
    """Number of iterations that were skipped in a row up to now. Iterations of --skip-train-iteration-range
    are not counted."""
    rollbacks: int = 0
    recent_losses: tuple[float, ...] = ()
    """Losses of the last updates, oldest first. Empty unless spike detection is on."""
    recent_grad_norms: tuple[float, ...] = ()
    """Gradient norms of the updates in `recent_losses`."""
    pending_evaluations: int = 0
    """How many data sets, counted from the last, were not evaluated at this iteration because the run
    stopped."""

    def __post_init__(self) -> None:
        for name in ("recent_losses", "recent_grad_norms", "warmup_end"):  # JSON turns tuples into lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its folder and the content of `run.json`."""

    folder: Path
    state: TrainingState
    run: dict[str, Any]
    skip_reason: str = ""
    """Why the run does not use a newer checkpoint; "" if this one is the newest."""
    unverified_note: str = ""
    """What could not be verified because the checkpoint does not contain it; "" if nothing."""
    weights_only: bool = False
    """Whether a new run starts from this checkpoint's weights only (--finetune)."""
    no_optimizer: bool = False
    """Whether the run does not load the optimizer state (--finetune, --no-load-optim)."""
    is_branch_point: bool = False
    """Whether a cooldown branch starts from this checkpoint (--branch-at)."""
    format: str = ""
    """Name of the checkpoint's format in `formats.registry`; "" if the files must be inspected to find it."""
    is_local: bool = False
    """Whether the checkpoint's files are on the disks of the nodes (--save-local)."""
    is_partial: bool = False
    """Whether `folder` holds only a part of the checkpoint's files: the ones on the node of this rank."""

    @property
    def start_state(self) -> TrainingState:
        """The training state of a run that starts from this checkpoint."""
        return TrainingState() if self.weights_only else self.state

    @property
    def is_external(self) -> bool:
        """Whether another framework wrote the checkpoint. Then `run` holds that framework's arguments, and no
        config."""
        return "config" not in self.run

    @property
    def records_run(self) -> bool:
        """Whether the checkpoint records the data and the schedule of its run. A checkpoint of another
        framework does not, even after it was converted to a format of this program."""
        return not self.is_external and IMPORTED_KEY not in self.run

    @property
    def run_id(self) -> str | None:
        """Id of the run that wrote the checkpoint; None if its version of this program had no run ids."""
        return parse_run_id(self.run.get("run_id"))

    @property
    def lineage(self) -> tuple[LineageEntry, ...]:
        """The run's earlier checkpoints, oldest first."""
        return parse_lineage(self.run.get("lineage", []))

    @property
    def origin(self) -> dict[str, Any]:
        """The `origin_record` of the checkpoint from which the run was started; {} if there is none."""
        origin = self.run.get("origin")
        return origin if isinstance(origin, dict) else {}

    @property
    def integrity_record(self) -> dict[str, Any]:
        """The digests and the canary loss that were recorded at the save; {} if there are none."""
        return self.run.get(INTEGRITY_KEY) or {}

    @property
    def entry(self) -> LineageEntry:
        """The entry for this checkpoint in the lineage of a later checkpoint."""
        name = self.folder.name.removesuffix(REPLACED)
        return LineageEntry(name, step_of(name), self.run_id, self.run.get("sha256"))

    @property
    def config(self) -> Config:
        """The configuration of the run that wrote the checkpoint."""
        return Config.from_dict(self.run["config"])

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding."""
        return int(self.run["vocab_size"])

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None if the run had none."""
        return self.run["eod"]


def step_of(name: str) -> int:
    """Returns the iteration in the name of a checkpoint's folder; -1 if there is none."""
    match = re.search(r"global_step(\d+)", name)
    return int(match[1]) if match else -1


def describe_start(checkpoint: Checkpoint | None, load: str | None) -> str:
    """Returns the log line that says what a run starts from, and why."""
    if checkpoint is None:
        return "initializing from scratch" + (f" (--load {load} holds no checkpoint)" if load else "")
    why = f" ({checkpoint.skip_reason})" if checkpoint.skip_reason else ""
    note = f". {checkpoint.unverified_note}" if checkpoint.unverified_note else ""
    if checkpoint.weights_only:
        return (
            f"weights from {checkpoint.folder}, iteration {checkpoint.state.iteration}{why}; iteration, "
            f"optimizer, learning-rate schedule and data start fresh (--finetune){note}"
        )
    if checkpoint.no_optimizer:
        note = f"; the optimizer state starts fresh (--no-load-optim){note}"
    start = "starting a cooldown branch (--branch-at)" if checkpoint.is_branch_point else "starting"
    return f"{start} from {checkpoint.folder}, iteration {checkpoint.state.iteration}{why}{note}"
