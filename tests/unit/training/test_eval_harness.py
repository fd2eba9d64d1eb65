"""tools/evaluate.py --tasks: a local task, and log-likelihoods of the exported Hugging Face model."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from megatron.checkpoint.reading import find_tokenizer, load_model, read_checkpoint
from megatron.config import CONFIG_ERROR_EXIT_CODE
from megatron.training.eval_harness import HarnessModel
from tests.unit.checkpoint.test_huggingface_import import save_tokenizer
from tests.unit.checkpoint.test_huggingface_llama import save_theirs
from tools import convert_huggingface, evaluate

TASK = """
task: toy
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
DOCUMENTS = [
    {"question": "def main(", "choices": ["self", "return", "args"], "answer": 0},
    {"question": "import", "choices": [" os", " sys and more"], "answer": 1},
    {"question": "class Queue:", "choices": [" pass", " def", " x", " return 1"], "answer": 2},
]
LENGTH = 12


@pytest.fixture
def folders(tmp_path):
    """A checkpoint, and the Hugging Face model that it was made from."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_theirs(theirs, "llama-3", vocab_size=save_tokenizer(theirs))
    convert_huggingface.main(["--from", str(theirs), "--to", str(tmp_path / "ours")])
    return tmp_path / "ours", theirs


def requests():
    pairs = [(d["question"], choice) for d in DOCUMENTS for choice in d["choices"]]
    pairs += [("", "import os"), ("x = 1\n" * 20, "print(x)"), ("a ", "b")]
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


def test_log_likelihoods_are_those_of_the_exported_model(folders):
    ours, theirs = folders
    checkpoint = read_checkpoint(ours)
    tokenizer = find_tokenizer(checkpoint.config.data, checkpoint)
    model = HarnessModel(load_model(checkpoint), tokenizer, LENGTH, 3)
    reference = HFLM(str(theirs), device="cpu", dtype="float32", batch_size=2, max_length=LENGTH)
    for found, expected in zip(
        model.loglikelihood(requests()), reference.loglikelihood(requests()), strict=True
    ):
        assert found[0] == pytest.approx(expected[0], rel=1e-4) and found[1] == expected[1]
    rolling = [Instance("loglikelihood_rolling", {}, ("import os, sys\n" * 5,), 0)]
    assert model.loglikelihood_rolling(rolling) == pytest.approx(
        reference.loglikelihood_rolling(rolling), rel=1e-4
    )
    settings = {"until": ["zz"], "max_gen_toks": 5, "do_sample": False}
    (text,) = model.generate_until([Instance("generate_until", {}, ("import", settings), 0)])
    with torch.no_grad():
        tokens = torch.tensor([tokenizer.tokenize("import")])
        for _ in range(5):
            tokens = torch.cat((tokens, reference.model(tokens).logits[:, -1:].argmax(-1)), 1)
    assert tokenizer.detokenize(tokens[0, -5:].tolist()).startswith(text)


def test_the_tool_runs_a_local_task(folders, tmp_path, capsys):
    ours, _ = folders
    data = tmp_path / "toy.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "toy.yaml").write_text(TASK.format(data=data))
    command = ["--load", str(ours), "--tasks-path", str(tasks), "--seq-length", str(LENGTH), "--tasks"]
    evaluate.main([*command, "toy"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("toy | acc: "))
    assert float(line.split("acc: ")[1].split(" |")[0]) in [pytest.approx(n / 3, abs=1e-4) for n in range(4)]
    with pytest.raises(SystemExit) as caught:
        evaluate.main([*command, "no_such_task"])
    assert caught.value.code == CONFIG_ERROR_EXIT_CODE
    assert "--tasks no_such_task: the harness has no such task" in capsys.readouterr().err
