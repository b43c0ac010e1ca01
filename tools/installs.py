"""Build the wheels and the sdist, install them in empty environments, and try them.

    python tools/installs.py                                     # core, each extra, studies, sdist
    python3.12 tools/installs.py --only core all

Torch and its requirements are installed once per Python and shared, so each extra meets a machine
with torch and nothing else. One line an environment says what was installed and what ran.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TORCH = SETTINGS["project"]["dependencies"][0]
START_LIMIT = 0.2
PARTS = {"lab": ("lab",), "all": ("lab",), "studies": ("lab", "studies")}

CORE = """
import importlib.util, torch, wellposed as wp
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
assert len(wp.find_roles(encoder).attention) == 1
assert wp.certify(wp.nn.L2SelfAttention(8, 2), seq_len=4).total > 0
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
wp.constrain_(encoder, optimizer, roles=("query",)).remove()
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
assert done.returncode == 1 and done.stderr.count("\\n") == 1, done
assert "pip install 'wellposed[lab]'" in done.stderr, done.stderr
"""
HF = """
import torch, wellposed as wp
model = wp.models.build_model("wellposed", "causal_lm", vocab_size=11, hidden_size=16, num_hidden_layers=1,
                              num_attention_heads=2)
model.save_pretrained("model")
assert torch.equal(wp.models.load_saved_model("model").lm_head.weight, model.lm_head.weight)
from transformers import BertConfig, BertModel
small = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
assert len(wp.find_roles(BertModel(small)).attention) == 1
"""
TRAIN = """
from wellposed_lab.cli.main import main
words = "train text_classification --data builtin --steps 2 --quiet --out run --model.hidden-size 8"
assert main([*words.split(), "--model.num-attention-heads", "2"]) == 0
"""
DOCTOR = """
from wellposed_lab.cli.main import main
assert main(["doctor"]) == 0
"""
LIGHTNING = "import lightning.pytorch, wellposed"
STUDIES = """
from wellposed_lab.cli.main import main
assert main(["reproduce", "kim2021/figure-2", "--scale", "toy", "--out", "made"]) == 0
assert main("train marked --num-train 50 --steps 2 --quiet --out marked".split()) == 0
"""
CHECKS = {
    "core": [CORE, NO_LAB],
    "sdist": [CORE, NO_LAB],
    "hf": [CORE, HF, NO_LAB],
    "lightning": [CORE, LIGHTNING],
    "lab": [CORE, HF, DOCTOR, TRAIN],
    "all": [CORE, HF, DOCTOR, TRAIN, LIGHTNING],
    "studies": [CORE, DOCTOR, STUDIES],
}
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
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{' '.join(map(str, command))[:200]}\n    {last}")
    return done.stdout


def environment(folder: Path, lends: Path | None = None) -> Path:
    """Make an empty environment and return its interpreter; packages of `lends` can be imported in
    it too."""
    ran([sys.executable, "-m", "venv", folder], folder.parent)
    interpreter = folder / "bin" / "python"
    if lends is not None:
        [packages] = folder.glob("lib/python*/site-packages")
        [lent] = lends.glob("lib/python*/site-packages")
        (packages / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    return interpreter


def install(interpreter: Path, folder: Path, *what: str) -> None:
    pins = ["--constraint", ROOT / "constraints.txt"]
    pip = [interpreter, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    ran([*pip, *pins, *what], folder)


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
    for check in CHECKS[name]:
        ran([interpreter, "-W", "ignore", "-c", check], home)
    added = statistics.median(float(ran([interpreter, "-c", START], home)) for _ in range(5))
    if added > START_LIMIT:
        raise RuntimeError(f"`import wellposed` adds {added:.2f} s to torch, not {START_LIMIT} s")
    if more:
        ran([home / "bin" / "wellposed", "doctor"], home)
    count = len(list(home.glob("lib/python*/site-packages/*.dist-info")))
    checks = len(CHECKS[name])
    return f"import adds {added:.3f} s, {count} packages beside torch's, {checks} checks ran"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every environment, write a line for each, and return 0 if all worked, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    chosen = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = built(folder)
        sys.stdout.write(f"built {', '.join(path.name for path in made.values())}\n")
        place = folder / "tried"
        place.mkdir()
        install(environment(place / "torch"), place, TORCH)
        for extra in chosen.only:
            try:
                line = tried(extra, made, place)
            except RuntimeError as error:
                failed += 1
                line = f"FAILED: {error}"
            sys.stdout.write(f"{extra:<10} {line}\n")
            sys.stdout.flush()
            shutil.rmtree(place / extra, ignore_errors=True)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
