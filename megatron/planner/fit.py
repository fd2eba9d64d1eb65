"""Decides whether a plan fits the device. If it does not, finds flags with which it fits, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from megatron.config import Config
from megatron.errors import UserError
from megatron.planner.memory import communicators, fits
from megatron.planner.plan import Plan, make_plan
from megatron.planner.search import evaluate
from megatron.training.out_of_memory import UNPREDICTED, memory_flags
from megatron.units import GIB

_MOST_NAMED = 3
_MOST_FLAGS = 3
"""Largest number of flags that are combined."""
# A flag is suggested only if it reduces the planned memory by at least this share.
_MIN_SAVING = 0.02

Flags = Mapping[str, str]
"""Option -> its text on a command line, such as '--zero-stage' -> '--zero-stage 1'."""


def with_verdict(plan: Plan) -> Plan:
    """Returns the plan with `Plan.verdict` set: a sentence on whether the plan fits the device. If it does
    not fit, the sentence names flags with which it fits. The verdict is '' if the device is not known."""
    device, largest, reserve = plan.device_bytes, plan.peak_bytes, plan.reserve_bytes
    if device is None or plan.verdict:
        return plan
    config, planned = plan.config, plan.bytes_by_rank
    name = config.training.gpu or f"{config.training.device_memory:g} GiB"
    what = "stage" if config.parallel.stages_per_rank == 1 else "rank"
    needs = (
        f"{what} {planned.index(largest)} needs {_gib(largest)} and a reserve of {_gib(reserve)} for CUDA, "
        f"NCCL ({communicators(config)} communicators) and the allocator; the device ({name}) has "
        f"{_gib(device)}"
    )
    spare = device - largest - reserve
    if plan.fits:
        return replace(plan, verdict=f"fits with {_gib(spare)} to spare: {needs}")
    over = [i for i, size in enumerate(planned) if not fits(config, size)]
    places = f"{what} {over[0]}" if len(over) == 1 else f"{len(over)} of {len(planned)} {what}s"
    verdict = f"does not fit ({places}), {_gib(-spare)} too much: {needs}. {_advice(plan)}"
    return replace(plan, verdict=verdict)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _advice(plan: Plan) -> str:
    """Returns the sentence on the flags with which the plan fits, or with which it needs the least memory."""
    found = remedies(plan)
    if not found:
        return "Try more devices"
    texts = []
    for flags, changed in found:
        effects = [_gib(changed.peak_bytes)] + ["fits"] * bool(changed.fits)
        if UNPREDICTED & flags.keys():
            effects.append("slower by an unpredicted time" if plan.step else "slower")
        elif plan.step is not None:
            change = changed.tokens_per_second / plan.tokens_per_second - 1
            effects.append(f"{100 * change:+.1f} % tokens/s")
        texts.append(f"{' '.join(flags.values())} ({', '.join(effects)})")
    if found[0][1].fits:
        return f"Try {', '.join(texts)}"
    return f"Try more devices: none of the flags suffices, such as {', '.join(texts)}"


def remedies(plan: Plan) -> list[tuple[Flags, Plan]]:
    """Returns up to three pairs (set of flags with which the plan fits, plan with these flags), fastest
    first. If no flags suffice, returns the sets of flags that need the least memory. The flags do not change
    the model or the global batch.

    Flags are combined if no single flag suffices, or if all flags that suffice cost time. Combinations share
    all flags except the last one.
    """
    found: list[tuple[Flags, Plan]] = []
    fitting: list[tuple[Flags, Plan]] = []
    chosen: Flags = {}
    last = plan
    for number in range(1, _MOST_FLAGS + 1):
        options = [({**chosen, **flags}, changed) for flags, changed in smaller_plans(last)]
        # A further value of a chosen flag may also have been tried alone.
        options = [one for one in options if one[0] not in [flags for flags, _ in found]]
        found += options
        fitting += [one for one in options if one[1].fits]
        large = [one for one in options if not one[1].fits]
        fitting.sort(key=lambda one: _seconds_per_token(*one))
        costs_time = (
            number == 1 and fitting and _seconds_per_token(*fitting[0]) > _seconds_per_token({}, plan)
        )
        if not large or (fitting and not costs_time):
            break
        chosen, last = min(large, key=lambda one: _cost(last, *one))
    return (fitting or sorted(found, key=lambda one: one[1].peak_bytes))[:_MOST_NAMED]


def _seconds_per_token(flags: Flags, plan: Plan) -> tuple[bool, float]:
    """Returns a key that sorts plans by speed. Without --gpu, plans keep the order of `memory_flags`."""
    return bool(UNPREDICTED & flags.keys()), 0.0 if plan.step is None else 1 / plan.tokens_per_second


def _cost(last: Plan, flags: Flags, changed: Plan) -> tuple[bool, float, float, float]:
    """Returns a sort key for plans that do not fit: the time that a plan costs per saved byte. Plans that
    cost no time are sorted by speed, if it is known, and by memory."""
    is_unpredicted, seconds = _seconds_per_token(flags, changed)
    more = seconds - _seconds_per_token({}, last)[1]
    cost = max(more, 0.0) / (last.peak_bytes - changed.peak_bytes)
    return is_unpredicted, cost, seconds, changed.peak_bytes


def smaller_plans(plan: Plan) -> list[tuple[Flags, Plan]]:
    """Returns (flag, plan with this flag) for each single flag that reduces the peak memory."""

    def try_one(entry: tuple[str, Config]) -> list[tuple[str, Plan]]:
        return list(_until_it_fits(*entry, plan.run.vocab.size))

    with ThreadPoolExecutor() as pool:  # recording, which takes most of the time, runs in other processes
        tried = dict(one for found in pool.map(try_one, memory_flags(plan.config)) for one in found)
    enough = (1 - _MIN_SAVING) * plan.peak_bytes
    return [
        ({flag.split()[0]: flag}, changed) for flag, changed in tried.items() if changed.peak_bytes < enough
    ]


def _until_it_fits(flag: str, config: Config, vocab_size: int) -> Iterator[tuple[str, Plan]]:
    """Yields (text of the flag, plan) with a flag, then with its further values (such as ever smaller
    micro-batches), until a plan fits."""
    while True:
        with suppress(UserError):
            made = make_plan(config, vocab_size)
            yield flag, made
            if made.fits:
                return
        same = (one for one in memory_flags(config) if " " in flag and one[0].split()[0] == flag.split()[0])
        following = next(same, None)
        if following is None:
            return
        flag, config = following


def free_saving(plan: Plan) -> str:
    """Returns a sentence if --zero-stage 1 saves memory and costs no time; otherwise ''."""
    parallel = plan.config.parallel
    if plan.step is None or parallel.zero_stage > 0 or parallel.dp_cp_size == 1:
        return ""
    try:
        changed = evaluate(plan.config, {"parallel.zero_stage": 1}, plan.run.vocab.size)
    except UserError:
        return ""
    ratio = changed.tokens_per_second / plan.tokens_per_second
    if ratio < 1:
        return ""
    return (
        f"--zero-stage 1 saves {_gib(plan.peak_bytes - changed.peak_bytes)} per device, costs no time "
        f"({100 * (ratio - 1):+.1f} % tokens/s) and changes no result"
    )
