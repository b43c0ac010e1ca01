"""Public calls under the modes of torch, and with arguments they are not made for: right, or refused
by an error of ours."""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterable

import pytest
import torch
from tests.support.layers import draw, plain_stack
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import wellposed
from wellposed import attack, certification, functional, linalg
from wellposed import nn as wn
from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, WellposedError


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def contractive():
    return wn.InvertibleResidual(wn.L2SelfAttention(8, 2, contractive=0.5, max_tokens=8))


def reversible(block):
    return wn.ReversibleSequential([block(), block()])


def bounded(model, **options):
    bound = wellposed.lipschitz_lower_bound(model, (3, 4), restarts=2, steps=3, **options)
    return bound.value, bound.slope


def constrained(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return wellposed.constrain_(model, optimizer, where="*.linear1", to="spectral"), model


Q = K = V = (2, 2, 5, 4)
SQUARE = (4, 4)
TALL = (5, 3)
X = (2, 5, 8)
ROWS = (2, 3, 4)
CHANCES = draw(2, 3, 4).softmax(-1)
FUNCTIONS = {
    "l2_attention": (functional.l2_attention, Q, K, V),
    "causal": (lambda q, k: functional.l2_attention(q, k, k, is_causal=True), Q, K),
    "cosine_attention": (functional.cosine_attention, Q, K, V),
    "affinity_penalty": (functional.affinity_penalty, Q, K),
    "from_logits": (functional.affinity_penalty_from_logits, (2, 5, 5)),
    "attention_entropy": (functional.attention_entropy, CHANCES),
    "softmax_sensitivity": (functional.softmax_sensitivity, CHANCES),
    "gram_attention": (functional.gram_attention, ROWS, SQUARE, SQUARE, (2, 4)),
    "orthogonality_error": (functional.orthogonality_error, TALL),
    "gram_penalty": (functional.gram_penalty, TALL),
    "gram_rows": (lambda w: functional.gram_penalty(w, side="rows", squared=False), TALL),
    "gram_of_two": (lambda *w: functional.gram_penalty(w), TALL, TALL),
    "qr_penalty": (functional.qr_penalty, TALL),
    "project_to_ball": (wn.project_to_ball, ROWS),
    "isometry_error": (linalg.isometry_error, SQUARE),
    "nearest_orthogonal": (linalg.nearest_orthogonal, TALL),
    "infinity_norm": (linalg.infinity_norm, SQUARE),
    "perturbation_size": (lambda x: attack.perturbation_size(x, "tok"), ROWS),
    "steepest_direction": (lambda x: attack.steepest_direction(x, "sum"), ROWS),
    **{
        f"norm_{method}": (lambda w, m=method: linalg.certified_spectral_norm(w, method=m), SQUARE)
        for method in ("svd", "cholesky", "gram")
    },
    **{
        name: (getattr(linalg, name), SQUARE)
        for name in ("singular_values", "largest_singular_value")
    },
}  # fmt: skip
LAYERS = {
    **{kind.__name__: lambda kind=kind: kind(8, 2) for kind in (
        wn.DotProductAttention, wn.L2SelfAttention, wn.CosineSelfAttention, wn.BallAttention, wn.InverseDAttention,
        wn.NGPTAttention, wn.TransJectStack,
    )},
    **{kind.__name__: lambda kind=kind: kind(8) for kind in (
        wn.OrthogonalFeedForward, wn.OrthogonalLinear, wn.BallProjection, wn.GramSpectrum, wn.DynamicTanh,
        wn.DynamicErf, wn.LearnedScale,
    )},
    "MLP": lambda: wn.MLP(8, 16),
    "NGPTFeedForward": lambda: wn.NGPTFeedForward(8, 16),
    "MaxMinFeedForward": lambda: wn.MaxMinFeedForward(8, 16),
    "TransformerStack": plain_stack,
    "InvertibleResidual": contractive,
    "ReversibleSequential": lambda: reversible(contractive),
}  # fmt: skip
VERBS = {
    "certify": (lambda m: wellposed.certify(m, seq_len=4).total, network),
    "lower_bound": (bounded, network),
    "as_it_runs": (lambda m: bounded(m, dtype=None), network),
    "from_start": (lambda m, x: bounded(m, start=x), network, ROWS),
    "find_roles": (lambda m, x: len(wellposed.find_roles(m, x).attention), encoder, X),
    "measure": (lambda m, x: wellposed.measure(m, x).rows, encoder, X),
    "penalty": (lambda m: wellposed.OrthogonalityPenalty(m, attention=1.0, feedforward=1.0)(), encoder),
    "constrain_": (constrained, encoder),
    "t_fixup_": (lambda m: (wellposed.t_fixup_(m), m), encoder),
    "remove_norms_": (lambda m: (wellposed.remove_norms_(m), m), encoder),
    "inverse": (lambda m, x: m.inverse(x)[0], contractive, X),
    "log_abs_det": (lambda m, x: m.log_abs_det(x).value, contractive, X),
    "lipschitz_bound": (lambda m: m.lipschitz_bound(5), lambda: wn.L2SelfAttention(8, 2)),
}  # fmt: skip
CALLS = {**FUNCTIONS, **{n: (lambda m, x: m(x), make, X) for n, make in LAYERS.items()}, **VERBS}


def made(parts):
    """Return the arguments of a call: modules, and tensors of these shapes."""
    torch.manual_seed(0)
    return [
        part().eval()
        if callable(part)
        else part.float()
        if isinstance(part, Tensor)
        else draw(*part, seed=seed, dtype=torch.float32)
        for seed, part in enumerate(parts)
    ]


def numbers(result):
    """Return what a call gave, as tensors of float64."""
    if isinstance(result, Tensor):
        return [result.detach().double()]
    if isinstance(result, (int, float)):
        return [torch.tensor(result, dtype=torch.float64, device="cpu")]
    parts = vars(result) if dataclasses.is_dataclass(result) else result
    parts = result.parameters() if isinstance(result, nn.Module) else parts
    parts = parts.values() if isinstance(parts, dict) else parts
    listed = isinstance(parts, Iterable) and not isinstance(parts, str)
    return [item for part in (parts if listed else ()) for item in numbers(part)]


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


PLAIN = contextlib.nullcontext
MODES = {  # in which arguments are made, the call is made, and how far off rounding may be
    "inference": (PLAIN, torch.inference_mode, 1e-5),
    "no_grad": (PLAIN, torch.no_grad, 1e-5),
    "made_in_inference": (torch.inference_mode, PLAIN, 1e-5),
    "all_in_inference": (torch.inference_mode, torch.inference_mode, 1e-5),
    "autocast": (PLAIN, autocast, 2e-2),
    "bfloat16": (PLAIN, default_dtype, 1e-5),
    "meta_context": (PLAIN, lambda: torch.device("meta"), 1e-5),
}


def same(results, expected, part):
    assert len(results) == len(expected)
    for result, want in zip(results, expected, strict=True):
        torch.testing.assert_close(
            result, want, rtol=part, atol=part * max(1, float(want.abs().max()))
        )


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_mode_is_the_plain_call_or_refused(name):
    call, *parts = CALLS[name]
    plain = numbers(call(*made(parts)))
    assert plain
    for making, calling, part in MODES.values():
        with making():
            inputs = made(parts)
        # Any message will do, but the error must be one of ours.
        with contextlib.suppress(WellposedError), calling():
            same(numbers(call(*inputs)), plain, part)
    with contextlib.suppress(WellposedError):
        result = call(*(x.to("meta") for x in made(parts)))
        assert not isinstance(result, Tensor) or result.is_meta or not bool(result.isfinite().all())


@pytest.mark.parametrize("mode", ["inference", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", ["lower_bound", "as_it_runs", "from_start"])
def test_what_is_measured_by_gradients_is_measured_in_every_mode(name, mode):
    call, *parts = CALLS[name]
    making, calling, _ = MODES[mode]
    plain = numbers(call(*made(parts)))
    with making():
        inputs = made(parts)
    with calling():
        same(numbers(call(*inputs)), plain, 1e-5)


@pytest.mark.parametrize("name", [*FUNCTIONS, "L2SelfAttention", "ReversibleSequential"])
def test_transforms_and_second_derivatives_are_right_or_refused(name):
    call, *parts = CALLS[name]
    tensors: list = [x.double() for x in made(parts)]
    if callable(parts[0]):
        call = tensors.pop(0)
    inputs = [x.requires_grad_() for x in tensors]
    value = call(*inputs)
    if not isinstance(value, Tensor) or not value.requires_grad:
        return
    plain = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
    used = [i for i, x in enumerate(plain) if x is not None]

    def total(*x):
        return call(*x).sum()

    with contextlib.suppress(WellposedError):
        gradients = torch.func.grad(total, argnums=tuple(used))(*inputs)
        same(numbers(gradients), numbers([plain[i] for i in used]), 1e-8)
    with contextlib.suppress(WellposedError):
        moved = torch.func.jvp(total, tuple(inputs), tuple(inputs))[1]
        same(numbers(moved), numbers(sum((plain[i] * inputs[i]).sum() for i in used)), 1e-7)
    with contextlib.suppress(WellposedError):
        batch = [torch.stack([x, 0.9 * x]) for x in inputs]
        one_by_one = torch.stack([call(*(x[i] for x in batch)) for i in (0, 1)])
        same(numbers(torch.func.vmap(call)(*batch)), numbers(one_by_one), 1e-8)
    if name == "steepest_direction":  # jumps
        return
    for i, x in enumerate(inputs):
        x.requires_grad_(i in used)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(call, inputs, atol=1e-4, rtol=1e-3, fast_mode=True)


@pytest.mark.parametrize("name", ["l2_attention", "cosine_attention", "L2SelfAttention"])
def test_a_derivative_that_does_not_exist_is_refused_in_words(name):
    call, *parts = CALLS[name]
    inputs = [x.requires_grad_() for x in made(parts)]
    (first,) = torch.autograd.grad(call(*inputs).square().sum(), inputs[-1], create_graph=True)
    with pytest.raises(ConfigError, match="second derivative"):
        first.sum().backward()


WRONG = {
    "None": lambda x: None, "text": lambda x: "x", "numpy": lambda x: x.numpy(), "list": lambda x: x.tolist(),
    "number": lambda x: 1.0, "integers": lambda x: x.long(), "flags": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64), "float8": lambda x: x.to(torch.float8_e4m3fn),
    "float64": lambda x: x.double(), "scalar": lambda x: x.flatten()[0], "vector": lambda x: x.flatten(),
    "deep": lambda x: x[None, None, None], "no rows": lambda x: x[:0], "no columns": lambda x: x[..., :0],
    "wide": lambda x: torch.cat([x, x], -1), "long": lambda x: torch.cat([x, x]), "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]), "meta": lambda x: x.to("meta"),
    "NaN": lambda x: x * math.nan, "module": lambda x: nn.Identity(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_computed_with_or_refused(name):
    """No exception of torch or Python, and none of complex numbers goes through."""
    call, *parts = CALLS[name]
    call = known_keywords(call)  # as verbs and layers do, some of which are called in lambdas
    for argument in [i for i, part in enumerate(parts) if not callable(part)]:
        for kind, change in WRONG.items():
            inputs = made(parts)
            inputs[argument] = change(inputs[argument])
            with contextlib.suppress(WellposedError):
                call(*inputs)
                assert kind != "complex"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_without_products_is_refused(dtype):
    with pytest.raises(ConfigError, match="gram_dtype"):
        functional.gram_penalty(draw(3, 3).requires_grad_(), gram_dtype=dtype)


def test_every_public_function_and_layer_explains_its_failures():
    packages = (functional, linalg, attack, certification, wn)
    values = [value for package in packages for value in vars(package).values()]
    published = [getattr(v, "forward", None) if isinstance(v, type) else v for v in values]
    functions = [item for item in published if inspect.isfunction(item)]
    calls = [item for item in functions if str(item.__module__).startswith("wellposed.")]
    assert len(calls) > 100
    # These are helpers that run many times in a training step.
    calls = [item for item in calls if item.__module__ != "wellposed.linalg._tensors"]
    silent = {item.__name__ for item in calls if not hasattr(item, "explains")}
    assert silent <= {"explain_failures_of", "removed_names", "refuse"}
