"""Every parser of the package, with valid inputs and the call that fuzz makes."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.faults.children import command, working_in


@dataclass(frozen=True)
class Target:
    """A parser: valid inputs, and the call."""

    name: str
    seeds: tuple[bytes, ...]
    call: Callable[[bytes], object]
    share: float
    """How many of a hundred inputs it gets."""
    text: bool = False
    """Whether it takes words, so that bytes that are no text never reach it."""


def targets(place: Path) -> list[Target]:
    """Return every parser, with the files of one input at a time below ``place``."""
    return [*_tables(place), *_texts(place), *_records(place), *_arrays(place), *_words()]


def _file(place: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def call(data: bytes) -> object:
        path = place / name
        path.write_bytes(data)
        return read(path)

    return call


def _tables(place: Path) -> list[Target]:
    from wellposed.tasks import build_task
    from wellposed.tasks.data.labelled import TableOptions, load_labelled
    from wellposed.tasks.data.minbert import read_minbert
    from wellposed.tasks.listops import ListOpsOptions
    from wellposed.tasks.retrieval import read_pairs

    rows = [("pos" if n % 2 else "neg", f"a film {n}, so") for n in range(24)]
    tsv = "label\ttext\n" + "".join(f"{a}\t{b}\n" for a, b in rows)
    csv = "label,text\n" + "".join(f'{a},"{b} ""q"""\n' for a, b in rows)
    jsonl = "".join(json.dumps({"label": a, "text": b}) + "\n" for a, b in rows)
    whole = json.dumps([{"label": a, "text": b} for a, b in rows])

    def labelled(path: Path) -> object:
        return load_labelled(str(path), valid=None, test=None, table=TableOptions())

    found = [
        Target(
            f"labelled rows, .{suffix}",
            (text.encode(),),
            _file(place, f"rows.train.{suffix}", labelled),
            share,
        )
        for suffix, text, share in (
            ("tsv", tsv, 9),
            ("csv", csv, 9),
            ("jsonl", jsonl, 7),
            ("json", whole, 7),
        )
    ]
    found.append(
        Target(
            "labelled rows, .csv.gz",
            (gzip.compress(csv.encode(), mtime=0),),
            _file(place, "z.train.csv.gz", labelled),
            3,
        )
    )
    found.append(Target("parquet", (_parquet(),), _file(place, "rows.train.parquet", labelled), 2))
    sets = place / "sets"
    sets.mkdir(exist_ok=True)
    for split in ("train", "dev"):
        for name, head, row in (
            ("ids-sst", "sentence\tsentiment", "a film\t3"),
            ("quora", "sentence1\tsentence2\tis_duplicate", "a\tb\t1.0"),
            ("sts", "sentence1\tsentence2\tsimilarity", "a\tb\t2.5"),
        ):
            (sets / f"{name}-{split}.csv").write_text(
                f"\tid\t{head}\n" + "".join(f"{n}\tx\t{row}\n" for n in range(3))
            )
    sts = (sets / "sts-train.csv").read_bytes()
    found.append(
        Target(
            "the three sets of McGrath (2024)",
            (sts,),
            _file(sets, "sts-train.csv", lambda _: read_minbert(sets)),
            4,
        )
    )
    pairs = b"".join(
        b"%d.0 doc%d doc%d a text of one\tanother text\n" % (n % 2, n, n + 1) for n in range(24)
    )
    found.append(
        Target(
            "pairs of documents",
            (pairs,),
            _file(
                place, "aan.train.tsv", lambda path: read_pairs(str(path), valid=None, test=None)
            ),
            3,
        )
    )
    ops = b"Source\tTarget\n" + b"( ( [MAX 1 ) 2 ] )\t2\n" * 30
    found.append(
        Target(
            "ListOps files",
            (ops,),
            _file(
                place,
                "basic_train.tsv",
                lambda path: build_task("listops", vars(ListOpsOptions(data=str(path)))),
            ),
            2,
        )
    )
    return found


def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    columns = {"label": ["pos", "neg"] * 12, "text": [f"a film {n}" for n in range(24)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _texts(place: Path) -> list[Target]:
    from wellposed.cli.prediction.lines import LineSource
    from wellposed.tasks.data.dialogues import load_dialogues, read_synonyms
    from wellposed.tasks.data.parallel import Languages, load_parallel
    from wellposed.tasks.data.texts import load_texts
    from wellposed.tasks.metrics.embedding import read_word_vectors

    prose = "The north wind and the sun were disputing which was the stronger. " * 4
    spaced = "n o r t h _ w i n d\nt h e _ s u n\n" * 4
    vectors = "the 0.1 -0.2 3e-1\nsun 1 2 3\nnorth wind 0 0 1\n"
    german, english = "ein Haus\neine Katze\n" * 24, "a house\na cat\n" * 24
    aligned = place / "aligned"
    aligned.mkdir(exist_ok=True)
    (aligned / "train.en").write_text(english)
    persona = "1 your persona: i like cats.\n2 hello\thi you\n3 and now\tbye\n" * 6
    daily = "Hello . __eou__ Hi there . __eou__\nBye . __eou__ Bye bye . __eou__\n" * 12

    def lines(path: Path) -> object:
        with LineSource(text=None, path=path) as source:
            return [list(source), list(source)]

    def text(form: str) -> Callable[[Path], object]:
        return lambda path: load_texts(str(path), valid=None, test=None, text_format=form)

    def dialogues(path: Path) -> object:
        return load_dialogues(str(path))

    packed = gzip.compress(vectors.encode(), mtime=0)
    return [
        Target("a text", (prose.encode(), spaced.encode()), _file(place, "a.txt", text("auto")), 6),
        Target("spaced characters", (spaced.encode(),), _file(place, "s.txt", text("spaced")), 3),
        Target(
            "lines to predict",
            (prose.encode(), gzip.compress(prose.encode(), mtime=0)),
            _file(place, "lines", lines),
            5,
        ),
        Target(
            "word vectors",
            (vectors.encode(), b"2 3\n" + vectors.encode()),
            _file(place, "vec.txt", read_word_vectors),
            12,
        ),
        Target("word vectors, gzip", (packed,), _file(place, "vec.txt.gz", read_word_vectors), 2),
        Target(
            "aligned files",
            (german.encode(),),
            _file(
                aligned, "train.de", lambda _: load_parallel(str(aligned), Languages("de", "en"))
            ),
            4,
        ),
        Target(
            "a table of two languages",
            (b"".join(b"ein Haus\ta house\n" for _ in range(44)),),
            _file(
                place,
                "train.tsv",
                lambda path: load_parallel(str(path), Languages("de", "en", columns="de,en")),
            ),
            4,
        ),
        Target(
            "dialogues",
            (daily.encode(), persona.encode()),
            _file(place, "dialogues_train.txt", dialogues),
            5,
        ),
        Target(
            "synonyms",
            (b"car auto automobile\nsun star\n",),
            _file(place, "syn.txt", read_synonyms),
            2,
        ),
    ]


def _records(place: Path) -> list[Target]:
    from wellposed.compare.compare import ORDER
    from wellposed.measurement import Measurement
    from wellposed.recipes.reproduction_page import reproduction_page
    from wellposed.report import aggregate
    from wellposed.training import read_result, verify_run_file
    from wellposed.training.certified.record import read_certified
    from wellposed.training.config import RunConfig, TrainOptions, read_toml
    from wellposed.training.folder.metrics import MetricsFile
    from wellposed.training.folder.run_folder import read_config, write_environment

    config = RunConfig("char_lm", {"data": "x"}, train=TrainOptions(steps=3)).to_dict()
    import tomli_w

    toml = tomli_w.dumps(config).encode()
    result = {
        "schema_version": 1,
        "task": "char_lm",
        "variant": "post_ln",
        "seed": 0,
        "results": {"char_lm": {"loss,test": 1.5}},
        "headline": "loss",
        "higher_is_better": {"loss": False},
        "reference": {"loss": 3.0},
        "config": config,
        "train_info": {"status": "success", "steps": 3},
        "date": "2026-01-01T00:00:00+00:00",
        "command": ["a"],
        "data": {},
        "n-samples": {},
        "versions": {},
    }
    rows = (
        b'{"step": 1, "split": "train", "loss": 1.5}\n{"step": 1, "split": "valid", "loss": 1.25,'
        b' "best": true}\n'
    )
    certified = {
        "format": 1,
        "run_date": "d",
        "split": "test",
        "norm": "tok",
        "examples": 3,
        "shares": [0.1, 0.2],
        "certified": [0.5, 0.4],
        "attacked": [0.6, 0.5],
    }
    measured = {
        "schema_version": 1,
        "rows": [{"stack": "d", "layer": 0, "role": "query", "path": "a", "err_orth": 0.1}],
        "activations": [],
        "notes": [],
    }
    claim = {
        "recipe": "kim2021/figure-2",
        "scale": "mini",
        "paper_says": "a",
        "we_got": "b",
        "holds": True,
        "seconds": 1.0,
        "criterion": {"test": "t", "seeds": 3, "uncertainty": "u"},
        "notes": ["n"],
        "command": "c",
        "data": None,
    }
    run, claims, manifest = (place / name for name in ("run", "claims", "manifest"))
    for folder in (run, claims, manifest):
        folder.mkdir(exist_ok=True)
    (run / "config.toml").write_bytes(toml)
    (manifest / "it").write_bytes(b"it")

    def truncate(path: Path) -> None:
        with MetricsFile(path.parent, rows=1):
            pass

    def environment(path: Path) -> None:
        write_environment(path.parent, {"date": "d", "command": []}, 0)

    entry = {"it": {"bytes": 2, "sha256": "0" * 64}}
    return [
        Target(
            "configuration, TOML",
            (toml,),
            _file(place, "config.toml", lambda path: read_config(path.parent)),
            2,
        ),
        Target(
            "TOML alone",
            (toml,),
            _file(place, "b.toml", lambda path: RunConfig.from_dict(read_toml(path))),
            2,
        ),
        Target("metrics.jsonl at resume", (rows,), _file(place, "metrics.jsonl", truncate), 4),
        Target(
            "env.json",
            (b'{"starts": [{"from_step": 0}]}',),
            _file(place, "env.json", environment),
            3,
        ),
        Target(
            "result.json at resume",
            (json.dumps(result).encode(),),
            _file(place, "result.json", lambda p: read_result(p.parent)),
            4,
        ),
        Target(
            "result.json in a report",
            (json.dumps(result).encode(),),
            _file(run, "result.json", lambda p: aggregate([p.parent]).table()),
            6,
        ),
        Target(
            "certified.json",
            (json.dumps(certified).encode(),),
            _file(place, "certified.json", lambda p: read_certified(p.parent, run_date="d")),
            4,
        ),
        Target(
            "a measurement",
            (json.dumps(measured).encode(),),
            _file(place, "m.json", lambda p: Measurement.from_json(p).table()),
            4,
        ),
        Target(
            "a manifest",
            (json.dumps({"format": 1, "files": entry}).encode(),),
            _file(manifest, "manifest.json", lambda p: verify_run_file(p.parent / "it")),
            4,
        ),
        Target(
            "claims of a reproduction",
            (json.dumps(claim).encode(),),
            _file(claims, "kim2021-figure-2.json", lambda p: reproduction_page(p.parent)),
            4,
        ),
        Target(
            "the order of a comparison",
            (b'{"variants": ["post_ln"]}',),
            _order(place, ORDER, result, aggregate),
            3,
        ),
    ]


def _order(
    place: Path, name: str, result: dict[str, Any], aggregate: Callable[..., Any]
) -> Callable[[bytes], object]:
    run = place / "ordered" / "post_ln" / "seed-0"
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text("task = 'char_lm'\n")
    (run / "result.json").write_text(json.dumps(result))
    return _file(place / "ordered", name, lambda path: aggregate([path.parent]).table())


def _arrays(place: Path) -> list[Target]:
    import numpy as np
    import torch
    from PIL import Image

    from wellposed.tasks.data.images import read_cifar_binary, read_image_file, read_npz
    from wellposed.training.folder import checkpoints
    from wellposed.training.folder.tensors import encode

    arrays = io.BytesIO()
    np.savez_compressed(arrays, x=np.zeros((2, 4, 4), np.uint8), y=np.zeros(2, np.int64))
    images = []
    for form in ("png", "gif", "bmp", "ppm", "tiff", "jpeg"):
        out = io.BytesIO()
        Image.new("RGB", (5, 4), (9, 8, 7)).save(out, form)
        images.append(out.getvalue())
    layer = torch.nn.Linear(2, 2)
    weights = encode({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    folder = place / "checkpoint-1"
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text("{}")

    def load(path: Path) -> object:
        return checkpoints.load_checkpoint(path.parent, layer)

    return [
        Target("images in npz", (arrays.getvalue(),), _file(place, "a.npz", read_npz), 5),
        Target("image files", tuple(images), _file(place, "image", read_image_file), 5),
        Target(
            "CIFAR, binary", (bytes(3073),), _file(place, "data_batch_1.bin", read_cifar_binary), 1
        ),
        Target("weights of a checkpoint", (weights,), _file(folder, "model.safetensors", load), 5),
        Target("state of a checkpoint", (_state(),), _checkpoint_state(folder, weights, layer), 4),
    ]


def _state() -> bytes:
    from wellposed.training.loop.state import TrainerState

    return json.dumps(TrainerState(step=3, best_metrics={"loss": 1.0}).to_dict()).encode()


def _checkpoint_state(folder: Path, weights: bytes, layer: Any) -> Callable[[bytes], object]:
    from wellposed.training.folder import checkpoints

    def call(data: bytes) -> object:
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "trainer_state.json").write_bytes(data)
        return checkpoints.load_checkpoint(folder, layer)

    return call


def _words() -> list[Target]:
    from wellposed.compare.named import NAMED
    from wellposed.compare.variants import apply_variant, variant_folder
    from wellposed.recipes.reproduce import RECIPES
    from wellposed.roles import find_roles
    from wellposed.tasks import build_task
    from wellposed.training.config import ConstrainOptions, RunConfig, TrainOptions
    from wellposed.training.folder.hub import check_repository

    base = RunConfig("listops")

    def variant(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        return apply_variant(text, base), variant_folder(text)

    model = _encoder()

    def roles(data: bytes) -> object:
        return find_roles(model, patterns={"query": data.decode("utf-8", "replace")})

    def constrained(data: bytes) -> object:
        import torch

        import wellposed

        patterns = ConstrainOptions(where=data.decode("utf-8", "replace")).patterns
        handle = wellposed.constrain_(model, torch.optim.SGD(model.parameters()), where=patterns)
        handle.remove()
        return handle

    def train_options(data: bytes) -> object:
        return RunConfig.from_dict({"task": "listops", "train": _loose(data)})

    def task_options(data: bytes) -> object:
        return build_task(
            "listops", {"train_size": 4, "valid_size": 2, "test_size": 2, **_loose(data)}
        )

    def named(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        for registry in (NAMED, RECIPES):
            try:
                registry.get(text)
            except ValueError:
                continue
        return check_repository(text)

    options = json.dumps(vars(TrainOptions(steps=3)))
    variants = (
        b"post_ln",
        b"lipschitz:2",
        b"oc3:1e-4",
        b"key:1e-2",
        b"rezero",
        b"t_fixup",
        b"cap:3.5",
    )
    train = (
        b"train char_lm --steps 3 --learning-rate 1e-3 --model.hidden-size 16 --out x --variant"
        b" oc1:1e-4 --print-config"
    )
    sized = (
        b"compare listops --seeds 2 --variants a,b --train-size 10 --max-length 50 --penalty.key"
        b" 1e-3 --print-config"
    )
    return [
        Target("variants", variants, variant, 16, text=True),
        Target(
            "patterns of roles", (b"layers.*.self_attn.in_proj_weight", b"*"), roles, 1, text=True
        ),
        Target(
            "patterns of constraints",
            (b"*.linear1", b"*.q_proj,*.linear?", b"layers.0.linear[12]"),
            constrained,
            2,
            text=True,
        ),
        Target("options of training", (options.encode(),), train_options, 5),
        Target(
            "options of a task",
            (b'{"max_depth": 3, "max_arguments": 4, "data": "builtin"}',),
            task_options,
            2,
        ),
        Target(
            "names of recipes and presets",
            (b"kim2021/figure-2", b"me/model"),
            named,
            3,
            text=True,
        ),
        Target("words of train and compare", (train, sized), _command_words, 0.2, text=True),
        Target("words of other commands", tuple(_OTHERS), _command_words, 0.4, text=True),
    ]


_OTHERS = (
    b"certify no-such-model --norm tok --radii 0,0.1 --examples 3 --seq-len 5",
    b"predict no-such-model --text hello --temperature 0.8 --beams 4 --n-best 2",
    b"measure no-such-model --text hello --out x",
    b"report no-such-run other --out page.html",
    b"reproduce no/such-recipe --scale mini --data none",
    b"push no-such-run owner/name --public",
)


def _loose(data: bytes) -> dict[str, Any]:
    """Return a JSON object as plain values; what is none of that is no input of an options
    class."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return {str(name): each for name, each in value.items()} if isinstance(value, dict) else {}


def _command_words(data: bytes) -> object:
    """Run a command whose model or data does not exist, or that prints its configuration."""
    words = [
        word for word in data.decode("utf-8", "replace").replace("\x00", "").split(" ") if word
    ]
    if words[:1] in (["train"], ["compare"]):
        words.append("--print-config")
    elif words[:1] == ["doctor"] or any("kim2021" in word for word in words):
        return None
    with tempfile.TemporaryDirectory() as empty, working_in(Path(empty)):
        said = command(words)
    if said.foreign or "Traceback" in said.err or said.status not in (0, 1, 2):
        raise RuntimeError(said.foreign or f"exit status {said.status}: {said.err[-300:]}")
    return said


def _encoder() -> Any:
    from torch import nn

    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
