"""A checkpoint on disk, the training state in it, and the names of its files. Reads no files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.lineage.identity import LineageEntry, parse_lineage, parse_run_id
from megatron.config import Config
from megatron.optimizer.batch_schedule import Progress

# In `run.json` of a model or checkpoint of another framework that was converted to a format of this program.
IMPORTED_KEY = "imported"
# In `run.json` of an imported Hugging Face model: the ids of special tokens in its settings.
TOKEN_IDS_KEY = "token_ids"
RUN_FILE = "run.json"
# Prefix of a checkpoint that is being written.
SAVING = "saving-"
# Suffix of a checkpoint that is being replaced by a new one of the same name.
REPLACED = ".replaced"


@dataclass(frozen=True)
class TrainingState(Progress):
    """Progress of a run, and what its next steps need to know about the last ones."""

    skipped_iterations: int = 0
    """Iterations without an update of the weights, for any reason."""
    skips_in_a_row: int = 0
    """Number of iterations skipped in a row up to now, without those of --skip-train-iteration-range."""
    rollbacks: int = 0
    recent_losses: tuple[float, ...] = ()
    """Losses of the last updates, oldest first; kept if spike detection is on."""
    recent_grad_norms: tuple[float, ...] = ()
    """Gradient norms of the updates in `recent_losses`."""
    pending_evaluations: int = 0
    """Number of data sets, counted from the last, that were not evaluated at this iteration due to a stop."""

    def __post_init__(self) -> None:
        for name in ("recent_losses", "recent_grad_norms", "warmup_end"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its folder and the content of `run.json`."""

    folder: Path
    state: TrainingState
    run: dict[str, Any]
    skip_reason: str = ""
    """Why a newer checkpoint was not selected; "" if this is the newest."""
    unverified_note: str = ""
    """What could not be compared, because the checkpoint does not contain it."""
    weights_only: bool = False
    """Whether a new run starts from its weights (--finetune)."""
    no_optimizer: bool = False
    """Whether its optimizer state is not loaded (--finetune, --no-load-optim)."""
    is_branch_point: bool = False
    """Whether a cooldown branch starts from it (--branch-at)."""
    format: str = ""
    """The name of its format in `formats.registry`; "" if it must be found from the files."""
    is_local: bool = False
    """Whether its files are on the nodes' disks (--save-local)."""
    is_partial: bool = False
    """Whether `folder` holds only a part of the files, the ones that are on this rank's node."""

    @property
    def start_state(self) -> TrainingState:
        """The training state of a run that starts from this checkpoint."""
        return TrainingState() if self.weights_only else self.state

    @property
    def is_external(self) -> bool:
        """Whether another framework wrote it. Then `run` holds that framework's arguments, and no config."""
        return "config" not in self.run

    @property
    def records_run(self) -> bool:
        """Whether it records the data and the schedule of its run. A checkpoint of another framework does
        not, also once it is converted to a format of this program."""
        return not self.is_external and IMPORTED_KEY not in self.run

    @property
    def run_id(self) -> str | None:
        """Id of the run that wrote it; None if it was written before run ids existed."""
        return parse_run_id(self.run.get("run_id"))

    @property
    def lineage(self) -> tuple[LineageEntry, ...]:
        """The earlier checkpoints of the run, oldest first."""
        return parse_lineage(self.run.get("lineage", []))

    @property
    def origin(self) -> dict[str, Any]:
        """The `origin_record` of the checkpoint that its run was started from; {} if there is none."""
        origin = self.run.get("origin")
        return origin if isinstance(origin, dict) else {}

    @property
    def entry(self) -> LineageEntry:
        """Its entry in the lineage of a later checkpoint."""
        name = self.folder.name.removesuffix(REPLACED)
        return LineageEntry(name, step_of(name), self.run_id, self.run.get("sha256"))

    @property
    def config(self) -> Config:
        """The configuration of the run that wrote it."""
        return Config.from_dict(self.run["config"])

    @property
    def vocab_size(self) -> int:
        """True size of the vocabulary, without padding."""
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
    """Describes what a run starts from, and why, for the log."""
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
