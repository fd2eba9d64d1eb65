"""Diagrams of the documentation: process groups, layers, a batch, a checkpoint and a run on a cluster."""

from __future__ import annotations

from itertools import groupby

from svg import BLUE, GREEN, GREY, LINE_COLORS, PURPLE, RED, YELLOW, Svg

from megatron.arguments import parse_args
from megatron.checkpoint.formats.deepspeed_files import missing_files
from megatron.data.loader import GPTBatchLoader
from megatron.model.layer_kinds import embedding_and_head
from megatron.mpu.mesh import Mesh
from megatron.pipeline.stages import StagePlan, plan_stages

TP_COLOR, PP_COLOR, DP_COLOR = LINE_COLORS[0], LINE_COLORS[1], LINE_COLORS[2]
# The model of the figures, except for its number of layers.
MODEL = (
    "--dry-run --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--vocab-size 7168 --train-iters 100 --lr 1e-3"
)
VOCAB_SIZE = 7168
MICRO_BATCH, GLOBAL_BATCH = 2, 16
EIGHT_RANKS = (
    "--num-layers 4 --world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    f"--micro-batch-size {MICRO_BATCH} --global-batch-size {GLOBAL_BATCH}"
)


def stages_of(flags: str) -> StagePlan:
    """Returns the program's partition of the model for these flags."""
    return plan_stages(parse_args([*MODEL.split(), *flags.split()], env={}), VOCAB_SIZE)


def layers_of_stage(plan: StagePlan, stage: int) -> list[str]:
    """Returns the contents of a stage: ["embedding", "layers 0-1"]. Transformer layers count from 0."""
    titles = [layer.title for layer in plan.layers if layer.title]
    first, end = plan.bounds[stage], plan.bounds[stage + 1]
    start = len([layer for layer in plan.layers[:first] if layer.title])
    entries = range(start, start + len([layer for layer in plan.layers[first:end] if layer.title]))
    contents = []
    for title, run in groupby(entries, key=lambda entry: titles[entry]):
        numbers = [entry - 1 for entry in run]  # the embedding precedes the transformer layers
        is_layer = title == "transformer layer"
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        contents.append(f"layer{'s' if len(numbers) > 1 else ''} {span}" if is_layer else title)
    return contents


def layout() -> str:
    """The ranks of TP 2 x PP 2 x DP 2, what each holds, and the three kinds of process groups."""
    figure = Svg(800, 486, "Ranks and process groups of TP 2 x PP 2 x DP 2")
    figure.text(20, 28, "8 ranks: TP 2 x PP 2 x DP 2, a model of 4 transformer layers", bold=True)
    ranks = [Mesh.create(8, tp_size=2, pp_size=2, rank=rank) for rank in range(8)]
    groups = {kind: ranks[0].topology.get_axis_comm_lists(kind) for kind in ("model", "pipe", "data")}
    plan = stages_of(EIGHT_RANKS)
    width, height = 148, 82

    def corner(rank: int) -> tuple[float, float]:
        at = ranks[rank]
        return 104 + 354 * at.dp.rank + (width + 12) * at.tp.rank, 114 + 142 * at.pp.rank

    for dp_rank in range(2):
        figure.text(104 + 354 * dp_rank + width + 6, 56, f"DP rank {dp_rank}", anchor="middle", bold=True)
    for stage in range(2):
        figure.text(20, 114 + 142 * stage + height / 2 + 4, f"stage {stage}", bold=True)
    for group in groups["model"]:
        x, y = corner(group[0])
        figure.frame(x - 9, y - 9, 2 * width + 30, height + 18, TP_COLOR)
    for group in groups["pipe"]:
        (x, y), (_, below) = corner(group[0]), corner(group[1])
        figure.line([(x + width / 2, y + height), (x + width / 2, below)], PP_COLOR, 3)
    for group in groups["data"]:
        at = ranks[group[0]]
        (left, y), (right, _) = corner(group[0]), corner(group[1])
        edge, sign = (y, -1) if at.pp.rank == 0 else (y + height, 1)
        middle = edge + sign * (20 + 14 * at.tp.rank)
        points = [(left, edge), (left, middle), (right, middle), (right, edge)]
        figure.line([(x + width / 2 + 16, y) for x, y in points], DP_COLOR, 3)
    for rank, at in enumerate(ranks):
        lines = [f"rank {rank}: TP rank {at.tp.rank}", *layers_of_stage(plan, at.pp.rank)]
        figure.box(*corner(rank), width, height, lines, GREY, bold_first=True)
    legend = (
        ("model", TP_COLOR, "tensor-parallel groups (TP)", "shards of every layer"),
        ("pipe", PP_COLOR, "pipeline-parallel groups (PP)", "activations and their gradients"),
        ("data", DP_COLOR, "data-parallel groups (DP)", "equal weights, gradients summed"),
    )
    for i, (kind, color, name, meaning) in enumerate(legend):
        y = 408 + 26 * i
        figure.line([(20, y - 4), (50, y - 4)], color, 4)
        figure.text(60, y, name)
        figure.text(302, y, " ".join(f"{{{group[0]},{group[1]}}}" for group in groups[kind]))
        figure.text(500, y, meaning)
    return str(figure)


def partition() -> str:
    """The layers of a model with 10 transformer layers on 4 stages, by three partition methods."""
    methods = ("type:transformer", "uniform", "time")
    figure = Svg(800, 48 + 88 * len(methods), "10 transformer layers on 4 stages, by three partition methods")
    figure.text(20, 28, "10 transformer layers on 4 stages, --partition-method ...", bold=True)
    colors = (BLUE, GREEN, YELLOW, PURPLE)
    for row, method in enumerate(methods):
        y = 66 + 88 * row
        plan = stages_of(
            f"--num-layers 10 --world-size 4 --pipeline-model-parallel-size 4 --partition-method {method} "
            "--micro-batch-size 1 --global-batch-size 8"
        )
        figure.text(20, y + 22, method)
        x, number = 158.0, 0
        for stage in range(4):
            left = x
            held = plan.layers[plan.bounds[stage] : plan.bounds[stage + 1]]
            for title in (layer.title for layer in held if layer.title):
                is_layer = title == "transformer layer"
                width = 30 if is_layer else 8 * len(title) + 8
                figure.box(x, y - 4, width, 34, [str(number) if is_layer else title], colors[stage])
                x, number = x + width + 3, number + is_layer
            figure.line([(left, y + 36), (left, y + 41), (x - 3, y + 41), (x - 3, y + 36)], "#444")
            figure.text((left + x - 3) / 2, y + 56, f"stage {stage}", anchor="middle")
            x += 13
    return str(figure)


class _NoTokens:
    """A data set whose samples have numbers, but no tokens."""

    name = "train"
    has_loss_mask = False

    def __len__(self) -> int:
        return GLOBAL_BATCH


def micro_batches_of(dp_rank: int) -> list[str]:
    """Returns the samples of the replica's micro-batches: ["0-1", "4-5"]."""
    loader = GPTBatchLoader(
        _NoTokens(),  # type: ignore[arg-type]
        micro_batch_size=MICRO_BATCH,
        dp_rank=dp_rank,
        dp_size=2,
        reads_tokens=False,
    )
    batches = [batch.samples for batch in loader.micro_batches(0, GLOBAL_BATCH)]
    return [f"{samples[0]}-{samples[-1]}" for samples in batches]


def _steps_of_a_batch() -> list[tuple[str, list[list[str]], str]]:
    """Returns the steps of `batch`: color, the lines of one column or of one per replica, and the module."""
    plan = stages_of(EIGHT_RANKS)
    stages = [", ".join(layers_of_stage(plan, stage)[:2]) for stage in range(2)]
    replicas = [
        [
            f"DP rank {rank}: {len(micro_batches_of(rank))} micro-batches",
            f"samples {', '.join(micro_batches_of(rank))}",
            "tokens, labels, mask [b, s]",
        ]
        for rank in range(2)
    ]
    return [
        (
            BLUE,
            [["token file data.bin, index data.idx", "ids of all documents, uint16 or int32"]],
            "data/indexed_dataset.py",
        ),
        (
            BLUE,
            [["documents shuffled, split every s tokens, samples shuffled", "sample [s + 1]"]],
            "data/indices.py",
        ),
        (BLUE, replicas, "data/loader.py"),
        (GREEN, [[f"stage 0: {stages[0]}", "hidden state [s, b, h]"]] * 2, "model/gpt_model.py"),
        (GREEN, [[f"stage 1: {stages[1]}", "hidden state [s, b, h]"]] * 2, "model/gpt_model.py"),
        (
            YELLOW,
            [["stage 1: LM head, cross entropy", "logits [b, s, V/TP] in chunks", "loss: fp32 scalar"]] * 2,
            "mpu/cross_entropy.py",
        ),
        (
            PURPLE,
            [[f"sum over {len(micro_batches_of(0))} backward passes", "fp32 gradients [n]"]] * 2,
            "optimizer/flat_group.py",
        ),
        (
            PURPLE,
            [
                [
                    "ZeRO-1: reduce-scatter over DP ranks",
                    "gradients [n/DP]; tied embedding: also over 2 stages",
                ]
            ],
            "optimizer/gradient_reduction.py",
        ),
        (
            PURPLE,
            [["grad norm over all ranks, clipping, Adam", "fp32 master weights and moments [n/DP]"]],
            "optimizer/mixed_precision.py",
        ),
        (
            PURPLE,
            [["all-gather over DP ranks", "bf16 weights [n] for the next step"]],
            "optimizer/mixed_precision.py",
        ),
    ]


def batch() -> str:
    """The life of a global batch, from the token file to the update, with the shapes on the way."""
    steps = _steps_of_a_batch()
    figure = Svg(800, 800, "The life of a global batch, from the token file to the update of the weights")
    figure.text(20, 28, "One step with a global batch of 16 samples: TP 2 x PP 2 x DP 2, --bf16", bold=True)
    lefts, width, y = (20, 286), 256, 44.0
    for i, (fill, columns, module) in enumerate(steps):
        height = 8 + 18 * len(columns[0])
        for left, lines in zip(lefts, columns, strict=False):
            figure.box(left, y, width if len(columns) > 1 else lefts[1] + width - 20, height, lines, fill)
        figure.text(554, y + height / 2 + 4, module, size=12)
        y += height
        if i == len(steps) - 1:
            break
        exchanges = fill == GREEN
        space = 34 if exchanges else 22
        for left in lefts:
            figure.arrow((left + width / 2, y + 2), (left + width / 2, y + space - 2), both=exchanges)
        if module == steps[i + 1][2] == "model/gpt_model.py":
            figure.text(554, y + 14, "activations, gradients: each TP", size=12)
            figure.text(554, y + 28, "rank sends its part [s, b, h/TP]", size=12)
        y += space
    figure.text(
        20, y + 24, "b: micro-batch size, 2. s: sequence length. h: hidden size. V: padded vocabulary size."
    )
    figure.text(20, y + 42, "n: parameters of one rank, which are its TP shard of its stage.")
    return str(figure)


def _files_of_checkpoint() -> dict[str, list[str]]:
    """Returns the names of the files that EIGHT_RANKS with ZeRO-1 saves, by the first part of the name."""
    plan = stages_of(EIGHT_RANKS)
    head = embedding_and_head(plan.layers)[1]
    with_weights = [i for i, count in enumerate(plan.parameters) if count and i != head]
    run = {
        "layout": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "data_parallel_size": 2,
            "zero_stage": 1,
        },
        "parameters": [f"{layer}.weight" for layer in with_weights],
    }
    no_files = {f"placeholder{i}" for i in range(8)}  # fewer names than ranks are an error of the layout
    names = missing_files(no_files, run)
    return {kind: list(group) for kind, group in groupby(sorted(names), key=lambda name: name.split("_")[0])}


def _draw_order_of_a_save(figure: Svg, y: float) -> None:
    figure.text(20, y + 22, "The order of a save", bold=True)
    steps = [
        (["all ranks write", "into saving-", "global_step300.<job>"], 172, BLUE),
        (["rank 0 writes", "run.json", "with all digests"], 142, PURPLE),
        (["files and folder", "are synced", "to disk"], 140, GREY),
        (["folder renamed", "to global_step300:", "complete"], 154, GREEN),
        (["latest", "names it"], 80, GREY),
    ]
    x = 20.0
    for i, (lines, width, fill) in enumerate(steps):
        if i:
            figure.arrow((x, y + 64), (x + 18, y + 64))
            x += 18
        figure.box(x, y + 34, width, 60, lines, fill)
        x += width


def checkpoint_files() -> str:
    """The files of a checkpoint, who writes them and what they hold, and the order of a save."""
    files = _files_of_checkpoint()
    layers = [name for name in files["layer"] if "model_00" in name]
    numbers = [name.split("-")[0].removeprefix("layer_") for name in layers]
    figure = Svg(800, 640, "The files of a checkpoint, and the order in which a save writes them")
    figure.text(20, 28, "TP 2 x PP 2 x DP 2, ZeRO-1", bold=True)
    y = 42.0

    def row(names: list[str], description: list[str], fill: str) -> None:
        nonlocal y
        height = max(8 + 18 * len(names), 12 + 16 * len(description))
        figure.box(44, y, 376, height, [], fill)
        for i, name in enumerate(names):
            figure.text(52, y + height / 2 + 5 + 18 * (i - (len(names) - 1) / 2), name)
        for i, line in enumerate(description):
            figure.text(432, y + height / 2 + 4 + 16 * (i - (len(description) - 1) / 2), line, size=12)
        y += height + 6

    def folder(name: str) -> None:
        nonlocal y
        figure.text(20, y + 16, name, bold=True)
        y += 26

    folder("checkpoints/")
    row(["latest"], ["name of the newest complete checkpoint", "writer: rank 0, at the end of a save"], GREY)
    row(["latest.json"], ["what the program wrote to latest, lineage", "writer: rank 0"], GREY)
    row(
        ["owner-000001-<token>.json"],
        ["the job that may save in this folder", "writer: rank 0, every 10 s"],
        GREY,
    )
    folder("checkpoints/global_step300/")
    row(
        [
            f"{layers[0]} ...",
            f"{numbers[0]}: embedding, and the LM head if tied",
            f"{numbers[1]} to {numbers[-2]}: transformer layers",
            f"{numbers[-1]}: final norm",
        ],
        [
            "weights in the precision of the run",
            f"{len(files['layer'])} files: one per layer and TP rank",
            "writer: one DP rank of the layer's stage",
        ],
        BLUE,
    )
    row(
        [f"{files['mp'][0]} ..."],
        [
            "step counters, arguments",
            f"{len(files['mp'])} files: one per stage and TP rank",
            "writer: DP rank 0",
        ],
        YELLOW,
    )
    row(
        [f"{files['zero'][0]} ..."],
        [
            "fp32 master weights, Adam moments",
            f"{len(files['zero'])} files: one per rank",
            "writer: every rank",
        ],
        GREEN,
    )
    row(
        ["run.json"],
        [
            "progress, flags, layout, parameter digests,",
            "size and SHA-256 of every file",
            "writer: rank 0, last",
        ],
        PURPLE,
    )
    _draw_order_of_a_save(figure, y)
    return str(figure)


def life_of_a_run() -> str:
    """A run under Slurm: start, step, signal, save, requeue, resume, and how a failure ends."""
    figure = Svg(800, 388, "The life of a run on a cluster")
    columns, widths = (20, 144, 368, 582), (104, 204, 194, 194)
    rows, height = (40, 162, 284), 74

    def box(column: int, row: int, lines: list[str], fill: str) -> None:
        figure.box(columns[column], rows[row], widths[column], height, lines, fill)

    def across(start: int, end: int, row: int) -> None:
        """An arrow between neighboring columns."""
        edges = (columns[start] + widths[start], columns[end])
        if end < start:
            edges = (columns[start], columns[end] + widths[end])
        figure.arrow(*((x, rows[row] + 37) for x in edges))

    box(0, 0, ["sbatch", "(queue)"], GREY)
    box(1, 0, ["start: processes connect,", "flags are compared,", "preflight"], BLUE)
    box(2, 0, ["load: newest complete", "checkpoint of --load,", "verified"], BLUE)
    box(3, 0, ["step: forward, backward,", "update; save at every", "--save-interval"], GREEN)
    for column in range(3):
        across(column, column + 1, 0)
    figure.arrow((730, rows[0]), (730, rows[0] - 20), (630, rows[0] - 20), (630, rows[0]))

    box(3, 1, ["a rank fails, hangs", "or is killed"], RED)
    box(2, 1, ["diagnosis: first cause,", "from the reports", "of all ranks"], RED)
    box(1, 1, ["exit code 2:", "flags, files or disk:", "correct them"], RED)
    figure.arrow((730, rows[0] + height), (730, rows[1]))
    across(3, 2, 1)
    across(2, 1, 1)
    figure.arrow((465, rows[1]), (465, 138), (246, 138), (246, rows[0] + height))
    figure.text(475, 143, "restart, MAX_RESTARTS times")

    box(3, 2, ["last iteration, or", "SIGUSR2 10 minutes", "before the time limit"], YELLOW)
    box(2, 2, ["save: a complete", "checkpoint, then", "`latest`"], YELLOW)
    box(1, 2, ["exit code 75:", "scontrol requeue,", "same job id"], YELLOW)
    box(0, 2, ["exit code 0:", "finished"], GREEN)
    figure.arrow((776, rows[0] + 37), (788, rows[0] + 37), (788, rows[2] + 37), (776, rows[2] + 37))
    across(3, 2, 2)
    across(2, 1, 2)
    figure.arrow((246, rows[2]), (246, 260), (72, 260), (72, rows[0] + height))
    figure.text(82, 180, "resume")
    figure.arrow((465, rows[2] + height), (465, 374), (72, 374), (72, rows[2] + height))
    return str(figure)
