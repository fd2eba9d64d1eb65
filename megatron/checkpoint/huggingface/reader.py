"""Reads a folder of Hugging Face transformers as a checkpoint at iteration 0 that has only weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.files import file_problem
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateReader, UnusableSourceError, check_shape
from megatron.checkpoint.huggingface.exporter import DIGEST_FILE, read_digests
from megatron.checkpoint.huggingface.family import IDENTITY, count_non_finite
from megatron.checkpoint.huggingface.importer import (
    HuggingFaceModel,
    losses,
    read_hugging_face,
    read_settings,
)
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.config import Config, ModelConfig
from megatron.mpu.mesh import Axis, place_on
from megatron.mpu.parameter_spec import ParameterSpec


class HuggingFaceReader(StateReader):
    """Reads config.json and the memory-mapped weights beside it. `stored_shard` documents what one rank
    reads."""

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        family, fields = read_settings(folder)
        run = {"vocab_size": fields["vocab_size"], "eod": None}
        has_digests = (folder / DIGEST_FILE).exists()
        digests = f"{DIGEST_FILE} has the digests of the files" if has_digests else "no digests of the files"
        note = "; ".join([f"{family.title} of Hugging Face: weights only", digests, *losses(folder)])
        return Checkpoint(folder, TrainingState(), run, unverified_note=note)

    @cached_property
    def model(self) -> HuggingFaceModel:
        return read_hugging_face(self.folder)

    @property
    def stored_names(self) -> Collection[str]:
        return self.model.parameters.keys()

    def recorded_model(self) -> tuple[dict[str, Any], int]:
        """See `StateReader`. The precision of the model is the dtype of the weights."""
        return {**self.model.fields, self.model.precision: True}, self.model.rows

    def files_to_verify(self) -> list[str]:
        """See `StateReader`. Returns the files for which an export of this program wrote digests."""
        return list(self._digests)

    def file_problem(self, name: str) -> str | None:
        return file_problem(self.folder, name, self._digests[name], DIGEST_FILE)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return read_digests(self.folder)

    def state_names(self, name: str) -> list[str]:
        return [VALUES]

    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        """See `StateReader`. Raises UserError for values that are not finite. Rows without a token are not
        checked."""
        num_rows = spec.num_valid_rows if spec is not None else None
        full = self._converted(name, self.model.parts(name), self._model_of(name), num_rows)
        if spec is not None:
            check_shape(tuple(full.shape), spec, f"{self.folder} holds {name},")
        return full

    def stored_shard(
        self, name: str, state_name: str, spec: ParameterSpec, axes: Sequence[Axis]
    ) -> Tensor | None:
        """See `StateReader`. Reads only this rank's experts, or a slice of the stored tensors that becomes
        this rank's shard. Reads whole tensors for the vocabulary, for matrices that GPT-2 transposes, and for
        query groups that cannot be divided evenly among the ranks."""
        if spec.axis_names == ("ep",):
            ep = place_on(axes, "ep")
            parts = self.model.parts(name, ep.rank, ep.size)
            return self._converted(name, parts, self._model_of(name)).reshape(-1)
        if spec.axis_names != ("tp",):
            return None
        tp_group = place_on(axes, "tp")
        ranks, transform, of_rank = tp_group.size, self.model.parameters[name].transform, self._model_of(name)
        dim = spec.sharding[0].dim if transform is IDENTITY else transform.slice_dim
        splits_groups = transform.needs_whole_groups and of_rank.query_groups % ranks
        if ranks == 1 or splits_groups or spec.num_valid_rows is not None or dim is None:
            return None
        slices = [part.chunk(ranks, dim)[tp_group.rank] for part in self.model.parts(name)]
        if transform.needs_whole_groups:
            of_rank = dataclasses.replace(
                of_rank,
                num_attention_heads=of_rank.num_attention_heads // ranks,
                group_query_attention=True,
                num_query_groups=of_rank.query_groups // ranks,
            )
        return self._converted(name, slices, of_rank).reshape(-1)

    def _model_of(self, name: str) -> ModelConfig:
        """Returns the model with the settings that it has in the parameter's layer."""
        return self.model.model.of_layer(self.model.parameters[name].block)

    def _converted(
        self, name: str, parts: list[Tensor], model: ModelConfig, num_rows: int | None = None
    ) -> Tensor:
        values = self.model.parameters[name].transform.to_megatron(parts, model).float()
        if count := count_non_finite(values[:num_rows]):
            raise UnusableSourceError(
                f"{self.folder} holds {count:,} values of {name} that are NaN or infinite: the folder is "
                "damaged, or the training diverged. Use another model"
            )
        return values

    def external_differences(
        self, config: Config, specs: Mapping[str, ParameterSpec], vocab_size: int
    ) -> list[str]:
        """See `StateReader`. Compares the settings of the model, and the vocabulary size with the number of
        word embeddings. There may be more word embeddings than tokens."""
        fields = {field.name for field in dataclasses.fields(ModelConfig)}
        differences = [
            f"{name} was {getattr(self.model.model, name)}, is {value}"
            for name, value in config.model_settings().items()
            if name in fields and getattr(self.model.model, name) != value
        ]
        if vocab_size > self.model.rows:
            differences.append(
                f"it has embeddings of {self.model.rows} tokens, and the vocabulary has {vocab_size}: set "
                f"the flags of the model's own tokenizer, or --vocab-size to at most {self.model.rows}"
            )
        return differences
