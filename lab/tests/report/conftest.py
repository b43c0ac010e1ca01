"""Run folders made up by hand, in the layout of the training loop."""

import json
import math

import numpy as np
import pytest
import tomli_w

ROLES = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")


def measurement(seed, *, error, layers=2, width=16):
    """A measurement file of an encoder with random weights."""
    generator = np.random.default_rng(seed)
    rows = []
    for layer in range(layers):
        for role in ROLES:
            shape = (width, width) if not role.startswith("feed") else (4 * width, width)
            weight = generator.normal(size=shape) / math.sqrt(width)
            values = np.linalg.svd(weight, compute_uv=False)
            address = {"stack": "encoder", "layer": layer, "path": f"model.layers.{layer}"}
            scale = error * float(generator.lognormal(0, 0.3))
            measured = {
                "scale_free_orthogonality_error": scale,
                "orthogonality_error": scale,
                "sigma_max": float(values[0]),
                "sigma_min": float(values[-1]),
                "condition_number": float(values[0] / values[-1]),
                "stable_rank": float((values**2).sum() / values[0] ** 2),
                "sigma_max_status": "exact",
                "singular_values": values.tolist(),
            }
            rows.append({**address, "role": role, "rows": shape[0], "cols": shape[1], **measured})
    return {"schema_version": 1, "rows": rows, "activations": [], "notes": []}


def write_run(
    folder, *, task="listops", variant="post_ln", seed=0, value=0.4, layers=2, model=None, **more
):
    """Write a run folder whose headline metric on test is ``value``; more: status, command, date."""
    defaults = {"status": "success", "command": ("wellposed", "compare", "listops")}
    status, command, date = {**defaults, "date": "2026-01-01T00:00:00", **more}.values()
    folder.mkdir(parents=True)
    language = task == "char_lm"
    headline = "nats_per_char" if language else "accuracy"
    results = {f"{headline},test": value, f"{headline},valid": value + 0.01}
    named = {"task": task, "variant": variant}
    train = {"steps": 100, "seed": seed}
    model = {"norm": "post", **(model or {})}
    config = {"schema_version": 1, **named, "task_options": {"data": "builtin"}, "model": model}
    config["train"] = train
    result = {
        "schema_version": 1,
        **named,
        "seed": seed,
        "results": {task: {**results, "loss,test": 1.2, "loss,valid": 1.3}},
        "headline": headline,
        "higher_is_better": {headline: not language, "loss": False},
        "reference": {headline: 2.87 if language else 0.18},
        "n-samples": {task: {"train": 1000, "valid": 100, "test": 100}},
        "config": config,
        "versions": {"torch": "2.13.0", "python": "3.11"},
        "git_hash": None,
        "date": date,
        "command": list(command),
        "train_info": {
            "status": status, "steps": 100, "best_step": 80, "seconds": 12.5, "tokens": 320000,
            "tokens_per_second": 25600.0, "parameters": 123456, "peak_memory_bytes": 300 * 2**20,
        },
        "data": {"source": "builtin", "sha256": {"train": "ab" * 32}},
    }  # fmt: skip
    generator = np.random.default_rng(seed + len(variant))
    rows = []
    for step in range(10, 101, 10):
        loss = 1.0 + 2 * math.exp(-step / 40) + 0.05 * float(generator.normal())
        row = {"step": step, "split": "train", "loss": loss, "learning_rate": 1e-3}
        rows.append({**row, "seconds": 0.1 * step})
        if step % 20 == 0:
            row = {"step": step, "split": "valid", "loss": loss + 0.1}
            rows.append({**row, headline: value * step / 100})
    machine = {"python": "3.11", "cpu_count": 2, "gpus": [], "git_hash": f"commit{seed}"}
    starts = [{"from_step": 0}, {"from_step": 50}][: 1 + seed]
    machine |= {"packages": {"torch": "2"}, "date": date, "command": list(command)}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "env.json").write_text(json.dumps({**machine, "starts": starts}))
    for when, shift, error in (("initial", 0, 0.4), ("final", 9, 0.2)):
        measured = json.dumps(measurement(seed + shift, error=error, layers=layers))
        (folder / f"measure-{when}.json").write_text(measured)
    return folder


def _write_comparison(folder, values, **options):
    folder = folder / options.get("task", "listops")
    for variant, numbers in values.items():
        for seed, value in enumerate(numbers):
            address = folder / variant.replace(":", "-") / f"seed-{seed}"
            write_run(address, variant=variant, seed=seed, value=value, **options)
    (folder / "compare.json").write_text(json.dumps({"variants": list(values)}))
    return folder


@pytest.fixture(scope="session")
def write_comparison():
    """Return the function that writes ``folder/task/variant/seed-k`` for every value."""
    return _write_comparison


@pytest.fixture
def compare(tmp_path):
    """Return a function that writes a comparison below ``tmp_path`` and returns its folder."""
    return lambda values, **options: _write_comparison(tmp_path, values, **options)


@pytest.fixture
def make_run():
    """Return the function that writes one run folder."""
    return write_run
