"""What follows the last step of a run, in order: final weights are chosen, scored and saved, and
the result written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate import PartialState

from wellposed.errors import CheckpointError, ConvergenceError
from wellposed.training.config import RunConfig
from wellposed.training.folder import checkpoints, manifest, run_folder
from wellposed.training.folder.model_card import model_card
from wellposed.training.folder.result import (
    RunResult,
    Status,
    describe_result,
    made_in,
    write_result,
)
from wellposed.training.folder.run_folder import environment_of
from wellposed.training.folder.save import save_final
from wellposed.training.folder.tensors import load_model_tensors, model_tensors
from wellposed.training.loop.divergence import Divergence
from wellposed.training.loop.processes import Cancelled
from wellposed.training.loop.progress import logger
from wellposed.training.loop.run import Run
from wellposed.training.loop.state import Evaluation, TrainerState
from wellposed.training.loop.steps import evaluate, validate

if TYPE_CHECKING:
    from wellposed.tasks import Task

GENERATE_BATCH = 64


def finish(run: Run) -> RunResult:
    """Choose the weights on *valid*, score them on *test*, which is read here alone, and leave them
    in ``final/``."""
    lost = load_best_weights(run)
    notes = choose_mean_weights(run)
    test = evaluate(run, "test")
    valid_scores, test_scores = score_texts(run, "valid"), score_texts(run, "test")
    if test_scores and (described := run.task.describe_generation()):
        notes["generation"] = described
    test = replace(test, metrics={**test.metrics, **test_scores}, notes=notes)
    row = {"step": run.state.best_step, "split": "test", **test.metrics}
    run.add_row({**row, "seconds": run.elapsed()})
    valid = run.best_evaluation()["valid"]
    valid = replace(valid, metrics={**valid.metrics, **valid_scores})
    run.measure("measure-final.json")
    evaluations = {"valid": valid, "test": test}
    whole = run.whole_to_save()
    if whole is not None:
        card = model_card(run.config, whole, run.task, evaluations, run.environment["command"])
        save_final(run.out, whole, run.task, card)
    result = end(run, "success", evaluations, lost)
    if run.history is not None and run.is_main:
        run.history.remove()
    return result


def cancel(run: Run) -> RunResult:
    """Save a checkpoint and end a run that was asked to stop."""
    run.save()
    message = f"interrupted after step {run.state.step}; continue with --resume auto"
    run.progress.say(f"{run.out}: {message}", warn=True)
    return end(run, "cancelled", run.best_evaluation(), message)


def fail(run: Run, error: Divergence | ConvergenceError) -> RunResult:
    """End a run that cannot go on; the weights are those of the last step with finite numbers."""
    run.progress.say(f"stopped: {error}", warn=True)
    divergence = error if isinstance(error, Divergence) else None
    return end(run, "failed", run.best_evaluation(), str(error), divergence)


def fail_before_start(
    config: RunConfig, out: Path, task: Task, error: ConvergenceError, *, resume: str, command: Any
) -> RunResult:
    """End a run whose model or constraint could not be made."""
    environment, state = environment_of(task, command), TrainerState()
    values = describe_result("failed", config, task, state, evaluations={}, message=str(error))
    result = RunResult("failed", out, {**values, **made_in(environment)}, str(error))
    if PartialState().is_main_process:
        logger.warning("%s: failed: %s", out, error)
        run_folder.enter_run_folder(out, config, resume)
        manifest.remove(out)
        run_folder.write_environment(out, environment, 0)
        write_result(result)
    return result


def load_best_weights(run: Run) -> str:
    """Load the weights that were best on *valid*; where those are damaged, keep the last ones and
    return why."""
    state = run.state
    if state.best_step == state.step:
        return ""
    best = run.out / f"checkpoint-{state.best_step}"
    try:
        checkpoints.load_weights(best, run.model)
    except CheckpointError as error:
        lost = (
            f"the best weights, of step {state.best_step}, are lost; those of step {state.step} are"
            f" used: {error}"
        )
        run.progress.say(lost, warn=True)
        state.best_value = None
        validate(run)
        return lost
    return ""


def choose_mean_weights(run: Run) -> dict[str, Any]:
    """Take the mean of the last evaluated weights where it is better on *valid*; return what was
    compared and used."""
    if run.history is None:
        return {}
    run.accelerator.wait_for_everyone()
    state, steps, headline = run.state, run.history.steps(), run.task.headline
    report: dict[str, Any] = {"used": "best", "best_step": state.best_step, "averaged_steps": steps}
    report |= {"chosen_by": f"{headline},valid", "best": state.best_value, "average": None}
    if len(steps) > 1:
        own = {name: tensor.clone() for name, tensor in model_tensors(run.model)[0].items()}
        load_model_tensors(run.model, run.history.mean())
        found = evaluate(run, "valid")
        report["average"] = found.metrics[headline]
        if state.is_better(found.metrics[headline], run.task):
            report["used"] = "average"
            state.best_metrics, state.best_examples = found.metrics, found.examples
        else:
            load_model_tensors(run.model, own)
    run.progress.say(
        f"final weights: {report['used']} ({report['chosen_by']}: best {report['best']}, mean"
        f" {report['average']})"
    )
    return {"weights": report}


def score_texts(run: Run, split: Literal["valid", "test"]) -> dict[str, float]:
    """Return the scores of texts that the final weights generate for ``split``; none for a task
    without texts."""
    if run.task.report_headline is not None and run.stop_requested():
        raise Cancelled

    def notify(done: int, count: int) -> None:
        if run.stop.requested and run.accelerator.num_processes == 1:
            raise Cancelled
        run.progress.part(f"generating the texts of {split}", done, count)

    how = {"batch_size": min(GENERATE_BATCH, run.options.batch_size), "notify": notify}
    scores = run.task.generate_metrics(run.whole().model, split, **how)
    return {name: float(value) for name, value in scores.items()}


def end(
    run: Run,
    status: Status,
    evaluations: Mapping[str, Evaluation],
    message: str = "",
    divergence: Divergence | None = None,
) -> RunResult:
    """Write ``result.json`` and the manifest, and return the result."""
    run.state.seconds = run.elapsed()
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    said = {"evaluations": evaluations, "message": message, "divergence": divergence}
    given = (status, run.config, run.task, run.state)
    values = describe_result(*given, parameters=parameters, **said)
    values |= made_in(run.environment or run_folder.environment(None))
    values["train_info"].update(run.constraint_error(), **run.started)
    result = RunResult(status, run.out, values, message)
    if run.is_main:
        write_result(result)
        run.trackers.end(values["results"][run.config.task], succeeded=status == "success")
    return result
