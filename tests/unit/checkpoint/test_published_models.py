"""docs/models.md: the flags of each published model make the model of its config.json.

docs/models_reference.md names the sources of the configurations and parameter counts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.huggingface.importer import read_settings
from megatron.config import ModelConfig
from megatron.pipeline.stages import plan_stages
from tests.end_to_end.command import ROOT

MODELS = json.loads((ROOT / "tests" / "assets" / "model_configs.json").read_text())
PAGE = (ROOT / "docs" / "models.md").read_text()
# In docs/models.md, the flags that all models of a table have in common stand before the table.
ROWS = {
    name: (int(count.replace(",", "")), [*common.split(), *flags.split()])
    for common, table in re.findall(
        r"models of this table have: `([^`]+)`(.*?)(?=\nFlags that|\Z)", PAGE, re.S
    )
    for name, count, flags in re.findall(
        r"^\| ([\w. -]+) \| ([\d,]+) \| `(--num-layers [^`]+)` \|$", table, re.M
    )
}
RUN = "--micro-batch-size 1 --global-batch-size 1 --lr 1 --train-iters 1 --seq-length 4096 --dry-run".split()
LENGTHS = {"seq_length", "max_position_embeddings"}


def test_the_table_has_every_model() -> None:
    assert ROWS.keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_the_flags_of_a_published_model_are_those_of_its_config(name: str, tmp_path: Path) -> None:
    count, flags = ROWS[name]
    config = parse_args([*RUN, *flags], {})
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    _, fields = read_settings(tmp_path)
    published = ModelConfig(**fields)
    differing = {
        field.name
        for field in dataclasses.fields(ModelConfig)
        if getattr(config.model, field.name) != getattr(published, field.name)
    }
    assert differing <= LENGTHS
    unpadded = config.with_settings({"model.make_vocab_size_divisible_by": 1})
    total = plan_stages(unpadded, config.model.vocab_size).total_parameters
    assert total == count == MODELS[name]["parameters"]
