"""An independent reading of roles: change one row of a weight, run the model, and see what moved."""

import pytest
import torch
from tests.support.many_families import FAMILIES, batch_of
from tests.support.zoo import ZOO
from torch.nn import functional as F

from wellposed.roles import find_roles

PARTS = {"query": 0, "key": 1, "value": 2}


class Watched:
    """What attention received and what feed-forward ends read, in a pass with all changes of rows
    allowed: nothing here knows how roles are found."""

    def __init__(self, monkeypatch, model, run):
        self.model = model.eval()
        self.run = run
        self.calls = []
        self.reads = {}
        attend = F.scaled_dot_product_attention

        def watched(q, k, v, *args, **options):
            self.calls.append([part.detach().clone() for part in (q, k, v)])
            return attend(q, k, v, *args, **options)

        monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
        for module in model.modules():
            module.register_forward_pre_hook(self.read)

    def read(self, module, inputs):
        if inputs and isinstance(inputs[0], torch.Tensor):
            self.reads.setdefault(module, inputs[0].detach().clone())

    def pass_(self, view=None, row=0):
        self.calls = []
        self.reads = {}
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.manual_seed(0)
        saved = None if view is None else view.parameter.detach().clone()
        with torch.no_grad():
            if view is not None:
                weight = view.parameter if view.expert is None else view.parameter[view.expert]
                row_ = (weight.T if view.transposed else weight)[row]
                row_ += torch.randn(len(row_), generator=torch.Generator().manual_seed(row))
            self.run(self.model)
            if saved is not None:
                view.parameter.copy_(saved)
        torch.backends.mha.set_fastpath_enabled(fast)
        return self.calls, self.reads


def rows_of(spans):
    return [row for start, stop in spans for row in range(start, stop)]


def first_moved(before, after):
    """Return the number of the first changed call, and its changed heads by part."""
    for number, (one, two) in enumerate(zip(before, after, strict=True)):
        far = [(x - y).abs() for x, y in zip(one, two, strict=True)]
        heads = [gap.amax((0, 2, 3)) if gap.ndim == 4 else gap.amax((1, 2)) for gap in far]
        moved = {part: set(h.gt(1e-6).nonzero().flatten().tolist()) for part, h in enumerate(heads)}
        if any(moved.values()):
            return number, {part: indices for part, indices in moved.items() if indices}
    return None, {}


def check(model, run, monkeypatch):
    roles = find_roles(model) if not hasattr(run, "batch") else find_roles(model, run.batch)
    watched = Watched(monkeypatch, model, run)
    before, reads = watched.pass_()
    assert len(before) >= len(roles.attention) > 0
    for part in roles.attention:
        called = set()
        for role, argument in PARTS.items():
            view = getattr(part, role)
            for head, spans in enumerate(part.heads[role]):
                number, moved = first_moved(before, watched.pass_(view, rows_of(spans)[0])[0])
                called.add(number)
                count = before[number][argument].shape[
                    1 if before[number][argument].ndim == 4 else 0
                ]
                share = count // len(part.heads[role])
                assert moved == {argument: set(range(head * share, (head + 1) * share))}, view.label
        assert len(called) == 1, part.path
    for network in roles.feedforward:
        if network.down.expert is not None or network.down.owner not in reads:
            continue
        for view in filter(None, (network.up, network.gate)):
            rows = rows_of(view.spans or ((0, view.shape[0]),))
            unit = len(rows) // 2
            after = watched.pass_(view, rows[unit])[1][network.down.owner]
            far = (after - reads[network.down.owner]).abs().flatten(0, -2).amax(0)
            assert set(far.gt(1e-6).nonzero().flatten().tolist()) <= {unit}, view.label


@pytest.mark.parametrize("name", ZOO)
def test_moving_a_row_moves_its_head_and_its_unit_alone(name, monkeypatch):
    if name.startswith("ours"):
        pytest.skip("its attention does not go through torch's function")
    check(ZOO[name].build(), ZOO[name].run, monkeypatch)


SEEN = [
    "modernbert", "qwen3", "smollm3", "gpt-neox", "opt", "phi", "cohere",
    "falcon", "falcon-grouped", "stablelm", "starcoder2", "gpt-bigcode", "clip-vision", "dinov2",
    "whisper", "mbart", "nemotron", "glm4", "persimmon", "mixtral", "esm",
]  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_moving_a_row_of_a_family_moves_its_head_and_its_unit_alone(name, monkeypatch):
    model = FAMILIES[name]()
    batch = batch_of(name, model)
    check(model, lambda model: model(**batch), monkeypatch)
