"""utils/settings/option.py: what one line of the page of settings may say."""

import copy
import math
import pickle

import pytest

from utils.settings import option
from utils.settings.option import Facts, Interval, is_model_folder, own_names

# --- bounds


FROM_0_TO_1 = {"at_least": 0, "below": 1}


@pytest.mark.parametrize("bounds, value, rule", [
    ({"at_least": 1}, 0, "at least 1"), ({"at_least": 1}, 1, ""), ({"above": 0}, 0.0, "above 0"),
    ({"above": 0}, 1e-9, ""),
    ({"at_most": 5}, 6, "at most 5"), ({"at_most": 5}, 5, ""), ({"below": 1}, 1.0, "below 1"), ({"below": 1}, 0.9, ""),
    (FROM_0_TO_1, 1.5, "at least 0 and below 1"), (FROM_0_TO_1, -1, "at least 0 and below 1"), (FROM_0_TO_1, 0, ""),
    ({"above": 0}, (1.0, 0.0), "above 0"), ({"above": 0}, (1.0, 2.0), ""),
    ({}, math.nan, "finite"), ({}, (0.0, math.inf), "finite"), ({"at_least": 0}, math.inf, "finite"),
    ({"at_least": 1}, 10**400, ""), ({"at_least": 1}, "auto", ""), ({"at_least": 1}, None, "")])
def test_a_rule_is_named_if_a_number_breaks_it(bounds, value, rule):
    assert Facts("help", **bounds).broken_rule(value) == rule


# --- intervals


@pytest.mark.parametrize("text, steps, seconds", [
    ("1000", 1000, math.inf), ("1", 1, math.inf), ("90s", math.inf, 90.0), ("5min", math.inf, 300.0),
    ("2h", math.inf, 7200.0), ("0.5h", math.inf, 1800.0), ("1.5 min", math.inf, 90.0), (" 7 ", 7, math.inf)])
def test_an_interval_is_steps_or_with_a_unit_a_duration(text, steps, seconds):
    interval = Interval(text)
    assert (interval.steps, interval.seconds, interval) == (steps, seconds, text)


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "1.5", "5 weeks", "min", "1e3", "5m", "s5"])
def test_any_other_interval_is_refused(text):
    with pytest.raises(ValueError, match="give a number of optimizer steps"):
        Interval(text)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda interval: pickle.loads(pickle.dumps(interval))])
def test_a_copy_of_an_interval_means_the_same(again):
    assert (again(Interval("5min")).seconds, again(Interval("7")).steps) == (300.0, 7)


# --- names in models/own.py


OWN = """
SIZES = {"no-name": 1}
def build(size): return {"nor this": size}
IMAGE_MODELS: dict = {"a": build, **{f"{size}": build for size in SIZES}}
TEXT_MODELS = {'b': build}
TEXT_MODELS["c"] = lambda outputs, vocab_size: wrapped("bert-base-uncased", outputs)
TEXT_MODELS |= {"größe": build}
for size in SIZES:
    IMAGE_MODELS.update({"d": build})
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Puts a text in the place of models/own.py."""
    def put(text):
        monkeypatch.setattr(option, "OWN", tmp_path / "own.py")
        option.OWN.write_text(text, encoding="utf-8")
        own_names.cache_clear()
    yield put
    own_names.cache_clear()


def test_names_of_own_models_are_read_in_each_way_of_filling_a_dict(own):
    own(OWN)
    assert own_names() == {"a", "b", "c", "d", "größe"}
    own("IMAGE_MODELS = {")
    assert own_names() == set()


def test_a_name_of_an_own_model_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("small-cnn", "other"):
        (tmp_path / name).mkdir()
    assert [is_model_folder(name) for name in ("small-cnn", "bag-of-words", "other", "gone")] == [
        False, False, True, False]
