"""The cost model: bytes that processes were counted to receive, and how a step's time follows from it."""

import pytest
import torch

from gape.distributed.cost import Machine, parameter_count, step_cost
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from tests.distributed.launch import work

SMALL = {"vocab_size": 50, "n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": 16}


@pytest.mark.parametrize("position", ["rope", "p-rope+gape", "fox", "t5"])
@pytest.mark.parametrize("changes", [{}, {"bias": True, "tied": False}, {"n_kv_head": 2}])
def test_parameters_are_those_of_the_model(position, changes):
    config = GPTConfig(**SMALL, position=position, **changes)
    assert sum(parameter_count(config)) == GPT(config).count_parameters()


def test_floors_make_a_step_cheaper_and_more_processes_make_it_shorter():
    config = GPTConfig(**SMALL)
    costs = {
        (ways, horizon): step_cost(
            config, batch=1, length=65_536, processes=ways, context_parallel=ways, shard=True, horizon=horizon
        )
        for ways in (2, 8)
        for horizon in (float("inf"), 8192.0)
    }
    assert costs[8, 8192.0].key_bytes < 0.4 * costs[8, float("inf")].key_bytes
    assert costs[8, 8192.0].attention_flops < 0.3 * costs[8, float("inf")].attention_flops
    assert costs[8, 8192.0].seconds() < costs[8, float("inf")].seconds() < costs[2, float("inf")].seconds()


def test_the_network_counts_where_a_job_leaves_its_node():
    cost = step_cost(GPTConfig(**SMALL), batch=16, length=1024, processes=16, shard=True)
    assert cost.seconds(Machine(network=1e6)) > cost.seconds(Machine(network=1e6, node=16))


@pytest.mark.parametrize("ways", [3, 5])
def test_slices_that_do_not_divide_are_refused(ways):
    with pytest.raises(ValueError, match="context_parallel"):
        step_cost(GPTConfig(**SMALL), batch=1, length=1024, processes=15, context_parallel=ways, dtype=torch.float32)


@pytest.mark.slow
def test_bytes_are_those_that_collectives_move(tmp_path):
    found = work(2, "cost", tmp_path)
    for counted, expected in (pair for kind in found.values() for pair in kind.values()):
        assert counted == pytest.approx(expected, rel=0.03), found
