"""Task ``dialogue``: both formats, contexts, splits, repetitions, refusals with file:line, metrics
by generation."""

import gzip
import random
from operator import methodcaller
from pathlib import Path

import pytest
from tests.support.bert import make_checkpoint
from tests.support.edited import edited

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.files import TextFile
from wellposed_lab.tasks.data.splits import DataOptions
from wellposed_lab.tasks.task import build_task
from wellposed_studies.tasks.dialogue import (
    Dialogue,
    detect_format,
    load_dialogues,
    parse_dailydialog,
    parse_personachat,
    repeated,
)
from wellposed_studies.tasks.dialogue_scores import VECTOR_METRICS
from wellposed_studies.tasks.vectors import hf_sentence_encoder

DAILY = "hello there ! __eou__ hi . __eou__ how are you ? __eou__ fine . __eou__\n"
PERSONA = (
    "1 your persona: i like tea.\n2 partner's persona: i fly.\n3 hi\thello .\t\tno .|hello .|yes"
    " .\n4 what do you drink ?\ttea , of course .\n1 your persona: i ski.\n2 hey\tyo\n"
)


def _file(text):
    return TextFile(Path("x.txt"), text, {})


def _daily(folder, *more, test=()):
    """Write a folder of made-up dialogues as DailyDialog is released, label files beside them."""
    rng = random.Random(0)

    def lines(count):
        turns = [
            [rng.choices("abcde", k=3) for _ in range(rng.randint(2, 5))] for _ in range(count)
        ]
        return ["".join(" ".join(turn) + " __eou__ " for turn in line).strip() for line in turns]

    train = "".join(line + "\n" for line in [*lines(30), *more])
    (folder / "dialogues_train.txt.gz").write_bytes(gzip.compress(train.encode()))
    (folder / "dialogues_act_train.txt").write_text("1 2\n" * 30)
    (folder / "dialogues_validation.txt").write_text("\n".join(lines(2)) + "\n")
    (folder / "dialogues_test.txt").write_text("\n".join(test or lines(3)) + "\n")
    return folder


def _task(data, **options):
    return build_task("dialogue", {"data": str(data), "tokenizer": "char", **options})


def _texts(task, split="train"):
    decode = lambda ids: str(task.tokenizer.decode(ids, skip_special_tokens=True))  # noqa: E731
    return [(decode(row["input_ids"]), decode(row["labels"])) for row in task.dataset(split)]


def test_dailydialog_is_one_dialogue_a_line_and_every_later_turn_a_reply():
    (dialogue,) = parse_dailydialog(_file(DAILY))
    assert dialogue.turns == ("hello there !", "hi .", "how are you ?", "fine .")
    assert list(dialogue.replies()) == [1, 2, 3]


def test_personachat_keeps_personas_exchanges_and_counts_candidates():
    first, second = parse_personachat(_file(PERSONA))
    turns = ("hi", "hello .", "what do you drink ?", "tea , of course .")
    assert first == Dialogue(1, turns, ("i like tea.",), ("i fly.",), True, 3)
    assert list(first.replies()) == [1, 3]
    assert (second.line, second.turns, second.persona) == (5, ("hey", "yo"), ("i ski.",))


NUMBER = "expected 2 and a space first, or 1 at the start of a dialogue: "
PERSONA_SAYS = {
    "1 a\tb\nc\td\n": f"2: {NUMBER}'c.td'",
    "1 a\tb\n3 a\tb\n": f"2: {NUMBER}'3 a",
    "2 a\tb\n": "1: expected 1 and a space",
    "1 a b\n": "1: expected an utterance, a tab and a reply, received no tab: '1 a b'",
    "1 a\t\n": "1: the reply is empty",
    "1 \tb\n": "1: the utterance is empty",
    "1 a\tb\t\tc|d\n": "1: the reply is not among its 2 candidates",
    "1 a\tb\t\tb\te\n": "1: 5 columns",
    "1 a\tb\n2 your persona: x\n": "2: a persona after an exchange",
    "1 your persona: \n2 a\tb\n": "1: the persona is empty",
    "1 your persona: x\n1 a\tb\n": "1: the dialogue that starts here has no exchange",
}
DAILY_SAYS = {
    DAILY + "no mark\n": "2: 'no mark'",
    DAILY + "\n": "2: ''",
    "a __eou__ b\n": "1: 'a __eou__ b'",
    "a __eou__ __eou__ b __eou__\n": "1: ",
}
CASES = [(parse_dailydialog, *case) for case in DAILY_SAYS.items()]
CASES += [(parse_personachat, *case) for case in PERSONA_SAYS.items()]
CASES += [(detect_format, "plain text\n", "1: neither format .* __eou__ .* received 'plain text'")]


@pytest.mark.parametrize(("parse", "text", "message"), CASES)
def test_malformed_lines_are_named(parse, text, message):
    with pytest.raises(DataError, match=f"x.txt:{message}") as caught:
        parse(_file(text))
    assert str(caught.value).count("x.txt:") == 1


def _fill(folder, text):
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_contexts_are_the_latest_utterances_with_the_replier_as_b(tmp_path):
    assert _texts(_task(_fill(tmp_path, DAILY), context=2)) == [
        ("A: hello there !", "hi ."),
        ("B: hello there ! A: hi .", "how are you ?"),
        ("B: hi . A: how are you ?", "fine ."),
    ]


def test_persona_lines_stand_first_and_only_the_owner_replies(tmp_path):
    data = _fill(tmp_path, PERSONA)
    assert _texts(_task(data)) == [
        ("persona: i like tea. A: hi", "hello ."),
        ("persona: i like tea. A: hi B: hello . A: what do you drink ?", "tea , of course ."),
        ("persona: i ski. A: hey", "yo"),
    ]


def test_long_contexts_keep_their_end_and_long_replies_their_beginning(tmp_path):
    data = _fill(tmp_path, DAILY)
    task = _task(data, max_tokens=6, context=1)
    assert _texts(task)[0] == ("ere !", "hi .")
    assert _texts(task)[1] == (" hi .", "how ar")
    assert task.description()["cut_to_max_tokens"]["train"] == {"contexts": 3, "replies": 2}
    message = ("max_tokens = 6; raise max_tokens, lower context (the longest", "overflow='cut'")
    where = "train, dialogue at line 1, context: 17 tokens"
    with pytest.raises(DataError) as caught:
        _task(data, max_tokens=6, overflow="error")
    for part in message:
        assert part in str(caught.value)
    assert where in str(caught.value)


def test_the_released_folder_is_found_by_name_without_its_label_files(tmp_path):
    described = _task(_daily(tmp_path)).description()
    assert described["dialogues"] == {"train": 30, "valid": 2, "test": 3}
    names = ["train.txt.gz", "validation.txt", "test.txt"]
    files = [Path(described["files"][split]["path"]).name for split in ("train", "valid", "test")]
    assert files == [f"dialogues_{name}" for name in names]


def _persona_lines(part):
    return {line for dialogue in part for line in dialogue.persona}


def test_missing_splits_are_cut_by_dialogues_that_share_no_persona_line(tmp_path):
    lines = []
    # dialogues 0 2 4, 6 8 10, ... and 1 3 5, ... are linked through their second lines
    for number in range(60):
        persona = [f"i am {number}.", f"i was {number // 6} {number % 2}."]
        lines += [f"{i} your persona: {text}" for i, text in enumerate(persona, start=1)]
        lines += [f"3 hi {number}\tyo {number}", "4 b\tc"]
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    splits, described = load_dialogues(DataOptions(str(path)))
    conversations = [dialogue.turns for part in splits.values() for dialogue in part]
    assert len(conversations) == len(set(conversations)) == 60
    personas = list(map(_persona_lines, splits.values()))
    assert not personas[0] & personas[1]
    assert not personas[0] & personas[2]
    assert set(described["cut_from_train"]) == {"valid", "test"}


def test_repeated_test_dialogues_are_counted(tmp_path):
    repeated_and_new = ["x y __eou__ z __eou__", "new one __eou__ bad __eou__"]
    _daily(tmp_path, "xy __eou__ z __eou__", test=repeated_and_new)
    described = _task(tmp_path).description()
    assert described["dialogues_also_in_train"] == {"valid": 0, "test": 1}
    assert described["dialogues"]["test"] == 2


def test_places_without_dialogues_are_errors(tmp_path):
    with pytest.raises(DataError, match="no train file; looked for names like"):
        _task(tmp_path)
    (_fill(tmp_path, DAILY) / "train.txt").write_text("alone __eou__\n")
    with pytest.raises(DataError, match=r"\(train\): no dialogue has a reply"):
        _task(tmp_path)


def test_metrics_without_their_file_are_named_and_all_nine_come_with_them(tmp_path):
    data = _fill(tmp_path, DAILY)
    task = _task(data)
    references = ["hi .", "how are you ?", "fine ."]
    missing = {"sentence_cosine", *VECTOR_METRICS}
    assert set(task.description()["metrics_not_computed"]) == missing
    vectors = tmp_path / "vectors.vec"
    vectors.write_text("hi 1 0\nfine 0 1\n")
    full = _task(data, vectors=str(vectors))
    assert list(full.description()["metrics_not_computed"]) == ["sentence_cosine"]
    (bare, _), (scores, _) = map(methodcaller("_score", references, references), (task, full))
    assert set(scores) - set(bare) == set(VECTOR_METRICS)
    assert (scores["bleu_1"], scores["rouge_l"]) == pytest.approx((100, 100))
    # "hi ." and "fine ." have a vector, "how are you ?" has none: two pairs of three.
    assert scores["embedding_average"] == pytest.approx(200 / 3)
    with pytest.raises(DataError, match="no such file"):
        _task(data, vectors=str(tmp_path / "none.vec"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        _task(data, sentence_encoder=str(tmp_path / "none"))


@pytest.mark.data
@pytest.mark.slow
def test_the_released_dailydialog_has_the_repetitions_it_is_known_for(shared_data):
    splits, _ = load_dialogues(DataOptions(str(shared_data / "dailydialog")))
    assert [len(splits[split]) for split in ("train", "valid", "test")] == [11118, 1000, 1000]
    assert sum(len(dialogue.turns) for dialogue in splits["test"]) == 7740
    assert len(repeated(splits["valid"], splits["train"])) == 89
    assert len(repeated(splits["test"], splits["train"])) == 112


def test_a_sentence_encoder_is_cut_to_its_positions_and_needs_a_pad_token(tmp_path):
    make_checkpoint(tmp_path)
    long, cut = hf_sentence_encoder(tmp_path)(["w1 " * 40, "w1 " * 30])
    assert long.tolist() == pytest.approx(cut.tolist(), abs=1e-6)
    with edited(tmp_path / "tokenizer_config.json") as record:
        del record["pad_token"]
    with pytest.raises(ConfigError, match="neither a pad nor an eos token"):
        hf_sentence_encoder(tmp_path)
