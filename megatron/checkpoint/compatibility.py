"""Whether a run may resume from a checkpoint: model, data and learning-rate schedule are compared."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from megatron.checkpoint.record import Checkpoint
from megatron.config import BatchSchedule, Config
from megatron.data.gpt_dataset import VOCABULARY_KEY, fingerprint_differences, same_data
from megatron.errors import UserError
from megatron.optimizer.schedule import LearningRateSchedule, schedule_of


def starts_at_zero(checkpoint: Checkpoint) -> bool:
    """Whether a run starts from it at sample 0: it was imported from Hugging Face, or --finetune is given.
    Any data, schedule and training settings are accepted then."""
    return not checkpoint.start_state.consumed_samples


def check_model(checkpoint: Checkpoint, config: Config, vocab_size: int) -> None:
    """Raises UserError, with the differences, for a checkpoint of another model."""
    # The vocabulary is compared by its size before padding: padding is removed or added.
    saved, now = checkpoint.config.model_settings(), config.model_settings()
    names = {field.name for field in fields(config.model)} if starts_at_zero(checkpoint) else now.keys()
    differences = [
        f"{key} was {saved.get(key)}, is {now[key]}"
        for key in now
        if key in names and saved.get(key) != now[key]
    ]
    if checkpoint.vocab_size != vocab_size:
        differences.append(f"the vocabulary had {checkpoint.vocab_size} tokens, has {vocab_size}")
    if differences:
        raise UserError(f"checkpoint {checkpoint.folder} holds another model: {'; '.join(differences)}")


def check_vocabulary(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> None:
    """Raises UserError for another vocabulary of the same size, if both digests are known."""
    saved, now = (data.get(VOCABULARY_KEY) for data in (checkpoint.run.get("data", {}), fingerprint))
    if saved and now and saved != now:
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with another vocabulary (SHA-256 {saved[:12]}) than "
            f"this run's tokenizer has ({now[:12]}), although both have {checkpoint.vocab_size} tokens: give "
            "the tokenizer files that it was trained with"
        )


def check_data(checkpoint: Checkpoint, config: Config, fingerprint: dict[str, Any]) -> None:
    """Raises UserError for other data, in which the saved position is meaningless, unless
    --override-data."""
    differences = _data_differences(checkpoint, fingerprint)
    if not differences or config.checkpoint.override_data:
        return
    if same_data(checkpoint.run["data"], fingerprint):
        raise UserError(
            f"checkpoint {checkpoint.folder} is of a run over {_train_samples(checkpoint.config):,} training "
            f"samples, this run is over {_train_samples(config):,}: that is another number of epochs of the "
            f"same data ({'; '.join(differences)}), which are shuffled together, so the order of the samples "
            "differs: keep the length of that run (--global-batch-size, --train-iters, --train-samples, "
            "--train-tokens), or pass --override-data to continue in the new order from the same sample"
        )
    raise UserError(
        f"checkpoint {checkpoint.folder} was trained on other data ({'; '.join(differences)}): pass the "
        "data flags of that run, or --override-data to continue with these data from the same sample "
        "number"
    )


def _train_samples(config: Config) -> int:
    """The training samples of the whole run."""
    batches = BatchSchedule.from_config(config.batch)
    return batches.consumed_after(
        batches.total_iterations(config.training, config.model.seq_length, config.curriculum)
    )


def check_first_sample(checkpoint: Checkpoint | None, config: Config) -> None:
    """Raises UserError if the run would start before the first sample of its data."""
    consumed = 0 if checkpoint is None else checkpoint.start_state.consumed_samples
    if consumed < config.data.data_first_sample:
        raise UserError(
            f"--data-first-sample {config.data.data_first_sample}, and the run starts at sample {consumed}: "
            "remove the flag, or load a later checkpoint"
        )


def data_line(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> str:
    """How the data compare with those of the checkpoint, for the log."""
    first = fingerprint.get("first_sample", 0)
    if checkpoint.weights_only:
        return "from sample 0 (--finetune)"
    if starts_at_zero(checkpoint):
        return "from sample 0: the checkpoint has consumed none"
    position = f"from sample {checkpoint.state.consumed_samples - first:,}"
    if checkpoint.is_external:
        return f"not compared, {position}: the program that saved it did not record them"
    if differences := _data_differences(checkpoint, fingerprint):
        what = (
            "the same data in another order"
            if same_data(checkpoint.run["data"], fingerprint)
            else "different data"
        )
        return f"{what}, {position} (--override-data): {'; '.join(differences)}"
    return f"the same, {position}"


def _data_differences(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[str]:
    return [] if starts_at_zero(checkpoint) else fingerprint_differences(checkpoint.run["data"], fingerprint)


def mismatched_replicas(checkpoint: Checkpoint) -> list[str]:
    """The parameters and moments whose replicas on several ranks differed when the checkpoint was saved."""
    return list(checkpoint.run.get("certificate", {}).get("unequal_copies", []))


def check_replicas(checkpoint: Checkpoint, config: Config) -> None:
    """Raises UserError if replicas of a parameter differed, unless --allow-replica-mismatch."""
    mismatched = mismatched_replicas(checkpoint)
    if mismatched and not config.checkpoint.allow_replica_mismatch:
        raise UserError(
            f"checkpoint {checkpoint.folder}: when it was saved, replicas on several ranks were not equal "
            f"({'; '.join(mismatched[:3])}; {len(mismatched)} in all): load an older one, or use the first "
            "rank's replicas with --allow-replica-mismatch"
        )


def check_external_schedule(checkpoint: Checkpoint, config: Config) -> None:
    """Raises UserError for --use-checkpoint-lr-scheduler with a checkpoint that has no schedule."""
    if config.schedule.use_checkpoint_lr_scheduler:
        raise UserError(
            f"--use-checkpoint-lr-scheduler: checkpoint {checkpoint.folder} was written by another program "
            "and its schedule is not known: drop the flag and give the --lr flags that it was trained with"
        )


def check_schedule(checkpoint: Checkpoint, config: Config) -> None:
    """Raises UserError for another learning-rate schedule, unless a flag selects one of the two."""
    if not _has_schedule(checkpoint) or checkpoint.is_branch_point:
        return
    saved, now = schedule_of(checkpoint.config), schedule_of(config)
    which = config.schedule.override_lr_scheduler or config.schedule.use_checkpoint_lr_scheduler
    if saved != now and not which:
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with another schedule ({_old_and_new(saved, now)}): "
            "--override-lr-scheduler uses that of the flags, --use-checkpoint-lr-scheduler that of the "
            "checkpoint"
        )


def resumed_schedule(checkpoint: Checkpoint | None, config: Config) -> LearningRateSchedule:
    """The schedule of a run that resumes from `checkpoint`, or of a new run if it is None."""
    use_checkpoint = config.schedule.use_checkpoint_lr_scheduler
    if checkpoint is not None and use_checkpoint and _has_schedule(checkpoint):
        return schedule_of(checkpoint.config)
    return schedule_of(config)


def schedule_line(checkpoint: Checkpoint, config: Config) -> str:
    """How the schedules compare and which one is used, for the log."""
    if checkpoint.weights_only:
        return "the schedule of the flags, from its start (--finetune)"
    if checkpoint.is_branch_point:
        return f"the decay of a branch begins (--branch-at {checkpoint.state.iteration})"
    if not _has_schedule(checkpoint):
        return "the schedule of the flags: the checkpoint has none that can be compared"
    saved, now = schedule_of(checkpoint.config), schedule_of(config)
    if saved == now:
        return "the same schedule"
    winner = "new" if config.schedule.override_lr_scheduler else "old"
    flag = "--override-lr-scheduler" if winner == "new" else "--use-checkpoint-lr-scheduler"
    return f"the {winner} schedule ({flag}): {_old_and_new(saved, now)}"


def _has_schedule(checkpoint: Checkpoint) -> bool:
    return not (starts_at_zero(checkpoint) or checkpoint.is_external)


def _old_and_new(saved: LearningRateSchedule, now: LearningRateSchedule) -> str:
    """The settings that differ, in words."""
    old, new = asdict(saved), asdict(now)
    return "; ".join(f"{key} was {old[key]}, is {new[key]}" for key in old if old[key] != new[key])
