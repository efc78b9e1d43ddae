"""ask.compare on runs that differ in one thing each: the cause that it prints is the true one."""

import csv
import json
import random
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import write_photos
from tests.harness.project_copy import copy_project, run_in
from tests.harness.run_directory import newest_checkpoint
from utils.errors import Exit
from utils.rundir.chain import digest_of
from utils.rundir.checkpoint_folder import _digest

STEPS = 6
WORDS = ["--max-steps", STEPS, "--log-every", "1", "--save-every", "2", "--workers", "0", "--threads", "1",
         "--global-batch-size", "24", "--micro-batch-size", "12", "--precision", "fp32"]
IMAGES = [*WORDS, "--model", "small-cnn", "--image-size", "32"]
TEXTS = [*WORDS, "--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32"]


@pytest.fixture(scope="module")
def table(session_dir, photos):
    """table(name, change): a folder with train.csv and val.csv of the photos; change(rows) of train."""
    def write(name, change=lambda rows: rows):
        root = session_dir / "compared" / name
        root.mkdir(parents=True, exist_ok=True)
        for split in ("train", "val"):
            rows = [[f"../../{path.relative_to(session_dir)}", path.parent.name]
                    for path in sorted((photos / split).rglob("*.png"))]
            with (root / f"{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([["image", "label"], *(change(rows) if split == "train" else rows)])
        return root
    return write


@pytest.fixture(scope="module")
def trained(session_dir, run_torchrun, run_train, table, texts):
    """trained(name, *words, processes=None): the run directory of a run of images; of texts if its name begins so."""
    def train(name, *words, processes=None):
        run = session_dir / "compared-runs" / name
        if not run.exists():
            common = [*TEXTS, "--data", texts] if name.startswith("text") else [*IMAGES, "--data", table("base")]
            launch = run_train if processes is None else lambda *given: run_torchrun(processes, *given)
            result = launch(*common, "--run-dir", run, *words)
            assert result.returncode in (0, Exit.STOPPED), result.text
        return run
    return train


@pytest.fixture(scope="module")
def compared(run_train):
    """compared(one, two, *words): exit code and what it prints. The runs stay as they are."""
    def compare(*words):
        result = run_train(*words, script="ask/compare.py")
        assert result.returncode in (0, 1), result.text
        return result.returncode, result.out
    return compare


def with_another_label(rows):
    """The class of the sixth sample is another one."""
    return [*rows[:5], [rows[5][0], "tint2"], *rows[6:]]


def shuffled(rows):
    return random.Random(0).sample(rows, len(rows))


def test_two_equal_runs_are_the_same(trained, compared):
    code, out = compared(trained("base"), trained("again"))
    assert (code, out.splitlines()[-1]) == (0, "the same, bit for bit: 10 records, 5 links of the chain, up to step 6")


def test_what_differs_before_the_first_step_is_named_without_computing(trained, compared):
    code, out = compared(trained("base"), trained("seed", "--seed", "1"))
    assert code == 1 and "  --seed: 0 in RUN1, 1 in RUN2\n" in out
    assert "the first content in the chain that differs: the state before the first step" in out
    assert re.search(r"first record that differs: train, step 1\n  loss: .* a jump", out)


@pytest.mark.long
def test_an_image_that_was_overwritten_is_named_though_all_names_are_equal(session_dir, run_train, compared):
    data, runs = [session_dir / "one-pixel" / name for name in ("one", "two")], []
    for root in data:
        write_photos(root)
        changed = root / "train/tint0/005.png"
        if root is data[1]:
            pixels = np.array(Image.open(changed))
            pixels[5, 5, 0] ^= 1
            Image.fromarray(pixels).save(changed)
        runs.append(session_dir / "one-pixel-runs" / root.name)
        assert run_train(*IMAGES, "--data", root, "--run-dir", runs[-1]).returncode == 0
    code, out = compared(*runs)
    assert code == 1 and f"  data: one sample differs: {data[0] / 'train/tint0/005.png'}\n" in out, out
    assert f"  --data: {data[0]} in RUN1, {data[1]} in RUN2\n" in out and "without an effect" not in out, out
    (data[0] / "train").rename(data[0] / "gone")
    assert "  data: one sample differs: sample 5 of train\n" in compared(*runs)[1]


# name of the second run, its words, what is said before the first step, and what --locate names
PAIRS = {
    "seed": (["--seed", "1"], "--seed: 0 in RUN1, 1 in RUN2", r"the weights \S+ before step 1"),
    "lr": (["--lr", "0.0007070001"], "--lr: 0.000707 in RUN1", "the learning rate of step 1: "),
    "threads": (["--threads", "2"], "--threads: 1 in RUN1, 2 in RUN2",
                "the (output|gradient) of .* in micro-batch 0 .*, which rounding may do"),
    "precision": (["--precision", "bf16"], "--precision: fp32 in RUN1, bf16 in RUN2",
                  "the output of stages.0.shrink in micro-batch 0 of step 1: float32 .*, bfloat16"),
    "augmentation": (["--augmentation", "none"], "--augmentation: ",
                     "the input images of micro-batch 0 of step 1: uint8")}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_first_tensor_that_a_setting_changes_is_named(trained, compared, name):
    words, before, located = PAIRS[name]
    base = trained("lr-base", "--lr", "0.000707") if name == "lr" else trained("base")
    code, out = compared(base, trained(name, *words), "--locate")
    assert code == 1 and before in out and re.search(f"the first thing that differs is {located}", out), out


CHANGES = {
    "label": (with_another_label, "data: 1 sample with another label: .*005.png (tint0 in RUN1, tint2 in RUN2)",
              r"the input labels of .*: 1 of 8 values, of \S*train/tint0/005.png\n"),
    "removed": (lambda rows: rows[:5] + rows[6:], "data: 1 sample only in RUN1: .*005.png (tint0)",
                "sample 0 of micro-batch 0 of step 1: "),
    "order": (shuffled, "data: the same samples in another order", "sample 0 of micro-batch 0 of step 1: ")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_the_samples_that_differ_are_named(trained, compared, table, name):
    change, before, located = CHANGES[name]
    code, out = compared(trained("base"), trained(name, "--data", table(name, change)), "--locate")
    before = before.replace("(", r"\(").replace(")", r"\)")
    assert code == 1 and re.search(before, out), out
    assert re.search(f"the first thing that differs is {located}", out), out


@pytest.mark.slow
@pytest.mark.parametrize("words, before", [(["--dropout", "0.2"], "--dropout: the default in RUN1, 0.2 in RUN2"),
                                           (["--cpu-kernels", "off"], "--cpu-kernels: on in RUN1, off in RUN2")])
def test_the_first_module_that_draws_other_masks_is_named(trained, compared, words, before):
    """And each run computes with its own kernels, whichever comes first in this process."""
    base, other = trained("text"), trained(f"text-{words[0]}", *words)
    code, out = compared(base, other, "--locate")
    located = "the first thing that differs is the output of bert.embeddings.dropout in micro-batch 0 of step 1:"
    assert code == 1 and before in out and located in out, out
    assert located in compared(other, base, "--locate")[1]


@pytest.mark.slow
def test_a_run_of_another_number_of_processes_is_not_repeated_under_ddp(trained, compared):
    words = ["--micro-batch-size", "4"]
    code, out = compared(trained("one-process", *words), trained("two-processes", *words, processes=2), "--locate")
    assert code == 1 and "  processes: 1 in RUN1, 2 in RUN2\n" in out
    assert re.search(r"RUN2 cannot be repeated here: .* of step \d: .* then, .* now: apart by .*\n"
                     "  processes: 2 then, 1 here", out), out


@pytest.mark.slow
def test_a_run_of_another_program_is_not_repeated(trained, compared, table, tmp_path, session_dir):
    copied, base = copy_project(tmp_path / "copy"), trained("base")
    file = copied / "models" / "own.py"
    file.write_text(file.read_text().replace("self.norm(self.shrink(features)).relu()",
                                             "self.norm(self.shrink(features)).sigmoid()"))
    words = [*IMAGES, "--data", table("base"), "--run-dir", tmp_path / "run"]
    done = run_in(copied, f"python train.py {' '.join(map(str, words))}", session_dir / "cache")
    assert done.returncode == 0, done.stderr
    code, out = compared(base, tmp_path / "run", "--locate")
    assert code == 1 and re.search(r"  the program: \w+ in RUN1, \w+ in RUN2", out)
    assert re.search(r"RUN2 cannot be repeated here: loss of step 1: .*\n  the program: ", out), out


@pytest.mark.slow
def test_one_bit_of_a_checkpoint_is_found(trained, compared, table, run_train):
    """The run went on from it, and its manifest agrees."""
    base, run = trained("base"), trained("bit", "--stop-after", "4")
    folder = newest_checkpoint(run)
    weights = load_file(folder / "model.safetensors")
    weights["head.weight"].view(-1)[7] *= -1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest["files"]["model.safetensors"] = _digest(folder / "model.safetensors")
    manifest["sha256"] = digest_of(manifest, "sha256")
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    result = run_train(*IMAGES, "--data", table("base"), "--run-dir", run)
    assert result.returncode == 0, result.text
    code, out = compared(base, run, "--locate")
    assert code == 1 and "the first thing that differs is the weights head.weight before step 5: " in out, out
    assert "; a checkpoint is not what was saved: " in out and "; different: 1 of 384 values, " in out


@pytest.mark.slow
def test_an_image_with_other_pixels_is_named(trained, compared, photos, tmp_path):
    """The fingerprint of the data does not know them."""
    shutil.copytree(photos, tmp_path / "photos")
    shutil.copy(photos / "train/tint1/003.png", tmp_path / "photos/train/tint0/005.png")
    base, other = trained("folder", "--data", photos), trained("pixels", "--data", tmp_path / "photos")
    code, out = compared(base, other, "--locate")
    assert code == 1 and "fingerprint" not in out
    assert re.search(r"is the input images of micro-batch 1 of step 3: .* values, of train/tint0/005.png\n", out), out


@pytest.mark.slow
def test_samples_of_folders_and_of_texts_are_named(trained, compared, texts, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos/train/tint0/005.png").rename(tmp_path / "photos/train/tint2/999.png")
    words = compared(trained("folder", "--data", photos), trained("moved", "--data", tmp_path / "photos"))[1]
    assert ("data: 1 sample only in RUN1: train/tint0/005.png (tint0)\n"
            "  data: 1 sample only in RUN2: train/tint2/999.png (tint2)\n") in words, words

    shutil.copytree(texts, tmp_path / "texts")
    lines = (texts / "train.csv").read_text().splitlines()
    (tmp_path / "texts/train.csv").write_text("\n".join([lines[0], lines[1].replace("topic0", "topic1"), *lines[2:]]))
    words = compared(trained("text"), trained("text-label", "--data", tmp_path / "texts"))[1]
    assert re.search(r"data: 1 sample with another label: .* \(topic0 in RUN1, topic1 in RUN2\)\n", words), words


@pytest.mark.slow
def test_a_start_with_other_settings_is_named(trained, compared, table, run_train):
    base, run = trained("base"), trained("grown", "--stop-after", "4")
    result = run_train(*IMAGES, "--data", table("base"), "--run-dir", run, "--threads", "2")
    assert result.returncode == 0, result.text
    code, out = compared(base, run, "--locate")
    assert code == 1 and "  RUN2 after step 4: --threads: 1 before, 2 from there on\n" in out
    assert "the first step that differs is step 5" in out, out


@pytest.mark.slow
def test_data_that_were_overwritten_name_no_sample(trained, compared, table):
    base = trained("before", "--data", table("overwritten"))
    code, out = compared(base, trained("after", "--data", table("overwritten", with_another_label)), "--locate")
    assert code == 1 and "the data of RUN1 are not as they were when it was trained" in out
    assert "RUN1 cannot be repeated here: " in out, out


def test_a_run_that_an_older_version_began_is_refused(trained, run_train, tmp_path):
    base, old = trained("base"), tmp_path / "old"
    shutil.copytree(base, old)
    for name in ("starts.jsonl", "chain.jsonl"):
        (old / name).unlink()
    for runs in ((base, old), (old, base)):
        result = run_train(*runs, script="ask/compare.py")
        assert (result.returncode, result.out) == (Exit.NO_INPUT, "") and result.err.count("before 0.11") == 1


@pytest.mark.slow
def test_the_data_of_each_run_may_have_moved(trained, compared, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "one")
    shutil.copytree(photos, tmp_path / "two")
    (tmp_path / "two/train/tint0/005.png").unlink()
    runs = [trained(f"moved-{name}", "--data", tmp_path / name) for name in ("one", "two")]
    for name in ("one", "two"):
        (tmp_path / name).rename(tmp_path / f"{name}-moved")
    words = [*runs, "--data", tmp_path / "one-moved", tmp_path / "two-moved", "--locate"]
    code, out = compared(*words)
    assert code == 1 and "data: 1 sample only in RUN1: train/tint0/005.png (tint0)" in out, out
    assert re.search(r"the first thing that differs is sample \d+ of micro-batch \d of step 1: ", out), out


@pytest.mark.slow
def test_two_processes_find_the_same_as_one(trained, compared, run_torchrun):
    words = [trained("exact", "--strategy", "exact"), trained("exact-lr", "--strategy", "exact", "--lr", "0.01"),
             "--locate"]
    result = run_torchrun(2, *words, script="ask/compare.py")
    assert (1, result.out) == compared(*words)
