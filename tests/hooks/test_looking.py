"""A look at a model restores every buffer and plain tensor: object, shape, values and names, by
every verb, for every way in which a layer changes its state, also if the pass fails."""

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.errors import ConfigError, ShapeError
from wellposed.hooks import call_model, quiet_run

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


class Restless(nn.Linear):
    """A layer that changes its state by ``change`` at each call."""

    def __init__(self, change):
        super().__init__(16, 16)
        self.change = change
        self.register_buffer("last_input", torch.ones(1, 3))
        self.register_buffer("unset", None)
        self.plain = torch.ones(3)
        self.unset_plain = None
        self.is_ready = False

    def forward(self, x):
        CHANGES[self.change](self)
        return super().forward(x)


def register_once(layer):
    if not layer.is_ready:
        layer.is_ready = True
        layer.register_buffer("late", torch.zeros(4), persistent=False)
    layer.late.add_(1)


def keep_last(layer):
    if layer.unset_plain is None:
        layer.unset_plain = torch.ones(2)


def delete_once(layer):
    if hasattr(layer, "last_input"):
        del layer.last_input


CHANGES = {
    "in place": lambda layer: layer.last_input.mul_(2),
    "grows": lambda layer: setattr(
        layer, "last_input", torch.cat([layer.last_input, torch.ones(1, 3)])
    ),
    "resized": lambda layer: layer.last_input.resize_(len(layer.last_input) + 7, 3).fill_(2),
    "cut": lambda layer: layer.last_input.resize_(0),
    "other memory": lambda layer: setattr(layer.last_input, "data", torch.zeros(8)),
    "other dtype": lambda layer: setattr(layer.last_input, "data", layer.last_input.data.double()),
    "set when needed": lambda layer: setattr(layer, "unset", torch.ones(2)),
    "registered late": register_once,
    "deleted": delete_once,
    "plain, in place": lambda layer: layer.plain.add_(1),
    "plain, resized": lambda layer: layer.plain.resize_(9).fill_(2),
    "plain, set when needed": keep_last,
    "observed": lambda layer: None,
}


def stateful(change):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = nn.Sequential(encoder, Restless(change))
    if change == "observed":
        from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

        fake = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )
        model.append(fake)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


VERBS = {
    "find_roles": lambda m: wp.find_roles(m, X),
    "measure": lambda m: wp.measure(m, X),
    "penalty": lambda m: wp.OrthogonalityPenalty(m, affinity=1.0, batch=X),
    "monitor": lambda m: wp.Monitor(m, optimizer_of(m), batch=X),
    "constrain_": lambda m: wp.constrain_(m, optimizer_of(m), to="spectral", batch=X),
    "parameter_groups": lambda m: wp.parameter_groups(m, 0.1, batch=X),
    "certify": lambda m: wp.certify(m, seq_len=5),
    "lower bound": lambda m: wp.lipschitz_lower_bound(m, X.shape[1:], restarts=1, steps=2),
    "t_fixup_": lambda m: wp.t_fixup_(m, batch=X),
    "dt_fixup_": lambda m: wp.dt_fixup_(m, [X]),
}


def state_of(model):
    """Return every buffer and plain tensor by name: itself, and a copy."""
    state = {}
    for path, part in model.named_modules():
        tables = [
            part._buffers,
            {n: v for n, v in vars(part).items() if isinstance(v, torch.Tensor)},
        ]
        for kind, table in enumerate(tables):
            for name, tensor in table.items():
                copy = (
                    None if tensor is None else (tensor.clone(), tensor.untyped_storage().nbytes())
                )
                state[path, kind, name] = (tensor, copy)
        state[path, "saved"] = (None, set(part._non_persistent_buffers_set))
    return state


def assert_same(now, before):
    assert [*now] == [*before]
    for key, (tensor, copy) in before.items():
        assert now[key][0] is tensor, key
        if isinstance(copy, tuple):
            assert now[key][1][0].dtype == copy[0].dtype, key
            assert torch.equal(now[key][1][0], copy[0]), key
            assert now[key][1][1] == copy[1], key
        else:
            assert now[key][1] == copy, key


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.ao
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_changes_the_state(verb, change):
    model = stateful(change)
    before = state_of(model)
    if change == "observed" and "fixup" in verb:  # an observer does not hear the scale: a norm
        with pytest.raises(ConfigError, match="activation_post_process"):
            VERBS[verb](model)
        assert_same(state_of(model), before)
        return
    if change == "observed" and verb == "lower bound":  # no observer observes float64
        with pytest.raises(ShapeError, match="must be Float"):
            VERBS[verb](model)
        assert_same(state_of(model), before)
        return
    result = VERBS[verb](model)
    if verb in ("penalty", "monitor", "constrain_"):
        result.remove()
    assert_same(state_of(model), before)
    model(X)  # a flag that speaks of a removed tensor would stop this


@pytest.mark.parametrize("change", CHANGES)
def test_a_pass_that_fails_restores_as_well(change):
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = nn.Sequential(Restless(change), Restless("resized"), Failing())
    before = state_of(model)
    with pytest.raises(ConfigError, match="no"), quiet_run(model):
        call_model(model, X)
    assert_same(state_of(model), before)


def test_the_growing_buffer_is_counted_once_by_training_alone():
    model = stateful("grows")
    for _ in range(2):
        wp.find_roles(model, X)
        model(X)
    assert len(model[1].last_input) == 3
