"""Build the wheels and the sdist, install them in empty environments, and try them.

    python tools/installs.py                                     # core, each extra, studies, sdist
    python3.12 tools/installs.py --only core all

Torch and its requirements are installed once per Python and shared, so each extra meets a machine
with torch and nothing else. One line an environment says what was installed and what ran.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"][0]
START_LIMIT = 0.2
PARTS = {"lab": ("lab",), "all": ("lab",), "studies": ("lab", "studies")}

CORE = """
import importlib.util, torch, wellposed as wp
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
assert len(wp.find_roles(encoder).attention) == 1
assert wp.certify(wp.nn.L2SelfAttention(8, 2), seq_len=4).total > 0
wp.constrain_(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1), where=("query",)).remove()
assert wp.OrthogonalityPenalty(encoder, feedforward=1.0)().requires_grad
wp.measure(encoder, torch.randn(2, 3, 8)).table()
wp.t_fixup_
if importlib.util.find_spec("transformers") is None:
    try:
        raise SystemExit(f"without transformers: {wp.models.build_model}")
    except wp.ConfigError as error:
        assert "wellposed[hf]" in str(error), error
"""
NO_LAB = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "wellposed"], capture_output=True, text=True)
assert done.returncode == done.stderr.count("\\n") == 1 and "pip install ./lab" in done.stderr, done
"""
HF = """
import torch, wellposed as wp
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
model = wp.models.build_model("wellposed", "causal_lm", vocab_size=11, **sizes)
model.save_pretrained("model")
assert torch.equal(wp.models.load_saved_model("model").lm_head.weight, model.lm_head.weight)
from transformers import BertConfig, BertModel
bert = BertModel(BertConfig(vocab_size=9, intermediate_size=8, **sizes))
assert len(wp.find_roles(bert).attention) == 1
"""
LIGHTNING = "import lightning.pytorch, wellposed"
CHECKS = {"core": [NO_LAB], "sdist": [NO_LAB], "hf": [HF, NO_LAB], "lightning": [LIGHTNING]}
CHECKS |= {"lab": [HF], "all": [HF, LIGHTNING], "studies": []}
for change in runpy.run_path(str(ROOT / "tools" / "first_page.py"))["changes"]():
    CHECKS[change.extra].append(change.script())
    CHECKS["all"].append(change.script())
"""Of each environment, what runs after `CORE`: the changes of README too, on the extra they name."""
TRAIN = "train text_classification --data builtin --steps 2 --quiet --out run --model.hidden-size 8"
LAB = ("doctor", f"{TRAIN} --model.num-attention-heads 2")
FIGURE = "reproduce kim2021/figure-2 --scale toy --out made"
MARKED = "train marked --num-train 50 --steps 2 --quiet --out marked"
COMMANDS = {"lab": LAB, "all": LAB, "studies": ("doctor", FIGURE, MARKED)}
START = """
import sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import wellposed
print(time.perf_counter() - start)
foreign = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"wellposed"}
assert not foreign, foreign
"""


def ran(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command in a folder, away from our sources, and return what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        last = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{' '.join(map(str, command))[:200]}\n    {last}")
    return done.stdout


def environment(folder: Path, lends: Path | None = None) -> Path:
    """Make an empty environment and return its interpreter; packages of `lends` can be imported in
    it too."""
    ran([sys.executable, "-m", "venv", folder], folder.parent)
    if lends is not None:
        [packages] = folder.glob("lib/python*/site-packages")
        [lent] = lends.glob("lib/python*/site-packages")
        (packages / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    return folder / "bin" / "python"


def install(interpreter: Path, folder: Path, *what: str) -> None:
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint"]
    ran([interpreter, *pip, ROOT / "constraints.txt", *what], folder)


def built(folder: Path) -> dict[str, Path]:
    """Build the sdist, the wheel that comes from it, and the wheels of lab and studies."""
    builder = environment(folder / "builder")
    install(builder, folder, "build")
    made = {}
    for name, source in {"wheel": ROOT, "lab": ROOT / "lab", "studies": ROOT / "studies"}.items():
        ran([builder, "-m", "build", "--outdir", folder / name, source], folder)
        [made[name]] = (folder / name).glob("*.whl")
    [made["sdist"]] = (folder / "wheel").glob("*.tar.gz")
    return made


def tried(name: str, made: Mapping[str, Path], folder: Path) -> str:
    """Install one thing in an empty environment, use it, and return a line about it."""
    home = folder / name
    interpreter = environment(home, folder / "torch")
    extra = "" if name in ("core", "sdist", "studies") else f"[{name}]"
    ours = made["sdist" if name == "sdist" else "wheel"]
    # An index would also install the lab of these extras, and the studies with it.
    more = [str(made[part]) for part in PARTS.get(name, ())]
    install(interpreter, folder, f"wellposed{extra} @ {ours.as_uri()}", *more)
    ran([interpreter, "-m", "pip", "check"], home)
    [package] = home.glob("lib/python*/site-packages/wellposed")
    ran([interpreter, "-m", "compileall", "-q", package], home)
    checks = [[interpreter, "-W", "ignore", "-c", check] for check in (CORE, *CHECKS[name])]
    checks += [[home / "bin" / "wellposed", *words.split()] for words in COMMANDS.get(name, ())]
    for check in checks:
        ran(check, home)
    added = statistics.median(float(ran([interpreter, "-c", START], home)) for _ in range(5))
    if added > START_LIMIT:
        raise RuntimeError(f"`import wellposed` adds {added:.2f} s to torch, not {START_LIMIT} s")
    count = len(list(home.glob("lib/python*/site-packages/*.dist-info")))
    return f"import adds {added:.3f} s, {count} packages beside torch's, {len(checks)} checks ran"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every environment, write a line for each, and return 0 if all worked, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    chosen = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = built(folder)
        sys.stdout.write(f"built {', '.join(path.name for path in made.values())}\n")
        target = folder / "tried"
        target.mkdir()
        install(environment(target / "torch"), target, TORCH)
        for extra in chosen.only:
            try:
                line = tried(extra, made, target)
            except RuntimeError as error:
                failed, line = True, f"FAILED: {error}"
            sys.stdout.write(f"{extra:<10} {line}\n")
            sys.stdout.flush()
            shutil.rmtree(target / extra, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
