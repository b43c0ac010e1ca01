"""Finished runs of studies, made up rather than trained."""

from pathlib import Path

from wellposed.model_options import ModelOptions
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_studies.study import FinishedRun


def finished(
    task,
    variant,
    metrics,
    *,
    depth=1,
    seed=0,
    reference=None,
    folder=Path("nowhere") / "gamma0.5",
    needs_blocks=True,
):
    """Return a run of a variant with these metrics; without any it diverged."""
    model = ModelOptions(num_hidden_layers=depth)
    train = TrainOptions(seed=seed)
    config = RunConfig(task, variant=variant, model=model, train=train)
    run = FinishedRun(
        config,
        folder,
        metrics,
        reference or {},
        {"accuracy": True, "loss": False, "perplexity": False, "nats_per_char": False},
        {"valid": 1000, "test": 1000},
        {"parameters": 7, "seconds": 1.0, "reason": "" if metrics else "diverged"},
    )
    vars(run)["needs_blocks"] = needs_blocks  # there is no model to ask
    return run


def written(folder):
    """Return when each result below a folder was written; unchanged if nothing trained again."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
