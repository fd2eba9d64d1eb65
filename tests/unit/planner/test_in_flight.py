"""The micro-batches in flight of each stage."""

from megatron.arguments import parse_args
from megatron.planner.in_flight import InFlight, in_flight_micro_batches, in_flight_on_rank
from tests.unit.config.command_lines import SMALL


def test_the_stages_of_an_interleaved_rank_do_not_have_most_at_the_same_time() -> None:
    words = "--world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 2"
    config = parse_args([*SMALL, *words.split(), "--num-layers", "4", "--global-batch-size", "32"], {})
    assert in_flight_on_rank(config, 0)[0] == {0: InFlight(3), 2: InFlight(2)}
    assert in_flight_micro_batches(config) == [4, 3, 2, 1]
