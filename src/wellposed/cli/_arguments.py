"""Turning words into a `RunConfig`: what `train` and `compare` share.

Precedence, lowest first: defaults, ``--preset`` or ``--config``, the variant (``train`` only), the
command line.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from wellposed.cli._start import READ_BY, start_config
from wellposed.cli.first_look import first_look
from wellposed.cli.parser import (
    HELP,
    HELP_ALL,
    OTHER_SPELLINGS,
    Flat,
    ImportedFiles,
    parse_words,
    unchecked,
)
from wellposed.errors import ConfigError, DataError, unknown_name
from wellposed.plugins import import_again, imported_files
from wellposed.tasks import TASKS
from wellposed.training.config import (
    ConstrainOptions,
    ModelOptions,
    PenaltyOptions,
    RunConfig,
    StartOptions,
    TrainOptions,
    read_toml,
)

COMMON = frozenset(
    {
        *("variant", "variants", "seeds", "out", "resume", "certify"),
        *("data", "src", "tgt", "columns", "label_column", "text_column", "model"),
        *("steps", "epochs", "batch_size", "learning_rate", "seed"),
        *("model.hidden_size", "model.num_hidden_layers"),
    }
)
"""The options that ``--help`` of `train` and `compare` shows; ``model`` is ``--from``."""
SECTIONS = ("train", "model", "penalty", "constrain")
"""Parts of a `RunConfig` whose options are those of the command line."""


@dataclass(frozen=True)
class StartArguments(StartOptions):
    """A Hugging Face model to start from."""

    model: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Start from this model: a folder, a name of the hub, a finished run, or a config.json (random weights)."""


@dataclass(frozen=True)
class FileArguments:
    """Where a configuration comes from."""

    config: Path | None = None
    """Read this config.toml (as a run folder holds) before the other options."""
    preset: str | None = None
    """Start from a named configuration."""
    print_config: bool = False
    """Print the resolved configuration as TOML and stop."""
    imports: ImportedFiles = ()
    """Run this Python file first: the tasks, variants and attentions that it registers can then be named."""


def split_task(command: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take the task name, the first word that is not an option, from the words of ``train`` or
    ``compare``."""
    if not words or words[0] in {*HELP, HELP_ALL}:
        return None, list(words)
    if words[0].startswith("-"):
        raise ConfigError(
            f"wellposed {command}: expected a task first, received {words[0]!r}; tasks:"
            f" {_task_names()}"
        )
    if words[0] not in TASKS:
        raise unknown_name("task", words[0], TASKS.names())
    return words[0], list(words[1:])


def task_usage(command: str) -> str:
    """Return the help of a command whose task has not been named yet."""
    width = max(map(len, TASKS.names()))
    rows = "\n".join(f"  {name:<{width}}  {TASKS.get(name).summary}" for name in TASKS)
    more = f"`wellposed {command} TASK --help` lists the options."
    return f"usage: wellposed {command} TASK [OPTIONS]\n\ntasks:\n{rows}\n\n{more}"


def base_config(task: str, words: Sequence[str]) -> RunConfig:
    """Return the configuration that ``--from``, ``--preset`` or ``--config`` names, else the
    defaults."""
    names = ("from", "preset", "config", "steps", "epochs", *READ_BY)
    said, _ = first_look(words, names, ["from-scratch"])
    sources = [name for name in names[:3] if said[name]]
    if len(sources) > 1:
        raise ConfigError(f"--{' and --'.join(sources)} each name a model; give one of them")
    base = RunConfig(task=task)
    if said["from"]:
        given = [name for name in READ_BY if said[name]]
        base = start_config(task, said["from"], from_scratch=said["from-scratch"], given=given)
    elif said["preset"]:
        from wellposed.compare.named import NAMED

        base = _of_task(NAMED.get(said["preset"])(), task, f"preset {said['preset']!r}")
    elif said["config"]:
        base = _of_task(read_config(Path(said["config"])), task, said["config"])
        import_again(base.imports, where=said["config"])
    if said["steps"] is None:
        return base
    if said["epochs"] not in (None, "None"):
        raise ConfigError(
            f"--steps {said['steps']} and --epochs {said['epochs']} both say how long to train;"
            " give one of them"
        )
    return dataclasses.replace(base, train=dataclasses.replace(base.train, epochs=None))


def read_config(path: Path) -> RunConfig:
    """Read a ``config.toml``; a missing file or a syntax error names the file and line."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such configuration file; a run folder holds one as config.toml"
        )
    return RunConfig.from_dict(read_toml(path), where=str(path))


def parse(
    command: str, base: RunConfig, words: Sequence[str], extra: type, summary: str
) -> tuple[RunConfig, Any]:
    """Parse the options of a task, a run and a command; return the configuration and the ``extra``
    options."""
    strangers, _ = first_look(words, strangers=[name[2:] for name in OTHER_SPELLINGS])
    for name, value in strangers.items():
        if value is not None:
            meant = OTHER_SPELLINGS[f"--{name}"]
            raise ConfigError(f"{command} {base.task}: no option --{name}; did you mean {meant}?")
    options = TASKS.get(base.task).options
    hints = {
        "command": Annotated[extra, Flat],
        "files": Annotated[FileArguments, Flat],
        "task": Annotated[options, Flat],
        "train": Annotated[TrainOptions, Flat],
        "model": ModelOptions,
        "penalty": PenaltyOptions,
        "constrain": ConstrainOptions,
        "start": Annotated[StartArguments, Flat],
    }
    arguments = dataclasses.make_dataclass(
        "Arguments", list(hints.items()), frozen=True, kw_only=True
    )
    default = arguments(
        command=extra(),
        files=FileArguments(),
        task=_task_defaults(options, base),
        start=StartArguments(**dataclasses.asdict(base.start)),
        **{name: getattr(base, name) for name in SECTIONS},
    )
    parsed: Any = parse_words(
        arguments,
        words,
        default=default,
        prog=f"wellposed {command} {base.task}",
        description=summary,
        common=COMMON,
    )
    run = dataclasses.replace(
        base,
        task_options=dataclasses.asdict(parsed.task),
        start=StartOptions(
            **{**dataclasses.asdict(parsed.start), "model": base.start.model or parsed.start.model}
        ),
        **{name: getattr(parsed, name) for name in SECTIONS},
        imports={**base.imports, **imported_files()},
    )
    if not (run.start.model or TASKS.get(run.task).own_models):
        raise ConfigError(
            f"{run.task}: no architecture of wellposed reads images as patches; give a Hugging Face"
            " model with --from FOLDER, or the config.json of one (docs/howto.md has one for small"
            " images); the task image reads pixels one by one"
        )
    if parsed.files.print_config:
        _print_config(run)
    return run, parsed.command


def command_words(command: str, words: Sequence[str]) -> list[str]:
    """Return the exact command, as reports print it."""
    return ["wellposed", command, *words]


def _task_defaults(options: type, base: RunConfig) -> Any:
    known = {item.name for item in dataclasses.fields(options)}
    unknown = [name for name in base.task_options if name not in known]
    if unknown:
        raise unknown_name(f"option of task {base.task}", unknown[0], known)
    defaults = {
        item.name: tyro.MISSING if item.default is dataclasses.MISSING else item.default
        for item in dataclasses.fields(options)
    }
    return unchecked(options, {**defaults, **base.task_options})


def _of_task(config: RunConfig, task: str, where: str) -> RunConfig:
    if config.task != task:
        raise ConfigError(
            f"{where} is a configuration of task {config.task!r}, the command names {task!r}"
        )
    return config


def _print_config(run: RunConfig) -> NoReturn:
    import tomli_w

    sys.stdout.write(tomli_w.dumps(run.to_dict()))
    raise SystemExit(0)


def _task_names() -> str:
    return ", ".join(TASKS.names())
