"""Decides whether a run may resume from a checkpoint, by its model, data and learning-rate schedule."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats.state import lacks_experts, lacks_mtp_layers
from megatron.checkpoint.record import Checkpoint
from megatron.config import Config
from megatron.data.gpt_dataset import ORDER_KEY, VOCABULARY_KEY, fingerprint_differences, same_data
from megatron.errors import UserError
from megatron.optimizer.batch_schedule import BEGIN, Progress, RunLength
from megatron.optimizer.schedule import schedule_of

if TYPE_CHECKING:  # importing it loads DeepSpeed, which tools that read checkpoints do not need
    from megatron.run import Run


def start_of(checkpoint: Checkpoint | None) -> Progress:
    """Returns what a run that starts from `checkpoint` (None: from scratch) has already consumed."""
    return BEGIN if checkpoint is None else checkpoint.start_state


def starts_at_zero(checkpoint: Checkpoint) -> bool:
    """Returns whether a run that starts from this checkpoint starts at sample 0, because the checkpoint was
    imported from Hugging Face or --finetune is given. Such a run may use any data, schedule and training
    settings."""
    return not checkpoint.start_state.consumed_samples


def check_model(checkpoint: Checkpoint, config: Config, vocab_size: int) -> None:
    """Raises UserError if the checkpoint is from a different model. The message lists the differences."""
    # Vocabulary sizes are compared without padding, which loading removes or adds.
    saved, now = checkpoint.config.model_settings(), config.model_settings()
    names = {field.name for field in fields(config.model)} if starts_at_zero(checkpoint) else now.keys()
    differences = [
        f"{key} was {saved.get(key)}, is {now[key]}"
        for key in now
        if key in names and saved.get(key) != now[key]
    ]
    if differences and saved.get("num_experts") is None and now.get("num_experts") is not None:
        raise lacks_experts(checkpoint, config)
    if differences and saved.get("mtp_num_layers") is None and now.get("mtp_num_layers") is not None:
        raise lacks_mtp_layers(checkpoint, config)
    if checkpoint.vocab_size != vocab_size:
        differences.append(f"the vocabulary had {checkpoint.vocab_size} tokens, has {vocab_size}")
    if differences:
        raise UserError(
            f"checkpoint {checkpoint.folder} holds another model: {'; '.join(differences)}. Correct "
            "the flags of the model and the tokenizer, or replace them by --use-checkpoint-args"
        )


def check_vocabulary(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> None:
    """Raises UserError if two vocabularies of equal size have different digests. Compares nothing if a digest
    is missing."""
    saved, now = (data.get(VOCABULARY_KEY) for data in (checkpoint.run.get("data", {}), fingerprint))
    if saved and now and saved != now:
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with another vocabulary (SHA-256 {saved[:12]}) than "
            f"this run's tokenizer has ({now[:12]}), although both have {checkpoint.vocab_size} tokens: give "
            "the tokenizer files of the checkpoint"
        )


def check_data(checkpoint: Checkpoint, config: Config, fingerprint: dict[str, Any]) -> None:
    """Raises UserError if the data differ from the checkpoint's, unless --override-data is given: the
    position that the checkpoint records has no meaning in different data. Compares nothing if another
    framework saved the checkpoint."""
    differences = _data_differences(checkpoint, fingerprint)
    if not differences or config.checkpoint.override_data:
        return
    if same_data(checkpoint.run["data"], fingerprint):
        was, now = (
            RunLength.from_config(settings, checkpoint.state).ordered_samples(settings)
            for settings in (checkpoint.config, config)
        )
        keeps = f"pass --data-order-samples {was} to keep its order, " if now < was else ""
        raise UserError(
            f"checkpoint {checkpoint.folder}: the order of the samples would change. Its run has {was:,} "
            f"training samples, this run {now:,}: another number of epochs of the same data "
            f"({'; '.join(differences)}). All epochs are shuffled together. Keep the length of the "
            f"checkpoint's run (--global-batch-size, --train-iters, --train-samples, --train-tokens), "
            f"{keeps}or pass --override-data to continue in the new order from the saved sample"
        )
    is_reordered = any(difference.startswith(f"{ORDER_KEY}:") for difference in differences)
    what = "in another order of samples" if is_reordered else "on other data"
    raise UserError(
        f"checkpoint {checkpoint.folder} was trained {what} ({'; '.join(differences)}): pass the "
        "data flags of its run, or --override-data to continue with the new data from the saved sample"
    )


def check_first_sample(checkpoint: Checkpoint | None, config: Config) -> None:
    """Raises UserError if the run would start before the first sample of its data."""
    consumed = start_of(checkpoint).consumed_samples
    if consumed < config.data.data_first_sample:
        raise UserError(
            f"--data-first-sample {config.data.data_first_sample}: the run starts before it, at sample "
            f"{consumed}. Remove --data-first-sample, or load a later checkpoint"
        )


def data_line(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> str:
    """Returns the log line that compares the run's data with the checkpoint's."""
    first = fingerprint.get("first_sample", 0)
    if checkpoint.weights_only:
        return "from sample 0 (--finetune)"
    if starts_at_zero(checkpoint):
        return "from sample 0: the checkpoint has consumed none"
    position = f"from sample {checkpoint.state.consumed_samples - first:,}"
    if not checkpoint.records_run:
        return (
            f"not compared, {position}: the framework that saved the checkpoint did not record its data "
            "(--data-order chooses its order of samples)"
        )
    if differences := _data_differences(checkpoint, fingerprint):
        what = (
            "the same data in another order"
            if same_data(checkpoint.run["data"], fingerprint)
            else "different data"
        )
        return f"{what}, {position} (--override-data): {'; '.join(differences)}"
    return f"the same, {position}"


def _data_differences(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[str]:
    if starts_at_zero(checkpoint) or not checkpoint.records_run:
        return []
    return fingerprint_differences(checkpoint.run["data"], fingerprint)


def mismatched_replicas(checkpoint: Checkpoint) -> list[str]:
    """Returns the parameters and moments whose replicas on several ranks differed at the save."""
    return list(checkpoint.integrity_record.get("unequal_copies", []))


def check_replicas(checkpoint: Checkpoint, config: Config) -> None:
    """Raises UserError if replicas differed at the save, unless --allow-replica-mismatch is given."""
    mismatched = mismatched_replicas(checkpoint)
    if mismatched and not config.checkpoint.allow_replica_mismatch:
        raise UserError(
            f"checkpoint {checkpoint.folder}: when it was saved, replicas on several ranks were not equal "
            f"({'; '.join(mismatched[:3])}; {len(mismatched)} in all): load an older checkpoint, or pass "
            "--allow-replica-mismatch to use the first rank's replicas"
        )


def check_schedule(checkpoint: Checkpoint, config: Config) -> None:
    """Raises UserError if the schedule differs from the checkpoint's and no flag selects one of the two, or
    if a flag selects the schedule of a checkpoint of another framework."""
    if config.schedule.use_checkpoint_lr_scheduler and not checkpoint.records_run:
        raise UserError(
            f"--use-checkpoint-lr-scheduler: checkpoint {checkpoint.folder} was written by another framework "
            "and its schedule is not known. Remove --use-checkpoint-lr-scheduler, and set the --lr flags of "
            "its run"
        )
    if not _has_schedule(checkpoint) or checkpoint.is_branch_point:
        return
    is_selected = config.schedule.override_lr_scheduler or config.schedule.use_checkpoint_lr_scheduler
    if not is_selected and (differences := _schedule_differences(checkpoint, config)):
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with another schedule ({differences}): "
            "pass --override-lr-scheduler to use the schedule of the flags, or --use-checkpoint-lr-scheduler "
            "to use the checkpoint's"
        )


def starting_from(checkpoint: Checkpoint | None, run: Run) -> Run:
    """Returns the run with the progress and schedule that it has when it starts from `checkpoint` (None: from
    scratch)."""
    schedule, use_checkpoint = None, run.config.schedule.use_checkpoint_lr_scheduler
    if checkpoint is not None and use_checkpoint and _has_schedule(checkpoint):
        schedule = schedule_of(checkpoint.config, checkpoint.state)
    return replace(run, start=start_of(checkpoint), checkpoint_schedule=schedule)


def schedule_line(checkpoint: Checkpoint, config: Config) -> str:
    """Returns the log line that compares the run's schedule with the checkpoint's and names the one in
    use."""
    if checkpoint.weights_only:
        return "the schedule of the flags, from its start (--finetune)"
    if checkpoint.is_branch_point:
        return f"the decay of a branch begins (--branch-at {checkpoint.state.iteration})"
    if not _has_schedule(checkpoint):
        return "the schedule of the flags: the checkpoint has none that can be compared"
    differences = _schedule_differences(checkpoint, config)
    if not differences:
        return "the same schedule"
    winner = "new" if config.schedule.override_lr_scheduler else "old"
    flag = "--override-lr-scheduler" if winner == "new" else "--use-checkpoint-lr-scheduler"
    return f"the {winner} schedule ({flag}): {differences}"


def _has_schedule(checkpoint: Checkpoint) -> bool:
    return checkpoint.records_run and not starts_at_zero(checkpoint)


def _schedule_differences(checkpoint: Checkpoint, config: Config) -> str:
    """Returns the settings that make the run's learning rates differ from the checkpoint's, as text; "" if
    there are none."""
    saved, now = (schedule_of(settings, checkpoint.state) for settings in (checkpoint.config, config))
    old, new = (schedule.effective_settings(checkpoint.state) for schedule in (saved, now))
    return "; ".join(
        f"{key} was {getattr(saved, key)}, is {getattr(now, key)}"
        for key in asdict(now)
        if old.get(key) != new.get(key) and getattr(saved, key) != getattr(now, key)
    )
