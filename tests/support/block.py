"""One Python block of a page, run in a process of its own."""

import os


def run_block(code, folder, said):
    """Run ``code`` as a script in ``folder``; what it prints goes to the file ``said``."""
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
