"""One Python block of a page, run in a process of its own."""

import os
import warnings


def run_block(code, folder, messages):
    """Run ``code`` as a script in ``folder``; what it prints goes to the file ``said``."""
    with messages.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    warnings.filterwarnings("error", r".* is .* now$", FutureWarning)  # a page has no old names
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
