"""The tutorials in docs/tutorials: their commands are typed in order, and print what the pages show."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.end_to_end import tutorial
from tests.end_to_end.command import ROOT
from tests.end_to_end.tutorial import Typed, blocks_of, type_tutorial
from tests.support.chat_tokenizer import random_chats, save_chat_tokenizer, write_rows

TUTORIALS = ROOT / "docs" / "tutorials"
LAST_LOSS = r"lm loss: (\d\.\d+E[+-]\d+)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory of a user: a folder with the part of a clone that the tutorials read."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one_with(words: str, typed: list[Typed]) -> Typed:
    """Returns the only command that has these words."""
    (found,) = (one for one in typed if words in one.command)
    return found


def test_a_tutorial_trains_a_first_model(folder: Path) -> None:
    typed = type_tutorial(TUTORIALS / "first_model.md", fewer=20)
    first, resumed = (one for one in typed if "pretrain_gpt.py" in one.command)
    losses = [float(loss) for one in (first, resumed) for loss in re.findall(LAST_LOSS, one.output)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    assert "starting from runs/first/global_step10, iteration 10" in resumed.output
    assert resumed.output.count("equal to the last bit") == 3
    assert (folder / "runs/first/loss.png").read_bytes().startswith(b"\x89PNG")
    written = one_with("generate.py", typed).output
    assert "def read(self, size=-1):" in written and "60 new tokens" in written


def test_a_tutorial_fine_tunes_a_model_of_hugging_face_and_returns_it(folder: Path) -> None:
    """A tiny model with the architecture and the chat template of the page's model replaces its download."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    size = len(AutoTokenizer.from_pretrained(save_chat_tokenizer(folder / "smollm")))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(5)
    LlamaForCausalLM(
        LlamaConfig(
            **{**sizes, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.1},
            **{"vocab_size": size, "max_position_embeddings": 1024},
        )
    ).save_pretrained(folder / "smollm")
    page = TUTORIALS / "finetune.md"
    (row,) = (json.loads(block.text) for block in blocks_of(page) if block.kind == "json")
    write_rows(folder / "chat.jsonl", [*random_chats(399), row])
    typed = type_tutorial(page, fewer=25)
    before, after = (one.number(LAST_LOSS) for one in typed if "evaluate.py" in one.command)
    assert after < before - 1e-3
    names = [set(os.listdir(folder / name)) for name in ("smollm", "smollm-tuned")]
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names[0] & names[
        1
    ]


def test_a_tutorial_moves_a_run_of_megatron_deepspeed(folder: Path) -> None:
    typed = type_tutorial(TUTORIALS / "from_megatron_deepspeed.md")
    one, two = (run for run in typed if "--log-path" in run.command)
    losses = [[float(loss) for loss in re.findall(LAST_LOSS, run.output)] for run in (one, two)]
    assert len(losses[0]) == 22 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert one_with("--dry-run", typed).number(r"parameters ([\d,]+)") == 1_194_428_416
    assert (folder / "runs/moved/global_step25/run.json").is_file()


def test_a_tutorial_tells_rounding_from_a_defect(folder: Path) -> None:
    typed = type_tutorial(TUTORIALS / "different_losses.md", fewer=5)
    low, full = (one.number(r"at most (\S+) at") for one in typed if "job_report.py" in one.command)
    assert full < 1e-5 and full < low < 4e-3  # the bounds of the page
    assert typed[-1].output.count("equal to the last bit") == 3
    saved, now = re.findall(r"canary loss +(\S+) saved, (\S+) now", typed[-1].output)[0]
    assert float(now) == pytest.approx(float(saved), rel=1e-6)


def test_a_shown_line_that_was_not_printed_is_found() -> None:
    printed = ["  saved runs/a in 0.4 s, 1,024.5 MB", "weights  51 parameters, equal"]
    tutorial.check_shown("saved runs/a in 12 s, 3 MB\nweights 7 parameters, ...", printed)
    for wrong in ("saved runs/b in 0.4 s, 1,024.5 MB", "weights 51 parameters", "..., different"):
        with pytest.raises(AssertionError, match="is not in"):
            tutorial.check_shown(wrong, printed)
