"""A plain run traces no roles; names give the roles that a pass confirms."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.words import TINY, python
from tests.support.words import words as typed

import wellposed_lab.training.folder
from wellposed.models import build_model
from wellposed.roles import find_roles

COUNT = """
import inspect, json, sys
from pathlib import Path
import wellposed

home, entered = Path(wellposed.__file__).parent, set()


def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
        entered.add(code.co_filename)


sys.setprofile(note)
from wellposed_lab.cli.main import main

assert main(sys.argv[1:]) == 0
sys.setprofile(None)
paths = map(Path, entered)
print(json.dumps(sorted(str(p.relative_to(home)) for p in paths if p.is_relative_to(home))))
"""


@pytest.mark.slow
def test_a_csv_is_trained_without_tracing_roles(tmp_path):
    rows = (f"{word} film,{k % 2}\n" for k, word in enumerate(["good", "bad", "dull", "fine"] * 30))
    (tmp_path / "x.csv").write_text("text,label\n" + "".join(rows))
    words = typed("train text_classification --data", [tmp_path / "x.csv"], "--steps 4", TINY)
    done = python("-c", [COUNT, *words, "--quiet", "--out", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    entered = json.loads(done.stdout.splitlines()[-1])
    assert not {"roles/_trace.py", "roles/_check.py"} & set(entered)
    assert (tmp_path / "run" / "measure-final.json").is_file()


def test_a_run_folder_knows_nothing_of_the_loop():
    (folder,) = wellposed_lab.training.folder.__path__
    files = list(Path(folder).glob("*.py"))
    assert len(files) > 5
    assert not [path.name for path in files if "training.loop" in path.read_text()]


SIZES = {"hidden_size": 16, "vocab_size": 9, "num_hidden_layers": 2}
OURS = [
    *(("wellposed", "causal_lm", {"attention": kind}) for kind in ("dot_product", "l2", "l2_tied")),
    *(("wellposed", "sequence_classification", {"norm": kind}) for kind in ("pre", "post", "none")),
    ("wellposed", "seq2seq_lm", {"attention": "cosine"}),
    ("wellposed", "sequence_pair_classification", {"attention": "ball", "norm": "none"}),
    ("transject", "causal_lm", {}),
]


@pytest.mark.parametrize(("architecture", "kind", "options"), OURS)
def test_names_of_our_models_give_the_roles_of_a_pass(architecture, kind, options):
    heads = {"num_attention_heads": 2} if architecture == "wellposed" else {}
    model = build_model(architecture, kind, **SIZES, **heads, **options)
    before = torch.get_rng_state()
    named = find_roles(model, run=False)
    passed = find_roles(model)
    assert torch.equal(torch.get_rng_state(), before)
    both = [
        [(w.role, w.stack, w.layer, w.path, w.view.key) for w in roles.weights()]
        for roles in (named, passed)
    ]
    assert both[0] == both[1] != []
    assert named.unnamed == passed.unnamed
    assert "nothing was run: run=False" in " ".join(named.notes)
