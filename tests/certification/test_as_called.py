"""For every registered rule and every way in which a call can differ from its class, the
certificate is right or refused."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from tests.support.sample import MAX_TOKENS, output_of
from tests.support.samples import SAMPLES
from torch import nn
from torch.nn.utils import parametrize, prune

from wellposed.attack import perturbation_size
from wellposed.certification import certifiable_classes, certify
from wellposed.errors import NotLipschitzError, UnsoundBoundError

pytestmark = pytest.mark.slow  # the whole table

LARGE = 1e6
TOKENS = 5
EVERY = [
    pytest.param(kind, sample, id=f"{kind.__name__}-{index}")
    for kind, samples in SAMPLES.items()
    for index, sample in enumerate(samples)
]
CASES = [pytest.param(case.values[1], id=case.id) for case in EVERY if case.values[1].attackable]
# Options change a bound, rarely what a rule reads: test the first and the last sample of a class.
ENDS = [
    case
    for kind, samples in SAMPLES.items()
    for case in CASES
    if case.values[0] in (samples[0], samples[-1])
]


def _larger(value):
    return LARGE * value if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _forward_hook(part):
    part.register_forward_hook(lambda module, args, output: _larger(output))


def _pre_hook(part):
    part.register_forward_pre_hook(lambda module, args: tuple(_larger(value) for value in args))


def _pre_hook_with_kwargs(part):
    part.register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(_larger(value) for value in args), kwargs),
        with_kwargs=True,
    )


def _global_hook(part):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: _larger(output) if module is part else None
    )
    return contextlib.closing(SimpleNamespace(close=handle.remove))


def _global_pre_hook(part):
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: tuple(_larger(value) for value in args) if module is part else None
    )
    return contextlib.closing(SimpleNamespace(close=handle.remove))


def _patched_object(part):
    forward = part.forward
    part.forward = lambda *args, **options: _larger(forward(*args, **options))


@contextlib.contextmanager
def _patched_class(part):
    kind = next(base for base in type(part).__mro__ if "forward" in vars(base))
    forward = kind.forward
    kind.forward = lambda self, *args, **kw: (
        _larger(forward(self, *args, **kw)) if self is part else forward(self, *args, **kw)
    )
    try:
        yield
    finally:
        kind.forward = forward


def _subclass(part):
    kind = type(part)

    class Louder(kind):
        def forward(self, *args, **options):
            return _larger(super().forward(*args, **options))

    part.__class__ = Louder


def _offloaded(part):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Louder(ModelHook):
        def post_forward(self, module, output):
            return _larger(output)

    add_hook_to_module(part, Louder())


class Adapter(nn.Module):
    """A low-rank addition beside a layer. It exposes the layer's weight, as adapter libraries do."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.down = nn.Parameter(LARGE * torch.randn_like(layer.weight[:1]))
        self.up = nn.Parameter(torch.randn_like(layer.weight[:, :1]))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.mT @ self.up.mT


class QuantisedTensor(torch.Tensor):
    """A weight with its own product."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [
            value.as_subclass(torch.Tensor) if isinstance(value, cls) else value for value in args
        ]
        out = function(*plain, **(kwargs or {}))
        return LARGE * out if function is nn.functional.linear else out


def _adapted(part):
    for name, child in part._modules.items():
        if isinstance(child, nn.Linear):
            part._modules[name] = Adapter(child)


def _quantised(part):
    for name, weight in part._parameters.items():
        if name == "weight" and weight is not None and weight.ndim == 2:
            part._parameters[name] = weight.detach().as_subclass(QuantisedTensor)


def _stale_weight_norm(part):
    if isinstance(part, nn.Linear):
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(part)
        part.weight_g.data.mul_(LARGE)


def _stale_spectral_norm(part):
    if isinstance(part, nn.Linear):
        nn.utils.spectral_norm(part)
        part.weight_orig.data.mul_(LARGE)
        with torch.no_grad():
            part.weight = part.weight / LARGE


def _stale_prune(part):
    if isinstance(part, nn.Linear):
        prune.l1_unstructured(part, "weight", amount=0.5)
        part.weight_orig.data.mul_(LARGE)


class Times(nn.Module):
    def forward(self, weight):
        return LARGE * weight


def _parametrised(part):
    if isinstance(part, nn.Linear):
        parametrize.register_parametrization(part, "weight", Times())


class Restless(nn.Module):
    """A parametrisation whose state changes at each reading, as spectral_norm in train mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("readings", torch.ones(()))

    def forward(self, weight):
        self.readings.add_(1)
        return self.readings * weight


def _restless(part):
    if isinstance(part, nn.Linear):
        parametrize.register_parametrization(part, "weight", Restless(), unsafe=True)


def _other_buffers(part):
    for buffer in part.buffers():
        if buffer.is_floating_point():
            buffer.mul_(LARGE)


def _is_linear(part):
    return isinstance(part, nn.Linear)


def _has_linear(part):
    return any(_is_linear(child) for child in part.children())


def _has_buffers(part):
    return any(
        buffer.is_floating_point() for buffer in part._buffers.values() if buffer is not None
    )


def _any(part):
    return True


WAYS_OF_A_PART = {
    way.__name__.strip("_"): (way, applies)
    for applies, ways in {
        _any: (_forward_hook, _pre_hook, _pre_hook_with_kwargs, _global_hook, _global_pre_hook, _patched_object,
               _patched_class, _subclass, _offloaded),
        _is_linear: (_quantised, _stale_weight_norm, _stale_spectral_norm, _stale_prune, _parametrised, _restless),
        _has_linear: (_adapted,),
        _has_buffers: (_other_buffers,),
    }.items()
    for way in ways
}  # fmt: skip


def _largest_slope(module, norm, radius, width=8):
    """Return the largest slope of the module as called, in its own dtype, between random inputs."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    scale = 0.3 if radius is None else 0.3 * radius / math.sqrt(width)
    x = scale * torch.randn(16, TOKENS, width)
    x = x.clamp(-1 / math.sqrt(width), 1 / math.sqrt(width)) if radius is not None else x
    y = torch.cat([x[:8] + 0.1 * (x[8:] - x[:8]), x[:8]])
    x = x.to(dtype)
    y = y.to(dtype)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        first = output_of(module, x)
        torch.manual_seed(1)
        second = output_of(module, y)
    moved = (second - first).double()
    apart = (y - x).double()
    moved = moved[:, None] if moved.ndim == 2 else moved
    return float((perturbation_size(moved, norm) / perturbation_size(apart, norm)).max())


def _right_or_refused(module, sample, what="", *, rounding=0.0001):
    """Return whether there is a certificate; if so, check that no slope exceeds it."""
    radius = 1.0 if sample.needs_ball else None
    norm = sample.norms[0]
    try:
        certificate = certify(module, seq_len=TOKENS, norm=norm, radius=radius, cross_check=False)
        total = certificate.total
        # The cross-check tests claims that somebody vouched for.
        if certificate.label == "empirical":
            certify(module, seq_len=TOKENS, norm=norm, radius=radius)
    except (NotLipschitzError, UnsoundBoundError):
        return False
    if math.isinf(total):
        return False
    slope = _largest_slope(module, norm, radius)
    assert slope <= total * (1 + rounding), f"{what}: certified {total}, slope {slope}"
    return True


def _complex(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.complex64) * 1j
    return module


def _one_part_of_each_class(module):
    first = {}
    for path, part in module.named_modules():
        first.setdefault(type(part), path)
    return list(first.values())


def test_every_rule_is_walked():
    """A new rule is covered once a sample of its class exists."""
    ours = {
        kind
        for kind in certifiable_classes()
        if kind.__module__.startswith(("torch.", "wellposed.", "transformers."))
    }
    assert ours <= SAMPLES.keys(), (
        f"add samples of {sorted(kind.__name__ for kind in ours - SAMPLES.keys())}"
    )
    ruled = {
        kind for kind, samples in SAMPLES.items() if any(sample.certifiable for sample in samples)
    }
    assert ruled <= ours, f"rules of {sorted(kind.__name__ for kind in ruled - ours)} are gone"


def _differs(sample, ways):
    plain = sample.build(8)
    for path in _one_part_of_each_class(plain):
        for name in ways:
            way, applies = WAYS_OF_A_PART[name]
            if applies(plain.get_submodule(path)):
                module = copy.deepcopy(plain)
                with way(module.get_submodule(path)) or contextlib.nullcontext():
                    assert _right_or_refused(module, sample, f"{name} of {path!r}") is not None


@pytest.mark.slow
@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize("sample", ENDS)
def test_a_call_that_differs_in_any_part(sample):
    _differs(sample, list(WAYS_OF_A_PART))


def test_every_way_to_differ_of_one_class():
    _differs(SAMPLES[nn.Sequential][0], list(WAYS_OF_A_PART))


@pytest.mark.parametrize("sample", ENDS)
def test_one_way_to_differ_of_every_class(sample):
    _differs(sample, ["patched_object"])


@pytest.mark.slow
@pytest.mark.parametrize("sample", CASES)
def test_ways_that_change_the_whole_module(sample):
    plain = sample.build(8)
    assert _right_or_refused(plain, sample)
    compiled = torch.compile(plain, backend="eager")
    assert type(compiled) is not type(plain)
    radius = 1.0 if sample.needs_ball else None
    assert certify(compiled, seq_len=5, radius=radius) == certify(plain, seq_len=5, radius=radius)
    assert not _right_or_refused(nn.DataParallel(plain), sample)
    _right_or_refused(copy.deepcopy(plain).train(), sample)
    _right_or_refused(copy.deepcopy(plain).bfloat16(), sample, rounding=0.1)
    _right_or_refused(copy.deepcopy(plain).double(), sample)
    if sample.keeps_width:
        assert _right_or_refused(nn.Sequential(plain, plain), sample) or sample.needs_ball
        assert _right_or_refused(nn.ModuleList([nn.Sequential(plain)] * 2)[1], sample)
    if any(True for _ in plain.parameters()):
        assert not _right_or_refused(copy.deepcopy(plain).to("meta"), sample)
        assert not _right_or_refused(_complex(copy.deepcopy(plain)), sample)


@pytest.mark.parametrize("way", ["forward_hook", "patched_object", "subclass", "offloaded"])
def test_what_is_refused_is_named(way):
    module = nn.Sequential(SAMPLES[nn.Sequential][3].build(8), nn.ReLU())
    WAYS_OF_A_PART[way][0](module.get_submodule("0.1.0"))
    certificate = certify(module, seq_len=4)
    assert [layer.path for layer in certificate.uncertified] == ["0.1.0"]
    with pytest.raises(NotLipschitzError, match=r"0\.1\.0 \("):
        certificate.require()


@pytest.mark.parametrize(("kind", "sample"), EVERY)
def test_a_sample_is_what_it_says(kind, sample):
    module = sample.build(8)
    assert type(module) is kind
    assert not module.training
    x = 0.1 * torch.randn(2, 5, 8)
    if sample.runs_alone and (sample.certifiable or not sample.two_inputs):
        with torch.no_grad():
            y = output_of(module, x)
            output_of(module, torch.randn(1, sample.tokens or MAX_TOKENS, 8))
        assert (y.shape == x.shape) or not sample.keeps_width
    for norm in sample.norms:
        certificate = certify(module, seq_len=5, norm=norm, radius=1.0)
        assert math.isfinite(certificate.total) == sample.certifiable
        tried = "largest slope / bound" in certificate.cross_check
        assert tried or not sample.attackable
        if sample.certifiable:
            assert math.isinf(certify(module, seq_len=5, norm=norm).total) == sample.needs_ball
