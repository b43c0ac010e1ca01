"""Two processes of one run on this machine."""

import os
import socket
import subprocess
import sys


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
