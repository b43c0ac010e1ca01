"""From options to the objects of a run: the optimizer that is named, weights held in their set, and
models of images that a run starts from."""

import inspect
import json
import shutil
from dataclasses import replace

import jsonschema
import pytest
import torch
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import assert_resumed_bit_for_bit, final, rows, same
from torch import nn

from wellposed.constrain import MuonAndAdamW
from wellposed.errors import ConfigError
from wellposed.linalg import certified_spectral_norm
from wellposed.model_options import ModelOptions
from wellposed.optim import Scion
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.report.page import build_report
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import (
    SCION_LEAVES,
    SCION_READS,
    ConstrainOptions,
    RunConfig,
    TrainOptions,
)
from wellposed_lab.training.folder.result import result_schema
from wellposed_lab.training.loop.build import (
    build_constraint,
    build_optimizer,
    build_run_model,
    load_run_model,
)
from wellposed_lab.training.loop.train import train


@pytest.mark.parametrize("to", [None, "orthogonal", "spectral"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, to):
    config = stub.make_config(dropout=0.3, optimizer="sgd")
    if to is not None:
        config = replace(config, constrain=ConstrainOptions("*.inner", to=to))
    assert_resumed_bit_for_bit(config, tmp_path)


@pytest.mark.parametrize("eval_every", [1, 4])
def test_draws_of_an_evaluation_move_no_training_and_a_resumed_run_repeats_them(
    tmp_path, eval_every
):
    options = {"steps": 4, "batch_size": 8, "checkpoint_every": 2, "keep_checkpoints": 2}
    texts = {"limit_chars": 3000, "seq_len": 16}
    model = ModelOptions(hidden_size=8, num_hidden_layers=1)
    plain = stub.make_config(**options, eval_every=4, learning_rate=1e-3)
    base = replace(plain, task="char_lm", task_options=texts, model=model)
    config = apply_variant("transject_redrawn", base)
    usual = train(config, tmp_path / "usual", progress=False).result
    often = replace(config, train=replace(config.train, eval_every=eval_every))
    run = tmp_path / "run"
    again = tmp_path / "again"
    first = train(often, run, progress=False).result
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("final", "checkpoint-4", "result.*"))
    second = train(often, again, resume="auto", progress=False).result
    assert same(final(tmp_path / "usual"), final(run))
    assert same(final(run), final(again))
    assert usual["results"] == first["results"] == second["results"]


@pytest.mark.slow
def test_dt_fixup_reads_the_longest_token_and_a_resumed_run_is_not_scaled_twice(tmp_path):
    options = {"steps": 2, "batch_size": 8, "checkpoint_every": 1, "keep_checkpoints": 2}
    texts = {"limit_chars": 9000, "seq_len": 32}
    run = tmp_path / "run"
    again = tmp_path / "again"
    base = replace(stub.make_config(**options), task="char_lm", task_options=texts)
    config = apply_variant("dt_fixup:3", base)
    first = train(config, run, progress=False).result["train_info"]["dt_fixup"]
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("final", "checkpoint-2", "result.*"))
    second = train(config, again, resume="auto", progress=False).result["train_info"]["dt_fixup"]
    assert (first, same(final(run), final(again))) == (second, True)
    torch.manual_seed(0)
    task = build_task("char_lm", texts)
    tokens, places, *_ = map(torch.Tensor.double, build_run_model(config, task).parameters())
    read = [row for rows in task.batches("train", 8, seed=0, epoch=0)[:3] for row in rows]
    lines = [task.dataset("train")[row]["input_ids"] for row in read]
    norms = [(tokens[i] + places[at]).norm().item() for line in lines for at, i in enumerate(line)]
    mu = 8**0.5 * max(norms)
    factor = (2 * (4 * mu**2 + 2 * mu + 2)) ** -0.5
    assert first == pytest.approx({"mu": mu, "tokens": len(norms), "factor": factor}, rel=1e-5)
    assert apply_variant("post_ln", config).start == base.start


def test_each_name_is_that_optimizer_with_its_numbers():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    constrained = [model.linear1.weight]

    def build(where=(), **options):
        return build_optimizer(model, TrainOptions(**options), constrained=constrained, where=where)

    adamw = build(adam_beta2=0.9)
    assert type(adamw) is torch.optim.AdamW
    assert adamw.defaults["betas"] == (0.9, 0.9)
    sgd = build(optimizer="sgd", learning_rate=0.5, weight_decay=0.1)
    assert type(sgd) is torch.optim.SGD
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.5, 0.9)
    muon = build(["linear1"], optimizer="muon", momentum=0.8, weight_decay=0.1)
    assert type(muon) is MuonAndAdamW
    assert {group["momentum"] for group in muon.param_groups if group["method"] == "muon"} == {0.8}
    for optimizer in (sgd, muon):
        groups = optimizer.param_groups
        decays = {id(entry): group["weight_decay"] for group in groups for entry in group["params"]}
        assert decays[id(constrained[0])] == 0.0
        assert decays[id(model.linear2.weight)] == 0.1
        assert len(decays) == len(list(model.parameters()))


def test_scion_has_its_radii_and_begins_inside_its_balls():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    with torch.no_grad():
        model.linear1.weight.mul_(100.0)
    options = TrainOptions(
        optimizer="scion", learning_rate=0.1, momentum=0.8, scion_radius=2.0, scion_head_radius=7.0
    )
    optimizer = build_optimizer(model, options)
    assert type(optimizer) is Scion
    groups = {group["norm"]: group for group in optimizer.param_groups}
    assert {group["radius"] for group in groups.values()} == {2.0}
    assert {group["momentum"] for group in groups.values()} == {0.8}
    assert max(optimizer.sizes().values()) <= 1 + 1e-5
    norm = torch.linalg.matrix_norm(model.linear1.weight.detach(), 2)
    assert float(norm) <= 2.0 * 2**0.5 * (1 + 1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "scion"])
@pytest.mark.parametrize("name", [*SCION_READS, *SCION_LEAVES])
def test_options_that_scion_alone_reads_or_leaves_are_refused_elsewhere(name, optimizer):
    is_read = (name in SCION_READS) == (optimizer == "scion")
    if is_read:
        assert getattr(TrainOptions(optimizer=optimizer, **{name: 0.25}), name) == 0.25
        return
    with pytest.raises(
        ConfigError, match=rf"{name} = 0[.]25, which .*optimizer = scion"
    ) as refused:
        TrainOptions(optimizer=optimizer, **{name: 0.25})
    assert str(refused.value).count("\n") == 1  # one problem, below its heading


def test_scion_takes_no_decay_for_an_answer_and_has_the_radii_of_the_library():
    options = TrainOptions(optimizer="scion", weight_decay=0.0)
    usual = inspect.signature(Scion).parameters
    assert options.scion_radius == usual["radius"].default
    assert options.scion_head_radius == usual["head_radius"].default


def test_what_cannot_work_is_refused():
    expected = "'adamw', 'muon', 'scion' or 'sgd'"
    with pytest.raises(ConfigError, match=f"optimizer = 'lion', expected {expected}"):
        TrainOptions(optimizer="lion")
    with pytest.raises(ConfigError, match=r"learning_rate = 2[.]0 with optimizer = scion"):
        TrainOptions(optimizer="scion", learning_rate=2.0)
    with pytest.raises(ConfigError, match=r"momentum = 0[.]9 with optimizer = adamw"):
        TrainOptions(momentum=0.9)
    with pytest.raises(ConfigError, match="no trainable matrix"):
        build_optimizer(nn.Embedding(4, 2), TrainOptions(optimizer="muon"))


TASK = {"data": "builtin", "max_length": 6, "limit_train": 40}
MODEL = ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
TRAIN = TrainOptions(steps=6, batch_size=4, eval_every=3, checkpoint_every=3, optimizer="muon")
BASE = RunConfig(task="text_classification", task_options=TASK, model=MODEL, train=TRAIN)


def weights_of(folder):
    return load_run_model(folder)[0].state_dict()


@pytest.mark.slow
def test_held_weights_stay_in_their_set_and_a_longer_run_is_the_same(tmp_path):
    config = apply_variant("lipschitz", replace(BASE, train=replace(TRAIN, schedule="constant")))
    train(config, tmp_path / "whole", progress=False)
    short = replace(config, train=replace(config.train, steps=3))
    train(short, tmp_path / "resumed", progress=False)
    train(config, tmp_path / "resumed", progress=False, resume="auto", longer=True)
    straight = weights_of(tmp_path / "whole")
    resumed = weights_of(tmp_path / "resumed")
    assert same(straight, resumed)
    clipped = [weight for name, weight in straight.items() if name.endswith("_proj.weight")]
    assert clipped
    assert all(float(certified_spectral_norm(weight)) <= 1 + 1e-6 for weight in clipped)


WEIGHTS = ("blocks.0.inner.weight", "blocks.1.inner.weight")


def make_config(where="*.inner", **options):
    return replace(stub.make_config(dropout=0.3, **options), constrain=ConstrainOptions(where))


def isometry_error(weight):
    """Return the largest |<w_i, w_j> - [i = j]| over pairs of columns, one by one in float64."""
    columns = list(enumerate(weight.double().T))
    return max(abs(float(v @ w) - (i == j)) for i, v in columns for j, w in columns)


def test_named_weights_stay_orthogonal_and_the_run_says_how_well(tmp_path):
    result = stub.run(make_config(), tmp_path / "run")
    worst = max(isometry_error(final(tmp_path / "run")[name]) for name in WEIGHTS)
    assert worst <= 1e-5
    assert result.result["train_info"]["isometry_error"] == pytest.approx(worst, rel=1e-6)
    logged = [row["isometry_error"] for row in rows(tmp_path / "run", "train")]
    assert len(logged) == 6
    assert max(logged) <= 1e-5
    # That is another quantity.
    assert not any("orthogonality_error" in row for row in rows(tmp_path / "run"))
    free = stub.run(stub.make_config(), tmp_path / "free")
    assert "isometry_error" not in free.result["train_info"]
    assert max(isometry_error(final(tmp_path / "free")[name]) for name in WEIGHTS) > 0.1


@pytest.mark.parametrize("to", ["spectral", "columns"])
def test_the_other_sets_are_held_through_kill_and_resume(tmp_path, to):
    config = replace(stub.make_config(), constrain=ConstrainOptions("*.inner", to=to, bound=0.5))
    info = stub.run(config, tmp_path / "run").result["train_info"]
    for name in WEIGHTS:
        weight = final(tmp_path / "run")[name].double()
        if to == "spectral":
            assert float(torch.linalg.svdvals(weight)[0]) <= 0.5
        else:
            assert float((weight.norm(dim=0) / 0.5 - 1.0).abs().max()) <= 1e-6
    assert info["constraint_error"] <= 1e-6
    assert "isometry_error" not in info
    assert_resumed_bit_for_bit(config, tmp_path)


def test_runs_of_version_0_1_that_name_it_otherwise_are_read(tmp_path):
    config = make_config()
    stub.run(config, tmp_path / "run")
    for name in ("metrics.jsonl", "result.json"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace('"isometry_error"', '"orthogonality_error"'))
    (tmp_path / "run" / "manifest.json").unlink()  # there were none
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text()), result_schema())
    build_report([tmp_path / "run"], tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    assert stub.run(config, tmp_path / "run", resume="auto").status == "success"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("*.inner, *.iner", r"where = '\*\.inner, \*\.iner' cannot.*'\*\.iner' is no role"),
        ("*.inner.bias", r"constrain\.where.*blocks[.]0[.]inner\.bias: shape \(8,\), expected a"),
        ("embedding", r"constrain\.where.*embedding of 11 vectors in 8 dimensions"),
    ],
)
def test_names_that_cannot_be_held_are_refused(tmp_path, where, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        stub.run(make_config(where), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_heads_of_a_query_are_held_by_themselves_where_asked_for():
    model = torch.nn.TransformerEncoderLayer(8, 2, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = build_constraint(ConstrainOptions("query", per="head"), model, optimizer)
    name = "self_attn.in_proj_weight"
    assert [row.path for row in handle.report.rows] == [f"{name}[0:4]", f"{name}[4:8]"]
    with pytest.raises(ConfigError, match="per = 'head' without where"):
        ConstrainOptions(per="head")
