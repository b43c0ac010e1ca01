"""The recipes of kim2021: each runs at toy size, and the numbers behind the figures are checked by
another route."""

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.errors import ConfigError
from wellposed.linalg import kim_bracket
from wellposed_studies.kim2021 import inverses as inverse
from wellposed_studies.kim2021 import jacobians as bounds
from wellposed_studies.kim2021.costs import shares_learned
from wellposed_studies.kim2021.language_models import (
    fixed,
    nll,
    one_layer,
    run_config,
    train_models,
)
from wellposed_studies.recipe import Request
from wellposed_studies.reproduce import reproduce
from wellposed_studies.study import Sizes


def test_row_norm_is_that_of_the_layer():
    x = 2 * torch.randn(9, dtype=torch.float64)
    assert float(bounds.row_norm(x)) == pytest.approx(bounds.row_norm_of_layer(x), rel=1e-12)


def test_the_whole_jacobian_is_that_of_the_layer():
    x = 2 * torch.randn(7, dtype=torch.float64)
    layer = bounds.unit_layer()
    by_autograd = torch.autograd.functional.jacobian(lambda t: layer(t[None, :, None])[0, :, 0], x)
    assert torch.allclose(bounds.jacobian(x), by_autograd, rtol=1e-10, atol=1e-12)


def test_figure_2_brackets_the_constant_at_100_tokens():
    """The figure's claim at N = 100 without ascent, against the certificate of the layer and an
    attack on it."""
    lower, x = bounds.two_sided_input(100)
    upper = kim_bracket(100, norm="inf", head_dim=1)
    assert 0.8 * upper <= lower <= upper
    assert certify(bounds.unit_layer(), seq_len=100, norm="inf").total == pytest.approx(
        upper, rel=1e-9
    )
    tokens = torch.cat((x.new_zeros(1), x))[None, :, None]
    attack = lipschitz_lower_bound(
        bounds.unit_layer(), (100, 1), norm="inf", start=tokens, restarts=1, steps=0
    )
    assert attack.value == pytest.approx(lower, rel=1e-6)


def test_gradient_ascent_alone_comes_near_the_bound():
    values, _ = bounds.ascend_inf(20, 8, 200)
    assert 0.7 < float(values.max()) / kim_bracket(20, norm="inf", head_dim=1) <= 1


def test_spectral_ascent_is_no_less_than_the_two_sided_input_and_below_both_upper_bounds():
    norms = bounds.ascend_two(12, 4, 60)
    two_sided = torch.cat([torch.zeros(1), bounds.two_sided_input(12)[1]])
    lower = float(torch.linalg.matrix_norm(bounds.jacobian(two_sided), 2))
    upper = certify(bounds.unit_layer(), seq_len=12, norm=2, mask="full").total
    assert lower <= float(norms.max()) <= upper <= kim_bracket(12, norm=2, head_dim=1)


def test_a_contraction_is_inverted_at_its_rate_and_an_expansion_is_not():
    half = nn.Linear(4, 4, bias=False)
    half.weight.data.copy_(0.5 * torch.eye(4))
    x = torch.randn(2, 3, 4)
    errors = inverse.reconstruction_errors(half, x, 1.0, 8)
    ratios = [later / earlier for earlier, later in itertools.pairwise(errors)]
    assert all(ratio == pytest.approx(0.5, rel=0.02) for ratio in ratios[:5])
    half.weight.data.mul_(4)
    assert inverse.reconstruction_errors(half, x, 1.0, 8)[-1] > 100


def test_random_layers_show_what_figure_3_shows():
    x = inverse.probe_inputs(4, 24, 32, 10.0, 0)
    assert bool((x[:, 0] == 0).all())
    ends = {
        kind: inverse.reconstruction_errors(inverse.random_layer(kind, 32, 24), x, 0.5, 20)[-1]
        for kind in inverse.KINDS
    }
    assert ends["l2_contractive"] < 1e-4
    assert ends["l2_tied"] < 1e-3
    assert ends["dot_product"] > 1


def test_paper_scale_has_the_papers_numbers(tmp_path):
    request = Request("paper", tmp_path)
    sizes = one_layer(request)
    config = run_config(request, sizes, "l2_contractive_kim2021", 1)
    assert (config.task_options["examples"], config.model.contractive_bound) == ("lines", "kim2021")
    assert run_config(request, sizes, "l2_contractive", 1).model.contractive_bound == "sharp"
    model = config.model
    train = config.train
    assert (model.hidden_size, model.num_attention_heads, train.batch_size) == (512, 8, 64)
    assert (train.schedule, train.steps, train.warmup_steps) == ("kim2021", 100 * 663, 4000)
    assert one_layer(Request("medium", tmp_path)).limit is None, "medium reads the whole text"
    sizes = fixed(Request("medium", tmp_path))
    assert run_config(request, sizes, "dot_product", 18).train.schedule == "constant"


@pytest.mark.slow
def test_a_diverged_run_has_no_depth_at_which_it_trains(tmp_path):
    sizes = Sizes(3, 1, 16, heads=8, batch_size=4, seq_len=16, depths=(1,), limit=2000)
    wild = replace(sizes, learning_rate=1e30, eval_batches=1)
    (run,) = train_models(Request("toy", tmp_path), "diverge", ("dot_product",), wild)
    assert math.isinf(nll(run))
    assert shares_learned([run]) == {"dot_product": {1: 0.0}}


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nearest: kim2021/figure"):
        reproduce("kim2021/figure-22", out=tmp_path)
    with pytest.raises(ConfigError, match="unknown scale"):
        reproduce("kim2021/figure-2", scale=cast(Any, "huge"), out=tmp_path)
