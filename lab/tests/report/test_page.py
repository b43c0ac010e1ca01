"""The page: complete, offline, escaped, well-formed, the same every time, and honest about missing
files."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest
from tests.support.edited import edited
from tests.support.html_page import Page
from tests.support.words import words as typed

from wellposed.errors import DataError
from wellposed.measurement import write_csv
from wellposed_lab.charts import COLOURS
from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report

pytestmark = pytest.mark.slow  # the whole table

ROLES = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")
VALUES = {"post_ln": [0.40, 0.42], "oc3:1e-4": [0.45, 0.46]}


@pytest.fixture(scope="module")
def report(write_comparison, tmp_path_factory):
    """A page about two tasks, written once; tests only read it."""
    folder = tmp_path_factory.mktemp("report")
    write_comparison(folder, VALUES)
    write_comparison(folder, {"post_ln": [2.0], "rezero": [3.2]}, task="char_lm")
    out = build_report([folder], folder / "page" / "report.html")
    return out, out.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_is_whole(report):
    out, text = report
    page = Page(text)
    for expected in (
        "listops", "char_lm", "Test accuracy: higher is better", "validation loss (nats)",
        "difference from post_ln", "oc3:1e-4", "p (Holm)",
        "one seed: no test", "Every variant learned", "did not learn: validation nats per character",
        "Environment", "packages.torch", "commit0", "wellposed compare listops", "resumed from step 50",
        "123,456", "Orthogonality error", "Singular values",
    ):  # fmt: skip
        assert expected in page.words, expected
    # three curves of each task, differences of two metrics, spectra and errors of six roles
    assert len(page.tags["svg"]) == 3 + 3 + 2 + 2 * 2 * 6
    assert out.stat().st_size < 2_000_000


def test_it_needs_no_network_and_runs_one_script_of_ours(report):
    _, text = report
    page = Page(text)
    assert len(page.tags["script"]) == 1
    assert page.tags["script"][0] == {}
    every = [item for tag in page.tags.values() for element in tag for item in element.items()]
    targets = [str(value) for name, value in every if name in ("href", "src", "xlink:href")]
    assert targets
    assert all(target.startswith(("#", "data:text/csv;", "data:image/png;")) for target in targets)
    assert "url(http" not in text
    assert "@import" not in text
    policies = {m.get("http-equiv"): str(m["content"]) for m in page.tags["meta"] if "content" in m}
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert policies["Content-Security-Policy"].split("; ") == [
        "default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", "img-src data:",
        "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip


def test_the_data_of_every_table_and_figure_is_inside(report):
    page = Page(report[1])
    names = page.csv_names()
    tables = [part for part in page.tags["div"] if "table" in str(part.get("class")).split()]
    # of each task two figures that have no table, and all results
    assert len(names) == len(set(names)) == len(tables) + 2 * 2 + 1
    for task in ("1-char_lm", "2-listops"):
        for part in typed("results differences curves spectra training"):
            assert page.csv(f"{task}-{part}"), part
    final, *_ = (
        [float(row[name]) for name in ("mean", "low", "high")]
        for row in page.csv("2-listops-curves")
        if [row[name] for name in ("variant", "metric", "step")] == ["post_ln", "accuracy", "100"]
    )
    assert final == pytest.approx([0.41, 0.40, 0.42])
    first = page.csv("2-listops-results")[0]
    assert float(first["accuracy,test"]) == (0.4 + 0.42) / 2
    every = [row for row in page.csv("results") if row["task"] == "listops"]
    assert every[0]["values"] == "0.4 0.42"
    spectra = page.csv("2-listops-spectra")
    assert {row["role"] for row in spectra} == set(ROLES)
    assert {row["when"] for row in spectra} == {"before", "after"}
    assert all(len(row["singular_values"].split()) == 16 for row in spectra)


@pytest.mark.parametrize(
    "loss", [[1.7e308, -1.7e308], [0.0, 0.0], [1e-320, 1e300]], ids=["ends", "zero", "far"]
)
def test_values_of_any_size_are_drawn(make_run, tmp_path, loss):
    run = make_run(tmp_path / "a")
    rows = [{"step": k, "split": "train", "loss": value} for k, value in enumerate(loss)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = build_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    drawn = "".join(re.findall(r"<svg .*?</svg>", text, re.DOTALL))
    assert "training loss (nats)" in drawn
    assert not re.search(r"\b(nan|inf)\b", drawn)


# Machado, Oliveira and Fernandes (2009), full loss of one kind of cone; the last: Ottosson's Oklab.
EYES = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}  # fmt: skip
OKLAB = (
    [[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]],
    [[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80868]],
)


@pytest.mark.parametrize("eyes", EYES)
def test_eight_variants_are_told_apart_with_any_eyes(eyes):
    display = np.array(
        [[int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)] for colour in COLOURS]
    )
    linear = np.where(display <= 0.04045, display / 12.92, ((display + 0.055) / 1.055) ** 2.4)
    cones = np.clip(linear @ np.transpose(EYES[eyes]), 0, None) @ np.transpose(OKLAB[0])
    oklab = np.cbrt(cones) @ np.transpose(OKLAB[1])
    apart = np.linalg.norm(oklab[:, None] - oklab, axis=-1)
    assert apart[~np.eye(8, dtype=bool)].min() > 0.1


def test_it_can_be_read_without_seeing(report):
    page = Page(report[1])
    assert page.tags["html"][0]["lang"] == "en"
    drawn = [svg for svg in page.tags["svg"] if not svg.get("aria-hidden")]  # what rows say too
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in drawn)
    assert all(cell.get("scope") for cell in page.tags["th"])
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(report, tmp_path):
    out, text = report
    again = build_report([out.parents[1]], tmp_path / "report.html")
    assert again.read_text(encoding="utf-8") == text
    assert [file.name for file in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", None, "metrics.jsonl: cannot be read (No such file or directory)"),
        ("metrics.jsonl", '{"step": 1, "split": "train"}\n{"step": 2, "spl', "metrics.jsonl:2: expected a JSON object"),
        ("measure-final.json", None, "measure-final.json: no measurement that can be read"),
        ("measure-initial.json", '{"schema', "measure-initial.json: no measurement that can be read"),
        ("env.json", None, "env.json: cannot be read"),
        ("env.json", "[1]", "env.json: expected a JSON object, received list"),
        ("env.json", '{"starts": null}', "env.json: starts: TypeError"),
        ("env.json", '{"starts": {}}', "env.json: starts: "),
        ("env.json", '{"starts": [1, 2]}', "env.json: starts: TypeError"),
    ],
)  # fmt: skip
def test_missing_and_half_written_files_are_named(compare, tmp_path, name, text, message):
    folder = compare(VALUES)
    other = folder / "post_ln" / "seed-1" / "env.json"
    other.unlink()
    file = folder / "oc3-1e-4" / "seed-0" / name
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(DataError) as caught:
        build_report([folder], tmp_path / "report.html")
    assert message in str(caught.value)
    assert str(file.parent) in str(caught.value)
    assert str(other) in str(caught.value)  # all offenders in one message
    assert not (tmp_path / "report.html").exists()


def test_files_of_cancelled_runs_may_be_missing_and_the_run_is_listed(compare, make_run, tmp_path):
    folder = compare(VALUES)
    stopped = make_run(folder / "stopped", variant="rezero", status="cancelled")
    for name in ("metrics.jsonl", "measure-final.json", "env.json"):
        (stopped / name).unlink()
    killed = make_run(folder / "killed", variant="qk_norm")
    (killed / "result.json").unlink()
    words = Page(build_report([folder], tmp_path / "report.html").read_text()).words
    assert "2 runs not counted" in words
    assert "cancelled" in words
    assert "no result.json: still running, or killed" in words


def test_a_variant_is_worth_what_is_asked_or_not(compare, tmp_path):
    page = build_report([compare(VALUES)], tmp_path / "report.html", worth=0.5).read_text()
    assert "worth it? better in accuracy,test by 0.5 or more (--worth)" in page
    assert "Worth it? oc3:1e-4: not worth it: the gain is 0.045" in page


def test_one_variant_that_did_not_learn_is_said_so(make_run, tmp_path):
    make_run(tmp_path / "a", value=0.1)
    words = Page(build_report([tmp_path], tmp_path / "report.html").read_text()).words
    assert "One variant: nothing to compare with" in words
    assert "did not learn: validation accuracy 0.11 is no better than the reference 0.18" in words


def test_models_without_known_roles_have_no_figures_of_weights(compare, tmp_path):
    folder = compare(VALUES)
    for seed in (0, 1):
        for name in ("measure-initial.json", "measure-final.json"):
            (folder / "post_ln" / f"seed-{seed}" / name).unlink()
    page = Page(build_report([folder], tmp_path / "report.html").read_text())
    assert "post_ln has no measurement" in page.words
    errors = [label for label in labels(page) if ": orthogonality error over layer" in label]
    assert errors
    assert all(label.endswith("; oc3:1e-4") for label in errors)


def test_long_runs_are_drawn_in_as_many_points_as_are_seen_and_all_are_in_the_file(
    make_run, tmp_path
):
    run = make_run(tmp_path / "run")
    noise = np.random.default_rng(0).random(20_000)
    rows = [
        {"step": k, "split": "train", "loss": 1 / (k + 1) + extra} for k, extra in enumerate(noise)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = build_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    curves = re.findall(r'<path d="([^"]*)"', text[: text.index("Singular")])
    assert 1_000 < max(curve.count("L") for curve in curves) < 7_000
    assert len(Page(text).csv("1-listops-curves")) == 20_000


LAYERS = 24
EXPERTS = 14


@pytest.fixture(scope="module")
def deep(write_comparison, tmp_path_factory):
    """Two variants of 24 layers with 4 weights of attention and 28 of experts each."""
    folder = tmp_path_factory.mktemp("deep")
    write_comparison(folder, {"post_ln": [0.4], "rezero": [0.5]})
    for file in folder.glob("**/measure-*.json"):
        with edited(file) as record:
            layer = record["rows"][:6]
            record["rows"] = [
                {**row, "layer": number, "path": f"layers.{number}.{expert}"}
                for number in range(LAYERS)
                for row in layer
                for expert in (range(EXPERTS) if row["role"].startswith("feed") else ["attention"])
            ]
            assert len(record["rows"]) == LAYERS * 32
    out = build_report([folder], folder / "report.html")
    assert out.stat().st_size < 4_000_000  # it can be mailed
    return Page(out.read_text(encoding="utf-8"))


def labels(page):
    return [str(svg["aria-label"]) for svg in page.tags["svg"] if "aria-label" in svg]


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", ["singular value of layers over relative rank", "orthogonality error over layer"]
)
def test_weights_have_one_panel_for_each_role_with_all_variants(deep, axes):
    panels = [label for label in labels(deep) if f": {axes};" in label]
    roles = ["query", "key", "value", "output", "ff in", "ff out"]
    assert panels == [f"{role}: {axes}; post_ln, rezero" for role in roles]
    assert len(deep.csv("1-listops-spectra")) == 2 * 2 * LAYERS * 32


def test_the_answers_of_all_tasks_come_before_any_plot(report):
    text = report[1]
    plots = text.index("<svg")
    for task in ("char_lm", "listops"):
        assert 0 < text.index(f"<h3>{task}</h3>") < plots
    assert text.count('<p class="verdict">', 0, plots) == 2
    assert text.count('aria-label="Each variant against post_ln', 0, plots) == 4


def test_certified_words_are_among_the_answers(make_run, tmp_path):
    for variant, share in (("post_ln", 0.0), ("lipschitz", 0.625)):
        run = make_run(tmp_path / variant, variant=variant)
        record = {"format": 1, "run_date": "2026-01-01T00:00:00", "split": "test", "examples": 8}
        record |= {"counts": [0, 2], "certified": [0.8, share], "attacked": [0.8, 0.7]}
        (run / "certified_words.json").write_text(json.dumps(record))
    text = build_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    answers = text[: text.index("<svg")]
    assert 'data-heading="certified, replaced words: 2" data-value="0.625">0.625</td>' in answers
    # one panel: certified and attacked accuracy of both
    (panel,) = [label for label in labels(Page(text)) if label.startswith("right answers")]
    assert panel.endswith("accuracy over replaced words; lipschitz, post_ln")


@pytest.mark.parametrize(("worth", "filled"), [(0.04, True), (0.2, False)])
def test_a_mark_is_filled_only_if_the_difference_is_worth_it(compare, tmp_path, worth, filled):
    values = {"post_ln": [0.40, 0.41, 0.42], "rezero": [0.50, 0.52, 0.53]}
    page = build_report([compare(values)], tmp_path / "page.html", worth=worth)
    text = page.read_text(encoding="utf-8")
    start = text.index('aria-label="test accuracy: difference')
    drawing = text[start : text.index("</svg>", start)]
    assert (f"fill-opacity: 0; stroke: {COLOURS[1]}" not in drawing) == filled


def test_one_seed_has_no_plot_of_differences(compare, tmp_path):
    page = build_report([compare({"post_ln": [0.4], "rezero": [0.5]})], tmp_path / "page.html")
    assert "Differences from" not in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_headings_are_short_and_a_folded_table_has_the_options(make_run, tmp_path):
    for name in ("semi.csv", "full.csv"):
        run = make_run(tmp_path / name, task="text_classification")
        with edited(run / "result.json") as record:
            options = {"data": name, "label_column": "auto", "header": f"the header of {name}"}
            record["config"]["task_options"] = options
    text = build_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h3>(text_class.*?)</h3>", text)
    assert headings == [f"text_classification (data={name})" for name in ("full.csv", "semi.csv")]
    folded = text[text.index("<summary>Options that differ</summary>") :]
    assert "the header of semi.csv" in folded
    assert re.findall("<(h[1-6])", text)[:3] == ["h1", "h2", "h3"]


VARIANTS = (
    '=HYPERLINK("http://x")', "--><script>alert(1)</script>", "$\\frac{$", "@SUM(A1)", "]]></style><img src=x>",
    "_日本語", "long " * 60,
)  # fmt: skip
EVIL = "<script>alert('x')</script>&\"$x^{$"


@pytest.fixture
def page(tmp_path, make_run):
    for number, variant in enumerate(VARIANTS):
        make_run(
            tmp_path / "runs" / str(number),
            task="<img src=x onerror=y>",
            variant=variant,
            value=0.3 + 0.01 * number,
            command=("wellposed", EVIL),
            model={EVIL: EVIL},
            status="failed" if number == 0 else "success",
        )
    run = tmp_path / "runs" / "1"
    with edited(tmp_path / "runs" / "0" / "result.json") as record:
        record["train_info"]["reason"] = EVIL
    with edited(run / "result.json") as record:
        record["data"] = {EVIL: EVIL}
    with edited(run / "env.json") as record:
        record[EVIL] = EVIL
    for name in ("measure-initial.json", "measure-final.json"):
        with edited(run / name) as record:
            record["rows"][0]["role"] = record["rows"][0]["stack"] = EVIL
    return build_report([tmp_path / "runs"], tmp_path / "page.html")


def test_a_page_shows_hostile_names_as_text(page):
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not set(parsed.tags) & {"img", "iframe", "object", "link", "base", "form", "embed"}
    assert len(parsed.tags["script"]) == text.count("<script") == 1
    assert EVIL in parsed.words
    assert "<!--" not in text
    assert "alert" not in parsed.script
    every = {name for tags in parsed.tags.values() for attrs in tags for name in attrs}
    assert not any(name.startswith("on") for name in every)
    assert "&lt;script&gt;" in text


def test_no_cell_of_a_csv_is_a_formula(page, tmp_path):
    parsed = Page(page.read_text(encoding="utf-8"))
    names = parsed.csv_names()
    assert len(names) >= 5
    for name in names:
        for row in parsed.csv(name):
            assert not any(is_formula(cell) for pair in row.items() for cell in pair), (name, row)
    assert "'" + VARIANTS[0] in {cell for row in parsed.csv("results") for cell in row.values()}
    assert VARIANTS[0] in aggregate([tmp_path / "runs"]).table()


def is_formula(cell):
    try:
        float(cell)
    except ValueError:
        return cell[:1] in tuple("=+-@\t\r")
    return False


def test_numbers_stay_numbers(tmp_path):
    cells = (-1.5, "-1e-3", [-0.5, 0.25], None, "+1+cmd|' /C calc'!A0", "\t=1", "plain")
    row = dict(zip(("=a", *"bcdefg"), cells, strict=True))
    text = write_csv(tmp_path / "x.csv", list(row), [row]).read_text(encoding="utf-8")
    assert text == "'=a,b,c,d,e,f,g\n-1.5,-1e-3,-0.5 0.25,,'+1+cmd|' /C calc'!A0,'\t=1,plain\n"
