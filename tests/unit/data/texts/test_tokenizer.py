"""data/texts/tokenizer.py: a trained tokenizer is a pure function of its texts; what is no tokenizer is refused."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.texts.tokenizer import SPECIAL, load_tokenizer, train_tokenizer, without_ends
from utils.errors import Exit, UserError

ROOT = Path(__file__).parents[4]
TEXTS = [text for name in sorted(topics)[:40] for text in topics[name].split("\n\n")]
MANY = [chr(0x1200 + number) for number in range(72)]  # letters without case and accents, in no other text here
# no character or pair is more frequent
TIES = ["".join(MANY[(start + step) % 72] for step in (0, 5, 11, 30, 31)) for start in range(72)]
TRAIN = """
import sys
from tests.unit.data.texts.test_tokenizer import TEXTS, TIES, train_tokenizer
train_tokenizer(TEXTS, 1000).save_pretrained(sys.argv[1] + "/texts")
train_tokenizer(TIES, 200).save_pretrained(sys.argv[1] + "/ties")
"""


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 1000)


@pytest.fixture
def folder(tmp_path, trained):
    """A saved tokenizer that the test may spoil."""
    trained.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def definition(tokenizer):
    return tokenizer.backend_tokenizer.to_str()


def tokens(tokenizer):
    """All of them, by number."""
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


def refusal(work, *arguments):
    with pytest.raises(UserError) as error:
        work(*arguments)
    return error.value.code, str(error.value)


# --- training


@pytest.mark.long
def test_training_gives_the_same_bytes_in_every_process(tmp_path, trained):
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / "there")], cwd=ROOT, check=True,
                   env=os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"})  # here sets have another order
    trained.save_pretrained(tmp_path / "here/texts")
    train_tokenizer(TIES, 200).save_pretrained(tmp_path / "here/ties")
    for name in ("texts", "ties"):
        assert content(tmp_path / "there" / name) == content(tmp_path / "here" / name)


@pytest.mark.parametrize("texts, vocab_size", [(TEXTS, 1000), (TIES, 200), (TIES, 400)],
                         ids=["texts", "ties", "ties and no cut"])
def test_the_order_of_the_texts_does_not_matter(texts, vocab_size):
    shuffled = [random.Random(seed).sample(texts, len(texts)) for seed in range(4)]
    assert len({definition(train_tokenizer(iter(each), vocab_size)) for each in [texts, *shuffled]}) == 1


def test_special_tokens_come_first_and_the_rest_sorted(trained):
    rest = tokens(trained)[5:]
    assert (tuple(tokens(trained)[:5]), rest) == (SPECIAL, sorted(set(rest)))


@pytest.mark.rows(2)
@pytest.mark.parametrize("vocab_size", [64, 65, 100, 500, 1000])
def test_as_many_tokens_as_asked_for_are_trained_where_the_texts_give_them(vocab_size):
    assert len(train_tokenizer(TEXTS, vocab_size)) == vocab_size


@pytest.mark.parametrize("vocab_size", [64, 100, 200])
def test_a_large_alphabet_is_cut_to_its_frequent_characters(vocab_size):
    """An alphabet of more than a quarter of the vocabulary keeps its most frequent characters."""
    texts = [character * 3 + MANY[0] for number, character in enumerate(MANY) for _ in range(2 + number * 2)]
    counts = Counter("".join(texts))
    tokenizer = train_tokenizer(texts, vocab_size)
    kept = {token for token in tokens(tokenizer) if len(token) == 1}
    assert kept == set(sorted(counts, key=counts.get)[-vocab_size // 4:]) and len(tokenizer) <= vocab_size


def test_a_word_with_a_character_cut_from_the_alphabet_is_unknown():
    tokenizer = train_tokenizer([*TEXTS, "".join(MANY)], 64)
    assert tokenizer(f"the {MANY[0]}he the").tokens()[1:-1] == [*tokenizer.tokenize("the"), "[UNK]",
                                                                *tokenizer.tokenize("the")]


def test_few_texts_give_fewer_tokens_and_none_gives_the_special_ones():
    few, none = (tokens(train_tokenizer(texts, 1000)) for texts in (["ab ab"], []))
    assert (few, none) == ([*SPECIAL, "##a", "##b", "a", "ab", "b"], [*SPECIAL])


def test_case_and_accents_do_not_matter(trained):
    assert trained("Élément").input_ids == trained("element").input_ids != trained("elements").input_ids


def test_one_text_has_type_0_and_of_a_pair_the_second_with_its_end_1(trained):
    one, pair = trained("the"), trained("the", "class of")
    assert (one.tokens(), one.token_type_ids) == (["[CLS]", "the", "[SEP]"], [0, 0, 0])
    assert (pair.tokens(), pair.token_type_ids) == (["[CLS]", "the", "[SEP]", "class", "of", "[SEP]"],
                                                    [0, 0, 0, 1, 1, 1])


def test_texts_are_decoded_again(trained):
    assert trained.decode(trained("inheritance (of classes)").input_ids,
                          skip_special_tokens=True) == "inheritance ( of classes )"


# --- pairs


@cache
def byte_level():
    """One as GPT-2's, where a character may be several tokens."""
    core = Tokenizer(models.BPE(byte_fallback=False))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=500, special_tokens=["[PAD]", "[END]"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    core.post_processor = processors.TemplateProcessing(single="$A [END]", pair="$A [END] $B [END]",
                                                        special_tokens=[("[END]", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[END]")


@pytest.mark.rows(2)
@pytest.mark.parametrize("max_length", [16, 32])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["WordPiece", "byte-level"])
def test_long_pairs_are_truncated_as_transformers_truncates_them(kind, side, max_length, trained):
    """Also where both texts are long, one is just longer, or the odd token goes to the first one."""
    tokenizer, draw = deepcopy(trained if kind == "WordPiece" else byte_level()), random.Random(max_length)
    tokenizer.truncation_side = side
    words = [*" ".join(TEXTS).split(), "Ünïcödé", "日本語", "😀😀"]
    longest = [draw.choice([1, 3, 8]) * max_length for _ in range(40)]
    texts = [[" ".join(draw.choices(words, k=draw.randint(1, count))) for count in longest] for _ in range(2)]
    equal = [" ".join(draw.choices(words, k=3 * max_length)) for _ in range(10)]
    columns = [texts[0] + equal, texts[1] + equal]
    cut = without_ends(tokenizer, columns, max_length)
    assert sum(map(len, cut[0] + cut[1])) < sum(map(len, columns[0] + columns[1]))
    ours, theirs = (tokenizer(*pair, truncation=True, max_length=max_length) for pair in (cut, columns))
    assert ours["input_ids"] == theirs["input_ids"] and ours["attention_mask"] == theirs["attention_mask"]


# --- loading


def test_a_loaded_tokenizer_is_the_saved_one(trained, folder):
    loaded = load_tokenizer(str(folder))
    facts = [(definition(each), dict(each(TEXTS[:20], TEXTS[20:40])), each.model_input_names, each.all_special_ids,
              each.mask_token_id)
             for each in (trained, loaded)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("spoil", [
    lambda folder: [file.unlink() for file in folder.iterdir()], lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: (folder / "tokenizer.json").write_text("{"),
    lambda folder: (folder / "tokenizer.json").write_text("{}"),
    lambda folder: folder.rename(folder.with_name("moved"))],
    ids=["an empty folder", "no tokenizer.json", "a torn one", "an empty one", "no folder"])
def test_a_folder_without_tokenizer_is_66(folder, spoil):
    spoil(folder)
    code, message = refusal(load_tokenizer, str(folder))
    assert (code, message.startswith(f"{folder} holds no tokenizer")) == (Exit.NO_INPUT, True)


def test_a_tokenizer_without_padding_token_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": None}))
    assert refusal(load_tokenizer, str(folder)) == (
        Exit.USAGE, f"{folder}: its tokenizer must be one of tokenizers (tokenizer.json) and have a padding token")


def test_code_in_the_folder_is_never_run(folder):
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nfrom transformers import"
                                   " PreTrainedTokenizerFast as Own\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | own))
    try:
        load_tokenizer(str(folder))
    except UserError as error:
        assert error.code == Exit.NO_INPUT
    assert not (folder / "ran").exists()
