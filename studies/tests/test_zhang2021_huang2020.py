"""Recipes of zhang2021 and huang2020: printed values against printed gains, the theorem by another
route, toy runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.tests.support.finished_runs import finished

from wellposed.errors import ConfigError
from wellposed.initialize import t_fixup_encoder_factor
from wellposed_lab.compare.run_presets import RUN_PRESETS
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_studies.huang2020 import attention_block as theorem_3_1
from wellposed_studies.huang2020.depth import summarise
from wellposed_studies.recipe import Request
from wellposed_studies.reproduce import reproduce
from wellposed_studies.run_presets import PRESETS
from wellposed_studies.sentences import translation_data
from wellposed_studies.study import FinishedRun, Sizes
from wellposed_studies.zhang2021 import affinity_rows as theorem
from wellposed_studies.zhang2021 import tables


def test_printed_values_give_the_printed_gains():
    # A value read into the wrong column would break its gain, which the paper prints to 0.1 %.
    printed = [
        measure
        for table in tables.PRINTED.values()
        for by_variant in table.values()
        for measure in by_variant.values()
    ]
    assert len(printed) == 6 + 2 + 3 + 18
    for values in printed:
        values = dict(values)
        plain = values.pop("post_ln")
        gain = values.pop("gain", None)
        top = (
            values["oc2"] if gain == 5.3 else max(values.values())
        )  # the gain of En-Mk is VAR-II's
        assert gain is None or 100 * (top / plain - 1) == pytest.approx(gain, abs=0.11), values


def test_the_factor_of_appendix_c_follows_from_the_square_of_its_input_and_breaks_its_premise():
    for layers in (6, 100):
        v = t_fixup_encoder_factor(layers)
        by_square = 2 * layers * (2 * v**2 * (9 * layers) ** -0.5 + v**4)
        assert by_square == pytest.approx(1, abs=2e-3)
        assert 2 * layers * (2 * v**2 * (9 * layers) ** -0.25 + v**4) > 1.5, "as printed"
        assert v**2 > 1 / layers


def test_gains_are_given_as_printed_and_as_recomputed_in_every_measure():
    text = tables.about_gains(tables.PRINTED["table-4"])
    assert text.count(" (") == 18
    assert "PersonaChat skip_thought 4.8 (4.8)" in text
    assert "En-Mk bleu 5.3 (5.6)" in tables.about_gains(tables.PRINTED["table-1"])


def test_vectors_and_encoder_reach_the_dialogues(tmp_path, monkeypatch):
    configs = []

    def stop(_, planned):
        configs.append(planned[0].config)
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "train_grid", stop)
    inputs: dict[str, Any] = {"vectors": "glove.txt", "encoder": "some/encoder"}
    with pytest.raises(KeyboardInterrupt):
        reproduce("zhang2021/table-4", scale="toy", out=tmp_path, **inputs)
    options = configs[0].task_options
    assert (options["vectors"], options["sentence_encoder"]) == tuple(inputs.values())
    with pytest.raises(
        ConfigError, match=r"zhang2021/table-1: reads no vectors.*these do: zhang2021/table-4"
    ):
        reproduce("zhang2021/table-1", scale="toy", out=tmp_path, vectors="glove.txt")


def test_the_tight_bound_holds_and_is_reached_where_the_printed_one_is_four_times_too_large():
    # Two keys +-k, q = 0, noise along k: p = sigmoid(2 alpha eps |k|), change = sqrt 2 |p - 1/2|,
    # by hand.
    keys = torch.tensor([[3.0, 4.0], [-3.0, -4.0]], dtype=torch.float64)
    alpha = 1 / math.sqrt(2)
    eps = 1e-4
    delta = eps * keys[0] / 5
    changed = float(theorem.row_change(torch.zeros(2, dtype=torch.float64), delta, keys, alpha))
    by_hand = math.sqrt(2) * abs(1 / (1 + math.exp(-2 * alpha * eps * 5)) - 0.5)
    assert changed == pytest.approx(by_hand, rel=1e-9)
    # |K| = 5 sqrt 2: tight = alpha 5 sqrt 2 eps / 2, printed four times that.
    tight = theorem.tight_bound(keys, alpha, eps)
    assert tight == pytest.approx(alpha * 5 * math.sqrt(2) * eps / 2, rel=1e-12)
    assert theorem.printed_bound(keys, alpha, eps) == pytest.approx(4 * tight)
    assert changed / tight == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("eps", [1e-2, 1.0, 30.0])
def test_no_ascent_passes_the_tight_bound(eps):
    generator = torch.Generator().manual_seed(1)
    keys = theorem.shifted_keys(6, 4, generator)
    change = theorem.ascend(keys, 0.5, eps, restarts=8, steps=60, generator=generator)
    assert 0 < change <= theorem.tight_bound(keys, 0.5, eps) * (1 + 1e-9)
    assert theorem.tight_bound(keys, 0.5, eps) <= math.sqrt(2)


def test_the_runs_of_the_papers_are_presets_by_name():
    settings = {}
    papers = [name for name in PRESETS if name.startswith(("zhang2021", "huang2020"))]
    for name in papers:
        config = RUN_PRESETS.get(name)()
        source = str(config.task_options["src"])
        target = str(config.task_options["tgt"])
        assert f"-{source}-{target}" in name
        assert config.model.norm == ("none" if name.startswith("huang2020") else "post")
        train = config.train
        options = config.task_options
        if name.startswith("huang2020"):
            assert (train.schedule, train.decay_steps) == ("inverse_sqrt", 4000)
            tokens = int(options["tokens_per_batch"] or 0) * train.gradient_accumulation
            settings[name] = (train.learning_rate, config.model.dropout, tokens, train.steps)
        else:
            assert (options["generate_beams"], options["generate_length_penalty"]) == (4, 0.6)
    assert len(papers) == 16
    assert sorted(settings.values()) == [
        (4e-4, 0.4, 25_000, 500_000), (4e-4, 0.4, 25_000, 500_000), (5e-4, 0.5, 4_000, 300_000),
        (6e-4, 0.4, 80_000, 90_000), (7e-4, 0.2, 25_000, 1_000_000),
    ]  # fmt: skip


def test_the_generated_corpus_is_the_same_twice_and_reversed(tmp_path):
    first = translation_data(Request("toy", tmp_path / "a"), pairs=20, words=True)
    second = translation_data(Request("toy", tmp_path / "b"), pairs=20, words=True)
    text = Path(first["data"]).read_text()
    assert text == Path(second["data"]).read_text()
    pairs = [line.split("\t") for line in text.splitlines()[1:]]
    assert all(source == target[::-1] for source, target in pairs)


def test_data_without_the_wanted_languages_takes_those_it_has(tmp_path):
    for language in ("fr", "en"):
        (tmp_path / f"train.{language}.gz").touch()
    options = translation_data(Request("toy", tmp_path, str(tmp_path)), wanted=("de", "en"))
    assert (options["src"], options["tgt"]) == ("en", "fr")
    (tmp_path / "train.fr.gz").unlink()
    with pytest.raises(ConfigError, match="no aligned train files of two languages"):
        translation_data(Request("toy", tmp_path, str(tmp_path)))


@pytest.mark.slow
def test_languages_name_the_columns_of_a_file(tmp_path):
    lines = [f"{'one two'[: i % 7 + 1]} {i}\t{'un deux'[: i % 7 + 1]} {i}" for i in range(60)]
    (tmp_path / "train.tsv").write_text("\n".join(["en\tfr", *lines]) + "\n")
    table = "zhang2021/table-2"
    out = tmp_path / "out"
    data = str(tmp_path)
    with pytest.raises(ConfigError, match="give --languages SRC,TGT"):
        reproduce(table, scale="toy", out=out, data=data)
    done = reproduce(table, scale="toy", out=out, data=data, languages="en,fr")
    command = json.loads(done.files[-1].read_text())["command"]
    assert (
        command == "wellposed reproduce zhang2021/table-2 --scale toy --data DATA --languages en,fr"
    )
    options = read_config(next((tmp_path / "out").rglob("config.toml")).parent).task_options
    assert [options[name] for name in ("src", "tgt")] == ["en", "fr"]


@pytest.mark.parametrize(
    ("name", "scale", "languages", "message"),
    [
        ("zhang2021/table-1", "toy", "en", "expected source and target, two names as en,fr"),
        ("zhang2021/table-1", "toy", "en,en", "expected source and target"),
        ("huang2020/depth", "toy", "en,fr", "without data: the generated corpus has none"),
        ("zhang2021/table-1", "paper", "en,fr", "has no paper scale"),
        ("kim2021/table-2", "toy", "en,fr", "kim2021/table-2: reads no languages"),
    ],
)
def test_languages_that_cannot_be_used_are_refused(tmp_path, name, scale, languages, message):
    with pytest.raises(ConfigError, match=message):
        reproduce(name, scale=scale, out=tmp_path, languages=languages)


def test_a_depth_trains_where_every_seed_is_below_the_unigram_model(tmp_path, monkeypatch):
    monkeypatch.setattr(FinishedRun, "settled", True)

    def run(variant, depth, seed, valid):
        loss = {} if valid is None else {"loss,valid": valid, "loss,test": valid}
        shape = {"depth": depth, "seed": seed}
        return finished(
            "translation", variant, loss, **shape, reference={"loss": 2.0}, folder=tmp_path
        )

    losses = {("t_fixup", 6): (1, 1), ("t_fixup", 100): (1, 1.1)}
    losses |= {("post_ln", 6): (1, 2.1), ("post_ln", 100): (2.1, 1e9)}
    runs = [
        run(*key, seed, value) for key, pair in losses.items() for seed, value in enumerate(pair)
    ]
    request = Request("mini", tmp_path)
    sizes = Sizes(2, 2, depths=(6, 100), rates=(1e-3,))
    result = summarise(request, sizes, runs)
    assert result.holds
    assert "T-Fixup trains at 6, 100" in result.got
    assert "post-LN trains at no layers" in result.got
    diverged = [
        run("t_fixup", 100, 0, None) if (r.variant, r.depth) == ("t_fixup", 100) else r
        for r in runs
    ]
    assert summarise(request, sizes, diverged).holds is None, (
        "the claim needs a T-Fixup that learns"
    )


@pytest.mark.parametrize("width", [1, 8])
def test_the_change_of_a_block_is_that_of_its_jacobian(width):
    """|J J^T u| from the dense Jacobian by autograd, and in one dimension from the closed form of
    appendix A."""
    torch.manual_seed(3)
    row = theorem_3_1.measure_block("v = w = m = L^-1/4", width, 60)
    torch.manual_seed(3)
    block = theorem_3_1.AttentionBlock(width, [60**-0.25] * 3)
    y = theorem_3_1.draw_numbers(1, width)
    weights = dict(block.named_parameters())
    jacobians = torch.func.jacrev(
        lambda values: torch.func.functional_call(block, values, (y,)).flatten()
    )(weights)
    dense = torch.cat([jacobian.detach().flatten(1) for jacobian in jacobians.values()], 1)
    direction = torch.randn(1, width, dtype=torch.float64).flatten()
    expected = float((dense @ dense.mT @ (direction / direction.norm())).norm())
    assert row["change_over_rate"] == pytest.approx(expected, rel=1e-5)
    if width == 1:
        assert row["closed_form"] == pytest.approx(expected, rel=1e-9)
        assert row["closed_form_as_printed"] != pytest.approx(expected, rel=1e-6)
