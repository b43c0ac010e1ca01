"""The code of README, CONTRIBUTING and every page of the documentation does what the page says."""

import doctest
import multiprocessing
import re
import runpy
import shlex
from pathlib import Path

import pytest
from tests.support.block import run_block

import wellposed
from wellposed_lab.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROCESSES = multiprocessing.get_context("forkserver")
# Once for all blocks; each is a process of its own.
PROCESSES.set_forkserver_preload(["torch", "transformers.trainer", "accelerate"])
# The blocks of contributing.md are files of a tree, in which test_contributing.py runs them.
BLOCKS = [
    (page, number, code)
    for page in PAGES
    if page.name != "contributing.md"
    for number, code in enumerate(BLOCK.findall(page.read_text("utf-8")))
]


@pytest.mark.parametrize(
    ("page", "code"),
    [pytest.param(page, code, id=f"{page.name}-{number}") for page, number, code in BLOCKS],
)
def test_the_block_runs(page, code, tmp_path):
    log = tmp_path / "said.txt"
    process = PROCESSES.Process(target=run_block, args=(code, ROOT, log))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{page.name}: {log.read_text('utf-8')[-2000:]}"


def test_ten_answers_have_ten_lines_at_most():
    page = ROOT / "docs" / "ten.md"
    blocks = [code for where, _, code in BLOCKS if where == page]
    asked = re.findall(r"^## How do I ", page.read_text("utf-8"), re.MULTILINE)
    assert len(asked) == len(blocks) == 10
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in blocks) <= 10


def test_the_readme_is_short_and_its_first_screen_says_what_it_is_what_changes_and_how_to_start():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert max(map(len, text.splitlines())) <= 120
    assert len(re.sub(r"```.*?```|\|", "", text, flags=re.DOTALL).split()) <= 500
    first = "".join(text.splitlines(keepends=True)[:36])
    parts = (SENTENCE, "pip install", "git clone", "wp.constrain_(", ".attach(trainer)")
    assert [part for part in parts if part not in first] == []
    assert f"`{wellposed.__version__}`" in first
    assert "make demo" in text
    assert "make test" in text


SENTENCE = "rthogonality, Lipschitz bounds and certificates for any PyTorch Transformer"


def test_every_place_says_the_same_sentence_and_counts_the_same_verbs(capsys):
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    main(["--help"])
    places = [readme, index, wellposed.__doc__ or "", capsys.readouterr().out]
    places += [(ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "mkdocs.yml")]
    for page_text in places:
        assert SENTENCE in " ".join(page_text.replace("`", "").split())
    tables = (readme.partition("| verb |")[2], index.partition("| verb |")[2])
    rows = {len(table.partition("\n\n")[0].splitlines()) - 2 for table in tables}
    assert rows == {7}
    for page_text in places[:3]:
        assert "seven verbs" in page_text.lower()


def test_readme_and_index_begin_with_the_same_page():
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    first = readme.partition("`make demo` makes")[0].replace("](docs/", "](")
    assert index.startswith(first)
    assert len(first.splitlines()) > 50


def test_the_navigation_has_at_most_eight_entries_and_every_page():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:\n")[2].partition("theme:")[0]
    assert len(re.findall(r"^  - ", nav, re.MULTILINE)) <= 8
    names = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == sorted(names)


def test_every_public_name_has_its_place_in_the_reference():
    tool = runpy.run_path(str(ROOT / "tools" / "reference_pages.py"))
    for path, text in tool["pages"]().items():
        stale = not path.is_file() or path.read_text("utf-8") != text
        assert not stale, f"{path.name}: run python tools/reference_pages.py"


TUTORIAL = ROOT / "docs" / "tutorial.md"
TYPED = re.compile(r"^```(console|pycon|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


class NearlyTheSame(doctest.OutputChecker):
    """Texts are equal except for numbers, which agree to a fifth: training differs with the
    processor."""

    def check_output(self, want, got, optionflags):
        """Return whether ``got`` is what the page shows."""
        if NUMBER.sub("#", want) != NUMBER.sub("#", got):
            return False
        pairs = zip(map(float, NUMBER.findall(want)), map(float, NUMBER.findall(got)), strict=True)
        return all(abs(old - new) <= 0.2 * abs(old) for old, new in pairs)


def shares(text):
    """Return the accuracies of the tables of the page, with the first word of their rows."""
    rows = re.findall(r"^(plain|key|orthogonal)\S* +\d+ +(0\.\d+)", text, re.MULTILINE)
    pairs = re.findall(r"^(?:none|words) +\d +(0\.\d+) +(0\.\d+)", text, re.MULTILINE)
    return [
        (name, float(share)) for name, share in [*rows, *(("held", s) for r in pairs for s in r)]
    ]


@pytest.fixture
def typist(tmp_path, monkeypatch, capsys):
    """Return what types blocks of the tutorial in, those from one number to another, and returns
    what the commands print; numbers of the page that are in no ``text`` block are checked."""
    monkeypatch.chdir(tmp_path)
    parser = doctest.DocTestParser()
    runner = doctest.DocTestRunner(NearlyTheSame())
    names = {}
    blocks = [block for block in TYPED.findall(TUTORIAL.read_text("utf-8")) if block[0] != "text"]

    def type_in(first, last):
        output = ""
        for kind, text in blocks[first:last]:
            if kind == "console":
                for line in text.splitlines():
                    assert main(shlex.split(line.removeprefix("$ wellposed "))) == 0, line
                output += capsys.readouterr().out
            else:
                test = parser.get_doctest(text, names, TUTORIAL.name, str(TUTORIAL), 0)
                runner.run(test, clear_globs=False)
                names.update(test.globs)
                assert not runner.failures, capsys.readouterr().out
        return output

    return type_in


@pytest.mark.slow
def test_the_page_prints_what_it_shows(typist, tmp_path):
    printed = typist(0, 99)
    typed = TYPED.findall(TUTORIAL.read_text("utf-8"))
    page = "".join(text for kind, text in typed if kind == "text")
    assert [name for name, _ in shares(page)] == ["plain", "key", "orthogonal", *["held"] * 8]
    for (name, here), (_, run) in zip(shares(page), shares(printed), strict=True):
        assert abs(here - run) <= 0.1, name
    heads, others = (
        set(re.findall(r"^\S+", shown_text, re.MULTILINE)) for shown_text in (page, printed)
    )
    assert heads <= others
    for variant in ("key:1e-2", "orthogonal"):
        assert f"\n{variant}: undecided with 3 seeds: the gain" in printed
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    assert any((tmp_path / "measured").iterdir())
