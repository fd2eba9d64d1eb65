"""Checkpoint verification: the integrity record of a checkpoint, and the comparison with it after loading.

The record has a digest of every full parameter and moment, and the canary loss: the loss of one fixed random
sequence. After loading, on any layout, digests and canary loss are recomputed and compared before the first
step. `names.INTEGRITY_KEY` is the key of the record in `run.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.digests import PartDigests, StateDigests, digest_state
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.names import CANARY_KEY
from megatron.checkpoint.record import Checkpoint
from megatron.checkpoint.upcycling import became_experts, is_upcycled
from megatron.config import Config, OptimizerConfig
from megatron.config.fields import option_name
from megatron.data.loader import MicroBatch
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError
from megatron.model.layer_list import ONLY_IN_TRAINING
from megatron.text_table import first_few, format_table

# Relative tolerance of the canary loss. Weights must be equal to the last bit, so the tolerance covers only
# the computation: layouts differ in the order of sums (fp32) and in rounding (fp16, bf16).
CANARY_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}
FP8_CANARY_TOLERANCE = 2e-2

CANARY_TOKENS = 64


@dataclass(frozen=True)
class Check:
    """A line of the verification table: what was compared, and the result."""

    subject: str
    result: str


def make_integrity_record(engine: GPTEngine) -> dict[str, Any]:
    """Returns the integrity record for `run.json`: digests and the canary loss. Collective."""
    state = digest_state(engine.optimizer, engine.mesh)
    return integrity_record(state, canary_loss(engine), engine.run.config)


def integrity_record(state: StateDigests, loss: float, config: Config) -> dict[str, Any]:
    """Returns the integrity record that consists of these digests and the canary loss `loss`."""
    return {
        "digests": state.tensors,
        "updates": state.step,
        "unequal_copies": list(state.mismatched),
        CANARY_KEY: {"seq_length": _canary_length(config), "loss": loss} if math.isfinite(loss) else None,
    }


def verify_loaded_state(
    engine: GPTEngine, checkpoint: Checkpoint, new_moments: str, unquantized: PartDigests
) -> list[Check]:
    """Compares the loaded state with the integrity record. Returns one `Check` per comparison. Collective.

    new_moments: why the checkpoint's moments were not loaded; "" if they were. unquantized: see
    `digest_state`. Raises UserError on every rank for the first difference.
    """
    record = checkpoint.integrity_record
    if not record:
        none = Check("integrity record", "the checkpoint has none: the loaded state cannot be compared")
        return [none, *([Check("moments", f"not loaded: {new_moments}")] if new_moments else [])]
    found = digest_state(engine.optimizer, engine.mesh, unquantized)
    upcycled = is_upcycled(checkpoint, engine.run.config)
    experts = "each has the dense MLP of its layer; the routers are initialized (--moe-use-upcycling)"
    return [
        *_check_digests(checkpoint, record, found, new_moments, upcycled),
        *([Check("experts", experts)] if upcycled else []),
        _check_canary(engine, checkpoint, record[CANARY_KEY]),
    ]


def _check_digests(
    checkpoint: Checkpoint, record: dict[str, Any], found: StateDigests, new_moments: str, upcycled: bool
) -> Iterator[Check]:
    in_order = sorted(record["digests"].items(), key=lambda item: (item[0] != "fp32", item[0]))
    for state_name, expected in in_order:
        subject = "weights, fp32" if state_name == "fp32" else f"moments, {state_name}"
        if state_name != "fp32" and new_moments:
            yield Check(subject, f"not loaded: {new_moments}")
            continue
        now = found.tensors.get(state_name, {})
        expected = {
            name: digest
            for name, digest in expected.items()
            if name in now or not (name.endswith(ONLY_IN_TRAINING) or (upcycled and became_experts(name)))
        }
        wrong = [name for name in expected if now.get(name) != expected[name]]
        if wrong:
            raise UserError(
                f"checkpoint {checkpoint.folder}: after loading, {subject} of {first_few(wrong, 1)} differs "
                "from what was saved: load an older checkpoint and report this"
            )
        result = f"{len(expected)} parameters, equal to the last bit"
        if state_name != "fp32" and found.quantized:
            result += f"; {len(found.quantized)} then quantized to 8 bits, each element to within one step"
        yield Check(subject, result)
    if not new_moments and record["updates"] is not None:
        if record["updates"] != found.step:
            raise UserError(
                f"checkpoint {checkpoint.folder}: after loading, the optimizer counts {found.step} updates "
                f"and had counted {record['updates']}: load an older checkpoint and report this"
            )
        yield Check("updates of the optimizer", f"{found.step:.0f}, equal")


def why_new_moments(reader: StateReader, optimizer: OptimizerConfig) -> str:
    """Returns why a run starts with new moments; "" if it loads the moments of the reader's checkpoint."""
    checkpoint = reader.checkpoint
    if checkpoint.no_optimizer:
        return "--finetune" if checkpoint.weights_only else "--no-load-optim"
    if reader.moments == optimizer.moments:
        return ""
    own, others = (", ".join(sorted(names)) or "none" for names in (optimizer.moments, reader.moments))
    return (
        f"--optimizer {optimizer.optimizer} has the moments {own} and the checkpoint has {others}; all "
        "moments start at 0"
    )


def _check_canary(engine: GPTEngine, checkpoint: Checkpoint, saved: dict[str, Any] | None) -> Check:
    if saved is None:
        return Check("canary loss", "not compared: the checkpoint has none")
    length = saved["seq_length"]  # older versions saved the loss of a sequence of --seq-length tokens
    config = engine.run.config
    if length > config.model.seq_length or length % config.parallel.length_multiple:
        return Check("canary loss", f"not compared: this run cannot compute the loss of {length} tokens")
    before, now = checkpoint.config.model_settings(), engine.run.config.model_settings()
    if changed := [option_name(name) for name in before if before[name] != now.get(name)]:
        return Check("canary loss", f"not compared: {', '.join(changed)} differ from the checkpoint's")
    own, other = config.precision, checkpoint.config.precision
    if (own.fp8_recipe, own.fp8_format) != (other.fp8_recipe, other.fp8_format):
        return Check(
            "canary loss", "not compared: --fp8-recipe or --fp8-format differs from the checkpoint's"
        )
    loss = canary_loss(engine, length)
    bound = max(CANARY_TOLERANCE[own.name], CANARY_TOLERANCE[other.name])
    if own.fp8_recipe is not None:
        bound = FP8_CANARY_TOLERANCE
    if not math.isclose(loss, saved["loss"], rel_tol=bound):
        raise UserError(
            f"checkpoint {checkpoint.folder}: the canary loss was {saved['loss']:.6f} when it was "
            f"saved and is {loss:.6f} now, expected a relative difference of at most {bound:.0e}: the "
            "weights are equal, so the computation differs; compare the versions in run.json with the "
            "installed ones"
        )
    return Check("canary loss", f"{saved['loss']:.6f} saved, {loss:.6f} now")


def canary_loss(engine: GPTEngine, length: int | None = None) -> float:
    """Returns the loss of a fixed random sequence, equal on every layout up to rounding. Collective.

    The sequence fills every row of every micro-batch on every data-parallel rank, so the loss depends neither
    on the micro-batch size nor on DP. length: number of tokens of the sequence; None: the length of new
    records.
    """
    config = engine.run.config
    length = length or _canary_length(config)
    count = config.parallel.min_micro_batches
    text = np.random.Generator(np.random.Philox(key=0)).integers(engine.run.vocab.size, size=length + 1)
    rows = torch.from_numpy(text).repeat(config.batch.micro_batch_size, 1)
    batches = repeat(MicroBatch.from_rows(rows, 0), count)
    losses, tokens = engine.evaluate_totals(batches, count, seq_length=length)
    return float(losses / tokens)


def _canary_length(config: Config) -> int:
    """Returns the number of tokens of the sequence: few, because training waits for its loss at every
    save."""
    multiple = config.parallel.length_multiple
    return min(-(-CANARY_TOKENS // multiple) * multiple, config.model.seq_length)


def verification_table(checks: list[Check]) -> str:
    """Returns the checks as a table for the log."""
    rows = [["", check.subject, check.result] for check in checks]
    return f"checkpoint verification:\n{format_table(rows, left_align=(0, 1, 2))}"
