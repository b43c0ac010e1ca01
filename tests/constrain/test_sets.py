"""`to="spectral"` and `to="columns"`: the stored weight is in its set after every step, by a float64 SVD;
and an embedding of more vectors than dimensions, whose columns stay orthogonal at the size they have."""

import math

import pytest
import torch
from tests.support.constrained import (
    NAMES,
    OPTIMIZERS,
    Mixed,
    constrained,
    descend,
    goes_on_bit_for_bit,
    isometry_error,
    train,
)
from torch import nn

import wellposed as wp
from wellposed.constrain import (
    SETS,
    MatrixSet,
    MuonAndAdamW,
    NearestMatrices,
    constrain_,
)
from wellposed.errors import ConfigError, ConvergenceError

SHAPES = [(8, 8), (12, 5), (5, 12), (1, 7), (7, 1)]


def spectral_norm(weight):
    return float(torch.linalg.svdvals(weight.detach().double())[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bound", [1e-3, 0.3, 1.0, 1e3])
def test_steps_of_any_size_end_below_a_spectral_norm(dtype, bound):
    matrices = (nn.Linear(n, m, bias=False, dtype=dtype) for m, n in SHAPES)
    layers = nn.ModuleList(matrices)
    options = {"model": layers, "lr": 1.0, "to": "spectral", "bound": bound}
    _, optimizer, handle = constrained("sgd", nn.Linear, **options)
    for size in [1e-4, 1e-2, 0.05, 0.1, 0.3, 1.0, 30.0, 1e3] * 3:
        for weight in layers.parameters():
            noise = torch.randn_like(weight, dtype=torch.float64)
            noise *= size * bound / torch.linalg.matrix_norm(noise, 2)
            weight.grad = noise.to(dtype)
        optimizer.step()
        for weight in layers.parameters():
            # a bound in float64 is exact, so the certificate is held to it without any slack
            assert spectral_norm(weight) <= bound, (size, weight.shape)
            assert float(wp.linalg.certified_spectral_norm(weight.detach())) <= bound
    assert handle.error().worst == 0.0


def test_certify_measures_the_weights_and_not_the_handle():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    handle = constrained("sgd", nn.Linear, model=model, to="spectral")[2]
    assert wp.certify(model, seq_len=4).total <= 1.0
    model[0].weight.data.mul_(5.0)
    assert handle.active
    first = spectral_norm(model[0].weight)
    second = spectral_norm(model[2].weight)
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    plain.load_state_dict(model.state_dict())
    total = wp.certify(model, seq_len=4).total
    assert 1.0 < total <= first * second * (1 + 1e-5)
    assert total == wp.certify(plain, seq_len=4).total
    assert handle.error().worst == pytest.approx(first - 1.0, rel=1e-4)


BUILT = {
    "adamw": lambda model: OPTIMIZERS["adamw"](list(model.parameters())),
    "sgd": lambda model: OPTIMIZERS["sgd"](list(model.parameters())),
    "muon and adamw": lambda model: MuonAndAdamW(model, lr=2e-2, adamw_lr=1e-2, muon=NAMES),
}


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(to, kind, dtype):
    def build():
        torch.manual_seed(5)
        model = Mixed().to(dtype)
        return model, BUILT[kind](model)

    goes_on_bit_for_bit(build, lambda *pair: constrain_(*pair, where=NAMES, to=to), train)


def columns_of(layer, bound=1.0):
    return constrained("sgd", "0", model=nn.Sequential(layer), lr=1.0, to="columns", bound=bound)[2]


def test_columns_that_a_step_takes_to_zero_are_counted():
    layers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(2))
    optimizer = constrained("sgd", nn.Linear, model=layers, lr=1.0, to="columns")[1]
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    layers[1].weight.grad[:, 1:3] = layers[1].weight.detach()[:, 1:3]
    message = r"1\.weight: 2 of 4 columns are zero or not finite .*: \[1, 2\]"
    with pytest.raises(ConvergenceError, match=message):
        optimizer.step()


def test_a_vector_of_padding_may_be_zero_or_have_the_length():
    for vector in (0.0, 3.0):
        table = nn.Embedding(4, 3, padding_idx=2)
        with torch.no_grad():
            table.weight[2] = vector
        handle = columns_of(table, 0.5)
        lengths = table.weight.detach().norm(dim=1)
        expected = [0.5, 0.5, 0.5 if vector else 0.0, 0.5]
        assert lengths.tolist() == pytest.approx(expected, abs=1e-6)
        assert handle.error().worst <= 1e-6
    table = nn.Embedding(4, 3, padding_idx=2)
    with torch.no_grad():
        table.weight[1] = 0.0
    with pytest.raises(ConfigError, match="1 zero columns, the first at 1"):
        columns_of(table)


VOCAB = 40
DIM = 6


class Bag(nn.Module):
    """Mean of word vectors, read out."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.few = nn.Embedding(4, DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1) + self.few(ids % 4).mean(1))


def attached(model):
    return constrained("adamw", nn.Embedding, model=model, lr=3e-2, embeddings="fit")[1:]


def train_bag(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (32, 7), generator=generator)
    labels = (ids < VOCAB // 3).sum(1).clamp(max=2)
    return descend(lambda: nn.functional.cross_entropy(model(ids), labels), optimizer, steps)


def frame_gain(table):
    """The slow reference: root of the mean eigenvalue of E^T E, which are all equal for orthogonal
    columns."""
    return math.sqrt(float(table.detach().double().square().sum()) / DIM)


def test_columns_stay_orthogonal_at_the_size_they_had_while_training_works():
    model = Bag()
    singular = torch.linalg.svdvals(model.words.weight.detach().double())
    optimizer, handle = attached(model)
    losses = train_bag(model, optimizer, 300)
    gain = frame_gain(model.words.weight)
    assert gain == pytest.approx(float(singular.mean()), rel=5e-3)
    assert gain == pytest.approx(float(f"{gain:.3g}"), rel=1e-6)
    assert isometry_error(model.words.weight / gain) <= 1e-5
    assert handle.error().worst <= 1e-5
    assert losses[-1] < 0.1 * losses[0]


def test_the_vector_of_padding_stays_zero_and_no_vector_is_longer_than_the_gain():
    model = Bag()
    optimizer, _ = attached(model)
    train_bag(model, optimizer, 50)
    lengths = model.words.weight.detach().norm(dim=1)
    assert float(lengths[0]) == 0.0
    assert float(lengths.max()) <= frame_gain(model.words.weight) * (1 + 1e-5)


def test_a_token_that_is_never_seen_moves_by_the_common_turn_alone():
    model = Bag()
    optimizer, _ = attached(model)
    before = model.words.weight.detach().clone()
    rare = slice(VOCAB - 8, VOCAB)
    ids = torch.randint(1, VOCAB - 8, (32, 7), generator=torch.Generator().manual_seed(1))
    descend(lambda: nn.functional.cross_entropy(model(ids), ids[:, 0] % 3), optimizer, 30)
    after = model.words.weight.detach()
    # one d x d matrix, fitted on six of the eight unseen vectors, explains the other two
    turn = torch.linalg.solve(before[rare][:DIM].double(), after[rare][:DIM].double())
    turned = before[rare].double() @ turn
    torch.testing.assert_close(turned, after[rare].double(), atol=1e-4, rtol=0)
    assert float((after - before)[: VOCAB - 8].norm(dim=1)[1:].min()) > 0.1


def test_a_resumed_run_of_embeddings_goes_on_bit_for_bit():
    def build():
        model = Bag()
        return model, OPTIMIZERS["adamw"](list(model.parameters()))

    def attach(model, optimizer):
        return constrain_(model, optimizer, where=nn.Embedding, embeddings="fit")

    goes_on_bit_for_bit(build, attach, train_bag)


@pytest.mark.parametrize("to", ["orthogonal", "spectral"])
@pytest.mark.slow
def test_attaching_on_two_threads_does_what_one_does(to):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(1030, 1024, bias=False) for _ in range(3)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            constrain_(
                model, optimizer, where=nn.Linear, to=to, bound=0.5 if to == "spectral" else None
            )
            results.append([weight.detach().clone() for weight in model.parameters()])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert float((one - two).abs().max()) <= 1e-5


PROJECTED = []
"""Shapes of the stacks that `Rows` has projected."""


@SETS.register("rows of a test")
class Rows(MatrixSet):
    """A set of another package: rows of length ``gain``, with its own tolerance, in one product a stack."""

    options = frozenset({"gain"})

    @classmethod
    def for_weight(cls, size, weight_slice):
        return cls(size, tolerance=1e-3)

    @classmethod
    def chosen(cls, weight_slice, options, *, is_table):
        return cls.for_weight(options.gain or 1.0, weight_slice)

    @classmethod
    def refusal(cls, weight_slice, options, *, is_table):
        return "a row of one entry has no direction" if weight_slice.shape[1] == 1 else None

    @classmethod
    def refusal_of_zeros(cls, zeros, options):
        return "all zero" if zeros.count == zeros.columns else None

    def error(self, matrix):
        return float((matrix.double().norm(dim=-1) / self.size - 1.0).abs().max())

    def spectral_error(self, matrix):
        return 7.0

    def nearest(self, matrix):
        return (
            self.nearest_stack(matrix[None]).matrices[0]
            if matrix.ndim == 2
            else self._scaled(matrix)
        )

    def nearest_stack(self, stack):
        PROJECTED.append(tuple(stack.shape))
        errors = [self.error(matrix) for matrix in stack]
        inside = self._scaled(stack)
        for index, error in enumerate(errors):
            inside[index] = stack[index] if error <= self.tolerance else inside[index]
        after = [self.error(matrix) for matrix in inside.to(stack.dtype)]
        return NearestMatrices([self.size] * len(stack), errors, inside, after)

    def _scaled(self, stack):
        return self.size * stack.double() / stack.double().norm(dim=-1, keepdim=True)


class TestASetOfAnotherPackage:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def constrained(self, model, **options):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return optimizer, constrain_(
            model, optimizer, where=nn.Linear, to="rows of a test", **options
        )

    def test_a_stack_is_projected_at_once(self):
        PROJECTED.clear()
        _, handle = self.constrained(self.model(), gain=2.0)
        assert PROJECTED == [(3, 6, 6)]
        assert {row.size for row in handle.report.rows} == {2.0}
        assert all(row.error_before > 0.1 and row.error_after < 1e-6 for row in handle.report.rows)

    def test_within_its_tolerance_a_weight_is_not_moved(self):
        model = self.model()
        lengths = torch.tensor([1.0 + 9e-4, 1.0 + 9e-4, 1.0 + 2e-3])
        with torch.no_grad():
            for layer, length in zip(model, lengths, strict=True):
                layer.weight.copy_(nn.functional.normalize(layer.weight, dim=-1) * length)
        _, handle = self.constrained(model)
        moved = [row.moved_frobenius > 0.0 for row in handle.report.rows]
        assert moved == [False, False, True]

    def test_steps_end_in_the_set(self):
        model = self.model()
        optimizer, handle = self.constrained(model, gain=0.5)
        for _ in range(3):
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            for layer in model:
                torch.testing.assert_close(layer.weight.norm(dim=-1), torch.full((6,), 0.5))
        assert handle.error(norm="spectral").worst == 7.0

    @pytest.mark.parametrize(
        ("change", "options", "message"),
        [
            ("", {"bound": 2.0}, "to='rows of a test' has no bound"),
            ("", {"embeddings": "fit"}, "to='rows of a test' has no embeddings"),
            ("narrow", {}, "a row of one entry has no direction"),
            ("zero", {}, "0.weight: all zero"),
        ],
    )
    def test_it_refuses_by_its_own_words(self, change, options, message):
        model = self.model()
        if change == "narrow":
            model.append(nn.Linear(1, 6))
        if change == "zero":
            nn.init.zeros_(model[0].weight)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises((ConfigError, wp.ShapeError), match=message):
            self.constrained(model, **options)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
