"""``python -m wellposed_lab.cli``: the same as ``python -m wellposed``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("wellposed", run_name="__main__", alter_sys=True)
