"""Several nodes with a cache each save to an object store, and resume from it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron.object_store.store import ObjectStore
from tests.support.bucket_saves import run_in_bucket
from tests.support.layouts import FP32_BOUND, Row, relative_errors, train_layout
from tests.support.object_store import Bucket
from tests.support.pool import run_world

STEPS = 5
SAVES = {1: "direct", 2: "background", 3: "rollback", 4: "direct"}


@pytest.mark.parametrize(
    ("save_format", "row", "nodes", "other", "other_nodes"),
    [
        ("native", Row(dp=4, zero=1), "abab", Row(tp=2, pp=2), "aabc"),
        pytest.param(*("dcp", Row(tp=2, pp=2), "aabc", Row(dp=4, zero=1), "abab"), marks=pytest.mark.full),
        pytest.param(*("native", Row(dp=4), "aabb", Row(dp=2), "ab"), marks=pytest.mark.full),
        pytest.param(*("dcp", Row(dp=4), "aabb", Row(dp=1), "a"), marks=pytest.mark.full),
    ],
)
def test_a_run_on_several_nodes_goes_on_on_others(
    save_format: str, row: Row, nodes: str, other: Row, other_nodes: str, bucket: Bucket, tmp_path: Path
) -> None:
    environment = {**bucket.environment, "SLURM_TMPDIR": str(tmp_path)}
    settings = {"save_format": save_format, "keep_last": 1}
    arguments = (row, bucket.url, environment, [*nodes], 4, SAVES)
    expected = run_world(row.world_size, train_layout, row, 4)[0]
    for _, _, history in run_world(row.world_size, run_in_bucket, *arguments, **settings):
        assert history == [*expected[:3], *expected[2:]]
    bucket.heal()
    arguments = (other, bucket.url, environment, [*other_nodes], STEPS, {})
    expected = run_world(other.world_size, train_layout, other, STEPS)[0]
    for step, line, history in run_world(other.world_size, run_in_bucket, *arguments, **settings):
        assert step == 4 and line == f"starting from {bucket.url}/global_step4, iteration 4"
        assert max(relative_errors(history, expected[4:])) < FP32_BOUND
    # Each node downloads a file at most once. One node downloads it once more to verify it.
    (run_file,) = (key for key in ObjectStore(bucket.url).list() if key.endswith("/run.json"))
    files = json.loads(ObjectStore(bucket.url).read(run_file))["files"]
    read = Counter(request.key.rpartition("/")[2] for request in bucket.requests if request.kind == "GET")
    assert all(1 <= read[name] <= 1 + len({*other_nodes}) for name in files)
    assert sum(1 for request in bucket.requests if request.kind == "LIST" and request.key == "run/") == 2
    assert list(tmp_path.iterdir()) == []
