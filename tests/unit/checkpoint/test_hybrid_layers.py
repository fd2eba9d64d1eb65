"""Layers of Megatron-Core's HybridModel are read as layers of a GPTModel. If a layer is not one, an error
names the first such layer."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.checkpoint.foreign_arguments import MEGATRON_CORE
from megatron.checkpoint.formats.torch_dist import read_common
from megatron.checkpoint.hybrid_layers import PATTERNS, hybrid_arguments, transformer_arguments
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import convert_checkpoint
from megatron.errors import USER_ERROR_EXIT_CODE, UserError
from tests.distributed.test_torch_dist import config_for
from tests.support.assets import unpack
from tests.support.layouts import Row, config_of, unconnected_run
from tests.unit.checkpoint.test_foreign_arguments import change

REJECTED = {
    "M*-*-": r"layer 0 is a Mamba layer \(M\), expected attention",
    "*-M-": r"layer 2 is a Mamba layer \(M\), expected attention",
    "*-|**-": r"layer 3 is attention \(\*\), expected an MLP \(-\) or experts \(E\)",
    "*--": r"layer 2 is an MLP \(-\), expected attention",
    "*-*": "layer 3 is missing, expected an MLP",
    "*-*-/*-": r"layer 4 is a prediction of several tokens \(/\), expected attention",
    "G-": r"layer 0 is a gated delta network \(G\)",
    "*-*x": r"layer 3 is unknown \(x\)",
}


@pytest.mark.parametrize("pattern", REJECTED)
def test_a_hybrid_pattern_of_other_layers_is_rejected(pattern: str) -> None:
    for name in PATTERNS:
        with pytest.raises(ValueError, match=f"{name} is .*: {REJECTED[pattern]}.* in Megatron-LM"):
            transformer_arguments({name: pattern, "num_layers": len(pattern)})


def test_a_rejected_hybrid_pattern_ends_conversion_and_load_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core, target = unpack("torch_dist_hybrid", tmp_path), tmp_path / "global_step3"
    change(core, hybrid_override_pattern="M-*-")
    sentence = r"hybrid_override_pattern is M-\*-: layer 0 is a Mamba layer"
    with pytest.raises(UserError, match=sentence):
        find_checkpoint(unconnected_run(config_for(Row(), core)))
    with pytest.raises(SystemExit) as stopped:
        convert_checkpoint.main(["--from", str(core), "--to", str(target)])
    assert stopped.value.code == USER_ERROR_EXIT_CODE and not target.exists()
    assert "hybrid_override_pattern is M-*-: layer 0 is a Mamba layer" in capsys.readouterr().err


MODELS: dict[str, dict[str, Any]] = {
    "*-*-*-*-": {},
    "*E*E*E*E": {"num_experts": 4},
    "*-*E*E*-": {"num_experts": 4, "moe_layer_freq": ("D", "E", "E", "D")},
}


@pytest.mark.parametrize("window", [{}, {"window_size": 8}, {"window_size": 8, "window_pattern": ("W", "F")}])
@pytest.mark.parametrize("pattern", MODELS)
def test_hybrid_arguments_return_to_those_of_the_model(pattern: str, window: dict[str, Any]) -> None:
    model = config_of(Row(), model={"num_layers": 4, **MODELS[pattern], **window}).model
    plain = MEGATRON_CORE.arguments(model)
    hybrid = hybrid_arguments(plain)
    assert [hybrid[name] for name in PATTERNS] == [pattern, pattern] and hybrid["num_layers"] == 8
    settings, problems = MEGATRON_CORE.translate(transformer_arguments(hybrid))
    assert problems == [] and settings == MEGATRON_CORE.translate(plain)[0]
    assert settings["num_layers"] == 4


def test_hybrid_layers_are_numbered_in_arguments() -> None:
    """The pattern has 8 layers, and layers 0, 2, 4 and 6 are attention. Every third of all 8 layers has no
    window: layers 2 and 5."""
    args = {"hybrid_layer_pattern": "*-*-|*-*-", "num_layers": 8, "num_experts": 4}
    found = transformer_arguments(args | {"window_attn_skip_freq": 3, "is_hybrid_model": True})
    assert found["window_attn_skip_freq"] == [1, 0, 1, 1] and found["num_experts"] is None
    assert "is_hybrid_model" not in found and "hybrid_layer_pattern" not in found
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    assert "spec" not in transformer_arguments(args | {"spec": spec})
    assert transformer_arguments(args | {"spec": ["mine", "spec"]})["spec"] == ["mine", "spec"]


def test_hybrid_models_ignore_scaled_and_cannot_interleave_rotations(tmp_path: Path) -> None:
    """HybridModel passes neither argument to its rotary embedding. So scaled rotations are read as unscaled,
    and interleaved rotations are rejected."""
    args = {"hybrid_layer_pattern": "*-", "use_rope_scaling": True}
    assert not transformer_arguments(args)["use_rope_scaling"]
    with pytest.raises(ValueError, match="rotary_interleaved is True with hybrid_layer_pattern"):
        transformer_arguments(args | {"rotary_interleaved": True})
    model = config_of(Row(), model={"position_embedding_type": "rotary"}).model
    interleaved = MEGATRON_CORE.arguments(replace(model, rotary_interleaved=True))
    with pytest.raises(UserError, match="--hybrid-model cannot express rotary_interleaved True"):
        hybrid_arguments(interleaved)


@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_the_hybrid_flag_acts_only_on_torch_dist(kind: str, tmp_path: Path) -> None:
    words = ["--from", str(tmp_path), "--to", str(tmp_path / "new"), "--format", kind, "--hybrid-model"]
    with pytest.raises(UserError, match="acts only on --format torch_dist: add this format, or"):
        convert_checkpoint.run(words)


def test_objects_of_megatron_beside_tensors_are_read_without_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since version 0.16 Megatron-LM saves a signal in the arguments, and the state of its rerun state
    machine."""
    core = unpack("torch_dist_llama", tmp_path)
    module = ModuleType("megatron.core.rerun_state_machine")

    class RerunMode(Enum):
        VALIDATE = "validate"

    RerunMode.__module__, RerunMode.__qualname__ = module.__name__, "RerunMode"
    vars(module)["RerunMode"] = RerunMode
    content = dict(torch.load(core / "common.pt", weights_only=False))
    content["args"].exit_signal, content["rerun_state_machine"] = signal.SIGTERM, {"mode": RerunMode.VALIDATE}
    with monkeypatch.context() as imported:
        for name in ("megatron.core", module.__name__):
            imported.setitem(sys.modules, name, module)
        torch.save(content, core / "common.pt")
    assert read_common(core)["rerun_state_machine"]["mode"].constructor_args == ("validate",)
    checkpoint = find_checkpoint(unconnected_run(config_for(Row(), core), 64))
    assert checkpoint is not None and checkpoint.run["args"]["exit_signal"] == signal.SIGTERM
