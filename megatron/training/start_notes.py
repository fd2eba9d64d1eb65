"""Sentences at the start of a run about what a resume changes and what the rest of the run will do."""

from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.compatibility import starts_at_zero
from megatron.checkpoint.manager import find_checkpoint
from megatron.checkpoint.record import Checkpoint, TrainingState, describe_start
from megatron.config import BatchSchedule, Config
from megatron.config.batch import RunLength
from megatron.config.fields import option_name
from megatron.optimizer.schedule import LearningRateSchedule, Progress
from megatron.tokenizer.vocabulary import Vocabulary
from megatron.training.data import missing_token_file, run_fingerprint

# A resume may change these settings, and names those that differ from the checkpoint's.
_CHANGEABLE_SETTINGS = {
    "model": ("hidden_dropout", "attention_dropout", "init_method_std"),
    "training": ("seed", "z_loss_weight"),
    "optimizer": (
        *("optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "weight_decay", "clip_grad"),
        "use_bnb_optimizer",
    ),
}


def start_notes(
    checkpoint: Checkpoint | None,
    config: Config,
    length: RunLength,
    batches: BatchSchedule,
    lr_schedule: LearningRateSchedule,
) -> list[str]:
    """One sentence each: nothing to train, a batch size or settings that differ from the checkpoint's, a
    learning rate of 0."""
    if config.training.no_train:
        return []
    state = checkpoint.start_state if checkpoint is not None else TrainingState()
    if state.iteration >= length.iterations:
        return [
            f"nothing to train: the checkpoint is at iteration {state.iteration} and the run ends at "
            f"iteration {length.iterations} (--train-iters, --train-samples, --train-tokens)"
        ]
    return [
        *_batch_notes(checkpoint, batches, length),
        *_settings_notes(checkpoint, config),
        *_rate_notes(config, length, batches, lr_schedule),
    ]


def planned_start(
    config: Config, length: RunLength, vocab: Vocabulary
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that a run with the flags of a dry run would start from, and a sentence about it.

    It is checked as in a run if --load is a folder on this machine and the data are there. Raises ConfigError
    if the run would be refused.
    """
    load = config.checkpoint.load
    if load is None:
        return None, []
    if not Path(load).is_dir():
        return None, [f"--load is not checked: {load} does not exist here"]
    if missing := missing_token_file(config):
        return None, [f"--load {load} is not checked: {missing}"]
    fingerprint = run_fingerprint(config, length, vocab)
    checkpoint = find_checkpoint(config, vocab.size, fingerprint)
    return checkpoint, [describe_start(checkpoint, load)]


def _batch_notes(checkpoint: Checkpoint | None, batches: BatchSchedule, length: RunLength) -> Iterator[str]:
    if checkpoint is None or checkpoint.is_external or starts_at_zero(checkpoint):
        return
    saved, samples = BatchSchedule.from_config(checkpoint.config.batch), checkpoint.state.consumed_samples
    if saved != batches:
        yield (
            f"the batch size differs from the checkpoint's: {saved.global_batch_size_at(samples)} samples "
            f"there (up to {saved.global_batch_size}), {batches.global_batch_size_at(samples)} samples from "
            f"iteration {checkpoint.state.iteration + 1} on (up to {batches.global_batch_size}); the run "
            f"ends at iteration {length.iterations}"
        )


def _settings_notes(checkpoint: Checkpoint | None, config: Config) -> Iterator[str]:
    if checkpoint is None or checkpoint.is_external or starts_at_zero(checkpoint):
        return
    saved = checkpoint.config
    changes = []
    for section, names in _CHANGEABLE_SETTINGS.items():
        before, now = getattr(saved, section), getattr(config, section)
        unused = before.unused_fields() & now.unused_fields()
        changes += [
            f"{option_name(name)} was {getattr(before, name)}, is {getattr(now, name)}"
            for name in names
            if name not in unused and getattr(before, name) != getattr(now, name)
        ]
    if changes:
        yield f"the run continues with other settings than the checkpoint's: {'; '.join(changes)}"


def _rate_notes(
    config: Config, length: RunLength, batches: BatchSchedule, lr_schedule: LearningRateSchedule
) -> Iterator[str]:
    def progress_at(iteration: int, samples: int) -> Progress:
        tokens = batches.tokens_of_samples(
            samples, seq_length=config.model.seq_length, curriculum=config.curriculum
        )
        return Progress(iteration, samples, int(tokens))

    # The last step may lie beyond the decay, because its batch is the rounded rest.
    last_but_one = progress_at(length.iterations - 1, length.train_samples - batches.global_batch_size)
    if lr_schedule.lr(last_but_one) > 0 or last_but_one.count("iterations") < 1:
        return
    unit = lr_schedule.decay_unit
    end = progress_at(length.iterations, length.train_samples).count(unit)
    remedy = (
        "--override-lr-scheduler uses the schedule of the flags instead"
        if config.schedule.use_checkpoint_lr_scheduler
        else "raise the --lr-decay flag, or set --min-lr"
    )
    yield (
        f"WARNING: the learning rate is 0 from {lr_schedule.decay_length:,} {unit} on and the run ends at "
        f"{end:,} {unit}: these steps do not change the weights; {remedy}"
    )
