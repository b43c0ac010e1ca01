"""Layers that compute something else than their weight: each verb computes it, or names the layer.

The reference calls each layer on the unit vectors, in float64.
"""

import functools
import logging
import warnings

import pytest
import torch
from tests.support.wrappers import Model, batch
from torch import nn

import wellposed as wp
from wellposed.errors import ConfigError

pytestmark = pytest.mark.slow  # the whole table


class Adapter(nn.Module):
    """A wrapper with low-rank factors, the last of which starts at zero as everybody's do."""

    def __init__(self, linear):
        super().__init__()
        rows, columns = rows_and_columns(linear)
        self.linear = linear
        self.lora_down = nn.Linear(columns, 2, bias=False, dtype=torch.float64)
        self.lora_up = nn.Linear(2, rows, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x) + 3 * self.lora_up(self.lora_down(x))


class Times(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 7 * self.linear(x)


class TimesGiven(nn.Module):
    """A wrapper that needs a second argument, which a hook gives."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.register_forward_pre_hook(lambda _module, inputs: (*inputs, 7.0))

    def forward(self, x, factor):
        return factor * self.linear(x)


def with_seven(forward):
    @functools.wraps(forward)
    def call(self, x):
        return forward(self, x, 7.0)

    return call


class TimesSeven(nn.Module):
    """A wrapper whose decorator gives the second argument."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    @with_seven
    def forward(self, x, factor):
        return factor * self.linear(x)


class Own(nn.Module):
    """A layer of its own, with the weight of another."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        rows, columns = self.weight.shape
        self.down = nn.Parameter(torch.randn(2, columns, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(rows, 2, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.down.T @ self.up.T


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 5 * super().forward(x)


class Factored(nn.Linear):
    """Low-rank factors in a subclass, as loralib has them."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.lora_A = nn.Parameter(torch.randn(2, sizes[0], dtype=torch.float64))
        self.lora_B = nn.Parameter(torch.randn(sizes[1], 2, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class Rounded(nn.Linear):
    """Products with a weight on a grid, as quantisation-aware training has them."""

    def forward(self, x):
        step = self.weight.detach().abs().max() / 7
        rounded = self.weight + ((self.weight / step).round() * step - self.weight).detach()
        return nn.functional.linear(x, rounded, self.bias)


def subclass(kind):
    def wrap(linear):
        layer = kind(linear.in_features, linear.out_features, dtype=torch.float64)
        layer.load_state_dict(linear.state_dict(), strict=False)
        return layer

    return wrap


def started(linear):
    layer = Adapter(linear)
    with torch.no_grad():
        layer.lora_up.weight.normal_()
    return layer


def unstarted(linear):
    layer = Adapter(linear)
    with torch.no_grad():
        layer.lora_up.weight.zero_()
    return layer


def replaced(change):
    def wrap(linear):
        before = linear.forward
        linear.forward = lambda x: change(before(x))
        return linear

    return wrap


def hooked(change):
    def wrap(linear):
        linear.register_forward_hook(lambda _module, _inputs, output: change(output))
        return linear

    return wrap


def pre_hooked(change):
    def wrap(linear):
        linear.register_forward_pre_hook(lambda _module, inputs: change(inputs))
        return linear

    return wrap


def called_by(kind):
    def wrap(linear):
        calls = []
        if kind == "accelerate":
            from accelerate.hooks import ModelHook, add_hook_to_module

            add_hook_to_module(linear, ModelHook())
        elif kind == "before":
            linear.register_forward_pre_hook(lambda _module, inputs: calls.append(len(inputs)))
        elif kind == "keywords":
            linear.register_forward_hook(lambda *_: calls.append(1), with_kwargs=True)
        else:
            linear.register_full_backward_hook(lambda *_: calls.append(1))
        return linear

    return wrap


COMPUTED = {
    "forward replaced": replaced(lambda y: 10 * y),
    "hook": hooked(lambda y: -2 * y),
    "hook in place": hooked(lambda y: y.mul_(3)),
    "hook of each unit": hooked(lambda y: y * torch.linspace(0.5, 2.0, y.shape[-1])),
    "pre-hook": pre_hooked(lambda inputs: (10 * inputs[0],)),
    "wrapper": Times,
    "wrapper with an argument of a hook": TimesGiven,
    "wrapper with an argument of a decorator": TimesSeven,
    "adapter": started,
    "adapter at its start": unstarted,
    "adapter around a hook": lambda linear: started(hooked(lambda y: 2 * y)(linear)),
}
OF_LINEAR = {
    "own layer": Own,
    "scaled subclass": subclass(ScaledLinear),
    "factors in a subclass": subclass(Factored),
    "rounded subclass": subclass(Rounded),
}
NAMED = {
    "hook of a sine": hooked(torch.sin),
    "forward of a sine": replaced(torch.sin),
    "pre-hook of a sine": pre_hooked(lambda inputs: (torch.sin(inputs[0]),)),
    "hook that clips": hooked(lambda y: y.clamp(-2, 2)),
}
INNOCENT = {
    "observer": hooked(lambda y: None),
    "observer that returns it": hooked(lambda y: y),
    "observer before": called_by("before"),
    "observer of keywords": called_by("keywords"),
    "backward hook": called_by("backward"),
    "constant added": hooked(lambda y: y + 1),
    "accelerate": called_by("accelerate"),
    "same forward": replaced(lambda y: y),
    "sequence": lambda linear: nn.Sequential(linear, nn.Dropout(0.5)),
}


def own_model():
    return Model(), batch().double()


def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    return BertModel(config), {"input_ids": torch.arange(3, 9)[None]}


def gpt2():
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    return GPT2Model(config), {"input_ids": torch.arange(3, 9)[None]}


def llama():
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
    )
    return LlamaModel(config), {"input_ids": torch.arange(3, 9)[None]}


PLACES = {
    "own query": (own_model, "attention.q_proj", "query"),
    "own output": (own_model, "attention.o_proj", "output"),
    "own feed-forward": (own_model, "mlp.up_proj", "feedforward_in"),
    "bert": (bert, "encoder.layer.0.attention.self.query", "query"),
    "bert feed-forward": (bert, "encoder.layer.0.intermediate.dense", "feedforward_in"),
    "gpt2": (gpt2, "h.0.attn.c_attn", "query"),
    "gpt2 feed-forward": (gpt2, "h.0.mlp.c_fc", "feedforward_in"),
    "llama": (llama, "layers.0.self_attn.q_proj", "query"),
    "llama feed-forward": (llama, "layers.0.mlp.down_proj", "feedforward_out"),
}

FAST = ("own query", "own feed-forward", "gpt2")


def rows_and_columns(linear):
    shape = tuple(linear.weight.shape)
    return shape if isinstance(linear, nn.Linear) else shape[::-1]


class Case:
    """A model with one changed layer, and the matrix that this layer computes."""

    def __init__(self, site, wrap):
        torch.manual_seed(0)
        make, self.path, self.role = PLACES[site]
        self.model, self.batch = make()
        self.model = self.model.double().eval()
        around, _, name = self.path.rpartition(".")
        plain = self.model.get_submodule(self.path)
        self.rows, self.columns = rows_and_columns(plain)
        self.stored = plain.weight.detach().clone()
        if (self.rows, self.columns) != self.stored.shape:
            self.stored = self.stored.T
        self.model.get_submodule(around).add_module(name, wrap(plain))
        self.layer = self.model.get_submodule(self.path).eval()
        self.is_fused = site == "gpt2"

    def of_role(self, matrix):
        return matrix[: self.rows // 3] if self.is_fused else matrix

    @torch.no_grad()
    def computed(self):
        unit = torch.eye(self.columns, dtype=torch.float64)
        return self.of_role((self.layer(unit) - self.layer(torch.zeros_like(unit))).T)

    def row(self, rows):
        (row,) = (row for row in rows if row["role"] == self.role)
        return row

    def penalty(self):
        strength = {"query": "query", "output": "attention"}.get(self.role, "feedforward")
        options = {strength: 1.0, "form": "gram_squared", "batch": self.batch}
        return wp.OrthogonalityPenalty(self.model, **options, attention_mode="separate")

    def term(self, terms):
        ends = {
            "query": "",
            "output": ".output",
            "feedforward_in": ".up",
            "feedforward_out": ".down",
        }
        names = [name for name in terms if name.endswith(ends[self.role] or "0")]
        return terms[names[0]]

    def constrained(self, **options):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        return wp.constrain_(self.model, optimizer, where=self.role, batch=self.batch, **options)


def squared(matrix, role):
    gram = matrix @ matrix.T if role == "query" else matrix.T @ matrix
    return (gram - torch.eye(len(gram), dtype=gram.dtype)).square().sum().item()


def cases(kinds, of_linear=()):
    for site in PLACES:
        names = [*kinds, *(() if site.startswith("gpt2") else of_linear)]
        for name in names:
            wrap = {**kinds, **dict(of_linear)}[name]
            slow = [] if site in FAST else pytest.mark.slow
            yield pytest.param(site, wrap, id=f"{site}-{name}", marks=slow)


computed_cases = pytest.mark.parametrize(("site", "wrap"), [*cases(COMPUTED, OF_LINEAR)])
named_cases = pytest.mark.parametrize(("site", "wrap"), [*cases(NAMED)])
innocent_cases = pytest.mark.parametrize(("site", "wrap"), [*cases(INNOCENT)])


@computed_cases
def test_a_linear_layer_is_measured_and_penalised_as_it_computes(site, wrap, caplog):
    case = Case(site, wrap)
    expected = case.computed()
    largest = torch.linalg.matrix_norm(expected, 2).item()
    measured = wp.measure(case.model, case.batch)
    assert case.row(measured.rows)["sigma_max"] == pytest.approx(largest, rel=1e-5)
    assert any(note.startswith(f"{case.path} (") for note in measured.notes)
    with caplog.at_level(logging.WARNING, logger="wellposed.monitor"):
        monitor = wp.Monitor(case.model, vitals=False, batch=case.batch)
    assert case.path in caplog.text
    (watched,) = (
        value for name, value in monitor.step().items() if f"0.{case.role}/sigma_max" in name
    )
    assert watched == pytest.approx(largest, rel=2e-2)
    penalty = case.penalty()
    penalty()
    expected_term = squared(expected, case.role)
    assert case.term(penalty.terms()) == pytest.approx(expected_term, rel=1e-6)


@pytest.mark.parametrize(("site", "wrap"), [*cases(COMPUTED, OF_LINEAR), *cases(NAMED)])
def test_no_verb_that_writes_weights_writes_them(site, wrap):
    case = Case(site, wrap)
    pattern = rf"(?s)cannot keep.*{case.path}"
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    for options in ({"to": "orthogonal"}, {"to": "spectral"}, {"to": "columns"}):
        with pytest.raises(ConfigError, match=pattern):
            case.constrained(**options)
    if site.startswith("own"):
        with pytest.raises(ConfigError, match=rf"(?s)drawn.*{case.path}"):
            wp.t_fixup_(case.model, batch=case.batch)
    after = case.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@named_cases
def test_a_layer_that_is_not_linear_is_named(site, wrap, caplog):
    case = Case(site, wrap)
    measured = wp.measure(case.model, case.batch)
    (note,) = (note for note in measured.notes if note.startswith(f"{case.path} ("))
    assert "not what it computes" in note
    stored = torch.linalg.matrix_norm(case.of_role(case.stored), 2).item()
    assert case.row(measured.rows)["sigma_max"] == pytest.approx(stored, rel=1e-5)
    with caplog.at_level(logging.WARNING, logger="wellposed.monitor"):
        wp.Monitor(case.model, vitals=False, batch=case.batch)
    assert case.path in caplog.text
    with pytest.raises(ConfigError, match=rf"(?s)cannot be penalised.*{case.path}"):
        case.penalty()


@innocent_cases
def test_a_hook_that_observes_changes_nothing(site, wrap, caplog):
    case = Case(site, wrap)
    largest = torch.linalg.matrix_norm(case.of_role(case.stored), 2).item()
    measured = wp.measure(case.model, case.batch)
    assert case.row(measured.rows)["sigma_max"] == pytest.approx(largest, rel=1e-5)
    assert not [note for note in measured.notes if case.path in note]
    with caplog.at_level(logging.WARNING, logger="wellposed.monitor"):
        wp.Monitor(case.model, vitals=False, batch=case.batch)
    assert case.path not in caplog.text
    penalty = case.penalty()
    penalty()
    assert case.term(penalty.terms()) == pytest.approx(
        squared(case.of_role(case.stored), case.role), rel=1e-6
    )
    handle = case.constrained(to="spectral", bound=0.5)
    assert handle.error().worst == 0
    handle.remove()
    assert torch.linalg.matrix_norm(case.computed(), 2) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("kind", [*COMPUTED, *OF_LINEAR, *NAMED])
def test_a_certificate_is_not_below_what_the_layer_computes(kind):
    case = Case("own query", {**COMPUTED, **OF_LINEAR, **NAMED}[kind])
    total = wp.certify(case.layer, seq_len=3, norm=2).total
    assert total >= torch.linalg.matrix_norm(case.computed(), 2).item() * (1 - 1e-9)


LATER = {
    "hook": hooked(lambda y: 3 * y),
    "pre-hook": pre_hooked(lambda inputs: (3 * inputs[0],)),
    "forward": replaced(lambda y: 3 * y),
    "sine": hooked(torch.sin),
}


@pytest.mark.parametrize("site", ["own query", "bert", "gpt2"])
@pytest.mark.parametrize("change", LATER)
def test_a_change_after_a_verb_was_attached_shows_at_its_next_look(site, change, caplog):
    case = Case(site, lambda linear: linear)
    roles = wp.find_roles(case.model, case.batch)
    monitor = wp.Monitor(case.model, every=1, vitals=False, batch=case.batch)
    penalty = case.penalty()
    handle = case.constrained(to="spectral")
    penalty()
    penalty.terms()
    INNOCENT["observer"](case.layer)
    penalty.terms()
    assert handle.error().worst == 0
    LATER[change](case.layer)
    with pytest.raises(ConfigError, match=rf"(?s){case.path}.*rebind"):
        penalty.terms()
    with pytest.warns(wp.constrain.ConstraintWarning, match=case.path):
        handle.error()
    with caplog.at_level(logging.WARNING, logger="wellposed.monitor"):
        monitor.step()
        monitor.step()
    assert caplog.text.count(f"{case.path} (") == 1
    notes = wp.measure(case.model, roles=roles).notes
    assert any(note.startswith(f"{case.path} (") for note in notes)


def test_a_router_and_a_fused_activation_keep_their_weight():
    class Activated(nn.Linear):
        def forward(self, x):
            return torch.relu(super().forward(x))

    case = Case("own feed-forward", subclass(Activated))
    measured = wp.measure(case.model, case.batch)
    stored = torch.linalg.matrix_norm(case.stored, 2).item()
    assert case.row(measured.rows)["sigma_max"] == pytest.approx(stored, rel=1e-5)
    case.constrained(to="spectral").remove()


def test_a_chain_of_two_weights_is_no_wrapper_of_the_first():
    case = Case("own query", lambda linear: nn.Sequential(linear, nn.Linear(16, 16).double()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = wp.measure(case.model, case.batch)
    assert not [note for note in measured.notes if "computes" in note]


def test_weights_that_are_not_numbers_get_their_own_reason():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)).eval()
    with torch.no_grad():
        layer.parametrizations.weight.original1.zero_()  # of length 0: the weight is 0 / 0
    try:
        text = str(wp.certify(layer, seq_len=3, norm=2))
    except wp.WellposedError as error:
        text = str(error)
    assert "changes each time" not in text
    assert "NaN" in text or "inf" in text
