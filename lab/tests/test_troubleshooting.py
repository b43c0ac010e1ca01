"""Each row of the page of troubleshooting: the message comes up, and the line that the page gives ends it."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.tokenizer_folders import bert_words, byte_level_bpe
from torch import nn

import wellposed as wp
from wellposed.errors import extra_line, missing_extra
from wellposed.words import WordCertificate, read_in_windows
from wellposed_lab.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| (?!you see|---)(.*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
ROWS = [*ROW.findall(PAGE.read_text("utf-8"))]
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


class Odd(nn.Module):
    """An attention whose names say nothing."""

    def __init__(self):
        super().__init__()
        self.abc = nn.Linear(16, 48)
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.abc(x).chunk(3, -1)]
        return self.mix(
            nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        )


class Direct(nn.Module):
    """A layer that runs its attention by `forward`, or calls it."""

    def __init__(self, *, called):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.called = called

    def forward(self, x):
        run = self.attention if self.called else self.attention.forward
        return run(x, x, x, need_weights=False)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def bert(size=40):
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=size, **SIZES)
    )


class Case:
    """One row: what raises or prints the message, and what the page's line does about it."""

    def __init__(self, tmp_path, monkeypatch, capsys):
        self.folder = tmp_path
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        monkeypatch.chdir(tmp_path)

    def cli(self, words):
        status = main(shlex.split(words))
        output = self.capsys.readouterr()
        return status, output.out + output.err

    def no_lab(self):
        with self.monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.startswith("wellposed_lab")]:
                patch.delitem(sys.modules, name)

            class Absent:
                def find_spec(self, name, path=None, target=None):
                    if name.startswith("wellposed_lab"):
                        raise ModuleNotFoundError(name, name="wellposed_lab")

            patch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
            runpy.run_module("wellposed", run_name="__main__")

    def no_accelerate(self):
        with self.monkeypatch.context() as patch:
            patch.setattr(
                transformers.training_args, "is_accelerate_available", lambda *a, **k: False
            )
            transformers.TrainingArguments(str(self.folder), use_cpu=True)

    def doctor(self):
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        return self.cli("doctor")[1]

    def constrain_odd(self, **options):
        model = nn.Sequential(Odd(), Odd())
        return wp.constrain_(model, sgd(model), where=("query",), **options)

    def constrain(self, where=("query",), owner=None):
        model = encoder()
        return wp.constrain_(model, sgd(owner or model), where=where)

    def constrain_twice(self, remove=False):
        model = encoder()
        optimizer = sgd(model)
        handle = wp.constrain_(model, optimizer, where=("query",))
        if remove:
            handle.remove()
        return wp.constrain_(model, optimizer, where=("query",))

    def in_half(self, dtype=torch.float16):
        model = encoder().half().to(dtype)
        return wp.constrain_(model, sgd(model), where=("query",))

    def windows(self, hook=False):
        tokenizer = bert_words(["good", "film"])
        model = read_in_windows(bert(), tokenizer, ["good film"])
        if hook:
            self.handle = model.model.bert.register_forward_hook(lambda *a: None)
        return model.eval(), tokenizer

    def own_ids(self):
        model, tokenizer = self.windows()
        return model(input_ids=torch.tensor(tokenizer(["good film"])["input_ids"]))

    def encoded_ids(self):
        model, tokenizer = self.windows()
        return model(input_ids=torch.stack(WordCertificate(model, tokenizer).encode(["good film"])))

    def direct(self, *, called):
        model = nn.Sequential(Direct(called=called), Direct(called=called))
        penalty = wp.OrthogonalityPenalty(model, affinity=1e-2)
        output = model(torch.randn(2, 5, 16))
        return output.sum() + penalty()

    def decoded(self, decode):
        model, tokenizer = self.windows()
        certificate = WordCertificate(model, tokenizer)
        return decode(certificate, certificate.encode(["good film"]))

    def padded(self, pad=False):
        tokenizer = byte_level_bpe(["oil"])
        if pad:
            tokenizer.pad_token = tokenizer.eos_token
        return read_in_windows(bert(len(tokenizer)), tokenizer, ["oil"])

    def hooked(self, remove=False):
        model, tokenizer = self.windows(hook=True)
        if remove:
            self.handle.remove()
        return WordCertificate(model, tokenizer)

    def reloaded(self, load):
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 40}
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)
        ).eval()
        wp.t_fixup_(model)
        model.save_pretrained(self.folder / "saved")
        ids = torch.arange(6)[None]
        again = load(self.folder / "saved").eval()
        return torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)

    def few_rows(self, count=2):
        for split in ("mine", "valid", "test"):
            lines = ["text,label", *["good film,a", "bad film,b"] * count]
            Path(f"{split}.csv").write_text("\n".join(lines) + "\n")
        tiny = "--steps 1 --quiet --model.hidden-size 8 --model.num-attention-heads 2 --out out"
        return f"train text_classification --data mine.csv {tiny}"

    def trained(self, *options):
        words = "train char_lm --steps 1 --seq-len 16 --limit-chars 3000 --eval-batches 1"
        return self.cli(f"{words} --model.hidden-size 8 --quiet --out run {' '.join(options)}")


DECODE = {
    True: lambda certificate, ids: certificate.decode(ids) == ["good film"],
    False: lambda certificate, ids: certificate.tokenizer.decode(ids[0]),
}
CERTIFIED = {"seq_len": 4, "radius": 1.0}
LOAD = {
    True: lambda folder: wp.models.load_saved_model(folder),
    False: lambda folder: transformers.GPT2LMHeadModel.from_pretrained(folder),
}
CASES = {
    "the command is in the lab, which is not installed": (
        lambda case: case.no_lab(),
        lambda case: extra_line("lab").startswith("pip install"),
    ),
    "which is not installed; run: pip install": (
        lambda case: str(missing_extra("sacrebleu", "translation", "BLEU")),
        lambda case: "pip install" in extra_line("translation"),
    ),
    "Using the `Trainer` with `PyTorch` requires `accelerate": (
        lambda case: case.no_accelerate(),
        lambda case: transformers.TrainingArguments(str(case.folder), use_cpu=True),
    ),
    "accelerators     none": (
        lambda case: case.doctor(),
        lambda case: case.cli("doctor")[0] == 0,
    ),
    "no attention or feed-forward weight was recognised": (
        lambda case: case.constrain_odd(),
        lambda case: case.constrain_odd(batch=torch.randn(2, 5, 16)),
    ),
    "matches no module with a weight and no parameter": (
        lambda case: case.constrain("*.wq.weight"),
        lambda case: wp.find_roles(encoder()) and case.constrain("*.in_proj_weight"),
    ),
    "not owned by the given optimizer": (
        lambda case: case.constrain(owner=nn.Linear(2, 2)),
        lambda case: case.constrain(),
    ),
    "constrained already": (
        lambda case: case.constrain_twice(),
        lambda case: case.constrain_twice(remove=True),
    ),
    "float16 on a CPU": (
        lambda case: case.in_half(),
        lambda case: case.in_half(torch.float32),
    ),
    "passes hooks by": (
        lambda case: case.direct(called=False),
        lambda case: case.direct(called=True),
    ),
    "unknown keyword of OrthogonalityPenalty": (
        lambda case: wp.OrthogonalityPenalty(encoder(), quary=1e-2),
        lambda case: wp.OrthogonalityPenalty(encoder(), query=1e-2),
    ),
    "no Lipschitz bound is known for": (
        lambda case: wp.certify(nn.Sequential(encoder()).eval(), seq_len=4).require(),
        lambda case: wp.certify(encoder().layers[0].self_attn.eval(), **CERTIFIED).total < 1e9,
    ),
    "depends on the number of tokens; pass seq_len=": (
        lambda case: wp.certify(encoder().layers[0].self_attn.eval(), radius=1.0),
        lambda case: wp.certify(encoder(), seq_len=128),
    ),
    "words are counted for words between white space": (
        lambda case: WordCertificate(bert(), bert_words(["good"])),
        lambda case: WordCertificate(*case.windows()),
    ),
    "were not encoded for this model's windows": (
        lambda case: case.own_ids(),
        lambda case: case.encoded_ids(),
    ),
    "number too small to fit in target type": (
        lambda case: case.decoded(DECODE[False]),
        lambda case: case.decoded(DECODE[True]),
    ),
    "this tokenizer has no padding token": (
        lambda case: case.padded(),
        lambda case: case.padded(pad=True),
    ),
    "which a hook or another forward of the model or of a part may change": (
        lambda case: case.hooked(),
        lambda case: case.hooked(remove=True),
    ),
    "other logits after `from_pretrained`": (
        lambda case: "" if case.reloaded(LOAD[False]) else "other logits after `from_pretrained`",
        lambda case: case.reloaded(LOAD[True]),
    ),
    "rows are too few to cut valid and test from": (
        lambda case: case.cli(case.few_rows())[1],
        lambda case: case.cli(f"{case.few_rows(8)} --valid valid.csv --test test.csv")[0] == 0,
    ),
    "the Hugging Face hub cannot be reached": (
        lambda case: case.cli("train text_classification --data hf:no/such --steps 1")[1],
        lambda case: case.cli(f"{case.few_rows(20)}")[0] == 0,
    ),
    "already holds files": (
        lambda case: (case.trained(), case.trained())[1][1],
        lambda case: case.trained("--resume", "auto")[0] == 0,
    ),
    "unknown option of wellposed": (
        lambda case: case.cli("train char_lm --stepps 3")[1],
        lambda case: case.cli("train char_lm --help-all")[0] == 0,
    ),
    "unknown variant": (
        lambda case: case.cli("compare char_lm --variants post_ln,spektral")[1],
        lambda case: "spectral" in case.cli("compare --help")[1],
    ),
}


def symptom(cell):
    """The message of a row: what stands in its code, or all of it if the code is a name in it."""
    code = re.fullmatch(r"(`+)(.*?)\1", cell)
    return code[2] if code else cell


def test_every_row_of_the_page_has_its_case():
    assert [symptom(cell) for cell, _, _ in ROWS] == [*CASES]
    assert all(line.strip() for _, _, line in ROWS)


@pytest.mark.filterwarnings("ignore:.*norms.*:UserWarning")
@pytest.mark.parametrize("message", CASES)
def test_the_message_comes_up_and_the_line_ends_it(message, tmp_path, monkeypatch, capsys):
    case = Case(tmp_path, monkeypatch, capsys)
    provoke, remedy = CASES[message]
    try:
        received = provoke(case)
    except (Exception, SystemExit) as error:
        received = str(error)
    assert message in str(received)
    assert remedy(case)
