"""`Run`: a run's configuration, and the properties that follow from it.

The properties are known in three steps. First, `Run.from_config` computes what the flags and files determine:
the vocabulary, and the stages unless they depend on measurements. Second, the checkpoint determines the
start, on which the length of the run, the learning-rate schedule and the order of the data depend
(`checkpoint.compatibility.starting_from`). Third, when the processes are connected, each rank has its mesh
(`Run.connected`), and all ranks have the stages (`training.build.find_stages`).

Each property is computed once. Functions get the run as an argument and read its properties. Objects with a
separate lifetime, such as the engine, the watchdog or the logger, are not properties of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron.config import Config, ConfigError
from megatron.config.model import padded_vocab_size
from megatron.data.flags import parse_split
from megatron.data.gpt_dataset import VOCABULARY_KEY, data_fingerprint
from megatron.data.index_stamp import IndexStamp
from megatron.data.vocabulary import Vocabulary, find_vocabulary
from megatron.mpu.mesh import Mesh
from megatron.optimizer.batch_schedule import BEGIN, BatchSchedule, Progress, RunLength
from megatron.optimizer.schedule import LearningRateSchedule, schedule_of
from megatron.pipeline.layer_times import needs_profiling, read_layer_times
from megatron.pipeline.methods import MemoryCosts
from megatron.pipeline.stages import StagePlan, needs_memory_costs, plan_stages

PredictMemory = Callable[[Config, int], MemoryCosts]
"""A function that returns the memory of the layers of a model with a given vocabulary size, for
--partition-method memory. The planner predicts the memory. The entry point of a run passes the function,
because `run` must not import the planner."""


@dataclass(frozen=True)
class Run:
    """A run: its configuration and the properties that follow from it. `dataclasses.replace` adds properties
    that are known later."""

    config: Config
    vocab: Vocabulary
    plan: StagePlan | None
    """The stages, see `stages`. None until the connected processes have measured what the partition needs."""
    mesh: Mesh
    """The mesh of this rank. Until the processes are connected, the mesh of rank 0 without process groups."""
    start: Progress = BEGIN
    """What the run has consumed before it starts."""
    checkpoint_schedule: LearningRateSchedule | None = None
    """The schedule of the checkpoint from which the run starts, if it replaces the schedule of the flags."""
    stamp: IndexStamp | None = None
    """The stamp of the token files; None before the files are verified, see `with_stamp`."""
    _fingerprints: dict[Progress, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Cache of fingerprints, which the copies of a run with one stamp share, because a fingerprint of
    thousands of files takes seconds."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        vocab: Vocabulary | None = None,
        predict_memory: PredictMemory | None = None,
        measures: bool = False,
    ) -> Run:
        """Returns the run as it is known before the processes connect.

        vocab: the vocabulary; None for the vocabulary of the flags. measures: whether
        `training.build.find_stages` will find the times or the memory of the layers, if the partition needs
        them. Raises UserError for a vocabulary with which no run can start, and ConfigError for such parallel
        sizes or partitions.
        """
        mesh = Mesh.from_config(config.parallel, 0)  # first, since plans need valid parallel sizes
        vocab = vocab or find_vocabulary(config)
        needs_times, needs_memory = needs_profiling(config), needs_memory_costs(config)
        times = read_layer_times(config, vocab.size) if needs_times else None
        plan = None
        if not (measures and (needs_memory or needs_times)):
            memory = predict_memory(config, vocab.size) if predict_memory and needs_memory else None
            plan = plan_stages(config, vocab.size, times, memory)
        return cls(config, vocab, plan, mesh)

    def connected(self, rank: int) -> Run:
        """Returns the run of a rank of the connected processes, with its process groups. Collective."""
        return replace(self, mesh=Mesh.from_config(self.config.parallel, rank).connect())

    def with_stamp(self, stamp: IndexStamp) -> Run:
        """Returns the run with the stamp of its verified token files."""
        return replace(self, stamp=stamp, _fingerprints={})

    @property
    def stages(self) -> StagePlan:
        """Returns the layers of each pipeline stage."""
        assert self.plan is not None, "the stages are not known before `training.build.find_stages`"
        return self.plan

    @property
    def padded_vocab_size(self) -> int:
        """Returns the number of rows of the embedding."""
        return padded_vocab_size(self.vocab.size, self.config.model, self.mesh.tp_size)

    @cached_property
    def batches(self) -> BatchSchedule:
        """Returns the schedule of the global batch size over the run."""
        return BatchSchedule.from_config(self.config.batch)

    @cached_property
    def length(self) -> RunLength:
        """Returns the length of the run."""
        return RunLength.from_config(self.config, self.start)

    @cached_property
    def lr_schedule(self) -> LearningRateSchedule:
        """Returns the learning-rate schedule of the run. Raises ConfigError if the flags define no schedule,
        even if the checkpoint's schedule replaces it."""
        own = schedule_of(self.config, self.start)
        return self.checkpoint_schedule or own

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Returns what identifies the training data of the run, their order and their vocabulary."""
        return self.fingerprint_at(self.start)

    def fingerprint_at(self, start: Progress) -> dict[str, Any]:
        """Returns the fingerprint of the run that continues from `start`, as JSON types for a checkpoint: the
        length of the run, and with it the order of the samples, depends on what its checkpoint has consumed.
        Raises ConfigError if there is no document to train on."""
        try:
            return self._fingerprints[start]
        except KeyError:
            found = self._find_fingerprint(RunLength.from_config(self.config, start))
        return self._fingerprints.setdefault(start, found)

    def _find_fingerprint(self, length: RunLength) -> dict[str, Any]:
        data, seq_length, seed = self.config.data, self.config.model.seq_length, self.config.training.seed
        if data.mock_data:  # the order of mock data does not depend on the length
            return {
                "mock_data": self.vocab.size,
                **{"paths": [], "weights": [1], "split": list(parse_split(data.split))},
                **{"seed": seed, "seq_length": seq_length, "documents": [], "tokens": []},
                **{"epochs": [1], "last_epoch_apart": [False]},
            }
        samples = length.ordered_samples(self.config)
        fingerprint = data_fingerprint(data, seq_length, seed, samples, self.stamp)
        if fingerprint["epochs"] is None and not self.config.training.no_train:
            raise ConfigError(
                f"--split {data.split} assigns no document of {' '.join(fingerprint['paths'])} to "
                "the train split: give it a larger weight"
            )
        if data.data_first_sample:
            fingerprint["first_sample"] = data.data_first_sample
        if self.vocab.digest is not None:
            fingerprint[VOCABULARY_KEY] = self.vocab.digest
        return fingerprint
