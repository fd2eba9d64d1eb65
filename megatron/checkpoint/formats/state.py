"""`StateReader`: the interface of every checkpoint format.

A parameter has several states, which are named tensors: fp32 values (`VALUES`) and moments ('exp_avg', ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.checkpoint.digests import fragment_digests, piece_digests
from megatron.checkpoint.files import READ_THREADS, digest_differs, file_problem
from megatron.checkpoint.foreign_arguments import Program
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.record import RUN_FILE, Checkpoint
from megatron.config import Config
from megatron.config.model import padded_vocab_size
from megatron.errors import UserError
from megatron.files import HostileFileError, expect_layout
from megatron.model.layer_list import ONLY_IN_TRAINING
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import Box, ParameterSpec
from megatron.mpu.parameters import spec_of
from megatron.mpu.pieces import Piece
from megatron.text_table import first_few

# (fp32 values, moment -> function that reads it, the rest of the optimizer's state: the step). The functions
# have the argument `out` of `StateReader.read_piece`.
ParameterState = tuple[Tensor, Mapping[str, Callable[[Tensor | None], Tensor]], dict[str, Any]]


class UnusableSourceError(UserError):
    """A checkpoint or model that cannot be converted. The conversion's unfinished files are of no use."""


def lacks_experts(checkpoint: Checkpoint, config: Config) -> UserError:
    return UserError(
        f"checkpoint {checkpoint.folder} has no experts, --num-experts is {config.model.num_experts}: add "
        "--finetune --moe-use-upcycling, which copies the MLP of each layer to its experts, or remove "
        "--num-experts"
    )


def lacks_mtp(names: Iterable[str]) -> bool:
    """Returns whether the parameter names include no layer for multi-token prediction."""
    return not any(name.endswith(".eh_proj.weight") for name in names)


def lacks_mtp_layers(checkpoint: Checkpoint, config: Config) -> UserError:
    """Returns the error for a checkpoint that lacks the layers of --mtp-num-layers."""
    return UserError(
        f"checkpoint {checkpoint.folder} has no layers for multi-token prediction, --mtp-num-layers is "
        f"{config.model.mtp_num_layers}: add --finetune, which initializes them, or remove --mtp-num-layers"
    )


class ReplicaMismatch:
    """The largest difference found so far between replicas on tensor-parallel ranks."""

    def __init__(self) -> None:
        self.largest = 0.0

    def update(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Compares two replicas and returns whether they differ."""
        if one.data.cast("B") == other.data.cast("B"):
            return False
        difference = float(np.abs(one - other).max())
        # The difference is NaN if two non-finite values differ in their bits. NaN counts as infinite.
        self.largest = max(self.largest, difference if difference == difference else float("inf"))
        return self.largest > 0.0


@dataclass(frozen=True)
class ParameterRecord:
    """A global parameter in a checkpoint. The shape includes the padding of the vocabulary."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class StateReader(ABC):
    """Reads a checkpoint of one format.

    A format defines `stored_names`, `state_names` and `read`. All other methods have defaults that use these
    three. A format overrides a default if its files contain the information, or if it can read fewer bytes.
    The constructor must not read files: if it failed on only one rank, the other ranks would wait.
    """

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        """Opens a checkpoint of another framework, which has no `run.json`. Raises UserError if it cannot be
        opened."""
        raise UserError(f"checkpoint {folder}: {RUN_FILE}, which is written last, is missing")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.folder = checkpoint.folder
        # Files that `file_problem` has read but could not compare, because they have no checksums.
        self.files_without_checksums: set[str] = set()

    @property
    @abstractmethod
    def stored_names(self) -> Collection[str]:
        """The global names of the parameters in the checkpoint, in any order."""

    @abstractmethod
    def state_names(self, name: str) -> list[str]:
        """Returns the names of a parameter's states: VALUES, and its moments as the optimizer names them."""

    @abstractmethod
    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        """Returns the global tensor of one state, in fp32. The vocabulary may have any number of padded rows.

        spec: the parameter's spec in the model that reads the tensor. Raises UserError if the shape does not
        match.
        """

    def read_blocks(self, name: str, state_name: str, mismatch: ReplicaMismatch) -> Iterator[Tensor]:
        """Yields the global tensor of one state, in fp32, without padding, in blocks of consecutive elements.
        mismatch: collects the differences between replicas, if the format stores several."""
        yield self.read_unpadded(name, state_name)

    def pieces(
        self, name: str, mismatch: ReplicaMismatch, verify: bool, state_names: Sequence[str] | None = None
    ) -> Iterator[Piece]:
        """Yields the states of a full parameter, one after the other, each in consecutive pieces without
        padding. mismatch: see `read_blocks`. state_names: the states to read; None for all.

        verify: compare the states with the digests in the integrity record, if there are any. Raises
        UserError after the last piece of a state that differs.
        """
        digests = self.tensor_digests if verify else {}
        step, spec = self.step_of(name), ParameterSpec(self.specs[name].valid_shape)
        for state_name in self.state_names(name) if state_names is None else state_names:
            digest, start, total = digests.get(state_name, {}).get(name), 0, 0
            for block in self.read_blocks(name, state_name, mismatch):
                values = {state_name: block.reshape(-1)}
                piece = Piece(name, spec, (), start, start + block.numel(), values, step)
                if digest is not None:
                    total += piece_digests(piece)[state_name]
                start = piece.stop
                yield piece
            if digest is not None and not mismatch.largest and f"{total % (1 << 64):016x}" != digest:
                problem = digest_differs(f"{state_name} of {name}")
                raise UserError(f"checkpoint {self.folder}: {problem}; convert an older checkpoint")

    # --- the model ---

    @property
    def program(self) -> Program | None:
        """The program whose arguments an external checkpoint may contain; None if the format has no
        arguments."""
        return None

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        """The specs of the model's parameters, from `run.json`; {} for checkpoints of other frameworks."""
        if self.checkpoint.is_external:
            return {}
        # The import is late: this module builds a model, which needs DeepSpeed.
        from megatron.model.inference.single_process import model_specs

        checkpoint = self.checkpoint
        with expect_layout(self.folder / RUN_FILE, "the record of a model that can be built"):
            return model_specs(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)

    @cached_property
    def names(self) -> list[str]:
        """The `stored_names`: first the model's parameters in its order, then names that the model lacks."""
        stored = set(self.stored_names)
        return [*(n for n in self.specs if n in stored), *sorted(stored - self.specs.keys())]

    def check_complete(self) -> None:
        """Raises UserError if the checkpoint lacks a parameter of the model."""
        missing = sorted(self.specs.keys() - set(self.stored_names))
        if missing := [name for name in missing if not name.endswith(ONLY_IN_TRAINING)]:
            raise UserError(
                f"checkpoint {self.folder} holds no state of {missing[0]} ({len(missing)} such parameters): "
                "use another checkpoint"
            )

    def read_unpadded(self, name: str, state_name: str) -> Tensor:
        """Returns the global tensor of one state, in fp32, without the padding of the vocabulary. For a
        checkpoint of another framework the padding is unknown, and is kept."""
        spec = self.specs.get(name)
        return self.read(name, state_name, spec)[: spec.num_valid_rows if spec else None]

    def check_external(self, config: Config, vocab_size: int) -> None:
        """Raises UserError if a checkpoint of another framework is of a different model, judged by its
        parameter names and `external_differences`. Shapes are compared later, when tensors are read."""
        from megatron.model.inference.single_process import model_specs

        specs = model_specs(config, vocab_size, None)
        differences = self.external_differences(config, specs, vocab_size)
        writer = f", written by {self.program.title}," if self.program and self.checkpoint.run["args"] else ""
        held = set(self.stored_names)
        if differences and config.model.num_experts and not any(".experts." in name for name in held):
            raise lacks_experts(self.checkpoint, config)
        if config.model.mtp_num_layers and lacks_mtp(held):
            raise lacks_mtp_layers(self.checkpoint, config)
        for difference, what in ((specs.keys() - held, "it lacks"), (held - specs.keys(), "it also has")):
            if names := [name for name in difference if not name.endswith(ONLY_IN_TRAINING)]:
                differences.append(f"{what} {len(names)} parameters, among them {min(names)}")
        if differences:
            raise UserError(f"checkpoint {self.folder}{writer} holds another model: {'; '.join(differences)}")

    def external_differences(
        self, config: Config, specs: Mapping[str, ParameterSpec], vocab_size: int
    ) -> list[str]:
        """Returns how the model in a checkpoint of another framework differs from the config's, except for
        parameter names. Raises UserError if no config can describe the model.

        specs: the parameters of the config's model. vocab_size: without padding.
        """
        return []

    def recorded_model(self) -> tuple[dict[str, Any], int] | None:
        """Returns the model that a checkpoint of another framework describes: fields of `ModelConfig`, and
        the number of tokens (or the number of word embeddings with padding, if the checkpoint does not record
        the number of tokens). Returns None if the checkpoint does not describe its model."""
        return None

    def recorded_optimizer(self) -> dict[str, Any]:
        """Returns entries for `run.json` with the part of the other framework's optimizer state that only a
        writer of the same format needs."""
        return {}

    # --- for a run, on any layout ---

    @property
    def moments(self) -> frozenset[str]:
        """Names of the moments in the checkpoint. They show which kind of optimizer wrote it."""
        if self.checkpoint.is_external:
            held = (self.state_names(name) for name in self.stored_names)
            return frozenset(chain.from_iterable(held)) - {VALUES}
        return self.checkpoint.config.optimizer.moments

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        """The state of the fp16 loss scale; None if the checkpoint has none, so that the run initializes
        it."""
        return None

    def optimizer_scalars(self, name: str) -> dict[str, Any]:
        """Returns the optimizer's state of a parameter without its moments: the step. Returns {} if the
        optimizer does not count its updates."""
        if not self.counts_updates(name):
            return {}
        updates = self.checkpoint.integrity_record.get("updates")
        step = self.checkpoint.state.iteration if updates is None else updates
        return {"step": torch.tensor(float(step))}

    def step_of(self, name: str) -> float | None:
        """Returns the number of updates that the optimizer counts for a parameter; None if it counts none."""
        step = self.optimizer_scalars(name).get("step")
        with expect_layout(self.folder, "the optimizer's step"):
            return None if step is None else float(step)

    def counts_updates(self, name: str) -> bool:
        """Returns whether the optimizer counts the updates of a parameter, judged by its moments. Adam's bias
        correction needs the number; SGD, Lion and the momentum of Muon do not."""
        return "exp_avg_sq" in self.state_names(name)

    def read_piece(self, piece: Piece, state_name: str, out: Tensor | None = None) -> Tensor:
        """Returns one state of a piece, flat. out: a flat fp32 tensor in host memory that receives the
        elements and is returned. Without `out` the result may share memory with the file."""
        spec, span = piece.spec, slice(piece.start, piece.stop)
        if (shard := self.stored_shard(piece.name, state_name, spec, piece.axes)) is not None:
            return shard[span] if out is None else out.copy_(shard[span])
        full = self.read(piece.name, state_name, spec)
        if not spec.sharding:
            flat = full.reshape(-1)
            return flat[span] if out is None else out.copy_(flat[span])
        return filled(piece, lambda box: full[box.slices], out)

    def stored_shard(
        self, name: str, state_name: str, spec: ParameterSpec, axes: Sequence[Axis]
    ) -> Tensor | None:
        """Returns a rank's shard of one state, flat and in fp32, if the format can read it without the other
        ranks' shards. Returns None if `read_piece` must read the whole parameter."""
        return None

    def read_parameter(self, piece: Piece, out: Tensor | None = None) -> ParameterState:
        """Returns all states of a piece as the optimizer loads them, one moment at a time. out: receives the
        values, see `read_piece`. Raises UserError if the parameter is missing."""
        name = piece.name
        if name not in self.stored_names and name.endswith(ONLY_IN_TRAINING):
            return self._initial_state(piece, out)
        if name not in self.stored_names:
            raise UserError(f"checkpoint {self.folder} holds no parameter {name}: is it of another model?")
        # The values are read first, which opens the files that also contain the moments.
        values = self.read_piece(piece, VALUES, out)
        moments = [state_name for state_name in self.state_names(name) if state_name != VALUES]
        readers = {moment: partial(self.read_piece, piece, moment) for moment in moments}
        return values, readers, self.optimizer_scalars(name)

    def _initial_state(self, piece: Piece, out: Tensor | None) -> ParameterState:
        """Returns the initial state of a piece, with the step that the other parameters have."""
        numel, other = piece.stop - piece.start, next(iter(self.stored_names))
        moments = [state_name for state_name in self.state_names(other) if state_name != VALUES]
        readers = dict.fromkeys(moments, lambda out: torch.zeros(numel) if out is None else out.zero_())
        values = (torch.empty(numel) if out is None else out).fill_(piece.spec.init_value)
        return values, readers, self.optimizer_scalars(other)

    # --- weights alone, for tools ---

    def weight_pieces(self, name: str, mismatch: ReplicaMismatch, verify: bool) -> Iterator[Piece]:
        """Yields a full parameter in the run's precision if the checkpoint stores it, else its fp32 values.
        The arguments are explained at `pieces`."""
        return self.pieces(name, mismatch, verify, [VALUES])

    def weights(self, specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, global tensor) of every parameter of a model, in the run's precision if the
        checkpoint stores it, else in fp32. The vocabulary may have padded rows. Raises UserError for
        parameters that are missing or have the wrong shape."""
        for name, spec in specs.items():
            yield name, self.read(name, VALUES, spec)

    @torch.no_grad()
    def load_weights(self, module: nn.Module) -> None:
        """Fills the parameters of a single-process model; padded rows become 0. Raises UserError if a
        parameter is missing."""
        parameters = dict(module.named_parameters())
        specs = {name: spec_of(parameter) for name, parameter in parameters.items()}
        for name, full in self.weights(specs):
            rows = specs[name].num_valid_rows
            parameters[name].zero_()
            parameters[name][:rows].copy_(full[:rows])

    # --- integrity ---

    @property
    def tensor_digests(self) -> dict[str, dict[str, str]]:
        """The digests in the integrity record: state -> parameter -> digest; {} if there is no record."""
        return self.checkpoint.integrity_record.get("digests", {})

    @property
    def files_have_digests(self) -> bool:
        """Whether `run.json` has a digest of each file, so that `verify` compares no tensors."""
        records = self.checkpoint.run.get("files", {}).values()
        return bool(records) and all("sha256" in record for record in records)

    def compared_files(self, weights_only: bool = False) -> list[str]:
        """Returns the files that have a digest or checksums. weights_only: only the files with weights."""
        return []

    def files_to_verify(self) -> list[str]:
        """Returns the files that the ranks together read and compare before a run resumes. Tensors that have
        digests are compared after loading."""
        return self.compared_files()

    def files_of_pieces(self, pieces: Iterable[Piece]) -> set[str]:
        """Returns the names of the files that a rank reads for its pieces. The other files may be missing."""
        return {*self.checkpoint.run["files"]}

    def file_problem(self, name: str) -> str | None:
        """Reads a file of `compared_files` and returns what is wrong with it; None if it is intact."""
        return file_problem(self.folder, name, self.checkpoint.run["files"][name].get("sha256"))

    def verify(self, weights_only: bool = False) -> tuple[int, list[str]]:
        """Compares all data that have digests (weights_only: only the weights). Tensors in files without a
        digest are compared with digests of tensors. Returns the number of digests, and the problems."""
        files = self.compared_files(weights_only)
        with ThreadPoolExecutor(READ_THREADS) as pool:
            problems = list(filter(None, pool.map(self.file_problem, files)))
        count = len(files) - len(self.files_without_checksums)
        if files and self.files_have_digests:
            return count, problems
        compared = [
            (state_name, *entry)
            for state_name, by_parameter in self.tensor_digests.items()
            for entry in by_parameter.items()
            if state_name == VALUES or not weights_only
        ]
        for state_name, name, digest in compared:
            if name not in self.specs:
                problems.append(f"{RUN_FILE} has a digest of {name}, which the model does not have")
                continue
            try:
                full = self.read_unpadded(name, state_name)
                found = fragment_digests(self.specs[name], (), 0, {"": full.reshape(-1)})[""]
                if f"{found:016x}" != digest:
                    problems.append(digest_differs(f"{state_name} of {name}"))
            except UserError as error:
                problems.append(str(error))
        return len(compared) + count, problems

    def verify_weights(self) -> int:
        """Reads the weights and compares them with their digests. Returns the number of digests; 0 if the
        checkpoint has none. Raises UserError for damaged weights."""
        count, problems = self.verify(weights_only=True)
        if problems:
            raise UserError(f"checkpoint {self.folder}: {'; '.join(problems[:3])}; use an older checkpoint")
        return count

    def weights_verification(self, master_weights: bool) -> str:
        """Returns a text that says with what `weight_pieces`, or the fp32 values, are compared."""
        if self.tensor_digests.get(VALUES):
            return "the digests of the fp32 values"
        return "sizes only: no digests stored"

    # --- for reports ---

    def inspect_parameters(self) -> tuple[list[ParameterRecord], list[str]]:
        """Returns all parameters, and what is wrong with their names and shapes."""
        records: list[ParameterRecord] = []
        problems: list[str] = []
        for name in self.names:
            try:
                shapes = {
                    state_name: tuple(self.read_unpadded(name, state_name).shape)
                    for state_name in self.state_names(name)
                }
            except HostileFileError:
                raise
            except UserError as error:
                problems.append(str(error))
                continue
            records.append(ParameterRecord(name, shapes[VALUES], "float32"))
            problems += [
                f"{state_name} of {name} has the shape {shape}, its values {shapes[VALUES]}"
                for state_name, shape in shapes.items()
                if shape != shapes[VALUES]
            ]
        if self.specs and (missing := [name for name in self.specs if name not in self.names]):
            problems.append(f"parameters that no file holds: {first_few(sorted(missing))}")
        if self.specs and (surplus := [name for name in self.names if name not in self.specs]):
            problems.append(f"parameters that the model does not have: {first_few(sorted(surplus))}")
        return records, problems


def filled(piece: Piece, read_box: Callable[[Box], Tensor], out: Tensor | None = None) -> Tensor:
    """Returns the elements of a piece, flat, which it reads as boxes of the full parameter. Padding is 0.
    out: see `StateReader.read_piece`."""
    target = torch.zeros(piece.stop - piece.start) if out is None else out.zero_()
    for box in piece.boxes():
        first = box.first - piece.start
        target[first : first + box.numel].view(box.sizes).copy_(read_box(box))
    return target


def padded_spec(spec: ParameterSpec, checkpoint: Checkpoint, tp_size: int) -> ParameterSpec:
    """Returns a parameter's spec with the vocabulary padding that a run of the checkpoint's model has with
    `tp_size` tensor-parallel ranks."""
    if spec.num_valid_rows is None:
        return spec
    rows = padded_vocab_size(checkpoint.vocab_size, checkpoint.config.model, tp_size)
    return replace(spec, global_shape=(rows, *spec.global_shape[1:]))


def check_shape(
    shape: tuple[int, ...], spec: ParameterSpec, source: str, cause: str = "it belongs to another model"
) -> None:
    """Raises UserError unless a global tensor has the spec's shape. The vocabulary may have any padding, or
    none. source: where the tensor is stored, for the message. cause: the probable cause, for the message."""
    expected = spec.valid_shape
    if spec.num_valid_rows is None:
        matches = shape == expected
    else:
        matches = shape[1:] == expected[1:] and shape[0] >= expected[0]
    if not matches:
        raise UserError(f"{source} a tensor of shape {shape}, expected {expected}: {cause}")
