"""QK-clip: after a step no head's logits of the batch exceed the bound, in attention of every kind."""

import copy
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.constrained import descend, goes_on_bit_for_bit
from tests.support.many_families import FAMILIES, GROUPED, batch_of, model
from tests.support.one_mesh import one_mesh
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError, ConvergenceError, RoleNotFoundError
from wellposed.hooks import ScaledDotProductCall, largest_logits
from wellposed.models import build_model

KINDS = {
    "llama": model("Llama", GROUPED),
    "gpt2": model("GPT2", vocab_size=40, n_embd=32, n_layer=2, n_head=4),
    "torch": lambda: nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True),
    **{
        name: FAMILIES[name]
        for name in ("xlm-roberta", "albert", "deepseek-v3", "gpt-neox", "mbart", "pegasus")
    },
}


class Logits(TorchFunctionMode):
    """The largest logit of each head in the first attention that runs, in float64 by definition."""

    largest: Tensor | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.largest is None:
            query, key = (tensor.detach().double() for tensor in args[:2])
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            logits = torch.einsum("bhid,bhjd->bhij", query, key) * scale
            mask = kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            if mask is not None:
                is_open = mask if mask.dtype == torch.bool else mask > -1e30
                logits = logits.masked_fill(~is_open, -math.inf)
            self.largest = logits.amax((0, 2, 3))
        elif func is F.multi_head_attention_forward and self.largest is None:
            x = args[0].detach().double()
            weight = args[5].double()
            bias = args[6].double()
            parts = (x @ weight[:64].T + bias[:64]).split(32, -1)
            query, key = (part.unflatten(-1, (4, 8)).transpose(0, 2) for part in parts)
            self.largest = (query @ key.mT / 8**0.5).amax((1, 2, 3))
        return func(*args, **kwargs)


def batch_for(name, built):
    return {"src": torch.randn(2, 5, 32)} if name == "torch" else batch_of(name, built)


def logits_of_pass(built, batch):
    with torch.no_grad(), Logits() as logits:
        built.train()(**batch)
    assert logits.largest is not None
    return logits.largest


def backward(built, batch):
    output = built(**batch)
    (output[0] if not isinstance(output, Tensor) else output).square().mean().backward()


@pytest.mark.parametrize("name", KINDS)
def test_the_largest_logit_of_each_head_is_the_bound_where_it_was_above(name):
    """Steps have rate 0, so that only scaling changes weights. Only the first layer is compared, as
    later ones read its output."""
    built = KINDS[name]()
    for module in built.modules():
        for rate in ("p", "dropout"):  # of BART and kin as a number that a function is given
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    with torch.no_grad():
        for parameter in built.parameters():  # biases too
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    batch = batch_for(name, built)
    before = logits_of_pass(built, batch)
    start = copy.deepcopy(built.state_dict())
    bound = float(before.median())
    optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
    handle = constrain_(built, optimizer, to="logits", bound=bound, batch=batch)
    assert all(torch.equal(value, start[key]) for key, value in built.state_dict().items())
    backward(built.train(), batch)
    optimizer.step()
    expected = before.clamp_max(bound)
    if name == "albert":  # its one layer reads what it changed
        assert (logits_of_pass(built, batch) <= bound * (1 + 1e-4)).all()
    else:
        torch.testing.assert_close(logits_of_pass(built, batch), expected, rtol=1e-4, atol=1e-5)
    assert handle.error().worst >= 0.0
    handle.remove()
    assert not any(module._forward_hooks for module in built.modules())


def test_keys_that_heads_share_are_left_alone_and_heads_below_the_bound_too():
    for name, keys in (("llama", ("k_proj",)), ("deepseek-v3", ("kv_a_proj_with_mqa", "q_a_proj"))):
        built = KINDS[name]()
        batch = batch_of(name, built)
        start = copy.deepcopy(built.state_dict())
        bound = 1.001 * float(logits_of_pass(built, batch).median())
        optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
        constrain_(built, optimizer, "*layers.0.*", to="logits", bound=bound)
        low = (logits_of_pass(built, batch) <= bound).tolist()
        backward(built, batch)
        optimizer.step()
        query = f"layers.0.self_attn.q_{'b_' if name == 'deepseek-v3' else ''}proj.weight"
        same = (built.state_dict()[query] == start[query]).unflatten(0, (4, -1)).flatten(1).all(1)
        assert same.tolist() == low
        after = built.state_dict()
        changed = [key for key, value in start.items() if not torch.equal(value, after[key])]
        assert query in changed
        assert not any(part in key for part in keys for key in changed)


@pytest.mark.parametrize("masked", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("above", [-math.inf, 1.0, 4.0])
@pytest.mark.parametrize("fused", [False, True])
def test_the_largest_logit_is_exact_or_bounded_by_a_sum_where_few_queries_decide(
    masked, above, fused
):
    query = torch.randn(3, 4, 7, 8) * torch.tensor([0.1, 1, 3, 9])[:, None, None]
    key = torch.randn(3, 2, 7, 8)
    keep = torch.rand(3, 1, 7, 7) > 0.4
    closed = torch.zeros(3, 1, 7, 7).masked_fill(~keep, -torch.inf)
    mask = {"bool": keep, "float": closed}.get(masked)
    call = ScaledDotProductCall(query, key, mask, masked == "causal", None)
    wide = query.double(), key.double().repeat_interleave(2, 1)
    logits = torch.einsum("bhid,bhjd->bhij", *wide) / 8**0.5
    is_open = {"none": torch.ones(7, 7), "causal": torch.ones(7, 7).tril()}.get(masked, keep).bool()
    exact = logits.masked_fill(~is_open, -math.inf).amax((0, 2, 3))
    output = query
    if fused:  # the kernel's sums decide, if they can
        query = query.requires_grad_()
        options = {"is_causal": masked == "causal", "enable_gqa": True}
        output = F.scaled_dot_product_attention(query, key, key, mask, **options)
        assert hasattr(output.grad_fn, "_saved_logsumexp")
    largest = largest_logits(call, output, above=above).double()
    is_exact = (largest - exact).abs() <= 1e-5 * exact.abs()
    if not fused or above < 2 * math.log(7):
        assert is_exact.all()
    assert is_exact[3]  # a few sharp queries decide
    assert (largest >= exact - 1e-5 * exact.abs()).all()
    assert (largest <= exact + math.log(7) + 1e-5).all()


def training(rate, seed, steps):
    """By what part the largest logit of each pass was above the bound, in attention that a high rate
    makes sharper."""
    torch.manual_seed(seed)
    model = ours(hidden_size=64, norm="pre")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    handle = constrain_(model, optimizer, to="logits", bound=6.0)
    excess = []
    for _ in range(steps):
        ids = torch.randint(0, 11, (4, 16)).repeat(1, 2)
        descend(lambda ids=ids: model(input_ids=ids, labels=ids).loss, optimizer, 1)
        excess.append(handle.error().worst)
    assert any("wellposed_logits" in state for state in optimizer.state.values())
    handle.remove()
    assert not any("wellposed_logits" in state for state in optimizer.state.values())
    return excess


LONG_RUNS = [(rate, seed, 120) for rate in (1e-3, 3e-3, 1e-2) for seed in range(3)]
RUNS = [(1e-2, 0, 25), *(pytest.param(*run, marks=pytest.mark.slow) for run in LONG_RUNS)]


@pytest.mark.parametrize(("rate", "seed", "steps"), RUNS)
def test_the_growth_of_a_step_is_foreseen(rate, seed, steps):
    """From the fourth pass on: before, too little growth was seen."""
    assert max(training(rate, seed, steps)[3:]) <= 0.05


def test_a_resumed_run_goes_on_bit_for_bit():
    def build():
        torch.manual_seed(0)
        model = ours()
        return model, torch.optim.AdamW(model.parameters(), lr=3e-2)

    def train(model, optimizer, steps):
        ids = torch.arange(12).view(2, 6) % 11
        return descend(lambda: model(input_ids=ids, labels=ids).loss, optimizer, steps)

    goes_on_bit_for_bit(build, lambda *pair: constrain_(*pair, to="logits", bound=0.1), train)


def test_what_was_not_seen_or_not_finite_is_said():
    layer = KINDS["torch"]()
    batch = batch_for("torch", layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = constrain_(layer, optimizer, to="logits", batch=batch)
    with pytest.raises(ConfigError, match="constrained already"):
        constrain_(layer, optimizer, "self_attn", to="spectral")
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.warns(ConstraintWarning, match="no forward pass with gradients"):
        optimizer.step()
    backward(layer, {"src": torch.full((2, 5, 32), math.inf)})
    optimizer.step()  # said before the next, when the number has reached the host
    assert handle.error().worst == math.inf
    with pytest.raises(ConvergenceError, match=r"the largest logit(.|\n)*self_attn$"):
        optimizer.step()
    handle.remove()


def ours(**parts):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    return build_model("wellposed", "causal_lm", **sizes | parts)


def compiled():
    layer = ours()
    layer.compile()
    return layer


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        *(
            (lambda part=part: ours(**part), {}, ConfigError, "does not scale its logits")
            for part in ({"attention": "l2"}, {"attention": "l2_tied"}, {"attention": "cosine"}, {"qk_norm": True})
        ),
        (FAMILIES["t5"], {}, ConfigError, "does not scale its logits"),
        (KINDS["torch"], {}, ConfigError, "give batch="),
        (lambda: torch.compile(ours()), {}, ConfigError, "leave torch.compile out"),
        (compiled, {}, ConfigError, "leave torch.compile out"),
        (ours, {"where": "*.up_proj"}, RoleNotFoundError, "needs a query or key of attention"),
        (ours, {"gain": 2.0, "per": "head"}, ConfigError, "has no gain, per"),
        (ours, {"bound": "rms:1"}, ConfigError, "expected a finite number > 0"),
        (ours, {"bound": 0.0}, ConfigError, "bound = 0.0, expected a finite number > 0"),
        (lambda: ours().requires_grad_(False), {}, ConfigError, "frozen"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(build, options, error, message):
    built = build()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        constrain_(built, optimizer, to="logits", **options)


class Launches(TorchDispatchMode):
    """How many operations run that are no views: each is a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.count += not func.is_view and "_unsafe_view" not in func.name()
        return func(*args, **(kwargs or {}))


def one_step(mode, layers=2, bound=None):
    """Take the second step of a training inside a mode, with logits that are held if a bound is given."""
    sizes = dict(vocab_size=40, n_embd=32, n_layer=layers, n_head=4)
    built = model("GPT2", **sizes)().eval()  # without dropout
    optimizer = torch.optim.SGD(built.parameters(), lr=1e-2, foreach=True)
    handle = None if bound is None else constrain_(built, optimizer, to="logits", bound=bound)
    ids = torch.arange(60).view(2, 30) % 40
    for context in (nullcontext(), mode):
        with context:
            backward(built, {"input_ids": ids})
            optimizer.step()
            optimizer.zero_grad()
    if handle is not None:
        assert isinstance(mode, FakeTensorMode) or handle.error().worst < 0.1
        handle.remove()
    return mode


@pytest.mark.parametrize(("bound", "per_layer"), [(1e-3, 8), (100.0, 10)])
def test_a_step_takes_few_launches_and_no_read(bound, per_layer):
    """All queries decide if the bound is low, else a few of them."""

    def launches(layers):
        counts = [one_step(Launches(), layers, limit).count for limit in (None, bound)]
        return counts[1] - counts[0]

    few = launches(2)
    many = launches(5)
    assert many - few <= 3 * per_layer
    assert few <= 40 + 2 * per_layer
    one_step(FakeTensorMode(allow_non_fake_inputs=True), bound=bound)  # a read raises


def test_weights_that_are_cut_twice_are_refused():
    layer = KINDS["torch"]()
    with one_mesh(1, 1) as mesh:
        weight = layer.self_attn.in_proj_weight.detach()
        layer.self_attn.in_proj_weight = nn.Parameter(
            distribute_tensor(weight, mesh, [Shard(0), Shard(1)])
        )
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="weights that are cut once"):
            constrain_(layer, optimizer, to="logits", batch=batch_for("torch", layer))


@pytest.mark.slow
def test_ddp_and_fsdp2_scale_heads_as_one_process_does(tmp_path):
    """Every process sees other logits; each has other rows, or none."""
    command = [sys.executable, "-m", "tests.support.logits_worker", str(tmp_path)]
    options = {"cwd": Path(__file__).parents[2], "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        runs = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name, run in runs.items():
            reference = runs[f"{name.split()[0]} single"]
            assert run["errors"] == pytest.approx(reference["errors"], abs=1e-5), name
            assert run["errors"][0] > 1.0  # heads were above, and are not any more
            assert run["errors"][-1] == 0.0
            kinds_of_heads = 2 if name.startswith("mixed") else 1
            assert run["collectives"] == kinds_of_heads, name
            for weight, values in run["weights"].items():
                expected = torch.tensor(reference["weights"][weight])
                torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-5)
        assert len(runs) == 8
