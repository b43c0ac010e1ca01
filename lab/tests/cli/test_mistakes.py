"""Mistakes on the command line: each gets one line that says what is wrong, where, and what to write
instead."""

import shutil
from pathlib import Path

import pytest
from tests.support.films import write_films

TYPED = """
trian char_lm                               | 'trian'; nearest: train
mesure run                                  | 'mesure'; nearest: measure
train --steps 3                             | train: expected a task first, received '--steps'; tasks: | char_lm
train word_ml                               | task 'word_ml'; nearest: word_lm
train char_lm --learning-rat 1              | --learning-rat | nearest: --learning-rate
train char_lm --steps many                  | steps = 'many', expected an integer >= 1
train char_lm --steps                       | --steps: expected one argument, a value after it
train char_lm --steps 0                     | steps = 0, expected an integer >= 1
train char_lm --steps 10 --epochs 2         | --steps 10 and --epochs 2 | give one of them
train char_lm --variant post_nl             | variant 'post_nl'; nearest: post_ln
train char_lm --variant oc3:much            | 'oc3:much': strength must be a finite number | write oc3:1e-2
train char_lm --variant pre_ln:3            | 'pre_ln:3': pre_ln takes no value; write 'pre_ln'
train char_lm --model.num-attention-heads 3 | hidden_size = 128 | num_attention_heads = 3; 126 or 129 would
train char_lm --model.attention dotproduct  | attention 'dotproduct'; nearest: dot_product
train char_lm --model.norm mid              | norm = 'mid', expected 'pre', 'post', 'none', 'dyt' or 'derf'
train char_lm --data prose.tx               | prose.tx: no such file or folder; nearest in .: prose.txt
train char_lm --data empty.txt              | empty.txt: the file is empty; give a file that holds text
train char_lm --data latin.txt              | latin.txt:1: not UTF-8: byte 0xe9 | convert it with | iconv
train char_lm --data nothing                | nothing: no train file; looked for names like train.txt | give the
train char_lm --seq-len 1                   | seq_len = 1, expected 2 or more
train char_lm --device tpu                  | device = 'tpu', expected auto, cpu, cuda
train char_lm --precision fp16              | train.precision = 'fp16' | give --precision bf16
train char_lm --track tensorbord            | tracker 'tensorbord'; nearest: tensorboard
train char_lm --out run                     | run: already holds files; name another --out, or | --resume auto
train char_lm --resume checkpoint-9 --out run | --resume checkpoint-9: expected never or auto | remove later ones
train char_lm --config nowhere.toml         | nowhere.toml: no such configuration file; each run folder has one
train char_lm --config bad.toml             | bad.toml: cannot be read | line 1, column 8 | correct
train char_lm --import nowhere.py           | --import nowhere.py: no such file; name a Python file
train char_lm --import mine.py              | mine.py: ModuleNotFoundError | 'no_such_module'; --debug shows where
train char_lm --from model                  | model: its weights need the model's own tokens | --from-scratch
train char_lm --from modle                  | modle: cannot be loaded | HF_HUB_OFFLINE | nearest: model
train char_lm --margin-loss words:x         | margin_loss = 'words:x', expected words:K
train text_classification                   | text_classification: --data is missing: A csv, tsv | builtin
train text_classification --data one.csv    | one.csv:1: one column, expected label and text: another delimiter?
train text_classification --data open.csv   | open.csv:2: not a row of quoted fields | double the quotes
train text_classification --data short.csv  | short.csv:3: 1 columns, expected 2 | correct or remove
train text_classification --data same.csv   | same.csv: every row has label 'pos' | --label-column
train text_classification --data many.csv   | many.csv: 26 different labels | not the label column | --label-column
train text_classification --data films.tsv --label-column labl | no label column 'labl' (nearest: label); give --label
train text_classification --data films.tsv --from model --variant pre_ln | 'pre_ln' makes its own | variants for such
train text_classification --data films.tsv --tokenizer bpe | tokenizer = 'bpe', expected byte, character, word or
train translation --data films.tsv          | --src is missing | --tgt is missing
train image_classification --data nothing   | image_classification: wellposed has no architecture | give | --from FOLDER
compare char_lm --variants post_ln,post_ln  | variants: post_ln named twice, expected different names
compare char_lm --variants                  | compare char_lm: --variants: expected one argument
compare char_lm --seeds 0                   | seeds = 0, expected an integer >= 1
compare char_lm --out run                   | run: the folder is not empty; name another --out
certify run --words 3,2                     | --words 3,2: expected whole numbers | increasing
compare char_lm --worth 0                   | worth = 0.0, expected a finite number > 0
measure                                     | measure: give a model, as the first word or with --from
measure rum                                 | rum: cannot be loaded | go online | nearest: run
measure nothing                             | nothing: expected a run folder or a saved model, found neither
measure films.tsv                           | films.tsv: is a file, expected a run folder | name the folder
measure hurt                                | model.safetensors: 100 bytes, expected | copy the folder again
certify run --words two                     | --words two: expected whole numbers of 1 or more
certify run --radii a,b                     | --radii 'a,b': expected comma-separated numbers, for instance
predict run                                 | give the text with --text, or a file with --input
predict run --input nowhere.txt             | nowhere.txt: no such file
predict run --input nothing                 | nothing: is a folder | reads lines of text; give a file
predict run --text a --beams 3              | --beams has no effect on this model | leave it out
predict run --input prose.txt --output prose.txt | --output prose.txt would overwrite the file of --input | name another
predict run --input prose.txt --output no/labels | no/labels: the folder no does not exist; make it first
report                                      | report: name the folders of runs, for instance
report nothing                              | no run folder | in nothing; give the --out of a training
reproduce kim2021/figure-22                 | 'kim2021/figure-22'; nearest: kim2021/figure-2
doctor --all                                | doctor: takes no options, received --all; leave it out
train char_lm --config=                     | --config: expected a value, received none
train char_lm --config odd.toml             | odd.toml | 'learning_rat'; nearest: learning_rate
train char_lm --learning-rate 1e999         | learning_rate = inf, expected a finite number > 0
train text_classification --data few.tsv    | few.tsv | 20
certify run --data super.tsv                | its vocabulary differs from the one the model was trained
certify run/final --data films.tsv          | accuracy needs the run folder | received run/final
predict run --text a --temperature inf      | temperature = inf, expected a finite number >= 0
predict run/final/config.json --text a      | a config.json holds no weights
measure broken.json                         | broken.json
certify --from run/no-such                  | run/no-such: no such folder
measure run --from run                      | give a model, as the first word or with --from
"""
MISTAKES = [[part.strip() for part in line.split(" | ")] for line in TYPED.strip().splitlines()]


@pytest.fixture
def desk(small_run, foreign, tmp_path, monkeypatch):
    """Return a folder with a run, a model and files, most of them wrong in one way each."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_run, "run")
    shutil.copytree(small_run / "final", "hurt")
    with Path("hurt/model.safetensors").open("r+b") as file:
        file.truncate(100)
    write_films(Path("films.tsv"))
    write_films(Path("super.tsv"), good="superb")
    Path("nothing").mkdir()
    texts = {
        "prose.txt": "the quick brown fox\n" * 60, "empty.txt": "", "bad.toml": "task = \n",
        "odd.toml": 'schema_version = 1\ntask = "char_lm"\n[train]\nlearning_rat = 1.0\n',
        "few.tsv": "label\ttext\n" + "1\tfine\n0\tdull\n" * 9,
        "broken.json": '{"model_type": "bert", "hidden_size": 15, "num_attention_heads": 2}',
        "mine.py": "import no_such_module\n", "one.csv": "a film\n" * 30,
        "open.csv": 'label,text\npos,"a film\nneg,a "bad" film\n', "same.csv": "label,text\n" + "pos,a\n" * 30,
        "short.csv": "label,text\npos,a film\nneg\n",
        "many.csv": "label,text\n" + "".join(f"{i},a\n" for i in range(30)),
    }  # fmt: skip
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("latin.txt").write_bytes("café ".encode("latin1") * 100)
    return tmp_path


@pytest.mark.parametrize(("words", "message"), [(words, message) for words, *message in MISTAKES])
def test_a_typed_mistake_gets_one_line(words, message, desk, cli):
    lines = cli(words, status=None).err.splitlines()
    at = [line.startswith("wellposed: ") for line in lines].index(True)
    assert at == len(lines) - 1, lines
    assert [part for part in message if part not in lines[at]] == [], lines[at]
