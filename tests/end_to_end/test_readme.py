"""Every command in the bash blocks of README.md and of the pages in docs/ runs in a copy of the repository.

The commands run unchanged, with these exceptions: `make train` becomes the script that it runs, with smaller
values in the variables at the script's top; `make test` is only looked up in the Makefile; the cluster has
one node. The `sh` block, which installs for GPUs, is not run.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.huggingface.family import FAMILIES
from tests.end_to_end.clone import commands_in, make_clone, run
from tests.end_to_end.command import ROOT
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.support.ports import free_ports

QUICKSTART = "examples/quickstart.sh"
SMALL_QUICKSTART = {
    "TRAIN_ITERS": "6",
    "MAX_FILES": "20",
    "VOCAB_SIZE": "512",
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "NUM_HEADS": "2",
    "SEQ_LENGTH": "32",
    "EVAL_ITERS": "1",
    "LOG_INTERVAL": "1",
    "NEW_TOKENS": "10",
}


def readme_commands() -> list[str]:
    return commands_in("README.md")


def first_words(command: str) -> str:
    """Returns the key of a command: its program and the script that the program runs."""
    return " ".join(re.findall(r"make \w+|[\w/]+\.py|distributed\.run|--dry-run|--nnodes", command))


EXPECTED = [
    "make train",
    "tools/generate.py",
    "make test",
    "tools/train_tokenizer.py",
    "tools/preprocess_data.py",
    "pretrain_gpt.py",
    "distributed.run pretrain_gpt.py",
    "pretrain_gpt.py --dry-run",
    "tools/inspect_checkpoint.py",
    "distributed.run --nnodes pretrain_gpt.py",
]


def test_the_readme_has_the_commands_that_are_run_here() -> None:
    assert [first_words(command) for command in readme_commands()] == EXPECTED


@pytest.mark.parametrize(("target", "recipe"), [("train", QUICKSTART), ("test", "-m pytest")])
def test_the_makefile_does_what_the_readme_says(target: str, recipe: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    shown = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert recipe in shown.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"), corpus)


def command_with(words: str) -> str:
    """Returns the README's command with the key `words`."""
    (command,) = (command for command in readme_commands() if first_words(command) == words)
    return command


@pytest.fixture(scope="module")
def quickstart(copy: Path) -> str:
    """Returns the output of the small quickstart. Its files are in runs/quickstart of the copy."""
    return run(QUICKSTART, copy, **SMALL_QUICKSTART)


def test_the_quickstart_trains_resumes_samples_and_plots(quickstart: str, copy: Path) -> None:
    made = copy / "runs" / "quickstart"
    assert "exiting program at iteration 3 (--exit-interval 3)" in quickstart
    assert "starting from runs/quickstart/checkpoints/global_step3, iteration 3" in quickstart
    assert (made / "checkpoints" / "latest").read_text() == "global_step6"
    assert (made / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((made / "tensorboard").iterdir())
    assert re.search(r"Done in \d+ s\. validation loss at .* \| lm loss value: \d\.\d+E\+00", quickstart)
    assert "def read(self, size=-1):" in quickstart.partition("6/6")[2]


def suggested_commands(printed: str) -> list[str]:
    """Returns the commands that the quickstart suggests at its end."""
    return re.findall(r"^  (\S.*)$", printed.partition("Three commands to try next:")[2], re.MULTILINE)


def test_the_quickstart_suggests_three_commands(quickstart: str) -> None:
    commands = suggested_commands(quickstart)
    assert [first_words(command) for command in commands] == [
        "make train",
        "tools/generate.py",
        "tools/evaluate.py",
    ]
    assert " ".join(command_with("tools/generate.py").split()) == commands[1]
    assert quickstart.endswith("\nDelete this run:  rm -r runs/quickstart\n")


@pytest.mark.full
def test_the_suggested_evaluation_runs(quickstart: str, copy: Path) -> None:
    printed = run(suggested_commands(quickstart)[2], copy)
    assert re.search(r"^runs/quickstart/tokens_text_document .* lm loss: \d\.\d+E", printed, re.MULTILINE)


@pytest.mark.full
def test_the_suggested_training_makes_nothing_twice_and_resumes(quickstart: str, copy: Path) -> None:
    files = [copy / "runs" / "quickstart" / name for name in ("text.jsonl", "tokens_text_document.bin")]
    before = [file.stat().st_mtime_ns for file in files]
    again = run(suggested_commands(quickstart)[0].replace("make train", QUICKSTART), copy, **SMALL_QUICKSTART)
    assert "starting from runs/quickstart/checkpoints/global_step6, iteration 6" in again
    assert "4/6" not in again and "iteration       12/      12" in again
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.full  # the quickstart has run the tool with a different prompt
def test_a_text_is_continued(quickstart: str, copy: Path) -> None:
    assert run(command_with("tools/generate.py"), copy).startswith("class Queue:")


@pytest.mark.full  # test_inspect.py runs the tool, test_documented_commands.py parses the command
def test_the_quickstarts_checkpoint_is_inspected(quickstart: str, copy: Path) -> None:
    printed = run(command_with("tools/inspect_checkpoint.py"), copy)
    newest = (copy / "runs" / "quickstart" / "checkpoints" / "latest").read_text()
    assert newest in printed and "tied_modules.embed.word_embeddings.weight" in printed


@pytest.mark.full
def test_four_processes_train(quickstart: str, copy: Path) -> None:
    # The launcher finds a free port and keeps it.
    command = command_with("distributed.run pretrain_gpt.py").replace(
        "--nproc_per_node 4", "--nproc_per_node 4 --standalone"
    )
    printed = run(command, copy)
    assert "4 processes = TP 2 x PP 2 x DP 1" in printed
    assert "iteration        5/       5" in printed


def test_the_flags_of_four_processes_are_valid() -> None:
    flags = shlex.split(command_with("distributed.run pretrain_gpt.py").partition("pretrain_gpt.py")[2])
    parallel = parse_args([*flags, "--dry-run", "--world-size", "4"], {}).parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)


@pytest.mark.full  # test_documented_plans.py plans it in process
def test_a_176b_run_is_planned(copy: Path) -> None:
    printed = run(command_with("pretrain_gpt.py --dry-run"), copy)
    assert "parameters 176,247,271,424" in printed
    assert "384 processes = TP 4 x PP 12 x DP 8" in printed
    # The picture shows lines of this output.
    shown = (ROOT / "docs" / "figures" / "console.txt").read_text().partition("\n$ ")[0].splitlines()[1:]
    assert {line for line in shown if line.strip() != "..."} <= set(printed.splitlines())


@pytest.mark.full
def test_a_cluster_of_one_node_trains(corpus: Path, data: list[str], copy: Path) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--pipeline-model-parallel-size", "2"]
    printed = run(
        command_with("distributed.run --nnodes pretrain_gpt.py"),
        copy,
        NNODES="1",
        NODE_RANK="0",
        GPUS_PER_NODE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_ports(1)[0]),
        FLAGS=" ".join(flags),
    )
    assert "iteration        5/       5" in printed


def test_a_model_trains_on_own_text(copy: Path) -> None:
    """The three commands run as they stand, but the model is made tiny by flags after the command."""
    run(command_with("tools/train_tokenizer.py"), copy)
    run(command_with("tools/preprocess_data.py"), copy)
    assert (copy / "my_text_text_document.bin").stat().st_size > 0
    assert (copy / "my_text_text_document.idx").is_file()
    tiny = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 "
        "--global-batch-size 2 --train-iters 2 --lr-warmup-iters 1 --eval-iters 1 --log-interval 1"
    )
    printed = run(f"{command_with('pretrain_gpt.py')} {tiny}", copy)
    assert "iteration        2/       2" in printed
    assert (copy / "runs" / "my_text" / "latest").read_text() == "global_step2"


def test_the_figures_of_the_readme_are_those_of_the_page_of_measurements() -> None:
    table = (ROOT / "README.md").read_text().partition("\n| measured")[2].partition("\n\n")[0]
    figures = re.findall(r"\d[\d.]*e-\d|[\d.]+ %", table)
    assert len(figures) == 5
    page = (ROOT / "docs" / "measured.md").read_text()
    assert all(figure in page for figure in figures)


def test_the_readme_counts_the_model_types() -> None:
    assert f"{len(FAMILIES)} [model types of Hugging Face]" in (ROOT / "README.md").read_text()


@pytest.mark.full
def test_the_commands_of_the_data_page_run(quickstart: str, copy: Path) -> None:
    preprocess, sharded, *others, prepare = commands_in("docs/data.md")
    assert [first_words(command) for command in others] == [
        "tools/merge_datasets.py",
        *["tools/verify_dataset.py"] * 3,
    ]
    if not (copy / "my_tokenizer").exists():
        run(command_with("tools/train_tokenizer.py"), copy)
    run(preprocess, copy)
    (copy / "corpus").mkdir()
    shutil.copy(copy / "my_text.jsonl", copy / "corpus")
    assert "tokens/my_text_text_document: " in run(sharded, copy)
    for ending in (".bin", ".idx", ".tokenizer.json"):
        shutil.copy(copy / f"my_text_text_document{ending}", copy / f"more_text_text_document{ending}")
    (verify,) = commands_in("docs/data_reference.md")
    assert run(verify, copy).startswith("my_text_text_document: intact")
    printed = [run(command, copy) for command in others]
    assert "intact" in printed[1] and "data.html" in printed[2]
    assert printed[3].startswith("sample 1,000 of train is sample 700 of more_text_text_document, in epoch ")
    assert first_words(prepare) == "tools/prepare_indices.py"
    assert "1 data set(s), 3 indices: 3 built, 0 kept" in run(prepare, copy, FLAGS=" ".join(DOCS_FLAGS))


@pytest.mark.full
def test_the_commands_of_the_inference_page_run(quickstart: str, copy: Path) -> None:
    # test_evaluate.py runs the tool under a launcher, test_eval_harness.py runs the tasks.
    commands = [
        command
        for command in commands_in("docs/inference.md")
        if " -m " not in command and "--tasks" not in command
    ]
    names = ("generate", "evaluate", "evaluate")
    assert [first_words(command) for command in commands] == [f"tools/{name}.py" for name in names]
    printed = [run(command, copy) for command in commands]
    assert "class Queue:" in printed[0]
    assert re.search(r"^runs/quickstart/tokens_text_document .* lm loss: \d\.\d+E", printed[1])
    assert "--tensor-model-parallel-size 2" in commands[2]
    assert printed[2].partition("lm loss")[0] == printed[1].partition("lm loss")[0] != ""


# --- the commands of the pages in docs/ ---

# Page -> the test that runs the commands of the page.
RUN_ELSEWHERE = {
    "cluster.md": "tests/slurm",
    "conversion.md": "tests/unit/checkpoint/test_conversion.py",
    "data.md": "test_the_commands_of_the_data_page_run",
    "data_reference.md": "test_the_commands_of_the_data_page_run",
    "external_checkpoints.md": "tests/unit/checkpoint/test_conversion.py",
    "inference.md": "test_the_commands_of_the_inference_page_run",
    "finetuning.md": "tests/end_to_end/test_finetuning.py",
    "huggingface.md": "tests/end_to_end/test_convert_and_inspect.py",
    "flags.md": "tests/unit/config/test_flags_page.py",
    "learning_rate.md": "tests/end_to_end/test_branches.py",
    "object_store.md": "tests/end_to_end/test_object_store.py",
    "recipes.md": "tests/unit/planner/test_documented_plans.py",
    "sweep.md": "tests/end_to_end/test_sweep.py",
}
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in (*RUN_ELSEWHERE, "LOG.md")]
# $FLAGS of the pages: a small model of four layers.
DOCS_FLAGS = [*MODEL, *ABSOLUTE, *SHORT, "--global-batch-size", "32"]


# Words of a command of the pages -> part of what it prints.
PRINTED = {
    "convert_checkpoint": "MixtralForCausalLM in fp32",
    "runs/experts": "tokens per expert, max",
    "memory.py loss": "16384 tokens, 62592 rows of the vocabulary, hidden 2048, bf16",
    "DRY_RUN=1": "--nnodes 128",
    "gpu.sh": "benchmarks/device_throughput.py gpt --out",
    "--compare": "another.log",
    "tools/job_report.py": "lm loss",
    "inspect_checkpoint": "tied_modules.embed.word_embeddings.weight",
    "planner_accuracy": "wrong verdicts: ",
    "parity.py": "4 of 4 rows within their bounds",
    "kernels.py": "sm_90",
    "host_time.py": "layer, no dropout, forward",
    "dcp_to_torch": "Converting checkpoint",
    "--other-frameworks": "| `--num-layers-per-virtual-pipeline-stage` | set --virtual-pipeline-stages",
    "step_cost": "host synchronizations per micro-batch",
    "tools/plan.py": "tokens/s",
    "--help": "--tensor-model-parallel-size",
    "--load checkpoints-of-another-layout": "at least 9,765,625 consumed samples; batches of 512 remain",
    "--dry-run": "heaviest ",
    "": "iteration        5/       5",
}


# Changes of the commands of experts.md, whose runs take a minute.
FEW_STEPS = {"--train-iters 200": "--train-iters 6", " 100 ": " 3 ", "global_step100": "global_step3"}


def test_every_page_has_a_command() -> None:
    assert all(commands_in(f"docs/{name}") for name in [*(page.name for page in PAGES), *RUN_ELSEWHERE])
    commands = [command for page in PAGES for command in commands_in(f"docs/{page.name}")]
    training = [command for command in commands if not any(words in command for words in PRINTED if words)]
    assert all("pretrain_gpt.py" in command for command in training), "PRINTED has no row for a command"


@pytest.mark.gate(rows=1)  # test_documented_commands.py parses them all
@pytest.mark.parametrize(
    ("page", "number"),
    [(page.name, number) for page in PAGES for number in range(len(commands_in(f"docs/{page.name}")))],
)
def test_a_command_of_a_page_runs(
    page: str, number: int, quickstart: str, copy: Path, data: list[str]
) -> None:
    commands = commands_in(f"docs/{page}")
    command = commands[number]
    flags = [*DOCS_FLAGS, *(("--vocab-size", "1000") if "--dry-run" in command else data)]
    if "--fp8-recipe" in command:  # FP8 needs multiples of 128, and a layer in FP8
        flags += ["--hidden-size", "256", "--num-attention-heads", "2", "--num-layers", "3"]
        flags += ["--fp8-min-size", "0"]
    if "another.log" in command:
        shutil.copy(copy / "runs" / "quickstart" / "train.log", copy / "another.log")
    if not (copy / "checkpoints").exists():
        (copy / "checkpoints").symlink_to(copy / "runs" / "quickstart" / "checkpoints")
    if page == "experts.md":
        for old, new in FEW_STEPS.items():
            commands = [each.replace(old, new) for each in commands]
        command = commands[number]
    if "runs/experts" in command and number > 0 and not (copy / "runs" / "experts").exists():
        run(commands[0], copy)
    if "dcp_to_torch" in command and not (copy / "runs" / "dcp").exists():
        run(commands[number - 1], copy, FLAGS=" ".join(flags))
    printed = run(command, copy, FLAGS=" ".join(flags))
    assert next(text for words, text in PRINTED.items() if words in command) in printed
    # The text's figures are rounded to hundreds. The text does not contain figures of the tests' model.
    if "--recipe" in command or ("--search" in command and "$FLAGS" not in command):
        figures = re.findall(r"^step .* ([\d,]+) tokens/s", printed, re.MULTILINE)
        figure = max(int(figure.replace(",", "")) for figure in figures)
        assert f"{round(figure, -2):,}" in (ROOT / "docs" / page).read_text()


def test_the_figures_of_the_questions_are_those_of_their_formulas() -> None:
    text = (ROOT / "docs" / "questions.md").read_text()
    assert f"= {8 * 2048 * (250368 // 4) * 4 / 2**30:.2f} GiB per rank" in text
    parameters, activations = 12 * 40 * 5120**2, 2 * 2048 * 5120
    zero_3 = 8 * parameters * 8 * 7 / 8 / 1e9
    tensor = 8 * activations * 40 * 64 * 7 / 8 / 1e9
    pipeline = 2 * activations * 64 / 1e9
    words = " ".join(text.split())
    assert f"with ZeRO-3 on 8 ranks: {zero_3:.0f} GB (8 micro-batches per GPU)" in words
    assert f"with TP 8: {tensor:.0f} GB (64 micro-batches)" in words
    assert f"with PP 8: {pipeline:.1f} GB (64 micro-batches)" in words


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert max(len(line) for line in lines) <= 100


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or f"]({name})" in index, f"docs/README.md lacks {name}"
