"""--branch: it computes what its parent would have; which settings it takes; it is whole without its parent.

The parent has 9 steps, 3 in an epoch, and a checkpoint of each 2nd step and of each end of an epoch.
"""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import extras
from ask.integrity import findings
from extras.branch import begin as begin_module
from extras.branch.begin import begin, differences, learnt_before, require_allowed
from extras.branch.parent import find_parent
from tests.harness.run_directory import contents, newest_checkpoint, records, rows_of, weights_sha256, written
from utils.errors import Exit, UserError
from utils.rundir.chain import files_in, read_lines
from utils.rundir.checkpoint_folder import CheckpointFolder, step_of
from utils.settings.command_line import parse_command_line
from utils.settings.config import CONFIGS, facts, settings, with_values
from utils.settings.option import OPERATIONAL, Interval, Kept

LENGTH = ["--epochs", "3", "--global-batch-size", "24", "--threads", "1", "--workers", "0", "--log-every", "1",
          "--save-every", "2", "--keep", "9", "--precision", "fp32"]
EXACT = ["--strategy", "exact", "--micro-batch-size", "4"]
TEXTS = ["--max-length", "32", "--text-column", "text", "--model", "bert-tiny", "--vocab-size", "200"]
WORDS = {"image-classification": ["--model", "small-cnn", "--image-size", "16", "--ema-decay", "0.5"],
         "text-classification": TEXTS, "masked-lm": TEXTS}
IMAGES = "image-classification"


@pytest.fixture(scope="module")
def parents(session_dir, data_of, run_train):
    """parents(task): a finished run; the same one for each test, which leaves it as it is."""
    made = {}

    def make(task):
        if task not in made:
            made[task] = session_dir / f"parent-{task}"
            result = run_train("--task", task, *WORDS[task], *LENGTH, *EXACT, "--data", data_of[task], "--run-dir",
                               made[task])
            assert result.returncode == 0, result.text
        return made[task]

    return make


@pytest.fixture
def parent(parents):
    return parents(IMAGES)


def steps_of(run):
    return sorted({step_of(name) for name in CheckpointFolder(run / "checkpoints", 1, print).names()})


def of_run(run, first=0):
    """The records after step `first`."""
    return [record for record in records(run) if record["step"] > first]


# --- the same bits


@pytest.mark.rows(1)
@pytest.mark.parametrize("task", WORDS)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_branch_without_changes_ends_with_its_parents_hash(task, processes, parents, run_torchrun, tmp_path):
    """From amid an epoch, through a stop; and its files belong together."""
    run = parents(task)
    before, words = written(run), ["--task", task, "--branch", f"{run}@4", "--run-dir", tmp_path / "run"]
    stopped = run_torchrun(processes, *words, "--stop-after", 2)
    assert (stopped.code, "branched from parent" in stopped.text) == (Exit.STOPPED, True), stopped.text
    assert run_torchrun(processes, *words).returncode == 0
    assert contents(tmp_path / "run")[9] == contents(run)[9]
    assert (records(tmp_path / "run"), findings(tmp_path / "run"), written(run)) == (records(run), [], before)


@pytest.mark.long
def test_a_branch_is_verified_through_the_steps_of_its_parent(parent, run_train, tmp_path):
    branch = tmp_path / "branch"
    assert run_train("--branch", f"{parent}@epoch:2", "--epochs", 4, "--lr", "0.01", "--run-dir",
                     branch).returncode == 0
    again = tmp_path / "of-a-branch"
    assert run_train("--branch", f"{branch}@best", "--epochs", 5, "--run-dir", again).returncode == 0
    for run, last in ((branch, 12), (again, 15)):
        result = run_train(run, script="ask/verify.py")
        assert (result.returncode, f"verified: {run}, steps 1 to {last}" in result.out) == (0, True), result.text
    compared = run_train(parent, branch, script="ask/compare.py").out
    assert "RUN2 was branched from parent-image-classification after step 6: --epochs was 3 and is 4; --lr" in compared
    assert "the first record that differs: train, step 7" in compared
    assert "Branched from branch after step" in (again / "report.html").read_text()


@pytest.mark.rows(1)
@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_step_that_was_not_kept_is_kept_later_if_it_is_verified(step, parent, run_train, tmp_path):
    """Amid an epoch; at an evaluation, whose checkpoint was removed. Both runs are verified with it."""
    run, branch = shutil.copytree(parent, tmp_path / "run"), tmp_path / "branch"
    if step == 6:
        shutil.rmtree(find_parent(f"{run}@6").checkpoint)
    missed = run_train("--branch", f"{run}@{step}", "--run-dir", branch)
    assert missed.returncode == Exit.NO_INPUT and f"ask.verify {run} --keep {step}" in missed.err, missed.text
    kept = run_train(run, "--keep", step, script="ask/verify.py")
    assert (kept.returncode, "kept: " in kept.out, findings(run)) == (0, True, []), kept.text
    assert run_train("--branch", f"{run}@{step}", "--run-dir", branch).returncode == 0
    assert (contents(branch)[9], findings(branch)) == (contents(parent)[9], [])
    for each in (run, branch):
        verified = run_train(each, script="ask/verify.py")
        assert (verified.returncode, f"verified: {each}" in verified.out) == (0, True), verified.text


@pytest.mark.long
def test_a_branch_needs_its_parent_no_more_once_it_has_begun(parent, run_train, tmp_path):
    run = shutil.copytree(parent, tmp_path / "runs" / "parent")
    words = ["--branch", run, "--epochs", 5]
    assert run_train(*words, "--stop-after", 1).returncode == Exit.STOPPED
    shutil.rmtree(run)
    assert run_train(*words).returncode == 0
    [branch] = (tmp_path / "runs").glob("parent@last-????????")
    assert (steps_of(branch)[-1], findings(branch)) == (15, [])
    gone = run_train("--branch", run, "--epochs", 6)
    assert (gone.returncode, "is not the directory of a run that has begun" in gone.err) == (Exit.NO_INPUT, True)


# --- other batches


@pytest.mark.rows(1)
@pytest.mark.parametrize("batch, steps", [(48, 2), (57, 1), (12, 5), (13, 5), (100, 1)])
def test_other_batches_from_the_end_of_an_epoch_use_each_sample_once(batch, steps, parent, run_train, tmp_path):
    words = ["--branch", f"{parent}@epoch:2", "--global-batch-size", batch, "--micro-batch-size", "auto"]
    result = run_train(*words, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.text
    assert "epoch 3: trained on 57 of 57 samples, evaluated 147 of 147" in result.out
    trained = [record for record in of_run(tmp_path / "run", 6) if record["split"] == "train"]
    assert [record["step"] for record in trained] == [*range(7, 7 + steps)] and trained[-1]["epoch"] == 3
    names = []
    for step in range(7, 7 + steps):
        out = tmp_path / f"step-{step}"
        listed = run_train(tmp_path / "run", "--step", step, "--list", "--output", out, script="ask/replay.py")
        assert listed.returncode == 0, listed.text
        names += [row["sample"] for row in rows_of(out)]
    assert len(names) == len({*names}) == 57


def test_other_batches_amid_an_epoch_are_refused_with_the_steps_that_end_one(parent, run_train, tmp_path):
    result = run_train("--branch", f"{parent}@4", "--global-batch-size", 12, "--run-dir", tmp_path / "run")
    assert result.returncode == Exit.USAGE and not (tmp_path / "run").exists()
    assert "--global-batch-size 12 needs the end of an epoch, because an epoch is cut by it: RUN@3, 6, 9" in result.text


# --- the table of settings


def other(value):
    """Another value of a setting."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(number / 2 for number in value)
    return Interval("7") if isinstance(value, Interval) else value + 1 if isinstance(value, int | float) else "other"


OF_SAMPLES = {"val_fraction", "group_column", "label_column", "multi_label", "image_column", "image_size", "mean",
              "std", "cache", "text_column", "max_length", "tokenizer", "vocab_size"}
KEPT = OF_SAMPLES | {"task", "model", "pretrained", "weights", "seed", "optimizer", "head_init"}


@pytest.mark.parametrize("task", CONFIGS)
def test_what_a_branch_keeps_is_what_its_page_says(task):
    found = {name: fact.in_branch for name, fact in facts(CONFIGS[task](extras=())).items() if fact.in_branch}
    assert {*found} == (KEPT | {"global_batch_size"}) & settings(CONFIGS[task]()).keys()
    assert {name for name, why in found.items() if why == Kept.SAMPLES} == OF_SAMPLES & {*found}
    assert found["global_batch_size"] == Kept.AMID_EPOCH


@pytest.mark.parametrize("name", [name for name, fact in facts(CONFIGS[IMAGES](extras=())).items()
                                  if fact.kind != OPERATIONAL and name != "data"])
def test_a_branch_takes_each_setting_or_says_why_not(name, parent):
    found, spec = find_parent(f"{parent}@4"), f"{parent}@4"
    config = parse_command_line(["--branch", spec], {}, extras.pages())
    assert differences(config, found) == {}
    value = 2 if name == "epochs" else 5 if name == "max_steps" else other(settings(config)[name])
    config = with_values(config, {name: value})
    changed = differences(config, found)
    assert [*changed] == [name]
    if name in KEPT | {"global_batch_size"}:
        with pytest.raises(UserError, match=re.escape(f"because {facts(config)[name].in_branch}")) as raised:
            require_allowed(config, spec, found, changed)
        assert raised.value.code == Exit.USAGE
    else:
        require_allowed(config, spec, found, changed)
    if name == "global_batch_size":
        require_allowed(config, spec, find_parent(f"{parent}@6"), changed)


def test_a_branch_leaves_out_what_its_parent_has_not_used(parent, photos, run_train, tmp_path):
    """Before their first use: it ends as if they had been left out from the start; behind it the branch is refused.

    A branch of it still leaves them out.
    """
    listed = run_train(parent, "--step", 3, "--list", "--output", tmp_path / "3", script="ask/replay.py")
    assert listed.returncode == 0, listed.text
    (tmp_path / "names").write_text("\n".join(row["sample"] for row in rows_of(tmp_path / "3")[:5]))
    words, first, again = ["--without", tmp_path / "names"], tmp_path / "first", tmp_path / "again"
    late = run_train("--branch", f"{parent}@3", *words, "--run-dir", tmp_path / "late")
    assert (late.returncode, "RUN has used " in late.err, "up to step 3" in late.err) == (Exit.USAGE, True, True)
    result = run_train("--branch", f"{parent}@2", *words, "--run-dir", first)
    assert "--without was None and is 5 names (" in result.out, result.text
    assert "epoch 3: trained on 52 of 57 samples" in result.out
    whole = run_train(*WORDS[IMAGES], *LENGTH, *EXACT, *words, "--data", photos, "--run-dir", tmp_path / "whole")
    assert (whole.returncode, contents(first)[9]) == (0, contents(tmp_path / "whole")[9]), whole.text
    result = run_train("--branch", f"{first}@epoch:2", "--epochs", 4, "--run-dir", again)
    assert "epoch 4: trained on 52 of 57 samples" in result.out, result.text
    verified = run_train(again, script="ask/verify.py")
    assert (verified.returncode, f"verified: {again}, steps 1 to 12" in verified.out) == (0, True), verified.text


@pytest.mark.parametrize("settings, resolved, learnt", [
    ({"task": IMAGES}, {}, []), ({"task": IMAGES}, {"head_init": "features"}, ["a head"]),
    ({"task": IMAGES, "class_weights": "balanced"}, {}, ["class weights"]),
    ({"task": "image-regression"}, {}, ["the mean and the deviation of the targets"]),
    ({"task": "masked-lm", "tokenizer": "auto"}, {}, ["a tokenizer"]),
    ({"task": "masked-lm", "tokenizer": "folder"}, {}, []),
    ({"task": "masked-lm", "tokenizer": "auto"}, {"encoder": "digest"}, [])])
def test_what_was_learnt_from_all_samples_leaves_none_out(settings, resolved, learnt, tmp_path):
    """In any start of RUN, also of the run that it branched from. To leave out none any more is no such wish."""
    later = {"settings": {"task": settings["task"]}, "resolved": {"encoder": "digest"}}
    lines = [{"settings": settings, "resolved": resolved}, later]
    (tmp_path / "starts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    parent = SimpleNamespace(path=tmp_path, step=4, trainer={"progress": {"epoch": 1}})
    assert learnt_before(parent) == learnt
    config = with_values(CONFIGS[settings["task"]](extras=()), {"epochs": 9})
    require_allowed(config, "RUN@4", parent, {"without": ["2 names", None]})
    if learnt:
        with pytest.raises(UserError, match=f"RUN has learnt {learnt[0]} from its samples before step 1"):
            require_allowed(config, "RUN@4", parent, {"without": [None, "2 names"]})


@pytest.mark.long
def test_a_branch_leaves_no_image_out_that_decided_the_image_size(photos, run_train, tmp_path):
    """Of 57 images 29 are large, which makes the size that of a large one: without one of them it would be another."""
    data, run = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "run"
    every = sorted(data.glob("train/*/*.png"))
    for number, file in enumerate(every):
        Image.open(file).resize((40, 40) if number % 2 else (90, 90)).save(file)
    words = ["--model", "small-cnn", "--save-every", 1, *LENGTH, "--data", data, "--max-steps", 2]
    assert run_train(*words, "--run-dir", run).returncode == 0
    names = tmp_path / "names"
    for place, expected in ((0, Exit.USAGE), (1, 0)):
        names.write_text("\n".join(str(file.relative_to(data)) for file in every[place::2]))
        uses = run_train(run, "--first-use", names, "--output", tmp_path / str(place), script="ask/replay.py")
        assert uses.returncode == 0, uses.text
        names.write_text(next(row["sample"] for row in rows_of(tmp_path / str(place)) if row["step"] == "never"))
        words = ["--branch", run, "--max-steps", 3, "--without", names]
        result = run_train(*words, "--run-dir", tmp_path / f"run-{place}")
        assert result.returncode == expected, result.text
        assert ("because the image size" in result.err) == bool(expected)


@pytest.mark.rows(2)
@pytest.mark.parametrize("words", [
    ["--freeze", "none", "--optimizer", "sgd"], ["--freeze", "none", "--optimizer", "adamw"],
    ["--ema-decay", "0.9", "--schedule", "constant"], ["--strategy", "ddp", "--early-stop-patience", "1"],
    ["--mixup", "0.4", "--class-weights", "balanced", "--label-smoothing", "0.1"], ["--precision", "bf16"]],
    ids=lambda words: " ".join(words[:4]))
def test_what_may_change_is_trained_with_and_repeats(words, photos, run_train, tmp_path):
    """Parameters that begin to learn begin with the optimizer's first state."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    kept = ["--optimizer", given.pop("--optimizer", "adamw")]
    frozen = ["--freeze", "backbone"] if "--freeze" in given else []
    assert run_train(*WORDS[IMAGES][:4], *LENGTH, *EXACT, *kept, *frozen, "--data", photos, "--run-dir",
                     tmp_path / "parent").returncode == 0
    changed = [word for pair in given.items() for word in pair]
    for name in ("one", "two"):
        result = run_train("--branch", f"{tmp_path / 'parent'}@4", *changed, "--run-dir", tmp_path / name)
        assert result.returncode == 0, result.text
    assert weights_sha256(tmp_path / "one") == weights_sha256(tmp_path / "two") != weights_sha256(tmp_path / "parent")
    assert findings(tmp_path / "one") == []
    if words[:4] == ["--freeze", "none", "--optimizer", "adamw"]:
        optimizer = torch.load(newest_checkpoint(tmp_path / "one") / "state.pt", weights_only=True)["optimizer"]
        steps = {name: int(state["step"]) for name, state in optimizer.items()}
        assert {*steps.values()} == {5, 9} and steps["head.weight"] == 9, steps


# --- the best model before it


def best_of(run):
    return json.loads((run / "summary.json").read_text())["best"]


@pytest.mark.long
def test_the_best_model_then_is_taken_along_or_looked_for_from_there(photos, run_train, tmp_path):
    """RUN/model is of a later step by now: it is written again from its checkpoint; without that, best begins anew."""
    run = tmp_path / "run"
    assert run_train(*WORDS[IMAGES], *LENGTH, *EXACT, "--data", photos, "--run-dir", run, "--best",
                     "loss").returncode == 0
    assert (find_parent(f"{run}@4").trainer["best"]["step"], best_of(run)["step"]) == (3, 9)
    words = ["--branch", f"{run}@4", "--stop-after", 1, "--run-dir"]
    result = run_train(*words, tmp_path / "with")
    assert result.returncode == Exit.STOPPED and 3 in steps_of(tmp_path / "with"), result.text
    assert files_in(tmp_path / "with" / "model") == next(each["model"] for each in read_lines(run) if each["step"] == 3)
    assert findings(tmp_path / "with") == []

    shutil.rmtree(find_parent(f"{run}@3").checkpoint)
    result = run_train(*words, tmp_path / "without")
    assert "the best model up to step 4 is gone" in result.out and not (tmp_path / "without" / "model").exists()
    assert run_train(*words[:2], "--run-dir", tmp_path / "without").returncode == 0
    assert (best_of(tmp_path / "without")["step"], findings(tmp_path / "without")) == (9, [])
    assert "branched from run after step 4" in (tmp_path / "without" / "model" / "README.md").read_text()
    assert run_train(tmp_path / "without", script="ask/verify.py").returncode == 0


@pytest.mark.long
def test_a_branch_at_an_evaluation_is_evaluated_if_the_best_model_is_gone(texts, run_train, tmp_path):
    """With --lr 0 all evaluations are equal, and the first one counts."""
    run, branch = tmp_path / "run", tmp_path / "branch"
    assert run_train("--task", "text-classification", *TEXTS, *LENGTH, *EXACT, "--lr", 0, "--data", texts, "--run-dir",
                     run).returncode == 0
    shutil.rmtree(find_parent(f"{run}@best").checkpoint)
    result = run_train("--branch", f"{run}@6", "--run-dir", branch)
    assert result.returncode == 0, result.text
    assert [record["step"] for record in records(branch) if record["split"] == "val"] == [3, 6, 9]
    assert (best_of(run)["step"], best_of(branch)["step"], findings(branch)) == (3, 6, [])
    assert run_train(branch, script="ask/verify.py").returncode == 0


def test_the_first_checkpoint_of_a_branch_stays_whatever_keep_says(parent, run_train, tmp_path):
    assert run_train("--branch", f"{parent}@4", "--keep", 1, "--run-dir", tmp_path / "run").returncode == 0
    assert 4 in steps_of(tmp_path / "run") and not {5, 6} & {*steps_of(tmp_path / "run")} - {best_of(parent)["step"]}


# --- refusals


@pytest.mark.rows(2)
@pytest.mark.parametrize("words, code, message", [
    (["PARENT@5"], Exit.NO_INPUT, "has no checkpoint there; it has those of step 4, 6, 3, 2, 8 and"),
    (["PARENT@epoch:7"], Exit.NO_INPUT, "has no checkpoint there"),
    (["nothing@3"], Exit.NO_INPUT, "nothing is not the directory of a run that has begun"),
    (["PARENT", "--check"], Exit.USAGE, "leave --check out"),
    (["PARENT", "--eval-only"], Exit.USAGE, "leave --eval-only out"),
    (["PARENT@6", "--epochs", "1"], Exit.USAGE, "--epochs 1 leaves nothing to train after step 6; give at least"),
    (["PARENT@6", "--max-steps", "6"], Exit.USAGE, "give at least --max-steps 7"),
    (["PARENT"], Exit.USAGE, "--epochs 3 leaves nothing to train after step 9; give at least --epochs 4"),
    (["PARENT@6", "--run-dir", "PARENT"], Exit.OTHER_RUN, "is another run; use another --run-dir"),
    (["PARENT@6", "--model", "resnet18"], Exit.USAGE, "--model was small-cnn and cannot become resnet18, because")])
def test_what_cannot_be_branched_is_said_once_and_leaves_nothing(words, code, message, parent, run_train):
    before = written(parent)
    result = run_train("--branch", *(word.replace("PARENT", str(parent)) for word in words))
    assert (result.returncode, result.text.count(message)) == (code, 1), result.text
    assert written(parent) == before
    assert not [path for path in parent.parent.glob(f"{parent.name}@*") if path.is_dir()]


@pytest.mark.parametrize("where", ["os.rename", "_remove", "_link", "write_atomically", "describe_run", "shutil.copy"])
def test_a_start_that_was_killed_while_it_laid_out_is_laid_out_again(where, parent, tmp_path, monkeypatch):
    """Killed at each call of these, one after the other."""
    run, notes = tmp_path / "run", []
    config = parse_command_line(["--branch", f"{parent}@6", "--run-dir", str(run)], {}, extras.pages())
    run.mkdir()
    begin(config, run, notes.append)
    whole = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    module, _, name = where.rpartition(".")
    holder = getattr(begin_module, module) if module else begin_module
    original, ends = getattr(holder, name), 0
    for count in range(30):
        shutil.rmtree(run)
        run.mkdir()
        calls = iter(range(count))

        def killed(*given, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return original(*given)

        monkeypatch.setattr(holder, name, killed)
        try:
            begin(config, run, notes.append)
        except KeyboardInterrupt:
            ends += 1
        else:
            break
        finally:
            monkeypatch.setattr(holder, name, original)
        if not (run / "auto.json").exists():
            begin(config, run, notes.append)
        again = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert again == whole
    assert ends


def test_a_damaged_checkpoint_begins_no_branch_and_a_lost_one_continues_none(parent, run_train, tmp_path):
    copy, branch = shutil.copytree(parent, tmp_path / "copy"), tmp_path / "branch"
    assert run_train("--branch", f"{parent}@6", "--stop-after", 1, "--run-dir", branch).returncode == Exit.STOPPED
    file = find_parent(f"{copy}@6").checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    result = run_train("--branch", f"{copy}@6", "--run-dir", tmp_path / "damaged")
    assert (result.returncode, "is damaged (model.safetensors" in result.err) == (Exit.NO_INPUT, True), result.text
    shutil.rmtree(branch / "checkpoints")
    result = run_train("--branch", f"{parent}@6", "--run-dir", branch)
    assert (result.returncode, "the checkpoint of that step is lost" in result.err) == (Exit.NO_CHECKPOINT, True)


def test_another_branch_in_the_same_directory_is_refused(parent, run_train, tmp_path):
    words = ["--run-dir", tmp_path / "run", "--stop-after", 1]
    assert run_train("--branch", f"{parent}@6", "--lr", "0.01", *words).returncode == Exit.STOPPED
    for spec, lr in ((f"{parent}@4", "0.01"), ("nothing@6", "0.01"), (f"{parent}@6", "0.1")):
        result = run_train("--branch", spec, "--lr", lr, *words)
        assert result.returncode == Exit.OTHER_RUN, result.text
    fresh = run_train("--branch", f"{parent}@6", "--fresh", *words)
    assert "after step 6: nothing is changed" in fresh.out, fresh.text


@pytest.mark.long
def test_a_run_that_stopped_early_is_trained_on(texts, run_train, tmp_path):
    """With --lr 0 no evaluation is a gain."""
    early = run_train("--task", "text-classification", *TEXTS, *LENGTH, *EXACT, "--data", texts, "--lr", 0,
                      "--early-stop-patience", 1, "--run-dir", tmp_path / "early")
    assert early.returncode == 0 and steps_of(tmp_path / "early")[-1] == 6, early.text
    result = run_train("--branch", tmp_path / "early", "--lr", "1e-3", "--run-dir", tmp_path / "on")
    assert result.returncode == 0 and steps_of(tmp_path / "on")[-1] == 9, result.text


@pytest.mark.long
def test_a_run_that_diverged_goes_on_from_before_with_a_lower_rate(parent, run_train, tmp_path):
    """It is a branch itself, which keeps the checkpoint that it began with."""
    diverged = run_train("--branch", f"{parent}@6", "--lr", "1e30", "--run-dir", tmp_path / "diverged")
    assert diverged.returncode == Exit.DIVERGED, diverged.text
    result = run_train("--branch", f"{tmp_path / 'diverged'}@6", "--lr", "1e-3", "--run-dir", tmp_path / "lower")
    assert (result.returncode, findings(tmp_path / "lower")) == (0, []), result.text
