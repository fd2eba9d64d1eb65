"""Whether a run may go on from a checkpoint: model, data and learning-rate schedule are compared."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import partial
from typing import Any

from megatron.checkpoint.discovery import Checkpoint
from megatron.config import BatchSchedule, Config, ConfigError
from megatron.data.gpt_dataset import VOCABULARY_KEY, fingerprint_differences
from megatron.optimizer.schedule import LearningRateSchedule


def is_untrained(checkpoint: Checkpoint) -> bool:
    """Whether it holds weights that were not trained here, as those of Hugging Face: no sample was consumed,
    so data, schedule and how the weights are trained on are free."""
    return not checkpoint.state.consumed_samples


def check_model(checkpoint: Checkpoint, config: Config, vocab_size: int) -> None:
    """Refuses a checkpoint of another model, naming what differs."""
    # The vocabulary is compared by its size before padding: padding is removed or added.
    saved, now = checkpoint.config.model_settings(), config.model_settings()
    names = now.keys()
    if is_untrained(checkpoint):
        names &= {field.name for field in fields(config.model)}
    differences = [
        f"{key} was {saved.get(key)}, is {now[key]}"
        for key in now
        if key in names and saved.get(key) != now[key]
    ]
    if checkpoint.vocab_size != vocab_size:
        differences.append(f"the vocabulary had {checkpoint.vocab_size} tokens, has {vocab_size}")
    if differences:
        raise ConfigError(f"checkpoint {checkpoint.folder} holds another model: {'; '.join(differences)}")


def check_vocabulary(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> None:
    """Refuses a checkpoint of another vocabulary of the same size, where both digests are known."""
    saved, now = (data.get(VOCABULARY_KEY) for data in (checkpoint.run.get("data", {}), fingerprint))
    if saved and now and saved != now:
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was trained with another vocabulary (SHA-256 {saved[:12]}) than "
            f"this run's tokenizer has ({now[:12]}), although both have {checkpoint.vocab_size} tokens: give "
            "the tokenizer files that it was trained with"
        )


def check_data(checkpoint: Checkpoint, config: Config, fingerprint: dict[str, Any]) -> None:
    """Refuses to go on with other data, where the position in it means nothing, unless --override-data."""
    differences = _data_differences(checkpoint, fingerprint)
    if differences and not config.checkpoint.override_data:
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was trained on other data ({'; '.join(differences)}): give the "
            "flags that wrote it, or --override-data to go on with these data at the same number of samples"
        )


def data_line(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> str:
    """The data then and now, in words."""
    if is_untrained(checkpoint):
        return "from sample 0: the checkpoint has seen none"
    position = f"from sample {checkpoint.state.consumed_samples:,}"
    if checkpoint.is_external:
        return f"not compared, {position}: the program that saved it does not tell which they were"
    if differences := _data_differences(checkpoint, fingerprint):
        return f"OTHER data, {position} (--override-data): {'; '.join(differences)}"
    return f"the same, {position}"


def _data_differences(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[str]:
    return [] if is_untrained(checkpoint) else fingerprint_differences(checkpoint.run["data"], fingerprint)


def unequal_copies(checkpoint: Checkpoint) -> list[str]:
    """The parameters and moments whose copies on several ranks differed when it was saved."""
    return list(checkpoint.run.get("certificate", {}).get("unequal_copies", []))


def check_replicas(checkpoint: Checkpoint, config: Config) -> None:
    """Refuses a checkpoint in which replicas of a parameter differ, unless --allow-replica-mismatch."""
    unequal = unequal_copies(checkpoint)
    if unequal and not config.checkpoint.allow_replica_mismatch:
        raise ConfigError(
            f"checkpoint {checkpoint.folder}: when it was saved, copies on several ranks were not equal "
            f"({'; '.join(unequal[:3])}; {len(unequal)} in all): load an older one, or take the first rank's "
            "copies with --allow-replica-mismatch"
        )


def check_external_schedule(checkpoint: Checkpoint, config: Config) -> None:
    """Refuses to take the schedule of a checkpoint that tells none."""
    if config.schedule.use_checkpoint_lr_scheduler:
        raise ConfigError(
            f"--use-checkpoint-lr-scheduler: checkpoint {checkpoint.folder} is another program's, whose "
            "schedule is not known: drop the flag and give the --lr flags that it was trained with"
        )


def check_schedule(checkpoint: Checkpoint, config: Config) -> None:
    """Refuses another learning-rate schedule unless a flag says which one wins."""
    if not _has_schedule(checkpoint):
        return
    saved, now = _schedule_of(checkpoint.config), _schedule_of(config)
    which = config.schedule.override_lr_scheduler or config.schedule.use_checkpoint_lr_scheduler
    if saved != now and not which:
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was trained with another schedule ({_old_and_new(saved, now)}): "
            "--override-lr-scheduler takes the one of the flags, --use-checkpoint-lr-scheduler the "
            "checkpoint's"
        )


def resumed_schedule(checkpoint: Checkpoint | None, config: Config) -> LearningRateSchedule:
    """The schedule of a run that goes on from `checkpoint`, or of a fresh one."""
    old_wins = config.schedule.use_checkpoint_lr_scheduler
    if checkpoint is not None and old_wins and _has_schedule(checkpoint):
        return _schedule_of(checkpoint.config)
    return _schedule_of(config)


def schedule_line(checkpoint: Checkpoint, config: Config) -> str:
    """The schedules then and now, in words, and which one wins."""
    if not _has_schedule(checkpoint):
        return "the schedule of the flags: the checkpoint has none that can be compared"
    saved, now = _schedule_of(checkpoint.config), _schedule_of(config)
    if saved == now:
        return "the same schedule"
    winner = "new" if config.schedule.override_lr_scheduler else "old"
    flag = "--override-lr-scheduler" if winner == "new" else "--use-checkpoint-lr-scheduler"
    return f"the {winner} schedule ({flag}): {_old_and_new(saved, now)}"


def _has_schedule(checkpoint: Checkpoint) -> bool:
    return not (is_untrained(checkpoint) or checkpoint.is_external)


def _schedule_of(config: Config) -> LearningRateSchedule:
    seq_length = config.model.seq_length
    tokens_of_samples = partial(
        BatchSchedule.from_config(config.batch).tokens_of_samples,
        seq_length=seq_length,
        curriculum=config.curriculum,
    )
    return LearningRateSchedule.from_config(config.schedule, config.training, seq_length, tokens_of_samples)


def _old_and_new(saved: LearningRateSchedule, now: LearningRateSchedule) -> str:
    """What differs, setting by setting."""
    old, new = asdict(saved), asdict(now)
    return "; ".join(f"{key} was {old[key]}, is {new[key]}" for key in old if old[key] != new[key])
