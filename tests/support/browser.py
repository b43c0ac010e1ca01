"""A page of frames in a real browser: what a probe in each of them finds, and the console."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from tests.support.words import words as typed

CHROMIUM = shutil.which("chromium")
_NO_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium on PATH")
needs_chromium = [pytest.mark.slow, _NO_CHROMIUM]
WIDTHS = (390, 1400)
# A probe posts what it finds, as JSON, to the frame around it.
AROUND = """<!doctype html><link rel="icon" href="data:,"><body><script>
addEventListener("message", (event) => {
  const pre = document.createElement("pre");
  pre.textContent = event.data;
  document.body.append(pre);
});
</script>"""


def frame(width, address):
    return f'<iframe width="{width}" height="900" src="{address}"></iframe>'


def visit(address, profile, *words, milliseconds):
    """Return what the probes of the frames at an address found, and the lines of the console."""
    command = typed([CHROMIUM], "--headless --no-sandbox --disable-gpu --enable-logging=stderr")
    command += typed(f"--dump-dom --virtual-time-budget={milliseconds}", *words)
    command += [f"--user-data-dir={profile}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=True)
    posted = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return [json.loads(unescape(message)) for message in posted], console
