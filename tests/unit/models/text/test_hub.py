"""models/text/hub.py: a run keeps the tokenizer that it began with. (Folders and names of the hub: test_bert.py.)"""

from pydoc_data.topics import topics

import pytest

from data.texts.tokenizer import load_tokenizer, train_tokenizer
from models.text.hub import resolve_tokenizer
from utils.errors import Exit, UserError
from utils.rundir.lock import RunLock
from utils.rundir.run import Run
from utils.settings.config import MaskedLMConfig
from utils.settings.text_options import TextModelOptions, TextOptions

TEXTS = [text for name in sorted(topics)[:40] for text in topics[name].split("\n\n")]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 1000)


@pytest.fixture
def folder(tmp_path, trained):
    """A saved tokenizer."""
    trained.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def start(tmp_path, world):
    """Settles the tokenizer of one run directory, as each start of the run does with what was kept.

    (tokenizer, kept).
    """
    def start(source, texts, kept=None):
        (tmp_path / "run").mkdir(exist_ok=True)
        run = Run(tmp_path / "run", dict(kept or {}), {"start": 1, "cores_per_process": 1}, print, RunLock())
        config = MaskedLMConfig(text=TextOptions(tokenizer=source or "auto", vocab_size=1000),
                                model=TextModelOptions(model="bert-tiny"))
        tokenizer, digest = resolve_tokenizer(config, None, texts, run, world)
        assert run.resolved.tokenizer == digest
        return tokenizer, run.resolved.as_dict()
    return start


def no_texts():
    pytest.fail("the texts were read")


def definition(tokenizer):
    return tokenizer.backend_tokenizer.to_str()


def refusal(work, *arguments):
    with pytest.raises(UserError) as error:
        work(*arguments)
    return error.value.code, str(error.value)


def test_a_run_trains_its_tokenizer_on_the_texts_and_keeps_it(start, trained, tmp_path):
    tokenizer, _ = start(None, lambda: iter(TEXTS))
    assert definition(tokenizer) == definition(load_tokenizer(str(tmp_path / "run/tokenizer"))) == definition(trained)


def test_a_given_tokenizer_is_kept_without_reading_texts(start, folder, trained, tmp_path):
    tokenizer, _ = start(str(folder), no_texts)
    assert definition(tokenizer) == definition(load_tokenizer(str(tmp_path / "run/tokenizer"))) == definition(trained)


def test_later_starts_use_the_kept_tokenizer(start, tmp_path, folder):
    """Later starts use the kept tokenizer without reading texts or writing."""
    first, kept = start(None, lambda: TEXTS)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.joinpath("run").rglob("*")}
    for source in (None, str(folder), "gone"):
        later, kept_later = start(source, no_texts, kept)
        assert (definition(later), kept_later) == (definition(first), kept)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.joinpath("run").rglob("*")} == times


def test_a_first_start_that_was_killed_is_repeated(start, tmp_path, trained):
    """Killed before it kept anything."""
    start(None, lambda: TEXTS[:50])
    tokenizer, _ = start(None, lambda: TEXTS)
    assert definition(tokenizer) == definition(trained)
    assert [path.name for path in tmp_path.joinpath("run").iterdir()] == ["tokenizer"]


def test_the_kept_value_tells_tokenizers_apart(start):
    kept = [start(None, lambda texts=texts: texts)[1]["tokenizer"] for texts in (TEXTS, TEXTS[:50], TEXTS)]
    assert kept[0] == kept[2] != kept[1]


@pytest.mark.rows(2)
@pytest.mark.parametrize("change", [
    lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " "),
    lambda folder: (folder / "tokenizer_config.json").unlink(),
    lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
    lambda folder: (folder / "tokenizer_config.json").rename(folder / "tokenizer_renamed.json"),
    lambda folder: folder.rename(folder.with_name("moved"))],
    ids=["a byte more", "a file less", "a file more", "a file renamed", "the folder gone"])
def test_a_changed_tokenizer_of_the_run_is_refused(start, tmp_path, change):
    _, kept = start(None, lambda: TEXTS)
    change(tmp_path / "run/tokenizer")
    code, message = refusal(start, None, no_texts, kept)
    assert (code, f"the tokenizer in {tmp_path}/run/tokenizer changed" in message) == (Exit.OTHER_RUN, True)


def test_a_source_without_tokenizer_is_66_and_leaves_the_run_as_it_was(start, tmp_path):
    (tmp_path / "empty").mkdir()
    code, message = refusal(start, str(tmp_path / "empty"), no_texts)
    assert (code, str(tmp_path / "empty") in message, list((tmp_path / "run").iterdir())) == (Exit.NO_INPUT, True, [])
