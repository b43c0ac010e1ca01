"""The options of `train` and `compare`, from command-line words to a `RunConfig`. Later ones win:
defaults; ``--preset``, ``--config`` or ``--from``; the variant (of ``train``); the command line."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from wellposed.errors import ConfigError, DataError
from wellposed.text_table import aligned
from wellposed_lab.cli import parser
from wellposed_lab.cli.load import model_folder, near_names
from wellposed_lab.cli.peek_arguments import peek_arguments
from wellposed_lab.plugins import import_again, imported_files
from wellposed_lab.tasks.image_classification import PROCESSOR_FILES, has_processor
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.tasks.text.tokenizers import has_tokenizer
from wellposed_lab.training import config as configs
from wellposed_lab.training.loop.processes import is_one_of_several

logger = logging.getLogger("wellposed.lab")
_COMMON = (
    "variant variants seeds out resume data src tgt label_column text_column model"
    " steps epochs batch_size learning_rate learning_rates seed margin_loss worth quiet max_length"
)
COMMON = frozenset(_COMMON.split())
"""The options that ``--help`` of `train` and `compare` shows; ``model`` is ``--from``."""
SECTIONS = ("train", "model", "penalty", "constrain")
"""Sections of a `RunConfig` that are options of the command line."""
NAMED_SECTIONS = SECTIONS[1:]
"""Sections whose options carry the section's name, as in ``--model.norm``."""
FINE_TUNING = configs.TrainOptions(
    epochs=3,
    learning_rate=3e-5,
    schedule="linear",
    warmup_share=0.1,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
)
"""Defaults for training a pretrained model (Devlin et al. 2019, appendix A.3)."""
LENGTHS = ("max_length", "seq_len", "max_tokens")
"""Task options that say how many tokens of a text are read."""
ALIASES = {
    "model_name_or_path": "from",
    "output_dir": "out",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_share",
    "label_smoothing_factor": "label_smoothing",
    "eval_steps": "eval_every",
    "save_steps": "checkpoint_every",
    "torch_compile": "compile",
    "report_to": "track",
    "train_file": "data",
    "validation_file": "valid",
    "test_file": "test",
    "max_seq_length": "max_length",
    "block_size": "seq_len",
}
"""Names of the Trainer of transformers and its example scripts, and ours for the same option."""
TrackerNames: TypeAlias = Annotated[tuple[str, ...], parser.Typed(metavar="NAME")]
"""The option ``--track`` of a command; it may be repeated."""


@dataclass(frozen=True)
class StartArguments(configs.StartOptions):
    """A Hugging Face model to start from."""

    model: Annotated[str, parser.Typed("from", "MODEL")] = ""
    """Start from this model: a folder, a hub name, a finished run, or a config.json (random weights)."""


@dataclass(frozen=True)
class FileArguments:
    """The source of a configuration."""

    config: Path | None = None
    """Read this config.toml (every run folder has one) before the other options."""
    preset: str | None = None
    """Start from a named configuration."""
    print_config: bool = False
    """Print the resolved configuration as TOML and stop."""
    imports: parser.ImportedFiles = ()
    """Run this Python file first, to use the tasks, variants and attentions that it registers."""


def split_task(command: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the words into the task and its options. Without a task, print all and return None."""
    if not words or words[0] in {*parser.HELP, parser.HELP_ALL}:
        rows = aligned([(f"  {name}", TASKS.get(name).summary) for name in TASKS], "l")
        more = f"`wellposed {command} TASK --help` lists the options."
        print(f"usage: wellposed {command} TASK [OPTIONS]\n\ntasks:\n{rows}\n\n{more}")
        return None, []
    if words[0].startswith("-"):
        raise ConfigError(
            f"wellposed {command}: expected a task first, received {words[0]!r}; tasks:"
            f" {', '.join(TASKS.names())}"
        )
    return TASKS.get(words[0]).name, [_new_name(word) for word in words[1:]]


def _new_name(word: str) -> str:
    """Return the word with our name of its option; an option of earlier versions is refused."""
    option, equals, value = word.partition("=")
    name = option[2:].replace("-", "_") if option.startswith("--") else ""
    if name == "per_device_train_batch_size" and is_one_of_several():
        raise ConfigError(
            f"{option}: several processes share a batch here; give --batch-size, the examples of all"
        )
    if name in ALIASES:
        return f"--{ALIASES[name].replace('_', '-')}{equals}{value}"
    if name not in configs.RENAMED:
        return word
    new = f"--{configs.RENAMED[name].replace('_', '-')}"
    raise ConfigError(f"{option} is {new} now; write {new} {value or 'VALUE'}")


def base_config(task: str, words: Sequence[str]) -> configs.RunConfig:
    """Return the configuration of ``--from``, ``--preset`` or ``--config``, or the defaults."""
    names = ("from", "preset", "config", "steps", "epochs", *READ_BY)
    values, _ = peek_arguments(words, (*names, "certified-windows"), ["from-scratch"])
    sources = [name for name in names[:3] if values[name]]
    if len(sources) > 1:
        raise ConfigError(f"--{' and --'.join(sources)} each name a model; give one of them")
    base = configs.RunConfig(task=task)
    if values["from"]:
        named = [name for name in READ_BY if values[name]]
        # The words of a text in windows need no positions.
        named += LENGTHS if values["certified-windows"] else ()
        base = from_config(task, values["from"], from_scratch=values["from-scratch"], named=named)
    elif sources:
        base, where = _named_config(values)
        if base.task != task:
            raise ConfigError(
                f"{where} is a configuration of task {base.task!r}, the command names {task!r}"
            )
        import_again(base.imports, where=where)
    if values["steps"] is None:
        return base
    if values["epochs"] not in (None, "None"):
        raise ConfigError(
            f"--steps {values['steps']} and --epochs {values['epochs']} both say how long to train;"
            " give one of them"
        )
    return dataclasses.replace(base, train=dataclasses.replace(base.train, epochs=None))


def _named_config(values: dict[str, Any]) -> tuple[configs.RunConfig, str]:
    """Return the configuration of ``--preset`` or ``--config``, and its source for messages."""
    name = values["preset"]
    if name:
        from wellposed_lab.compare.run_presets import run_preset

        return run_preset(name), f"preset {name!r}"
    path = Path(values["config"])
    if not path.is_file():
        raise DataError(f"{path}: no such configuration file; each run folder has one, config.toml")
    return configs.RunConfig.from_dict(configs.read_toml(path), where=str(path)), str(path)


def from_config(
    task: str, name: str, *, from_scratch: bool, named: Sequence[str] = ()
) -> configs.RunConfig:
    """Return the default configuration of a run from the model ``name``: its tokenizer or
    processor, at most its positions, and fine-tuning. Options in ``named`` are left as they are."""
    from wellposed.models import text_positions
    from wellposed_lab.training.start import check_start

    is_config = Path(name).is_file()
    source = name if is_config else model_folder(name)
    kind = getattr(TASKS.get(task).build, "kind", None)
    if kind is not None:
        with near_names(name):
            positions = text_positions(check_start(source, kind))
    else:
        positions = None
    folder = Path(name).parent if is_config else Path(source)
    random = from_scratch or is_config
    defaults = {item.name: item.default for item in dataclasses.fields(TASKS.get(task).options)}
    known = defaults.keys()
    asked = [option for option in READ_BY if option in known and option not in named]
    read = {option: READ_BY[option](source, folder, random) for option in asked}
    train = configs.TrainOptions() if random else FINE_TUNING
    task_options: dict[str, Any] = {option: value for option, value in read.items() if value}
    for option in known & {*LENGTHS} - {*named}:
        usual = defaults[option]
        if positions is not None and isinstance(usual, int) and positions < usual:
            task_options[option] = positions
    start = configs.StartOptions(source, from_scratch=from_scratch)
    return configs.RunConfig(task, task_options, variant="plain", train=train, start=start)


def _tokenizer(source: str, folder: Path, random: bool) -> str:
    del source
    if not folder.is_dir() or has_tokenizer(folder):
        return f"hf:{folder}"
    if random:
        return ""
    raise ConfigError(
        f"{folder}: the folder has no tokenizer, and its weights need their own tokens; save it"
        " there with tokenizer.save_pretrained(FOLDER), name it with --tokenizer hf:FOLDER, or"
        " give --from-scratch"
    )


def _processor(source: str, folder: Path, random: bool) -> str:
    if random:
        return f"config:{source}"
    if not folder.is_dir() or has_processor(folder):
        return f"hf:{folder}"
    raise ConfigError(
        f"{folder}: no {PROCESSOR_FILES[0]}, so the preprocessing of its images is unknown; copy the"
        " file there, or name its folder with --processor hf:FOLDER. To use only the image size,"
        f" give --processor config:{folder}"
    )


READ_BY: dict[str, Callable[[str, Path, bool], str]] = {
    "tokenizer": _tokenizer,
    "processor": _processor,
}
"""Task options of how inputs are read, and a function (source, folder, random weights) for each."""


def parse(
    command: str, base: configs.RunConfig, words: Sequence[str], extra: type, summary: str
) -> tuple[configs.RunConfig, Any]:
    """Parse the options of a task, a run and a command; return the first two and ``extra``."""
    task = TASKS.get(base.task)
    sections = {name: getattr(base, name) for name in SECTIONS}
    parts = {
        "command": (extra, {}),
        "files": (FileArguments, {}),
        "task": (task.options, base.task_options),
        **{name: (type(value), vars(value)) for name, value in sections.items()},
        "start": (StartArguments, vars(base.start)),
    }
    hints = [
        (name, kind if name in NAMED_SECTIONS else Annotated[kind, parser.Flat])
        for name, (kind, _) in parts.items()
    ]
    arguments = dataclasses.make_dataclass("Arguments", hints, frozen=True, kw_only=True)
    parsed: Any = parser.parse_words(
        arguments,
        words,
        prog=f"wellposed {command} {base.task}",
        description=f"{summary}: {task.summary}. `wellposed compare` lists variants.",
        values={name: values for name, (_, values) in parts.items()},
        common=COMMON,
    )
    for option in LENGTHS:
        positions = base.task_options.get(option) if base.start.model else None
        if positions is not None and getattr(parsed.task, option) == positions:
            logger.info(
                "--%s %d: the model has no more positions", option.replace("_", "-"), positions
            )
    start = dataclasses.asdict(parsed.start)
    run = dataclasses.replace(
        base,
        task_options=dataclasses.asdict(parsed.task),
        start=configs.StartOptions(**{**start, "model": base.start.model or parsed.start.model}),
        **{name: getattr(parsed, name) for name in SECTIONS},
        imports={**base.imports, **imported_files()},
    )
    if not (run.start.model or task.own_models):
        raise ConfigError(
            f"{run.task}: wellposed has no architecture for image patches; give a Hugging Face"
            " model with --from FOLDER, or its config.json (docs/howto/images.md has one for small"
            " images). The task image reads pixels one by one"
        )
    if parsed.files.print_config:
        import tomli_w

        sys.stdout.write(tomli_w.dumps(run.to_dict()))
        raise SystemExit(0)
    return run, parsed.command
