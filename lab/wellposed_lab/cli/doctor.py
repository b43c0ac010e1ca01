"""``wellposed doctor``: versions and devices of this installation."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from collections.abc import Sequence

from wellposed.errors import EXTRAS, ConfigError, extra_line
from wellposed.version import __version__


def run(words: Sequence[str]) -> int:
    """Print versions and devices and return 0."""
    if words:
        if not set(words) <= {"-h", "--help", "--help-all"}:
            raise ConfigError(
                f"doctor: takes no options, received {shlex.join(words)}; leave it out"
            )
        print("usage: wellposed doctor\n\nPrint versions and devices.")
        return 0
    print(f"wellposed        {__version__}")
    print(f"python           {platform.python_version()} on {platform.platform()}")
    for extra, packages in {"": ("torch",), **EXTRAS}.items():
        missing = f"not installed ({extra_line(extra)})" if extra else "not installed"
        for package in packages:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = missing
            print(f"{package:<16} {version}")

    import torch

    print(f"threads          {torch.get_num_threads()}")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"accelerators     {', '.join(devices) or 'none'}")
    return 0
