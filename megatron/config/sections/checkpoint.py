"""Checkpoint folders, the save interval, and what may differ on resume."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag
from megatron.config.registries import SAVE_FORMATS

_LOAD = {"checkpoint.load": ""}


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoint folders, the save interval, and what may differ on resume."""

    group: ClassVar[str] = "checkpointing"

    save: str | None = flag(
        None,
        metavar="FOLDER",
        help="folder for checkpoints, which are saved every --save-interval iterations, at the end of the "
        "run and on exit (default: no checkpoint is saved). A URL s3://BUCKET/FOLDER is a folder in an "
        "object store",
        group=COMMON_FLAGS,
    )
    load: str | None = flag(
        None,
        metavar="FOLDER",
        help="resume from the checkpoint in this folder (default: the run is initialized from scratch). "
        "Once the run has saved checkpoints in --save, it resumes from the newest of those. If --load and "
        "--save name one folder that is empty or missing, the run is initialized from scratch. A URL "
        "s3://BUCKET/FOLDER is a folder in an object store",
        group=COMMON_FLAGS,
    )
    save_interval: int | None = flag(
        None,
        at_least=1,
        help="iterations between checkpoints (default: save only at the end of the run and on exit)",
        needs={"checkpoint.save": ""},
    )
    save_format: str = flag(
        "native",
        choices=SAVE_FORMATS,
        help="format of the checkpoints in --save. With --num-experts the default is dcp, because "
        "DeepSpeed's files cannot hold experts. Local checkpoints (--save-local) are always native",
        used_with=("checkpoint.save",),
    )
    async_save: bool = flag(
        False,
        help="save in the background: training waits only until the state is copied to host memory, and one "
        "process beside each rank writes the files (without the flag, training waits until the files are "
        "written). A run ends when its last save is complete",
        needs={"checkpoint.save_interval": ""},
    )
    save_local: str | None = flag(
        None,
        metavar="FOLDER",
        help="folder on each node's own disk for local checkpoints, which are saved in the background every "
        "--save-local-interval iterations (default: no local checkpoints). Each node also keeps a copy of "
        "the files of the preceding node. A restart loads the newest local checkpoint if it is complete and "
        "newer than the checkpoint in --save. In the path, {node} stands for the node's name",
        needs={
            "checkpoint.save": "it is a shared folder",
            "checkpoint.save_local_interval": "",
        },
        excludes={
            "training.no_train": "an evaluation (--eval-only) does not save; remove --save-local",
            "model.num_experts": "local checkpoints have DeepSpeed's layout, which has no place for experts; "
            "remove --save-local",
        },
    )
    save_local_interval: int | None = flag(
        None,
        at_least=1,
        help="with --save-local: iterations between local checkpoints",
        needs={"checkpoint.save_local": ""},
    )
    async_save_memory_gb: float | None = flag(
        None,
        above=0.0,
        help="host memory per rank, in GB, for the copy of the state that --async-save and --save-local "
        "make. If the state needs more than this, training waits longer",
        derived="as much as the state needs",
        needs={
            "checkpoint.async_save|checkpoint.save_local": "set --async-save or --save-local, or remove "
            "--async-save-memory-gb"
        },
    )
    save_hf_interval: int | None = flag(
        None,
        at_least=1,
        metavar="N",
        help="every N iterations write the model as a Hugging Face transformers folder "
        "(huggingface_step<iteration> in --save), in the precision of the run (default: never). Each rank "
        "writes a part of it",
        needs={"checkpoint.save": ""},
    )
    save_hf_at_end: bool = flag(
        False,
        help="after the last iteration write the model as a Hugging Face transformers folder in --save, as "
        "--save-hf-interval does",
        needs={"checkpoint.save": ""},
    )
    universal_checkpoint: bool = flag(
        False,
        aliases=("--universal_checkpoint",),
        help="start from the universal checkpoint in --load, even if the folder also has native "
        "checkpoints. tools/ds_to_universal.py, tools/convert_huggingface.py and DeepSpeed write universal "
        "checkpoints, and BLOOM is published as one",
        needs=_LOAD,
    )
    load_huggingface: str | None = flag(
        None,
        metavar="FOLDER",
        help="start a new training from the Hugging Face transformers model in this folder, with its model "
        "and tokenizer flags; implies --load FOLDER --finetune --use-checkpoint-args. Running the same "
        "command again resumes from --save",
    )
    finetune: bool = flag(
        False,
        help="start a new training from the weights in --load: iteration, optimizer, learning-rate schedule "
        "and data start from the beginning. Running the same command again resumes from --save",
        needs=_LOAD,
        excludes={
            "training.no_train": "an evaluation (--eval-only) does not train; remove --finetune, and add "
            "--override-data to evaluate on other data",
            "schedule.use_checkpoint_lr_scheduler": "fine-tuning starts the flags' schedule",
        },
    )
    moe_use_upcycling: bool = flag(
        False,
        help="with --finetune: start a model with experts from the dense model in --load. Each expert gets "
        "the weights of the dense MLP of its layer, and the router is initialized (arXiv:2212.05055)",
        needs={
            "model.num_experts": "",
            "checkpoint.finetune": "experts start without moments",
        },
        excludes={
            "model.moe_shared_expert_intermediate_size": "the dense model has one MLP for the experts and "
            "none for the shared expert"
        },
    )
    branch_at: int | None = flag(
        None,
        at_least=1,
        metavar="ITERATION",
        help="start a cooldown branch: a new run in --save that continues from the checkpoint of this "
        "iteration in --load. The checkpoint must be in a phase of constant learning rate. The learning "
        "rate then decays over --lr-wsd-decay-iters or --lr-wsd-decay-samples, see docs/learning_rate.md. "
        "Running the same command again resumes from --save",
    )
    no_load_optim: bool = flag(
        False,
        help="load fp32 weights from --load, but neither the optimizer's moments nor the loss scale; "
        "iteration, data and schedule continue. Running the same command again resumes from --save",
        used_with=("checkpoint.load",),
        unused_with=("checkpoint.finetune",),
    )
    use_checkpoint_args: bool = flag(
        False,
        help="take the model and tokenizer flags from the checkpoint in --load. A model flag that is also "
        "given must have the checkpoint's value",
    )
    override_data: bool = flag(
        False,
        help="resume with data that differ from the checkpoint's data, at the checkpoint's number of "
        "consumed samples (without the flag, such a resume is an error)",
        used_with=("checkpoint.load",),
    )
    allow_replica_mismatch: bool = flag(
        False,
        aliases=("--allow-drift",),
        help="resume from a checkpoint in which replicas of a parameter differ, with the first rank's copy "
        "(without the flag, such a resume is an error)",
        used_with=("checkpoint.load",),
    )
    keep_last: int | None = flag(
        None,
        at_least=1,
        help="after each save, delete all of this run's checkpoints in --save except the newest N (default: "
        "keep all). The newest checkpoint from which a run can resume is never deleted",
        used_with=("checkpoint.save",),
    )
    save_retain_interval: int | None = flag(
        None,
        at_least=1,
        metavar="STEPS",
        help="with --keep-last: also keep the first checkpoint at or after each multiple of STEPS iterations",
        used_with=("checkpoint.keep_last",),
    )
    overwrite_checkpoints: bool = flag(
        False,
        help="start even if --save holds checkpoints of a different run (without the flag, this is an "
        "error). A checkpoint is replaced when a new one of the same name is complete",
        used_with=("checkpoint.save",),
    )

    @property
    def save_is_load_folder(self) -> bool:
        """Returns whether --save is the folder --load, or the folder that contains the checkpoint --load."""
        if self.load is None or self.save is None:
            return False
        load = os.path.realpath(self.load)
        return os.path.realpath(self.save) in (load, os.path.dirname(load))

    @property
    def saves_layer_files(self) -> bool:
        """Returns whether the checkpoint has files of layers, with weights in the precision of the run, in
        addition to the optimizer's fp32 values."""
        return self.save_format == "native" or self.save_local is not None

    def local_folder(self, node: str) -> str:
        """Returns the folder of this run's local checkpoints on a node. node: name of the node. Runs with
        different --save folders have different local folders."""
        save = os.path.abspath(str(self.save))
        digest = hashlib.sha256(save.encode(errors="surrogateescape")).hexdigest()[:8]
        folder = str(self.save_local).replace("{node}", node)
        return os.path.join(os.path.abspath(folder), f"{os.path.basename(save)[:100]}-{digest}")
