"""tools/evaluate.py --tasks runs local tasks, and has the log-likelihoods of the exported Hugging Face model,
on one process and on several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

if "CI" not in os.environ:
    pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from megatron.checkpoint.reading import find_tokenizer, load_model, read_checkpoint
from megatron.commands import convert_huggingface, evaluate
from megatron.config import ParallelConfig
from megatron.errors import USER_ERROR_EXIT_CODE, UserError
from megatron.training.build import load_distributed_model, run_of_layout
from megatron.training.harness.model import HarnessModel, _load
from tests.end_to_end.command import ROOT, environment, pretrain, scalars
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.support.pool import run_world
from tests.unit.checkpoint.test_huggingface_import import save_tokenizer
from tests.unit.checkpoint.test_huggingface_llama import save_hf

TASK = """
task: local
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
ROLLING = [Instance("loglikelihood_rolling", {}, ("import os, sys\n" * 5,), 0)]


def add_bos(folder):
    """Gives the folder's tokenizer a token that begins texts. It differs from the end-of-document token, as
    in Llama's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


@pytest.fixture
def folders(tmp_path, request):
    """Returns the folders of a checkpoint, and of the Hugging Face model from which it was converted. With
    the parameter "bos" its tokenizer begins texts with a BOS token."""
    hf_folder = tmp_path / "hf"
    hf_folder.mkdir()
    vocab_size = save_tokenizer(hf_folder)
    if getattr(request, "param", "") == "bos":
        vocab_size = add_bos(hf_folder)
    save_hf(hf_folder, "llama-3", vocab_size=vocab_size)
    convert_huggingface.main(["--from", str(hf_folder), "--to", str(tmp_path / "megatron")])
    return tmp_path / "megatron", hf_folder


def requests():
    pairs = [(d["question"], choice) for d in DOCUMENTS for choice in d["choices"]]
    pairs += [("", "import os"), ("x = 1\n" * 20, "print(x)"), ("a ", "b")]
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


def harness_model_of(folder):
    """Returns the harness's own model of a Hugging Face folder, without its cache. The cache confuses
    requests that have equal tokens but a different boundary between context and continuation."""
    return HFLM(
        str(folder), device="cpu", dtype="float32", batch_size=2, max_length=LENGTH, logits_cache=False
    )


def on_ranks(folder, tp_size, pp_size):
    """Returns on rank 0 the log-likelihoods of `requests` and of whole texts."""
    checkpoint = read_checkpoint(folder)
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    planned = run_of_layout(
        checkpoint,
        ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size, world_size=world_size
        ),
    )
    model = load_distributed_model(checkpoint, planned.connected(rank), 1)
    if rank:
        model.serve()
        return None
    tokenizer = find_tokenizer(checkpoint.config.data, checkpoint)
    harness = HarnessModel(model, tokenizer, LENGTH, model.batch_size)
    found = harness.loglikelihood(requests()), harness.loglikelihood_rolling(ROLLING)
    model.stop()
    return found


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(("tp_size", "pp_size", "dp_size"), [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2)])
def test_log_likelihoods_on_several_ranks_are_those_of_the_exported_model(folders, tp_size, pp_size, dp_size):
    saved, hf_folder = folders
    reference = harness_model_of(hf_folder)
    found, rolling = run_world(tp_size * pp_size * dp_size, on_ranks, saved, tp_size, pp_size)[0]
    for one, expected in zip(found, reference.loglikelihood(requests()), strict=True):
        assert one[0] == pytest.approx(expected[0], rel=1e-4) and one[1] == expected[1]
    assert rolling == pytest.approx(reference.loglikelihood_rolling(ROLLING), rel=1e-4)


@pytest.mark.parametrize("folders", ["no bos", "bos"], indirect=True)
def test_log_likelihoods_are_those_of_the_exported_model(folders):
    saved, hf_folder = folders
    checkpoint = read_checkpoint(saved)
    tokenizer = find_tokenizer(checkpoint.config.data, checkpoint)
    model = HarnessModel(load_model(checkpoint), tokenizer, LENGTH, 3)
    reference = harness_model_of(hf_folder)
    for found, expected in zip(
        model.loglikelihood(requests()), reference.loglikelihood(requests()), strict=True
    ):
        assert found[0] == pytest.approx(expected[0], rel=1e-4) and found[1] == expected[1]
    assert model.loglikelihood_rolling(ROLLING) == pytest.approx(
        reference.loglikelihood_rolling(ROLLING), rel=1e-4
    )
    # The second context loses its beginning: 7 of the model's 12 tokens remain, 5 are for the output.
    settings = {"until": ["zz"], "max_gen_toks": 5, "do_sample": False, "temperature": 1.0}
    generated = [Instance("generate_until", {}, (text, settings), 0) for text in ("import", "x = 1\n" * 9)]
    assert model.generate_until(generated) == reference.generate_until(generated, disable_tqdm=True)
    with pytest.raises(UserError, match="generates up to 12 tokens, expected fewer than .* 12"):
        model.generate_until([Instance("generate_until", {}, ("import", {"max_gen_toks": 12}), 0)])


@pytest.fixture
def local_tasks(tmp_path):
    """Returns a folder with the tasks `local` and `answers`, and the group `mine` with one task."""
    data = tmp_path / "local.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "local.yaml").write_text(TASK.format(data=data))
    generated = TASK.replace("multiple_choice", "generate_until").replace("task: local", "task: answers")
    (folder / "answers.yaml").write_text(
        generated.replace("metric: acc", "metric: exact_match").format(data=data)
    )
    (folder / "mine.yaml").write_text("group: mine\ntask: [local]\n")
    return folder


def test_a_task_whose_answers_are_too_long_is_refused_before_the_weights_are_read(
    folders, local_tasks, capsys, monkeypatch
):
    monkeypatch.setattr("megatron.checkpoint.reading.load_model", None)
    command = ["--load", str(folders[0]), "--tasks-path", str(local_tasks), "--tasks", "local", "answers"]
    with pytest.raises(SystemExit) as caught:
        evaluate.main([*command, "--seq-length", "256"])
    assert caught.value.code == USER_ERROR_EXIT_CODE
    assert "a task generates up to 256 tokens, expected fewer than" in capsys.readouterr().err


@pytest.mark.full  # the harness reads all of its tasks
def test_the_harness_s_own_tasks_are_known_to_a_group_only(local_tasks):
    """The harness's own tasks, which take long to read, are read only for a group, since they may be its
    members."""
    for name, expected in (("local", False), ("mine", True)):
        manager, loaded = _load([name], [str(local_tasks)])
        assert ("hellaswag" in manager.all_tasks) is expected
        assert list(loaded["tasks"]) == ["local"]


def test_the_tool_runs_a_local_task(folders, local_tasks, capsys):
    saved, _ = folders
    command = ["--load", str(saved), "--tasks-path", str(local_tasks), "--seq-length", str(LENGTH), "--tasks"]
    evaluate.main([*command, "local"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("local | acc: "))
    assert float(line.split("acc: ")[1].split(" |")[0]) in [pytest.approx(n / 3, abs=1e-4) for n in range(4)]


@pytest.mark.full  # the harness reads all of its tasks
def test_an_unknown_task_is_refused(folders, capsys):
    with pytest.raises(SystemExit) as caught:
        evaluate.main(["--load", str(folders[0]), "--tasks", "toy", "no_such_task"])
    assert caught.value.code == USER_ERROR_EXIT_CODE
    assert "unknown task no_such_task" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.launch", "--nproc_per_node", "2"]])
def test_the_typed_command_prints_the_results_of_one_process(folders, launcher, capsys):
    """One case has no launcher: then the tool itself starts its ranks."""
    saved, _ = folders
    flags = ["--load", str(saved), "--tasks", "toy"]
    evaluate.main(flags)
    (expected,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("toy | acc: "))
    command = [sys.executable, *launcher, "tools/evaluate.py", *flags, "--tensor-model-parallel-size", "2"]
    typed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert typed.returncode == 0, typed.stderr
    assert [line for line in typed.stdout.splitlines() if line.startswith("toy")] == [expected]


@pytest.mark.full
def test_training_runs_tasks_and_its_losses_stay_the_same(data, tmp_path):
    """Trains with TP 2 x PP 2 and dropout. The tasks' values are logged and written to TensorBoard."""
    flags = [*MODEL, *SHORT, *ABSOLUTE, *data, "--seed", "7"]
    flags += ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    plain = pretrain(flags, processes=4).ok()
    tasks = ["--eval-harness-tasks", "toy", "--eval-harness-interval", "2", "--eval-harness-limit", "4"]
    evaluated = pretrain([*flags, *tasks, "--tensorboard-dir", str(tmp_path / "board")], processes=4).ok()
    assert evaluated.facts == plain.facts and len(plain.steps) == 5
    lines = re.findall(r"^ task toy at iteration (\d+) \| acc: (\S+) \|", evaluated.stdout, re.MULTILINE)
    assert [int(iteration) for iteration, _ in lines] == [2, 4]
    assert scalars(tmp_path / "board")["eval-harness/toy/acc"] == [
        (int(step), pytest.approx(float(value))) for step, value in lines
    ]
