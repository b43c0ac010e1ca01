"""Two processes of one run on this machine; run as a script it gives them one command after the
other.

``python two_processes.py COMMANDS.json``: a list of lists of words; prints the exit statuses.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from wellposed_lab.cli.main import main


def start_two(*words):
    """Start ``python WORDS`` twice, as two processes of one run on the CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shared = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = []
    for rank in ("0", "1"):
        env = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
        started.append(subprocess.Popen([sys.executable, *map(str, words)], env=env, **pipes))
    return started


def run_commands(commands, folder):
    """Run the commands one after the other in two processes; return the first one's exit statuses
    and messages."""
    listed = folder / "commands.json"
    listed.write_text(json.dumps(commands))
    first, second = start_two(__file__, listed)
    try:
        stdout, stderr = first.communicate(timeout=280)
        second.communicate(timeout=60)
    finally:
        first.kill()
        second.kill()
    assert stdout, stderr
    return json.loads(stdout.splitlines()[-1]), stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    codes = []
    for words in json.loads(Path(sys.argv[1]).read_text()):
        if any(codes):  # a refused process leaves the other at a barrier, where it would wait
            break
        codes.append(main(words))
    print(json.dumps(codes))
