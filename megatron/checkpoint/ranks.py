"""What ranks share when they use a checkpoint: the values and errors of rank 0, and the reading of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.errors import UserError
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks


class FolderTakenError(Exception):
    """Another run or job owns --save, or the checkpoint of the same name in it. Raised on every rank."""


@contextmanager
def errors_of_rank_0(unreadable: str = "") -> Iterator[None]:
    """Raises on all ranks the error that rank 0 raises in the block. Without it, if only rank 0 reads files
    and fails, the other ranks would wait for rank 0. Only the end of the block is collective.

    unreadable: if given, an OSError becomes a UserError that says that this cannot be read.
    """
    error: Exception | None = None
    try:
        yield
    except (UserError, FolderTakenError, OSError) as found:
        error = found
        if unreadable and isinstance(found, OSError):
            error = UserError(f"{unreadable} cannot be read ({found})")
    if (shared := broadcast_from_rank_0(error)) is not None:
        raise shared


@contextmanager
def errors_of_all_ranks() -> Iterator[None]:
    """Raises on all ranks the error that any rank raises in the block; if several do, the error of the lowest
    rank. Only the end of the block is collective."""
    error: Exception | None = None
    try:
        yield
    except (UserError, OSError) as found:
        error = found
    for rank, of_rank in enumerate(gather_from_all_ranks(error)):
        if of_rank is not None:
            raise error if error is not None and rank == dist.get_rank() else of_rank


def first_problem_of_ranks(problem: str | None) -> tuple[int, str] | None:
    """Returns the lowest rank that has a problem, and the problem; None if no rank has one. Collective."""
    return next(
        ((rank, text) for rank, text in enumerate(gather_from_all_ranks(problem)) if text is not None), None
    )


def first_problem(
    names: list[str], find_problem: Callable[[str], str | None], heartbeat: Callable[[], None] = lambda: None
) -> str | None:
    """Returns the first problem that `find_problem` finds in the files `names` of rank 0; None if there is
    none. The ranks share the files, so each file is read once. heartbeat: called after each file.
    Collective."""
    found: dict[str, str | None] = {}
    names = broadcast_from_rank_0(names)
    with errors_of_all_ranks():
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            found[name] = find_problem(name)
            heartbeat()
    problems = (item for part in gather_from_all_ranks(found) for item in part.items())
    return next((problem for _, problem in sorted(problems) if problem), None)
