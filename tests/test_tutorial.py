"""The tutorial is typed in again, in order, in an empty folder; what it prints is what the page
shows, to a fifth."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from wellposed.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(console|pycon)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


class NearlyTheSame(doctest.OutputChecker):
    """Texts are equal but for numbers, which agree to a fifth: training differs with the
    processor."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Return whether ``got`` is what the page shows."""
        if NUMBER.sub("#", want) != NUMBER.sub("#", got):
            return False
        pairs = zip(map(float, NUMBER.findall(want)), map(float, NUMBER.findall(got)), strict=True)
        return all(abs(shown - found) <= 0.2 * abs(shown) for shown, found in pairs)


@pytest.mark.parametrize(
    ("want", "got", "same"), [("0.97", "0.95", True), ("0.97", "0.5", False), ("1", "inf", False)]
)
def test_the_checker_tells_numbers_apart(want: str, got: str, same: bool) -> None:
    assert NearlyTheSame().check_output(want, got, 0) is same


def test_the_page_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    parser, runner, names = doctest.DocTestParser(), doctest.DocTestRunner(NearlyTheSame()), {}
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    assert {kind for kind, _ in blocks} == {"console", "pycon"}
    for kind, text in blocks:
        if kind == "console":
            for line in text.splitlines():
                assert main(shlex.split(line.removeprefix("$ wellposed "))) == 0, line
        else:
            test = parser.get_doctest(text, names, PAGE.name, str(PAGE), 0)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
    printed = capsys.readouterr().out
    assert runner.summarize(verbose=False).failed == 0, printed
    shown = re.findall(r"^```text\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[0]
    assert [line.split()[0] for line in shown.splitlines()] == [
        line.split()[0] for line in printed.splitlines()[:6]
    ]
    assert "t_fixup against post_ln: better" in shown
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert any((tmp_path / "measured").iterdir())
