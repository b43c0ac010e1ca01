"""The options of `train` and `compare`, from command-line words to a `RunConfig`. Later ones win:
defaults; ``--preset``, ``--config`` or ``--from``; the variant (of ``train``); the command line."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from wellposed.errors import ConfigError, DataError
from wellposed.model_options import ModelOptions
from wellposed.text_table import aligned
from wellposed_lab.cli import parser
from wellposed_lab.cli.load import model_folder, near_names
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
CommandArguments = TypeVar("CommandArguments")
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
    return TASKS.get(words[0]).name, list(words[1:])


def our_name(word: str) -> str:
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


def base_config(task: str, typed: parser.TypedValues) -> configs.RunConfig:
    """Return the configuration of ``--from``, ``--preset`` or ``--config``, or the defaults."""
    files = typed.get("files", {})
    start = typed.get("start", {})
    sources = {
        "from": start.get("model"),
        "preset": files.get("preset"),
        "config": files.get("config"),
    }
    empty = [f"--{name}" for name, value in sources.items() if value == ""]
    if empty:
        raise ConfigError(f"{', '.join(empty)}: expected a value, received none")
    chosen = [name for name, value in sources.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"--{' and --'.join(chosen)} each name a model; give one of them")

    base = configs.RunConfig(task=task)
    if sources["from"]:
        task_options = typed.get("task", {})
        named = [name for name in READ_BY if name in task_options]
        # The words of a text in windows need no positions.
        named += LENGTHS if task_options.get("certified_windows") else ()
        from_scratch = start.get("from_scratch", False)
        base = from_config(task, sources["from"], from_scratch=from_scratch, named=named)
    elif chosen:
        base, where = _named_config(files)
        if base.task != task:
            raise ConfigError(
                f"{where} is a configuration of task {base.task!r}, the command names {task!r}"
            )
        import_again(base.imports, where=where)
    return _with_typed_length(base, typed.get("train", {}))


def with_typed(base: configs.RunConfig, typed: parser.TypedValues) -> configs.RunConfig:
    """Return ``base`` with the typed options that it can have: those of a section together, or each
    that is right alone. Nothing is refused: `read_request` does it, for the result of a variant."""
    for section in (*SECTIONS, "start"):
        # The model of --from is in the base, by its folder.
        values = {name: v for name, v in typed.get(section, {}).items() if name != "model"}
        if not values:
            continue
        try:
            base = _with_section(base, section, values)
        except ConfigError:
            for name, value in values.items():
                with suppress(ConfigError):
                    base = _with_section(base, section, {name: value})
    task_options = {**base.task_options, **typed.get("task", {})}
    return dataclasses.replace(base, task_options=task_options)


def _with_section(
    base: configs.RunConfig, section: str, values: Mapping[str, Any]
) -> configs.RunConfig:
    changed = dataclasses.replace(getattr(base, section), **values)
    return dataclasses.replace(base, **{section: changed})


def _with_typed_length(base: configs.RunConfig, typed: Mapping[str, Any]) -> configs.RunConfig:
    """Return ``base`` without its epochs if steps are typed; both are refused."""
    steps = typed.get("steps")
    epochs = typed.get("epochs")
    if steps is None:
        return base
    if epochs is not None:
        raise ConfigError(
            f"--steps {steps} and --epochs {epochs:g} both say how long to train; give one of them"
        )
    return dataclasses.replace(base, train=dataclasses.replace(base.train, epochs=None))


def _named_config(files: Mapping[str, Any]) -> tuple[configs.RunConfig, str]:
    """Return the configuration of ``--preset`` or ``--config``, and its source for messages."""
    name = files.get("preset")
    if name:
        from wellposed_lab.compare.run_presets import run_preset

        return run_preset(name), f"preset {name!r}"
    path = Path(files["config"])
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
    option_names = defaults.keys()
    asked = [option for option in READ_BY if option in option_names and option not in named]
    read = {option: READ_BY[option](source, folder, random) for option in asked}
    train = configs.TrainOptions() if random else FINE_TUNING
    task_options: dict[str, Any] = {option: value for option, value in read.items() if value}
    for option in option_names & {*LENGTHS} - {*named}:
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


@dataclass(frozen=True)
class Request(Generic[CommandArguments]):
    """Result of reading the words of `train` or `compare`."""

    config: configs.RunConfig
    """The run, with the typed options."""
    base: configs.RunConfig
    """The run before they were put into it."""
    command: CommandArguments
    """The options of the command itself."""
    typed: parser.TypedValues
    """The typed values, without defaults."""


def read_request(
    command: str,
    task: str,
    words: Sequence[str],
    extra: type[CommandArguments],
    summary: str,
    *,
    changed: Callable[[configs.RunConfig, parser.TypedValues], configs.RunConfig] | None = None,
) -> Request[CommandArguments]:
    """Read the words after the task, once; return the run and the options of the command.

    Args:
        command: The name of the command.
        task: The name of the task.
        words: The words after it.
        extra: The dataclass of the command's own options.
        summary: First words of its help.
        changed: Function from the configuration of ``--from``, ``--preset`` or ``--config`` and the
            typed values to the one that these are put into.
    """
    form = command_form(command, task, extra, summary)
    typed = form.read(words)
    base = base_config(task, typed)
    if changed is not None:
        base = changed(base, typed)
    sections = {name: vars(getattr(base, name)) for name in SECTIONS}
    values = {
        "command": {},
        "files": {},
        "task": base.task_options,
        "start": vars(base.start),
        **sections,
    }
    if form.asks_for_help(words):
        form.print_help(words, values)
        raise SystemExit(0)

    filled: Any = form.fill(typed, values)
    _say_lengths(base, filled.task)
    config = _run_config(base, filled)
    if filled.files.print_config:
        import tomli_w

        sys.stdout.write(tomli_w.dumps(config.to_dict()))
        raise SystemExit(0)
    return Request(config, base, filled.command, typed)


def command_form(command: str, task: str, extra: type[Any], summary: str) -> parser.Form[Any]:
    """Return all options of a command on a task; those of the model need no ``--model.``."""
    spec = TASKS.get(task)
    hints = {
        "command": Annotated[extra, parser.Flat],
        "files": Annotated[FileArguments, parser.Flat],
        "task": Annotated[spec.options, parser.Flat],
        "train": Annotated[configs.TrainOptions, parser.Flat],
        "model": Annotated[ModelOptions, parser.Typed(has_short_names=True)],
        "penalty": configs.PenaltyOptions,
        "constrain": configs.ConstrainOptions,
        "start": Annotated[StartArguments, parser.Flat],
    }
    arguments = dataclasses.make_dataclass(
        "Arguments", list(hints.items()), frozen=True, kw_only=True
    )

    return parser.Form(
        arguments,
        prog=f"wellposed {command} {task}",
        description=f"{summary}: {spec.summary}. `wellposed compare` lists variants.",
        common=COMMON,
        epilog="--model.NAME may be written --NAME, if no other option has that name.",
        new_name=our_name,
    )


def _say_lengths(base: configs.RunConfig, task_options: Any) -> None:
    """Say which lengths the positions of the model set."""
    for option in LENGTHS:
        positions = base.task_options.get(option) if base.start.model else None
        if positions is not None and getattr(task_options, option) == positions:
            logger.info(
                "--%s %d: the model has no more positions", option.replace("_", "-"), positions
            )


def _run_config(base: configs.RunConfig, filled: Any) -> configs.RunConfig:
    """Return the run of the options ``filled``; what no option says is as in ``base``."""
    start = dataclasses.asdict(filled.start)
    run = dataclasses.replace(
        base,
        task_options=dataclasses.asdict(filled.task),
        start=configs.StartOptions(**{**start, "model": base.start.model or filled.start.model}),
        **{name: getattr(filled, name) for name in SECTIONS},
        imports={**base.imports, **imported_files()},
    )
    if not (run.start.model or TASKS.get(run.task).own_models):
        raise ConfigError(
            f"{run.task}: wellposed has no architecture for image patches; give a Hugging Face"
            " model with --from FOLDER, or its config.json (docs/howto/images.md has one for small"
            " images). The task image reads pixels one by one"
        )

    return run
