"""ask.compare: what its words say of records, samples and traces that differ."""

from types import SimpleNamespace

import pytest
import torch

from ask.compare import first_apart, record_apart, samples_apart, settings_apart
from ask.trace import AFTER, GRADIENT, INPUT, OUTPUT, distance, first_difference, names_of


def line(settings=None, resolved=None, **facts):
    """A start in RUN/starts.jsonl."""
    return {"step": 0, "settings": {"task": "image-classification", **(settings or {})}, "resolved": resolved or {},
            **facts}


@pytest.mark.parametrize("precision, steps, other, verdict", [
    ("fp32", 1, 1 + 1e-7, "which rounding may do"), ("fp32", 1, 1 + 1e-5, "a jump"),
    ("fp32", 50, 1 + 1e-5, "which rounding may do"), ("fp32", 10**6, 1.1, "a jump"),
    ("bf16", 1, 1.01, "which rounding may do"), ("bf16", 1, 1.3, "a jump")])
def test_a_small_difference_is_rounding_and_a_large_one_a_jump(precision, steps, other, verdict):
    [words] = record_apart({"step": steps, "loss": 1.0}, {"step": steps, "loss": other}, steps, precision)
    assert verdict in words and f"loss: 1.0 in RUN1, {other} in RUN2" in words


def test_what_is_never_rounded_is_shown_as_it_is():
    one, two = {"lr": 0.1, "top1": 0.5, "loss": None}, {"lr": 0.1000001, "top1": 0.25, "loss": 2.0}
    assert [*record_apart(one, two, 1, "fp32")] == [
        "  lr: 0.1 in RUN1, 0.1000001 in RUN2", "  top1: 0.5 in RUN1, 0.25 in RUN2",
        "  loss: not finite in RUN1, 2.0 in RUN2"]


def test_the_first_that_differs_is_found_among_those_that_both_have():
    one = {key: {"step": step, "loss": step} for key, step in zip("abcd", (1, 2, 3, 4), strict=True)}
    two = {key: {"step": step, "loss": loss} for key, step, loss in (("b", 2, 2), ("d", 4, 9))}
    assert first_apart(one, two) == ([2], ({"step": 4, "loss": 4}, {"step": 4, "loss": 9}))
    assert first_apart(one, {"c": one["c"]}) == ([3], None)


ONE = [("a.png", "cat"), ("b.png", "dog"), ("c.png", "cat")]


@pytest.mark.parametrize("two, words", [
    (ONE[1:], ["1 sample only in RUN1: a.png (cat)"]),
    ([*ONE, ("d.png", "dog")], ["1 sample only in RUN2: d.png (dog)"]),
    ([("a.png", "dog"), *ONE[1:]], ["1 sample with another label: a.png (cat in RUN1, dog in RUN2)"]),
    ([*ONE, ONE[0]], ["1 sample only in RUN2: a.png (cat)"]),
    (ONE[::-1], ["the same samples in another order, or with others held out"]),
    ([("a.png", "dog"), ("x.png", "cat"), ONE[2]], [
        "1 sample with another label: a.png (cat in RUN1, dog in RUN2)", "1 sample only in RUN1: b.png (dog)",
        "1 sample only in RUN2: x.png (cat)"])])
def test_samples_that_were_added_removed_or_relabelled_are_named(two, words):
    assert samples_apart(ONE, two) == [f"data: {text}" for text in words]


def test_settings_are_as_resolved_and_apart_from_those_without_effect():
    one = line({"lr": "auto", "workers": 1, "data": "/a"}, {"lr": 0.1, "data": "f" * 64}, packages={"torch": "2.14"})
    two = line({"lr": 0.2, "workers": 0, "data": "/b"}, {"lr": 0.2, "data": "f" * 64}, packages={"torch": "2.11"})
    assert settings_apart(one, two) == [
        "--lr: 0.1 in RUN1, 0.2 in RUN2", "torch: 2.14 in RUN1, 2.11 in RUN2", "without an effect on what is computed:"
        " --workers: 1 in RUN1, 0 in RUN2; --data: /a in RUN1, /b in RUN2"]
    one, two = (line({"data": path}, {"data": path * 64}) for path in ("a", "b"))
    assert settings_apart(one, two)[0] == "--data: a in RUN1, b in RUN2"
    assert settings_apart(line({"eval_every": 2}), line({"eval_every": 3})) == ["--eval-every: 2 in RUN1, 3 in RUN2"]
    assert settings_apart(line({"dropout": 0.1}), line()) == ["--dropout: 0.1 in RUN1, the default in RUN2"]


def test_stages_come_before_micro_batches_and_these_before_time():
    """Another input of a later micro-batch is the cause of another gradient, not its effect."""
    one = {(INPUT, 0, "images"): ("", "a"), (OUTPUT, 0, "conv"): ("", "b"), (GRADIENT, 0, "weight"): ("", "c"),
           (INPUT, 1, "images"): ("", "d")}
    assert first_difference(one, one) is None
    two = one | {(GRADIENT, 0, "weight"): ("", "x"), (INPUT, 1, "images"): ("", "x")}
    assert first_difference(one, two) == (INPUT, 1, "images")
    assert first_difference(one, two | {(OUTPUT, 0, "norm"): ("", "")}) == (INPUT, 1, "images")
    assert first_difference(one, one | {(OUTPUT, 0, "norm"): ("", "")}) == (OUTPUT, 0, "norm")


@pytest.mark.parametrize("data, name", [("/data/x.csv", "train/7.png"), ("demo", "/data/train/7.png")])
def test_a_sample_is_named_by_its_path_in_the_data_or_its_whole_path(data, name):
    named = SimpleNamespace(name=lambda index: f"/data/train/{index}.png")
    t = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(data=data)),
                        task=SimpleNamespace(train_set=named))
    assert names_of(t, SimpleNamespace(indices=[7])) == [name]


def test_how_much_two_tensors_differ_is_said_by_the_largest_value():
    one = torch.tensor([1.0, -4.0, 2.0])
    assert distance(one, torch.tensor([1.0, -4.0, 3.0]), OUTPUT, "fp32") == (
        "different: 1 of 3 values, by at most 2.5e-01 of the largest")
    assert distance(one, one + 1e-6, OUTPUT, "fp32").endswith(" of the largest, which rounding may do")
    assert distance(one, one + 1e-6, AFTER, "fp32").endswith(" of the largest")  # so small is a step
    assert distance(torch.arange(3), torch.tensor([0, 1, 5]), INPUT, "fp32") == "different: 1 of 3 values"
    assert distance(one, one[:2], OUTPUT, "fp32") == ""
    assert distance(torch.zeros(2), torch.tensor([0.0, 3.0]), GRADIENT, "fp32") == (
        "different: 1 of 2 values, by at most 1.0e+00 of the largest")
