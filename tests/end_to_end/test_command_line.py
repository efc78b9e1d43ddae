"""train.py as users meet it: wrong input, signals, a run directory used again.

Every message comes once, whatever the number of ranks.
"""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from data.sampler import epoch_order
from tests.conftest import COUNTS, Result, write_photos
from tests.harness.run_directory import records, status, trained_steps
from utils.errors import Exit

SMALL = ["--model", "mobilenet_v3_small", "--image-size", "32", "--global-batch-size", "24",
         "--micro-batch-size", "4", "--threads", "1", "--precision", "fp32", "--log-every", "1", "--workers", "0"]
REAL = ("unknown flag", "missing folder")  # before and after torch is imported: the exit code that a shell sees
NUM_TRAIN = sum(COUNTS["train"])


def assert_refused(result: Result, code: Exit, *parts: str) -> None:
    """It ended with `code`, and exactly one message over all ranks, which has all `parts`."""
    messages = [line for line in (result.out + result.err).splitlines() if line.startswith("train.py: ")]
    assert result.code == code, result.text
    assert len(messages) == 1, result.text
    assert all(part in messages[0] for part in parts), messages[0]
    assert "rank0]: Traceback" not in result.err


def spoiled(root: Path, spoil) -> Path:
    spoil(write_photos(root))
    return root


@pytest.fixture(scope="module")
def refused(session_dir, run_train, photos) -> dict[str, tuple[Result, Path]]:
    """{case: (result, run directory)} of one-process launches that are refused, two at a time."""
    folder = session_dir / "refused"
    folder.mkdir()
    (folder / "empty").mkdir()
    (folder / "a-file").touch()
    (folder / "typo.yaml").write_text("learning_rate: 0.1\n")
    empty_class = spoiled(folder / "empty-class", lambda root: (root / "train" / "nothing").mkdir())
    one_class = spoiled(folder / "one-class", lambda root: [folder.rename(root / folder.name)
                                                            for folder in (root / "train").iterdir()][:0])
    no_network = {"TORCH_HOME": str(folder / "torch"), "https_proxy": "http://127.0.0.1:9",
                  "HTTPS_PROXY": "http://127.0.0.1:9"}
    cases = {
        "missing folder": (["--data", folder / "nowhere"], {}),
        "empty folder": (["--data", folder / "empty"], {}),
        "empty class": (["--data", empty_class], {}),
        "train without classes": (["--data", one_class], {}),
        "one sample under BatchNorm": (["--data", photos, "--micro-batch-size", "1"], {}),
        "one sample to mix": (
            ["--data", photos, "--model", "squeezenet1_1", "--micro-batch-size", "1", "--mixup", "0.2"], {}),
        "unknown model": (["--data", photos, "--model", "resnet19"], {}),
        "missing weights": (["--data", photos, "--weights", folder / "nowhere.pth"], {}),
        "no network": (["--data", photos, "--pretrained"], no_network),
        "no GPU": (["--data", photos, "--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}),
        "unknown flag": (["--data", photos, "--epoch", "3"], {}),
        "unknown key": (["--data", photos, "--config", folder / "typo.yaml"], {}),
        "node numbers": (["--data", photos], {"RANK": "1", "WORLD_SIZE": "2"}),
        "no address": (["--data", photos], {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
                                            "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "localhost"}),
        "run directory below a file": (["--data", photos, "--run-dir", folder / "a-file" / "run"], {}),
    }

    def launch(case: str) -> tuple[Result, Path]:
        words, env = cases[case]
        run = folder / f"run-{case}"
        return run_train(*SMALL, "--run-dir", run, *words, env=env, real=case in REAL), run

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(launch, cases), strict=True))


@pytest.mark.parametrize(("case", "code", "parts"), [
    ("missing folder", Exit.NO_INPUT, ["nowhere", "no such folder"]),
    ("empty folder", Exit.BAD_DATA, ["empty", "holds no class folders with images: it is empty"]),
    ("empty class", Exit.BAD_DATA, ["train/nothing holds no images", ".png"]),
    ("train without classes", Exit.BAD_DATA, ["train/ holds no class folders with images: it is empty"]),
    ("one sample under BatchNorm", Exit.USAGE,
     ["57 training samples", "BatchNorm needs two", "--micro-batch-size 3"]),
    ("one sample to mix", Exit.USAGE, ["--mixup 0.2", "every micro-batch of this run has one sample",
                                       "use --micro-batch-size 3"]),
    ("unknown model", Exit.USAGE, ["resnet19", "did you mean resnet"]),
    ("missing weights", Exit.NO_INPUT, ["--weights", "nowhere.pth"]),
    ("no network", Exit.NO_INPUT,
     ["--pretrained", "https://download.pytorch.org", "--weights FILE", "without --pretrained"]),
    ("no GPU", Exit.USAGE, ["--device cuda", "finds no accelerator here", "--device cpu"]),
    ("unknown key", Exit.USAGE, ["typo.yaml: learning_rate: unknown key; use lr"]),
    ("node numbers", Exit.USAGE, ["RANK=1 WORLD_SIZE=2 without LOCAL_RANK", "torchrun"]),
    ("no address", Exit.USAGE, ["WORLD_SIZE=2 needs MASTER_ADDR and MASTER_PORT", "torchrun"]),
    ("run directory below a file", Exit.CANNOT_CREATE, ["a-file", "--run-dir"]),
])
def test_wrong_input_is_refused_with_its_code_and_a_way_out(refused, case, code, parts):
    result, _ = refused[case]
    if result.code == 0:  # found on the command line, before there is anything that records codes
        result = Result(result.returncode, result.returncode, result.out, result.err, result.seconds)
    assert_refused(result, code, *parts)
    assert result.returncode == code


def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(refused):
    result, run = refused["unknown flag"]
    assert result.returncode == Exit.USAGE
    assert "--epochs" in result.err
    assert not run.exists()


def test_a_refused_start_leaves_no_run_directory(refused):
    assert [case for case, (_, run) in refused.items() if run.exists()] == []


def test_a_class_that_only_val_has_is_refused_once_on_two_processes(own_photos, run_dir, run_torchrun):
    (own_photos / "val" / "tint2").rename(own_photos / "val" / "Tint2")
    result = run_torchrun(2, *SMALL, "--data", own_photos, "--run-dir", run_dir)
    assert_refused(result, Exit.BAD_DATA, "val/ has Tint2, which train/ lacks",
                   "'Tint2' and 'tint2' differ only in case")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_ranks_beyond_the_micro_batches_are_idle_and_change_nothing(photos, run_dir, run_torchrun, strategy):
    """Three processes for two micro-batches compute what two do."""
    words = [*SMALL, "--data", photos, "--micro-batch-size", "12", "--strategy", strategy, "--threads", "1",
             "--epochs", "3"]
    for processes in (2, 3):
        result = run_torchrun(processes, *words, "--run-dir", run_dir / str(processes))
        assert result.returncode == 0, result.text
        idle = "a global batch has 2 micro-batches, and there are 3 processes: rank 2 only takes part in the sums"
        assert (idle in result.text) == (processes == 3), result.text
    two, three = (json.loads((run_dir / str(processes) / "summary.json").read_text()) for processes in (2, 3))
    assert abs(two["loss"] - three["loss"]) < 1e-3 * two["loss"]


def image_of(root: Path, split: str, index: int) -> Path:
    """The image with this index in its split."""
    return sorted((root / split).glob("*/*.png"))[index]


def test_an_image_that_rank_1_alone_cannot_read_stops_all_with_65_and_path(own_photos, run_dir, run_torchrun):
    # Position 9 of the first epoch is in micro-batch 3 of the first global batch, the second that rank 1 computes.
    bad = image_of(own_photos, "train", int(epoch_order(0, 0, NUM_TRAIN)[9]))
    bad.write_bytes(bad.read_bytes()[:-200])
    result = run_torchrun(2, *SMALL, "--data", own_photos, "--run-dir", run_dir, "--epochs", "1")
    assert result.returncode != 0
    assert result.code == Exit.BAD_DATA, result.text
    assert (result.out + result.err).count(f"train.py: cannot read {bad}: ") == 1, result.text
    assert "truncated" in result.err
    assert not list(run_dir.glob("checkpoints/step-*"))


@pytest.mark.long
def test_skipped_bad_images_are_listed_and_in_no_sum_of_an_evaluation(own_photos, run_dir, run_torchrun, run_train):
    words = [*SMALL, "--strategy", "exact", "--bad-samples", "skip", "--epochs", "1"]
    bad = {image_of(own_photos, "train", 20): "not an image", image_of(own_photos, "val", 100): "the file is empty"}
    image_of(own_photos, "train", 20).write_text("<html>404</html>")
    image_of(own_photos, "val", 100).write_bytes(b"")
    result = run_torchrun(2, *words, "--data", own_photos, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    assert "skipped 2 unreadable samples" in result.out
    listed = sorted((run_dir / "bad_samples.txt").read_text().splitlines())
    assert len(listed) == 2
    assert all(line.startswith(f"{path}: {reason}")
               for line, (path, reason) in zip(listed, sorted(bad.items()), strict=True))

    image_of(own_photos, "val", 100).unlink()  # the same training, and an evaluation without the image
    without = run_dir.with_name("without")
    assert run_train(*words, "--data", own_photos, "--run-dir", without).returncode == 0
    skipped, left_out = records(run_dir)[-1], records(without)[-1]
    assert skipped["top1"] == left_out["top1"]
    assert skipped["loss"] == pytest.approx(left_out["loss"], rel=1e-5)  # float32 forwards of other batches
    assert records(run_dir)[:-1] == records(without)[:-1]


@pytest.fixture(scope="module")
def finished(session_dir, run_train) -> tuple[list, Path, Result]:
    """(command, run directory, result) of a finished run on a folder with things in it that are no images."""
    root, run = write_photos(session_dir / "littered"), session_dir / "finished"
    (root / "train" / "tint0" / "notes.txt").touch()
    (root / "train" / ".cache").mkdir()
    (root / "__MACOSX").mkdir()
    command = [*SMALL, "--data", root, "--run-dir", run, "--max-steps", "1"]
    return command, run, run_train(*command, real=True)


def listing(run: Path) -> dict[str, tuple]:
    """Every file with its size and time."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*")
            if path.is_file() and path.name != ".lock"}


def test_hidden_folders_and_stray_files_are_passed_over_with_a_note(finished):
    _, run, result = finished
    assert result.returncode == 0, result.text
    assert ("skipped 1 file, not images in class folders, such as train/tint0/notes.txt"
            in result.out)
    assert json.loads((run / "model" / "config.json").read_text())["classes"] == ["tint0", "tint1", "tint2"]


def test_the_command_of_a_finished_run_says_so_at_once_and_trains_nothing(finished, run_train):
    command, run, _ = finished
    before = listing(run)
    again = run_train(*command, env={"PYTHONPROFILEIMPORTTIME": "1"})  # a real process lists its imports
    assert again.returncode == 0, again.text
    assert f"{run} is finished: step 1" in again.out
    assert "--fresh starts over" in again.out
    assert "utils.rundir.restart" in again.err and " torch" not in again.err
    assert listing(run) == before


def test_a_run_of_other_settings_is_refused_with_the_keys_and_untouched(finished, run_torchrun):
    command, run, _ = finished
    before = listing(run)
    result = run_torchrun(2, *command, "--optimizer", "sgd", "--lr", "0.5")
    assert_refused(result, Exit.OTHER_RUN, "--optimizer was adamw and is now sgd", "--lr was 0.000612 and is now 0.5",
                   "--fresh")
    assert listing(run) == before


def test_fresh_starts_over_and_keeps_the_old_run(finished, run_train):
    command, run, _ = finished
    weights = (run / "model" / "model.safetensors").read_bytes()
    result = run_train(*command, "--fresh", "--seed", "1")
    assert result.returncode == 0, result.text
    assert "a new run" in result.out
    assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 1
    [old] = (run.parent / ".old").glob("finished-*")
    assert (old / "model" / "model.safetensors").read_bytes() == weights != (
        run / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_in_use_is_refused_and_ctrl_c_still_stops_and_saves_it(photos, run_dir, start_torchrun, run_train):
    command = [*SMALL, "--data", photos, "--run-dir", run_dir, "--epochs", "1000", "--eval-every", "100000"]
    holder = start_torchrun(2, *command)
    holder.wait_for(lambda: trained_steps(run_dir) >= 1, "a step")
    result = run_train(*command)
    assert_refused(result, Exit.OTHER_RUN, f"{run_dir} is in use by process", "--run-dir")
    reached = trained_steps(run_dir)
    holder.wait_for(lambda: trained_steps(run_dir) > reached, "a step more")
    holder.process.send_signal(signal.SIGINT)
    stopped = holder.wait()
    assert (stopped.code, status(run_dir)["state"], status(run_dir)["message"]) == (
        Exit.STOPPED, "stopped", "SIGINT"), stopped.text
    assert [path.name for path in run_dir.glob("checkpoints/step-*")] == [f"step-{trained_steps(run_dir):010d}-g1"]


def test_a_second_ctrl_c_leaves_at_once_with_130(photos, run_dir, start_torchrun):
    live = start_torchrun(None, *SMALL, "--data", photos, "--run-dir", run_dir, "--image-size", "128",
                          "--epochs", "1000", real=True)
    live.wait_for(lambda: trained_steps(run_dir) >= 1, "a step")
    # A step takes far longer than two looks, and Python handles signals between micro-batches: signals that come
    # at once would be one.
    live.process.send_signal(signal.SIGINT)
    live.wait_for(lambda: live.process.send_signal(signal.SIGINT) or live.process.poll() is not None, "the end")
    result = live.wait()
    assert result.returncode == 130, result.text
    assert not list(run_dir.glob("checkpoints/step-*"))


def test_stop_after_a_duration_saves_and_leaves_with_75(photos, run_dir, run_train):
    result = run_train(*SMALL, "--data", photos, "--run-dir", run_dir, "--epochs", "1000", "--eval-every", "100000",
                       "--stop-after", "4s")
    assert (result.returncode, result.code) == (Exit.STOPPED, Exit.STOPPED), result.text
    assert (status(run_dir)["state"], status(run_dir)["message"]) == ("stopped", "--stop-after")
    assert [path.name for path in run_dir.glob("checkpoints/step-*")] == [f"step-{status(run_dir)['step']:010d}-g1"]
