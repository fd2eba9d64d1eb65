"""The whole model is in one file, which README and CONTRIBUTING name."""

from __future__ import annotations

import torch

from megatron.model import gpt_model
from megatron.model.inference.single_process import GPTModel
from tests.end_to_end.command import ROOT
from tests.support.layouts import EOD, VOCAB, Row, config_of

# Parts of a layer that have a separate file: most have several implementations, and residual additions choose
# a kernel.
PARTS = {f"megatron.model.{name}" for name in ("attention.core_attention", "norm", "position", "residual")}


def test_every_layer_is_defined_in_one_file() -> None:
    with torch.device("meta"):
        model = GPTModel(config_of(Row()), VOCAB, EOD)
    modules = {type(module).__module__ for module in model.modules() if module is not model}
    assert {name for name in modules if name.startswith("megatron.model.")} - PARTS == {gpt_model.__name__}


def test_the_documents_name_this_file() -> None:
    assert "| `megatron/model/gpt_model.py` | the whole model" in (ROOT / "docs/architecture.md").read_text()
    assert "`megatron/model/gpt_model.py` has the whole model" in (ROOT / "CONTRIBUTING.md").read_text()
