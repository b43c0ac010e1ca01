"""Every recipe of CONTRIBUTING.md, in a copy of the tree and outside it: what it adds is found, and works."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.block import run_block

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## How to add")[2]
PARTS = re.split(r"^\*\*(.+?)\*\*", SECTION, flags=re.MULTILINE)[1:]
BLOCK = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RECIPES = {name: BLOCK.findall(text) for name, text in zip(PARTS[::2], PARTS[1::2], strict=True)}
ROOTS = ("src", "lab", "studies", "tests/support")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch"])

LAYER = """
import torch, wellposed as wp
from torch import nn
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
"""
PROGRAMS = {
    "A model family": """
attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("to_queries", "to_keys", "to_values", "out")})
attention.num_attention_heads = 2
mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
block = nn.ModuleDict({"attention": attention, "mlp": mlp})
found = wp.find_roles(nn.ModuleDict({"layers": nn.ModuleList([block])}))
roles = {"query", "key", "value", "output", "feedforward_in", "feedforward_out"}
assert {weight.role for weight in found.weights()} == roles, str(found)
""",
    "A role": """
layer.router = nn.Linear(8, 4)
layer.mixer = nn.Linear(8, 4)
found = wp.find_roles(layer)
assert [w.view.parameter_name for w in found.weights() if w.role == "router"] == ["router.weight"]
assert found.unnamed == ("mixer.weight (4, 8)",), found.unnamed
assert "router" in wp.roles.ROLE_NAMES
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
mixer = layer.mixer.weight.detach().clone()
handle = wp.constrain_(layer, optimizer, where="router", to="spectral")
for _ in range(3):
    layer.router(layer(torch.randn(2, 3, 8))).square().mean().backward()
    optimizer.step()
assert torch.linalg.matrix_norm(layer.router.weight, 2) < 1 + 1e-5
assert torch.equal(layer.mixer.weight, mixer)
assert {row["role"] for row in wp.measure(layer).rows} >= {"router", "query"}
for name, message in {"query": "has a meaning already", "router": "is registered twice"}.items():
    try:
        wp.roles.ROLES.register(name)(lambda located: None)
    except wp.ConfigError as error:
        assert message in str(error), error
    else:
        raise SystemExit(f"{name} is registered twice")
wp.roles.ROLES.register("doubled")(
    lambda located: wp.roles.view_of(located.path, located.module) if located.path == "linear1" else None
)
try:
    wp.find_roles(layer)
except wp.ConfigError as error:
    assert "it plays 'feedforward_in'" in str(error), error
else:
    raise SystemExit("a weight has two roles")
""",
    "A penalty": """
penalty = wp.OrthogonalityPenalty(layer, query=0.5, form="nuclear")
left, values, right = torch.linalg.svd(layer.self_attn.in_proj_weight[:8].detach())
value = penalty()
value.backward()
torch.testing.assert_close(value, 0.5 * values.sum())
torch.testing.assert_close(layer.self_attn.in_proj_weight.grad[:8], 0.5 * left @ right)
try:
    wp.OrthogonalityPenalty(layer, query=0.5, form="nuklear")
except wp.ConfigError as error:
    assert "nearest: nuclear" in str(error), error
try:
    wp.penalize.FORMS.register("gram")(None)
except wp.ConfigError as error:
    assert "has a meaning already" in str(error), error
else:
    raise SystemExit("gram is registered twice")
""",
    "A role of a penalty": """
penalty = wp.OrthogonalityPenalty(layer, query=1.0, output=0.5, form={"output": "gram_squared"})
penalty()
weight = layer.self_attn.out_proj.weight.detach()
off = weight.T @ weight - torch.eye(8)
assert set(penalty.terms()) == {"query.encoder.0", "output.encoder.0"}
assert abs(penalty.terms()["output.encoder.0"] - 0.5 * off.square().sum().item()) < 1e-5
try:
    wp.OrthogonalityPenalty(layer, outputt=0.5)
except wp.ConfigError as error:
    assert "unknown keyword of OrthogonalityPenalty 'outputt'; nearest: output" in str(error), error
""",
    "A constraint set": """
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
handle = wp.constrain_(layer, optimizer, where=("query", "feedforward_in"), to="centered")
before = layer.linear1.weight.detach().clone()
for _ in range(3):
    layer(torch.randn(2, 3, 8)).square().mean().backward()
    optimizer.step()
assert handle.error().worst < 1e-6 and (layer.linear1.weight - before).abs().max() > 0.1
assert layer.linear1.weight.mean(0).abs().max() < 1e-6 < layer.linear2.weight.mean(0).abs().max()
""",
    "An initialisation": """
from wellposed.models import WellposedConfig, WellposedModel
sizes = {"vocab_size": 9, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
drawn = [WellposedModel(WellposedConfig(init=name, **sizes)) for name in ("small", "xavier")]
spread = [model.layers[0].attention.q_proj.weight.std().item() for model in drawn]
assert abs(spread[0] - 0.02) < 0.002 < spread[1] - 0.1, spread
""",
    "A family for T-Fixup": """
import sys
if "electra" not in globals():
    # The copy's own tests, not those that started this process.
    sys.path.insert(0, ".")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    from tests.support.electra import electra
    from tests.support.initialized import ALL, ENCODER_ONLY
    assert ALL["electra"] is ENCODER_ONLY["electra"] is electra
model = electra(3)
report = wp.t_fixup_(model)
assert abs(report.factors["encoder"] - 18**-0.25) < 1e-12, report.factors
assert len(report.norms_removed) == 7
drawn = {row.role: row.factor for row in report.rows if row.drawn}
assert drawn["query"] == 1 and drawn["value"] == drawn["feedforward_in"] == report.factors["encoder"]
""",
    "A rule of certificates": """
total = wp.certify(nn.Sequential(layer.linear1, nn.CELU(0.5)), seq_len=4).total
assert total == wp.certify(layer.linear1, seq_len=4).total < float("inf")
""",
    "An attention": """
from wellposed.models import WellposedConfig, WellposedForCausalLM
sizes = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
model = WellposedForCausalLM(WellposedConfig(attention="average", **sizes)).eval()
made = [model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, use_cache=use) for use in (False, True)]
assert made[0].shape == (1, 6) and torch.equal(*made)
x, padded = torch.tensor([[[2.0], [4.0], [9.0]]]), torch.tensor([[False, False, True]])
seen = model.model.layers[0].attention(x, key_padding_mask=padded, is_causal=True)
assert seen.flatten().tolist() == [2.0, 3.0, 9.0]
""",
    "A variant": """
from wellposed_lab.compare.variants import apply_variant, summary
from wellposed_lab.training.config import RunConfig
assert apply_variant("narrow", RunConfig("text_classification")).model.hidden_size == 64
assert summary("narrow") == "post_ln at half the width."
""",
    "A task": """
from pathlib import Path
from wellposed_lab.tasks.task import build_task
text = "label\\ttext\\n" + "good\\ta film\\nbad\\ta movie\\n" * 30
Path("train.tsv").write_text(text)
assert build_task("films", {"data": "train.tsv"}).labels == ("bad", "good")
""",
    "A study": """
from pathlib import Path
from wellposed_studies.reproduce import reproduce
done = reproduce("mine/figure-1", scale="mini", out=Path("made"))
assert done.files[0].read_text().split() == ["x,y", "1,2"]
""",
}
WITHOUT_TORCH = ("A variant", "A task")
SLOW = ("An initialisation", "An attention", "A study")
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROGRAMS]


def add(blocks, folder):
    """Do what the text says: make each file, or add the lines to an existing one."""
    for name, text in blocks:
        file = folder / name
        first = text.partition("\n")[0] + "\n"
        old = file.read_text("utf-8") if file.is_file() else ""
        before, separator, after = old.partition(first)
        new = before + text + after if separator else f"{old}\n{text}" if old else text
        file.write_text(new, "utf-8")


@pytest.fixture
def tree(tmp_path):
    """A copy of the tree."""
    for name in ROOTS:
        ignored = shutil.ignore_patterns("__pycache__", "tests" if name == "lab" else "*.pyc")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def paths(folder):
    """Return what makes a copy of the tree the one that is imported, its entry points installed."""
    for part in ("lab", "studies"):
        project = tomllib.loads((folder / part / "pyproject.toml").read_text("utf-8"))["project"]
        installed = folder / "installed" / f"wellposed_{part}-{project['version']}.dist-info"
        installed.mkdir(parents=True)
        metadata = f"Name: wellposed-{part}\nVersion: {project['version']}\n"
        (installed / "METADATA").write_text(metadata)
        groups = project["entry-points"].items()
        listed = (
            "\n".join([f"[{group}]", *map(" = ".join, names.items())]) for group, names in groups
        )
        (installed / "entry_points.txt").write_text("\n".join(listed))
    return [str(folder / name) for name in ("installed", "src", "lab", "studies")]


def run(code, folder):
    printed = folder / "printed.txt"
    process = PROCESSES.Process(target=run_block, args=(code, folder, printed))
    process.start()
    process.join()
    assert process.exitcode == 0, printed.read_text("utf-8")[-2000:]


def test_every_recipe_has_a_program_and_is_short():
    assert [name for name, blocks in RECIPES.items() if blocks] == list(PROGRAMS)
    for name, blocks in RECIPES.items():
        files = [text for path, text in blocks if not (ROOT / path).exists()]
        lines = [text for path, text in blocks if (ROOT / path).exists()]
        assert len(files) == bool(blocks), name
        assert all(line.count("\n") <= 2 for line in lines), name


@pytest.mark.parametrize("name", EVERY)
def test_the_recipe_works_in_the_tree(name, tree):
    add(RECIPES[name], tree)
    start = "" if name in WITHOUT_TORCH else LAYER
    here = f"import sys\nsys.path[:0] = {paths(tree)}\n"
    check = f"\nimport wellposed\nassert wellposed.__file__.startswith({str(tree)!r})\n"
    run(here + start + PROGRAMS[name] + check, tree)


@pytest.mark.parametrize("name", EVERY)
def test_the_recipe_works_outside(name, tmp_path):
    """The names come from the packages."""
    [code] = [text for path, text in RECIPES[name] if not (ROOT / path).exists()]
    run(re.sub(r"(\w)\._\w+ import", r"\1 import", code) + LAYER + PROGRAMS[name], tmp_path)


HELD = (
    "tests/certification/test_as_called.py::test_every_rule_is_walked",
    "tests/test_model_options.py",
    "lab/tests/test_claims.py",
    "lab/tests/compare/test_variants.py",
)
"""Tests that look at everything that is registered."""
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_recipes_together_pass_the_checks_in_the_tree_as_it_is(tree):
    """Those of `make check`; pyright reads the files that the recipes touch, pytest what tries them."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "mkdocs.yml"):
        shutil.copy(ROOT / name, tree / name)
    folders = "tests lab/tests studies/tests tools docs findings benchmarks examples"
    for name in folders.split():
        shutil.copytree(ROOT / name, tree / name, dirs_exist_ok=True)
    for blocks in RECIPES.values():
        add(blocks, tree)
    touched = {path for blocks in RECIPES.values() for path, _ in blocks if path.endswith(".py")}
    sources = sorted(path for path in touched if not path.startswith("tests/"))

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths(tree), str(tree)])}
    options = {"cwd": tree, "env": environment, "text": True, "capture_output": True}
    for words in (
        ("-m", "ruff", "check", "--fix", "--select", "I", "--quiet", *touched),
        ("-m", "ruff", "check", *touched),
        ("-m", "ruff", "format", "--check", *touched),
        ("-m", "pyright", "--pythonpath", sys.executable, *sources),
        ("-c", LINT),
        ("tools/house.py",),
        ("tools/prose.py",),
        (*PYTEST, *HELD),
        (*PYTEST, "tests/initialize/test_t_fixup.py", "-k", "electra"),
    ):
        done = subprocess.run([sys.executable, *words], check=False, **options)
        assert done.returncode == 0, (words, done.stdout + done.stderr)


def test_two_commands_start_a_contribution(tmp_path):
    """The second makes the environment, installs everything into it, and runs the tests."""
    start = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("```\n")[2]
    commands = start.partition("```")[0].strip().splitlines()
    assert commands[0].startswith("git clone ")
    assert len(commands) == 2
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for part in ("lab", "studies"):
        (tmp_path / part).mkdir()
        shutil.copy(ROOT / part / "pyproject.toml", tmp_path / part)
    words = [*commands[1].split(), "--dry-run"]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = ["-m venv .venv", "pip", "--editable '.[all,test,lint,docs]'", "-m pytest"]
    assert [done.stdout.find(step) for step in steps] == sorted(map(done.stdout.find, steps))
    assert all(step in done.stdout for step in steps)
