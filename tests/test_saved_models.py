"""Models of a script under every verb, on every way out of the process: hooks leave no trace in a file, a
copy or an export, and a process without wellposed reads what the page "Load, share and upload" says."""

import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from tests.support.public_models import STYLES, TOKENS
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import wellposed as wp
from wellposed.models import WindowsForSequenceClassification

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "share.md"
OURS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(torch.jit.trace|torch.jit.save|TracerWarning|pytree|LeafSpec|deprecated)"
)


def style(name="meta llama"):
    return STYLES[name].build()


def train(model, optimizer, penalty=None):
    loss = model(TOKENS).square().mean()
    loss = loss if penalty is None else loss + penalty()
    loss.backward()
    optimizer.step()


def used(attach, *, is_penalty=False):
    """Return a model after two steps under a verb, its optimizer, and what keeps its hooks."""
    model = style()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    owner = attach(model, optimizer)
    for _ in range(2):
        train(model, optimizer, owner if is_penalty else None)
    return model, optimizer, owner


def all_at_once(model, optimizer):
    # The penalty first: it is called before the step that the others watch.
    penalty = wp.OrthogonalityPenalty(
        model, affinity=1e-2, attention=1e-2, attention_mode="separate"
    )
    handles = [wp.constrain_(model, optimizer, role, to=to, batch=TOKENS) for role, to in (
        ("value", "orthogonal"), ("feedforward_in", "spectral"), ("query", "logits"))]  # fmt: skip
    monitor = wp.Monitor(model, optimizer, every=1)
    return penalty, handles, monitor


VERBS = {
    "constrain_, orthogonal": lambda: used(lambda m, o: wp.constrain_(m, o, "query")),
    "constrain_, spectral": lambda: used(lambda m, o: wp.constrain_(m, o, to="spectral")),
    "constrain_, columns": lambda: used(lambda m, o: wp.constrain_(m, o, "value", to="columns")),
    "constrain_, logits": lambda: used(lambda m, o: wp.constrain_(m, o, to="logits", batch=TOKENS)),
    "penalty": lambda: used(lambda m, o: wp.OrthogonalityPenalty(m, query=1e-2), is_penalty=True),
    "affinity penalty": lambda: used(lambda m, o: wp.OrthogonalityPenalty(m, affinity=1e-2), is_penalty=True),
    "Monitor": lambda: used(lambda m, o: wp.Monitor(m, o, every=1)),
    "all of these": lambda: used(all_at_once),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    cache = {}

    def build(verb):
        if verb not in cache:
            cache[verb] = VERBS[verb]()
        return cache[verb]

    return build


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


def written(value, save=torch.save):
    buffer = io.BytesIO()
    save(value, buffer)
    buffer.seek(0)
    return buffer


def hooks_of(model):
    return [
        hook for part in model.modules() for table in OURS for hook in vars(part)[table].items()
    ]


def plain_twin(model):
    twin = style()
    twin.load_state_dict(model.state_dict())
    return twin


def by_torch_save(model):
    buffer = written(model)
    named = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    assert not [name for name in named if "wellposed" in name]
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_listed_globals(model):
    """As pytorch/examples does: `weights_only=True`, and the classes of the script are allowed."""
    buffer = written(model)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    parts = {
        f"{type(m).__module__}.{type(m).__qualname__}": type(m) for m in plain_twin(model).modules()
    }
    buffer.seek(0)
    with torch.serialization.safe_globals([*parts.values(), set]):
        loaded = torch.load(buffer, weights_only=True)
    assert set(names) <= {*parts, "builtins.set"}
    return loaded


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


COPIES = {
    "torch.save(model)": by_torch_save,
    "torch.save(model), weights_only": by_listed_globals,
    "pickle": by_pickle,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("route", COPIES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_copy_has_no_hook_and_the_original_keeps_its_own(verb, route, trained):
    model, _, _ = trained(verb)
    before = hooks_of(model)
    other = COPIES[route](model)
    assert not hooks_of(other)
    assert hooks_of(model) == before
    torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=0)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_hooks_of_others_are_copied(trained):
    model, _, _ = trained("Monitor")
    heard = model.layers[0].attn.wq.register_forward_hook(print)
    again = model.layers[0].register_forward_pre_hook(print, with_kwargs=True)
    other = by_pickle(model)
    heard.remove()
    again.remove()
    assert [hook for part in other.modules() for hook in part._forward_hooks.values()] == [print]
    (number,) = other.layers[0]._forward_pre_hooks
    assert [*other.layers[0]._forward_pre_hooks_with_kwargs] == [number]


class Own(torch.nn.Linear):
    """A layer that pickles itself as it likes."""

    def __getstate__(self):
        return {**self.__dict__, "seen": "by its own state"}


def test_a_class_with_a_state_of_its_own_keeps_it():
    model = style()
    model.lm_head = Own(16, 30)
    monitor = wp.Monitor(model)
    for other in (by_pickle(model), copy.deepcopy(model)):
        assert other.lm_head.seen == "by its own state"
        assert not hooks_of(other)
    monitor.remove()
    assert not hooks_of(model)


@pytest.mark.parametrize("verb", VERBS)
def test_state_dicts_are_read_with_weights_only(verb, trained):
    model, optimizer, _ = trained(verb)
    for owner in (model, optimizer):
        state = torch.load(written(owner.state_dict()), weights_only=True)
        owner.load_state_dict(state)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", VERBS)
def test_torch_export_sees_the_model_without_its_hooks(verb, strict, trained):
    model, _, _ = trained(verb)
    before = hooks_of(model)
    program = torch.export.export(model, (TOKENS,), strict=strict)
    plain = torch.export.export(plain_twin(model), (TOKENS,), strict=strict)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls == [str(node.target) for node in plain.graph.nodes if node.op == "call_function"]
    torch.testing.assert_close(program.module()(TOKENS), logits(model), rtol=0, atol=0)
    assert hooks_of(model) == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_traced_model_is_that_without_hooks(verb, trained):
    model, _, _ = trained(verb)
    program = torch.jit.trace(model, TOKENS)
    torch.testing.assert_close(program(TOKENS), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("verb", [*VERBS, "t_fixup_"])
def test_onnx_computes_what_the_model_computes(verb, trained, tmp_path):
    onnx = pytest.importorskip("onnx", reason="torch.onnx.export needs the package onnx")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs the package onnxscript")
    model = without_norms() if verb == "t_fixup_" else trained(verb)[0].eval()
    tokens = IDS if verb == "t_fixup_" else TOKENS
    with torch.no_grad():
        result = model(tokens)
    expected = getattr(result, "logits", result)
    program = torch.onnx.export(model, (tokens,), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx")
    runtime = pytest.importorskip(
        "onnxruntime", reason="running the file needs the package onnxruntime"
    )
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (result,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    torch.testing.assert_close(torch.tensor(result), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("verb", ["Monitor", "affinity penalty", "constrain_, logits"])
def test_the_verb_works_on_after_every_route(verb):
    model, optimizer, owner = VERBS[verb]()
    for route in COPIES.values():
        route(model)
    torch.export.export(model, (TOKENS,))
    train(model, optimizer, owner if verb == "affinity penalty" else None)
    if verb == "Monitor":
        assert "vital/encoder.0.head0/logit_max" in owner.step()
    elif verb == "constrain_, logits":
        assert all(weight.largest is not None or weight.late for weight in owner.weights)
    else:
        assert owner.terms()["affinity.encoder.0"] > 0


LOADS = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "wellposed":
            raise ModuleNotFoundError(f"No module named {name!r}", name="wellposed")
sys.meta_path.insert(0, Blocked())
import torch
from tests.support.public_models import STYLES, TOKENS
folder, numbers = sys.argv[1], {}
for number in range(int(sys.argv[2])):
    expected = torch.load(f"{folder}/{number}.logits", weights_only=True)
    model = torch.load(f"{folder}/{number}.model", weights_only=False)
    other = STYLES["meta llama"].build()
    other.load_state_dict(torch.load(f"{folder}/{number}.state", weights_only=True))
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    optimizer.load_state_dict(torch.load(f"{folder}/{number}.optimizer", weights_only=True))
    program = torch.export.load(f"{folder}/{number}.pt2").module()
    with torch.no_grad():
        results = [part(TOKENS) for part in (model, other, program)]
    model(TOKENS).square().mean().backward()
    numbers[number] = [float((result - expected).abs().max()) for result in results]
assert not any(name.partition(".")[0] == "wellposed" for name in sys.modules)
print(json.dumps(numbers))
"""


@pytest.mark.slow
def test_a_process_without_wellposed_loads_models_states_and_programs(trained, tmp_path):
    for number, verb in enumerate(VERBS):
        model, optimizer, _ = trained(verb)
        torch.save(model, tmp_path / f"{number}.model")
        torch.save(model.state_dict(), tmp_path / f"{number}.state")
        torch.save(optimizer.state_dict(), tmp_path / f"{number}.optimizer")
        torch.export.save(torch.export.export(model, (TOKENS,)), tmp_path / f"{number}.pt2")
        torch.save(logits(model), tmp_path / f"{number}.logits")
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path), str(len(VERBS))],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    assert len(differences) == len(VERBS)
    assert max(map(max, differences.values())) == 0.0


def windowed():
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16, "max_position_embeddings": 8, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    inner = hf.BertForSequenceClassification(hf.BertConfig(**sizes)).eval()
    windows = {"window_words": 1, "word_tokens": 2, "frame": [[1], [2]], "frozen": False}
    return WindowsForSequenceClassification.around(inner, 0, **windows).eval()


def without_norms():
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "use_cache": False}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).eval()
    wp.t_fixup_(model)
    return model


CHANGED = {"read_in_windows": windowed, "t_fixup_": without_norms}
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 3, 0]])


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_with_classes_of_ours_is_copied_and_saved_and_its_file_names_them(name):
    model = CHANGED[name]()
    expected = model(input_ids=IDS).logits
    buffer = written(model)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    assert any(name.startswith("wellposed.") for name in names)
    buffer.seek(0)
    state = torch.load(written(model.state_dict()), weights_only=True)
    for other in (torch.load(buffer, weights_only=False), copy.deepcopy(model)):
        torch.testing.assert_close(other(input_ids=IDS).logits, expected)
        other.load_state_dict(state)


@pytest.mark.slow
def test_a_model_without_norms_is_exported_and_one_in_windows_is_not():
    model = without_norms()
    program = torch.export.export(model, (), {"input_ids": IDS}, strict=False)
    torch.testing.assert_close(program.module()(input_ids=IDS).logits, model(input_ids=IDS).logits)
    # Each distinct word is read once, so the number of words read depends on their values.
    with pytest.raises(GuardOnDataDependentSymNode, match="votes"):
        torch.export.export(windowed(), (), {"input_ids": IDS}, strict=False)


def test_the_page_has_a_row_for_each_verb_and_a_column_for_each_route():
    section = PAGE.read_text("utf-8").partition("{ #hooks-and-files }")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    assert all(len(row) == len(rows[0]) for row in rows)
    named = {re.sub("`", "", row[0]).strip() for row in rows[1:]}
    assert named >= {*VERBS, *CHANGED} - {"all of these"}
