"""Experts: one process is compared with a GPT in plain PyTorch, every layout with one process. Each silent
defect of expert layers that is known from other programs has a test."""

from dataclasses import dataclass, replace
from itertools import combinations, product
from math import isfinite
from random import Random
from unittest import mock

import pytest
import torch

from megatron.model import experts as experts_module
from megatron.model.experts import Router, RouterBalance
from megatron.mpu.token_dispatch import AllToAll
from tests.distributed.parity import LAYOUTS as COMMON_LAYOUTS
from tests.distributed.parity import assert_same_numbers, assert_same_on
from tests.distributed.test_model_variants import LLAMA, initial_weights_and_history, plain_history
from tests.reference.plain_experts import PlainExperts
from tests.reference.plain_gpt import GLU_LIMIT
from tests.support.layouts import (
    DROPOUT,
    FP32_BOUND,
    GLOBAL_BATCH,
    SEQ,
    STEPS,
    Row,
    build_engine,
    config_of,
    evaluate,
    micro_batches,
    relative_errors,
    train,
)
from tests.support.pool import run_world

EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 24, "init_method_std": 0.1}
MIXTRAL = {**LLAMA, **EXPERTS, "moe_aux_loss_coeff": 0.1}
OLMOE = {**MIXTRAL, "moe_router_pre_softmax": True, "moe_router_topk": 4, "moe_z_loss_coeff": 0.01}
GPT_OF_EXPERTS = {
    **{**EXPERTS, "moe_layer_freq": ("2",), "moe_router_load_balancing_type": "global_aux_loss"},
    **{"moe_aux_loss_coeff": 0.1, "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    # The gradient of a key's bias is only rounding noise. It grows with the weights, and Adam scales it up.
    "init_method_std": 0.02,
}
GLM = {
    **{**LLAMA, **EXPERTS, "moe_layer_freq": ("D", "E", "E", "E"), "moe_router_topk": 4},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_bias_update_rate": 0.01, "moe_router_topk_scaling_factor": 2.5},
    **{"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 24},
    **{"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
}
OSS = {
    **{**GPT_OF_EXPERTS, "moe_layer_freq": ("E",), "moe_router_load_balancing_type": "seq_aux_loss"},
    **{"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False, "moe_router_topk": 4},
    **{"glu_activation": "quick_geglu", "activation_func_clamp_value": GLU_LIMIT, "glu_linear_offset": 1.0},
    **{"position_embedding_type": "rotary", "normalization": "RMSNorm", "softmax_type": "learnable"},
}
# Name -> (the model, the arguments of PlainExperts).
MODELS = {
    "mixtral": (MIXTRAL, {"balance": "seq_aux_loss", "coefficient": 0.1}),
    "olmoe": (
        OLMOE,
        {
            **{"k": 4, "pre_softmax": True, "balance": "seq_aux_loss", "coefficient": 0.1},
            "z_coefficient": 0.01,
        },
    ),
    "gpt": (GPT_OF_EXPERTS, {"balance": "global_aux_loss", "coefficient": 0.1}),
    "glm": (
        GLM,
        {
            **{"k": 4, "score": "sigmoid", "groups": 4, "group_topk": 2, "factor": 2.5, "bias_rate": 0.01},
            **{"balance": "seq_aux_loss", "coefficient": 0.01, "z_coefficient": 0.001},
        },
    ),
}


PLAIN = MODELS | {"gpt-oss": (OSS, {"k": 4, "balance": "seq_aux_loss", "coefficient": 0.1})}


@pytest.mark.gate(rows=0, also=["gpt-oss"])
@pytest.mark.parametrize("name", PLAIN)
def test_one_process_trains_as_experts_in_plain_pytorch_do(name):
    model, options = PLAIN[name]
    steps = STEPS if name == "glm" else STEPS // 2
    ((weights, history),) = run_world(1, initial_weights_and_history, Row(micro_batch=4), {"model": model})
    groups, experts = model.get("num_query_groups"), PlainExperts(**options)
    plain = plain_history(weights, model, steps, groups=groups, experts=experts)
    assert max(relative_errors(history[:steps], plain)) <= FP32_BOUND


SCHEDULES = {
    "1f1b": {},
    "interleaved": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2},
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
    "dualpipev": {"pipeline_schedule": "dualpipev"},
}
SEED = 32
"""The first seed with which `chosen_layouts` covers all pairs."""
OPTIONS = {
    "model": tuple(MODELS),
    "ep": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "micro_batch": (1, 2),
    "recompute": (False, True),
    "schedule": tuple(SCHEDULES),
    "dispatcher": ("alltoall", "allgather"),
}
SIZES = tuple(
    (tp, cp, pp, dp)
    for tp, cp, pp, dp in product((1, 2), (1, 2), (1, 2), (1, 2, 4))
    if tp * cp * pp * dp <= 8
)


@dataclass(frozen=True)
class Layout:
    """A layout of a model with experts."""

    tp: int
    cp: int
    pp: int
    dp: int
    model: str
    ep: int
    zero: int
    micro_batch: int
    recompute: bool
    schedule: str
    dispatcher: str

    @property
    def exists(self) -> bool:
        passes = GLOBAL_BATCH // (self.dp * self.micro_batch)
        return (
            self.tp * self.cp * self.dp % self.ep == 0
            and (self.zero < 2 or self.pp == 1)
            and (self.schedule == "1f1b" or self.pp > 1)
            and (self.schedule != "interleaved" or passes % self.pp == 0)
            and (self.schedule != "dualpipev" or passes >= 2 * self.pp)
            and (self.dispatcher == "alltoall" or self.ep > 1)
        )

    @property
    def pairs(self) -> set[tuple]:
        """Returns the pairs that the layout covers: of two options, and of an option and a size."""
        values = {name: getattr(self, name) for name in (*OPTIONS, "tp", "cp", "pp", "dp")}
        return set(combinations(values.items(), 2))

    @property
    def row(self) -> Row:
        return Row(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            zero=self.zero,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
        )

    @property
    def changes(self) -> dict:
        parallel = {"expert_model_parallel_size": self.ep, "moe_token_dispatcher_type": self.dispatcher}
        return {"parallel": {**parallel, "sequence_parallel": self.tp > 1, **SCHEDULES[self.schedule]}}

    def __str__(self) -> str:
        recompute = "recompute" if self.recompute else "keep"
        return (
            f"{self.model}-ep{self.ep}-tp{self.tp}-cp{self.cp}-pp{self.pp}-dp{self.dp}-zero{self.zero}-"
            f"micro{self.micro_batch}-{recompute}-{self.schedule}-{self.dispatcher}"
        )


def all_layouts() -> list[Layout]:
    options = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    found = [Layout(*sizes, **values) for sizes in SIZES for values in options]
    return [layout for layout in found if layout.exists]


def chosen_layouts(number: int) -> list[Layout]:
    """Returns a fixed random choice of layouts in which every pair occurs, with few of the slow layouts of 8
    processes."""
    generator = Random(SEED)
    few = [at for at in all_layouts() if at.row.world_size < 8 or generator.random() < 0.2]
    return generator.sample(few, number)


LAYOUTS = chosen_layouts(120)


def test_the_layouts_cover_every_pair_of_sizes_and_options():
    pairs = set().union(*(layout.pairs for layout in all_layouts()))
    assert set().union(*(layout.pairs for layout in LAYOUTS)) == pairs


@pytest.mark.gate(rows=5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_loss_and_the_grad_norm_of_one_process(layout):
    assert_same_numbers(layout.row, STEPS, {"model": MODELS[layout.model][0]}, layout.changes)


# --- silent defects that other programs had in 2025 and 2026 ---
# The defects that the layouts above find, since they also compare grad norms: norms that omit experts or
# count them twice, gradients divided by the wrong number of ranks, biases added once per tensor-parallel
# rank.


def state_of_run(layout: Layout, model: dict, steps: int) -> dict:
    """Returns losses, metrics, the routers' counts and state, and the weights after a run."""
    engine = build_engine(config_of(layout.row, model=model, **layout.changes))
    metrics, losses = [], []
    for step in range(steps):
        with engine.module.metrics.recording():
            losses += train(engine, [step])
        metrics.append(engine.module.metrics.collect(torch.device("cpu")))
        evaluate(
            engine, micro_batches(engine, step), GLOBAL_BATCH // layout.micro_batch // engine.mesh.dp_size
        )
    routers = [module for module in engine.module.modules() if isinstance(module, Router)]
    return {
        "losses": losses,
        "metrics": metrics,
        "counts": [router.tokens_per_expert.clone() for router in routers],
        "state": {name: p.clone() for name, p in engine.module.named_parameters() if "router.expert" in name},
        "weights": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
    }


ONE = Layout(1, 1, 1, 1, "", 1, 0, 2, False, "1f1b", "alltoall")
SOME_LAYOUTS = [
    replace(ONE, micro_batch=1, recompute=True),
    replace(ONE, tp=2, cp=2, ep=4),
    replace(ONE, dp=2, ep=2, zero=1, dispatcher="allgather"),
    replace(ONE, pp=2, dp=2, ep=2, micro_batch=1, recompute=True, zero=1, schedule="zero-bubble"),
]


# The gradient jumps where an activation reaches the clamp. With a clamp at 0.5, no activation is within 2e-6
# of the clamp, so rounding moves none to its other side.
OSS_ON_LAYOUTS = {**OSS, "activation_func_clamp_value": 0.5}
REJECTIONS = {"tp2-pp2-partitioned-activations": "--partition-activations with --sequence-parallel"}


@pytest.mark.gate(rows=0, also=["dp2-zero2"])
@pytest.mark.parametrize("layout", COMMON_LAYOUTS)
def test_biases_of_experts_and_routers_do_not_depend_on_the_layout(layout):
    assert_same_on(layout, {"model": OSS_ON_LAYOUTS}, REJECTIONS)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_losses_counts_and_biases_do_not_depend_on_the_layout(layout):
    """Fails if accumulation, TP, CP or PP changes the scale of the balance loss or z-loss, or if
    recomputation or evaluations count tokens twice."""
    (expected,) = run_world(1, state_of_run, ONE, GLM, 3)
    ranks = run_world(layout.row.world_size, state_of_run, layout, GLM, 3)
    for rank in ranks:
        assert max(relative_errors(rank["losses"], expected["losses"])) <= FP32_BOUND
        for found, wanted in zip(rank["metrics"], expected["metrics"], strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert found[name] == pytest.approx(value, rel=1e-5), name
        for name, state in rank["state"].items():
            assert torch.equal(state, expected["state"][name])
    tokens = sum(int(counts.sum()) for rank in ranks for counts in rank["counts"])
    assert tokens == 3 * 4 * GLOBAL_BATCH * SEQ, "3 layers, 4 experts for each token of one step"


def test_a_run_repeats_itself_to_the_last_bit():
    """Fails if balance losses or the experts' results are added in an order that depends on timing."""
    first, second = (run_world(4, state_of_run, replace(ONE, dp=4, ep=4, zero=1), GLM, 2) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"] and one["metrics"] == other["metrics"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


def losses_of_equal_scores(layout: Layout) -> tuple[list, list[int]]:
    """Trains with equal scores of all experts, so that each token chooses experts 0 and 1."""
    model = {**MIXTRAL, "moe_aux_loss_coeff": 0.0}
    with mock.patch.object(Router, "_ranking", lambda _, logits: logits * 0.0):
        engine = build_engine(config_of(layout.row, model=model, **layout.changes))
        history = train(engine, range(2))
    routers = [module for module in engine.module.modules() if isinstance(module, Router)]
    return history, [int((router.tokens_per_expert > 0).sum()) for router in routers]


def test_ties_go_to_the_lower_expert_and_ranks_without_tokens_take_part():
    """Fails if a rank without tokens skips an exchange for which the other ranks wait, or if ranks break ties
    differently."""
    (expected, used), *_ = run_world(1, losses_of_equal_scores, ONE)
    assert used == [2, 2, 2, 2]
    for dispatcher in ("alltoall", "allgather"):
        layout = replace(ONE, dp=4, ep=4, zero=3, dispatcher=dispatcher)
        for losses, _ in run_world(4, losses_of_equal_scores, layout):
            assert max(relative_errors(losses, expected)) <= FP32_BOUND


def choices_with_recomputation() -> tuple[int, int, int, list]:
    """Trains with a router whose choice differs from call to call. Counts the choices and their exchanges."""
    calls, layout = [], replace(ONE, dp=2, ep=2, recompute=True)
    model = {**MIXTRAL, "moe_aux_loss_coeff": 0.0}

    def unstable(scores: torch.Tensor, k: int) -> torch.Tensor:
        calls.append(k)
        return torch.rand(scores.shape).topk(k).indices

    exchange = mock.patch.object(
        AllToAll, "_exchange_counts", autospec=True, side_effect=AllToAll._exchange_counts
    )
    with mock.patch.object(experts_module, "top_k", unstable), exchange as exchanges:
        engine = build_engine(config_of(layout.row, model=model, **layout.changes))
        history = train(engine, [0])
    return len(calls), exchanges.call_count, engine.micro_batches, history


def test_a_recomputed_layer_keeps_the_choice_of_its_forward_pass():
    for calls, exchanges, passes, history in run_world(2, choices_with_recomputation):
        assert calls == exchanges == 4 * passes, "one choice and one exchange per layer and micro-batch"
        assert all(isfinite(value) for step in history for value in step)


def bias_in_bf16() -> tuple[set, torch.Tensor, torch.Tensor]:
    engine = build_engine(config_of(Row(precision="bf16"), model=GLM))
    router = next(module for module in engine.module.modules() if isinstance(module, Router))
    balance = RouterBalance(engine.module, engine.mesh)
    counts = torch.full((8,), 2**20, dtype=torch.int64)
    counts[0] += 1  # a difference that bf16, or a mean of rounded counts, would lose
    counts[1] -= 1
    router.tokens_per_expert.copy_(counts)
    changes = balance.end_step()[router.expert_bias]
    train(engine, range(3))
    for router in engine.module.modules():
        if isinstance(router, Router):
            router.to(torch.bfloat16)  # as tools do with a model that they have loaded
    biases = [state for name, state in engine.module.named_parameters() if name.endswith("expert_bias")]
    return {bias.dtype for bias in biases}, changes, torch.stack(biases)


def test_the_bias_is_fp32_and_follows_exact_counts():
    """Fails if counts or biases are in bf16, which flips the sign of an update or loses the update."""
    ((dtypes, changes, biases),) = run_world(1, bias_in_bf16)
    assert dtypes == {torch.float32}
    assert changes.tolist() == pytest.approx([-0.01, 0.01, 0, 0, 0, 0, 0, 0])
    steps = (biases / 0.01).round()
    assert (biases - steps * 0.01).abs().max() < 1e-6 and steps.abs().max() <= 3 and steps.any()


# Name -> (changes of both runs, changes of only the run on a layout). The reference runs on one process.
SETTINGS = {
    "8-bit Adam": ({"model": {"moe_ffn_hidden_size": 64}, "optimizer": {"use_bnb_optimizer": True}}, {}),
    "Muon": ({"optimizer": {"optimizer": "muon", "weight_decay": 0.1}}, {}),
    "Muon, ZeRO 3": ({"optimizer": {"optimizer": "muon"}}, {"parallel": {"zero_stage": 3}}),
    "SGD": ({"optimizer": {"optimizer": "sgd"}}, {}),
    "Lion": ({"optimizer": {"optimizer": "lion"}}, {}),
    "CPU offload": ({}, {"parallel": {"cpu_offload": True}}),
    "a bucket per layer": ({}, {"parallel": {"ddp_bucket_size": 1}}),
    "no overlap": ({}, {"parallel": {"no_overlap_grad_reduce": True, "no_overlap_param_gather": True}}),
    "chunks of tensor parallelism": ({}, {"parallel": {"tp_comm_overlap": True}}),
    "dropout": ({"model": DROPOUT}, {}),
    "selective recomputation": ({}, {"training": {"recompute_granularity": "selective"}}),
    "bf16": ({}, {"precision": {"bf16": True}}),
    "fp16": ({}, {"precision": {"fp16": True, "initial_loss_scale": 2.0**12}}),
    "compile": ({}, {"training": {"compile": True}}),
}


@pytest.mark.gate(rows=1, also=["Lion", "chunks of tensor parallelism"])
@pytest.mark.parametrize("name", SETTINGS)
def test_experts_train_with_every_setting_as_on_one_process(name):
    numbers, layout = SETTINGS[name]
    at = replace(ONE, tp=2, dp=2, ep=2, zero=1)
    numbers = {**numbers, "model": {**GLM, **numbers.get("model", {})}}
    changes = {**layout, "parallel": {**at.changes["parallel"], **layout.get("parallel", {})}}
    precision = next(iter(layout.get("precision", {"fp32": True})))
    assert_same_numbers(replace(at.row, precision=precision), 5, numbers, changes)
