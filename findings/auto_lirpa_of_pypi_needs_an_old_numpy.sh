#!/usr/bin/env bash
# Guess: `pip install auto_LiRPA` gives the library for bounds of networks, in a version that runs.
# Fact: the newest version on PyPI is 0.3 of 2022. It installs beside torch 2.13 and numpy 2.4 without a warning, and its
# import fails, as numpy no longer has a module that it reads.
# Bites: whoever compares bounds with it, or lists it as a dependency. Its own repository has later versions.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet torch==2.13.0 numpy==2.4.6
pip install --quiet --no-deps auto_LiRPA==0.3

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.metadata

import torch

print("torch", torch.__version__, {name: importlib.metadata.version(name) for name in ("numpy", "auto_LiRPA")})
try:
    import auto_LiRPA
except ImportError as error:
    print(f"import auto_LiRPA: {type(error).__name__}: {error}")
else:
    raise AssertionError(f"auto_LiRPA {auto_LiRPA.__version__} imports")
PYTHON
