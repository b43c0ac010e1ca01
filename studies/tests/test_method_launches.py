"""Costs of a step of ``frontier/methods``, where they are known by hand."""

from dataclasses import replace

import pytest
import torch

from wellposed_studies.frontier.method_data import Text, Training
from wellposed_studies.frontier.method_launches import cost_over_plain, plain_cost, step_cost

TINY = Training("ours", "AdamW", 1e-2, 0, steps=4, layers=2, width=16, heads=2, block=8, batch=4, warmup=1,
                decay=0.1)  # fmt: skip
STREAM = torch.arange(400) % 7
TEXT = Text(STREAM[:360], STREAM[360:], 7)
MATRICES = 2 * (4 * 16 * 16 + 2 * 16 * 64)
FLOAT = 4


def test_a_step_costs_more_with_more_layers_and_the_plain_method_costs_nothing_more():
    two = step_cost(TINY, TEXT)
    four = step_cost(replace(TINY, layers=4), TEXT)
    assert 0 < two.launches < four.launches
    assert 0 < two.peak_bytes < four.peak_bytes
    difference = cost_over_plain(TINY, TEXT, plain_cost(TINY, TEXT))
    assert (difference.launches, difference.peak_bytes, difference.kept_bytes) == (0, 0, 0)


def test_the_state_of_adamw_is_two_moments_of_each_parameter():
    parameters = MATRICES + 7 * 16 + 8 * 16  # tables of tokens and positions
    parameters += 2 * (4 * 16 + 64 + 16) + (2 * 2 + 1) * 2 * 16  # biases, norms
    assert step_cost(TINY, TEXT).kept_bytes == FLOAT * 2 * parameters


def test_muon_keeps_one_moment_less_of_each_matrix_and_steps_them_one_by_one():
    cost = cost_over_plain(replace(TINY, method="Muon"), TEXT, plain_cost(TINY, TEXT))
    assert cost.kept_bytes == -FLOAT * MATRICES
    assert cost.launches >= 12 * 15


def test_a_penalty_keeps_its_graph_within_the_step_alone():
    cost = cost_over_plain(
        replace(TINY, method="orthogonality penalty"), TEXT, plain_cost(TINY, TEXT)
    )
    assert cost.launches > 0
    assert cost.peak_bytes > 0
    assert cost.kept_bytes <= 1000


@pytest.mark.parametrize("method", ["spectral cap", "soft cap", "sigmaReparam", "QK-clip"])
def test_constraints_launch_more(method):
    assert cost_over_plain(replace(TINY, method=method), TEXT, plain_cost(TINY, TEXT)).launches > 10
