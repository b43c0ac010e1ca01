"""Ways to train, each attached by one line to random models of transformers: routes by families.

Each cell trains three steps, looks at the method's own claim, and saves and loads its weights.
"""

import math

import pytest
import torch
from tests.support.four_families import FAMILIES, VOCABULARY

import wellposed as wp
from wellposed.constrain import MuonAndAdamW, decay_groups, sigma_reparam_
from wellposed.initialize import mimetic_
from wellposed.optim import Scion

# Matrices of attention and feed-forward networks, by hand: of GPT-2 three in one weight, of Mixtral one
# of gate and one of up in each of three experts.
MATRICES = {"gpt2": 12, "llama": 14, "bert": 12, "mixtral": 2 * (4 + 9)}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def scion(model):
    optimizer = Scion(model, lr=0.05, radius=4.0, head_radius=20.0)
    optimizer.shrink_into_balls_()

    def check(count):
        sizes = optimizer.sizes()
        spectral = {
            w for g in optimizer.param_groups if g["norm"] == "spectral" for w in g["params"]
        }
        inside = [name for name in sizes if "layer" in name or "transformer.h" in name]
        assert max(sizes.values()) <= 1 + 1e-5
        assert len(spectral) > 0
        assert len(inside) >= count

    return optimizer, check


def muon_on_the_manifold(model):
    optimizer = MuonAndAdamW(model, lr=0.02, where="layers")
    handle = wp.constrain_(model, optimizer, where="layers", to="orthogonal")

    def check(count):
        assert len(handle.report.rows) == count
        assert handle.error().worst <= 1e-5

    return optimizer, check


def mimetic(model):
    """The claim on products is checked by hand in tests/initialize; here, which weights it draws."""
    report = mimetic_(model)

    def check(count):
        drawn = {row.name for row in report.rows}
        layers = 2 * (2 if any("c_attn" in name for name in drawn) else 4)
        assert len(drawn) == layers < count

    return adamw(model), check


def kept_in(to, worst):
    def attach(model):
        optimizer = adamw(model)
        handle = wp.constrain_(model, optimizer, where="layers", to=to)

        def check(count):
            assert len(handle.report.rows) == count
            assert handle.error().worst <= worst

        return optimizer, check

    return attach


# Parts of one fused matrix, beyond the first: query, key and value of GPT-2, gate and up of Mixtral.
FUSED = {"GPT2LMHeadModel": 2 * 2, "MixtralForCausalLM": 2 * 3}


def muon(model):
    """Steps are torch's, compared in tests/constrain; here, which matrices Muon takes."""
    optimizer = MuonAndAdamW(model, lr=0.02)
    groups = (group for group in optimizer.param_groups if group["method"] == "muon")
    taken = [weight for group in groups for weight in group["params"]]
    fused = FUSED.get(type(model).__name__, 0)

    def check(count):
        matrices = sum(len(weight) if weight.ndim == 3 else 1 for weight in taken)
        assert matrices == count - fused

    return optimizer, check


def qk_clip(model):
    """Logits are compared by hand in tests/constrain; here, that every attention is found."""
    optimizer = adamw(model)
    handle = wp.constrain_(model, optimizer, to="logits", bound=1.0)

    def check(count):
        del count
        assert len(handle.report.rows) == 2
        assert handle.error().worst <= 0.1

    return optimizer, check


def sigma_reparam(model):
    handle = sigma_reparam_(model)

    def check(count):
        norms = handle.norms().values()
        assert len(norms) == count
        assert all(0.9 * gain <= norm <= 2.0 * gain for norm, gain in norms)

    return torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-3), check


METHODS = {
    "mimetic": mimetic,
    "scion": scion,
    "muon on the manifold": muon_on_the_manifold,
    "sigma_reparam": sigma_reparam,
    "spectral_soft": kept_in("spectral_soft", 1e-5),
    "spectral_sphere": kept_in("spectral_sphere", 1e-5),
    "spectral_hammer": kept_in("spectral_hammer", math.inf),  # empirical
    "rows": kept_in("rows", 1e-5),
    "columns": kept_in("columns", 1e-5),
    "hypersphere": kept_in("hypersphere", 1e-5),
    "spectral": kept_in("spectral", 0.0),
    "muon": muon,
    "qk-clip": qk_clip,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_jasmin_attaches_and_is_lowered(family):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, form={"affinity": "jasmin"})
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    ids = torch.randint(3, VOCABULARY, (4, 12))
    values = []
    for _ in range(5):
        output = model(input_ids=ids).logits
        optimizer.zero_grad()
        value = penalty()
        assert len(penalty.terms()) == 2
        (value + 0 * output.sum()).backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_attaches_trains_and_saves(method, family):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    optimizer, check = METHODS[method](model)
    ids = torch.randint(3, VOCABULARY, (4, 12))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        check(MATRICES[family])
    assert losses[-1] < losses[0]

    torch.manual_seed(1)
    other = FAMILIES[family]()
    METHODS[method](other)
    other.load_state_dict(model.state_dict())
    model.eval()
    other.eval()
    torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits)
