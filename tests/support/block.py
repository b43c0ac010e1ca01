"""One Python block of a page, run in a process of its own."""

import os


def run_block(code, folder, messages):
    """Run ``code`` as a script in ``folder``; what it prints goes to the file ``said``."""
    with messages.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
