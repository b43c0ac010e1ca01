"""A spectrum that is drawn in each pass, as in the code of Sengupta et al. (2023): the draw, the cache,
the inverse of its own pass, and what is refused."""

import io

import pytest
import torch
from tests.support.close import within
from tests.support.layers import draw
from tests.support.transject import slow_stack

from wellposed import nn as wn
from wellposed.certification import certify
from wellposed.errors import NotLipschitzError
from wellposed.models import TransJectConfig, TransJectForCausalLM, TransJectModel

D = 6
SIZES = dict(vocab_size=13, hidden_size=8, num_hidden_layers=2, spectrum="redrawn", num_experts=2)


def stack_of(**options):
    torch.manual_seed(7)
    stack = wn.TransJectStack(D, 3, spectrum="redrawn", **options).double().eval()
    with torch.no_grad():
        for index, layer in enumerate(stack.layers):
            layer.residual.weight.fill_(1.2 - index / 2)
    return stack


@pytest.mark.parametrize("training", [True, False])
def test_sigma_is_tanh_of_uniform_numbers_over_its_largest_anew_in_each_pass(training):
    stack = stack_of().train(training)
    x = draw(2, 5, D)
    torch.manual_seed(3)
    sigmas = [stack(x).sigma for _ in range(2)]
    torch.manual_seed(3)
    for sigma in sigmas:
        expected = torch.rand(D, dtype=torch.float64).tanh()
        within(sigma, expected / expected.max(), 1e-15)
    assert not torch.equal(*sigmas)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_experts": 2, "gating": "normalized"}])
def test_a_pass_is_the_formula_at_its_sigma_and_inverts_with_it(options):
    stack = stack_of(**options)
    x = draw(2, 4, D)
    output = stack(x)
    # The slow reference reads a learnt spectrum, so it gets the drawn one by its inverse.
    fixed = wn.LearnedSpectrum(D).double()
    fixed.weight.copy_(output.sigma.clamp_max(1 - 1e-16).atanh())
    stack.spectrum = fixed
    expected = torch.stack([slow_stack(stack, sample) for sample in x])
    within(output.last_hidden_state, expected, 1e-12)
    back, report = stack.inverse(output.last_hidden_state, output.sigma, output.gates)
    assert float((back - x).norm(dim=-1).max()) <= report.error_bound + 1e-12
    other, _ = stack.inverse(output.last_hidden_state, output.sigma.flip(0), output.gates)
    assert float((other - x).norm(dim=-1).max()) > 1e-3


@torch.no_grad()
def test_a_cache_keeps_the_first_draw_and_its_rows():
    stack = stack_of(is_causal=True, num_experts=2)
    x = draw(3, 5, D)
    cache = wn.TransJectCache()
    first = stack(x[:, :2], cache=cache)
    rows = torch.tensor([2, 0])
    rest = stack(x[rows, 2:], cache=cache.reorder_(rows))
    assert torch.equal(first.sigma, rest.sigma)
    in_one_pass = stack(x, sigma=first.sigma).last_hidden_state
    within(rest.last_hidden_state, in_one_pass[rows, 2:], 1e-12)


def test_recomputed_layers_have_the_sigma_of_their_pass():
    stack = stack_of().train()
    x = draw(2, 4, D)
    gradients = []
    for recompute in (False, True):
        stack.gradient_checkpointing = recompute
        stack.zero_grad()
        torch.manual_seed(5)
        stack(x).last_hidden_state.square().sum().backward()
        gradients.append([weight.grad.clone() for weight in stack.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        within(plain, recomputed, 1e-14)


def test_it_has_no_weights_and_a_saved_model_draws_the_same_by_seed(tmp_path):
    model = TransJectModel(TransJectConfig(**SIZES)).eval()
    assert not list(model.stack.spectrum.state_dict())
    model.save_pretrained(tmp_path)
    again = TransJectModel.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[3, 1, 4]])
    outputs = []
    for one in (model, again):
        torch.manual_seed(1)
        outputs.append(one(ids).last_hidden_state)
    assert torch.equal(*outputs)
    assert model.train()(input_ids=ids).auxiliary_loss is None
    torch.save(model, io.BytesIO())


def test_it_is_refused_a_certificate_by_name_and_generates():
    for module in (stack_of(), torch.nn.Sequential(stack_of())):
        with pytest.raises(NotLipschitzError, match=r"sigma is drawn anew in each pass.*'random'"):
            certify(module, seq_len=4).require()
    assert certify(stack_of(), seq_len=4).total == float("inf")
    writer = TransJectForCausalLM(TransJectConfig(**SIZES)).eval()
    ids = torch.tensor([[3, 1]])
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 2}
    assert writer.generate(ids, **options).shape == (1, 5)
