"""ask.verify: an honest run is verified whatever it went through; what was changed in a run directory is named."""

import getpass
import json
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from ask.integrity import findings
from tests.harness.forging import changed_weights, rehash, seal
from tests.harness.launches import HeldImage, image_of
from tests.harness.run_directory import newest_checkpoint, trained_steps, written
from utils.errors import Exit
from utils.rundir.chain import FILE, files_in, read_lines

# 12 steps in four epochs; nothing under --strategy exact depends on the number of processes
WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "4", "--global-batch-size", "24",
         "--micro-batch-size", "4", "--save-every", "2", "--keep-every", "4", "--log-every", "1", "--threads", "1",
         "--workers", "0", "--precision", "fp32"]
VERIFY = {"script": "ask/verify.py"}


@pytest.fixture(scope="module")
def begun(session_dir, run_train, photos):
    """(what its command says, a run that was stopped after five steps)."""
    words, run = [*WORDS, "--strategy", "exact", "--data", photos], session_dir / "to-verify-begun"
    result = run_train(*words, "--run-dir", run, "--stop-after", 5)
    assert result.returncode == Exit.STOPPED, result.text
    return words, run


@pytest.fixture(scope="module")
def honest(begun, session_dir, run_train):
    """The same run, finished by a second start."""
    words, run = begun
    copy = shutil.copytree(run, session_dir / "to-verify")
    result = run_train(*words, "--run-dir", copy)
    assert result.returncode == 0, result.text
    return copy


@pytest.fixture
def copied(honest, run_dir):
    """A copy of the finished run, to be changed."""
    return shutil.copytree(honest, run_dir)


def receipt_in(folder):
    """What the receipt of this folder says."""
    return json.loads((folder / "receipt.json").read_text())["predicate"]


# --- honest runs


def test_a_finished_run_is_verified_and_stays_as_it_is(honest, run_train, tmp_path):
    before = written(honest)
    result = run_train(honest, "--output", tmp_path / "receipt.json", **VERIFY)
    assert (result.returncode, written(honest)) == (0, before), result.text
    steps = [0, 2, 3, 4, 5, 6, 8, 9, 10, 12]
    assert [line.partition(":")[0] for line in result.out.splitlines() if "before its evaluation" not in line] == [
        "computing steps 1 to 12 again, from the beginning, on 1 x cpu", *(f"step {step}" for step in steps),
        "verified"]
    receipt, lines = receipt_in(tmp_path), read_lines(honest)
    assert (receipt["result"], receipt["run"], receipt["steps"]) == ("verified", honest.name, [1, 12])
    assert receipt["head"] == lines[-1]["link"] and [*map(int, receipt["links"])] == steps
    assert [start["step"] for start in receipt["starts"]] == [0, 5]
    assert receipt["links"][str(receipt["model_step"])]["model"] == files_in(honest / "model")


def test_a_receipt_is_an_in_toto_statement_and_names_no_place(honest, run_train, tmp_path):
    """Of the files of RUN/model. --with-places keeps the paths of data and weights."""
    words, statements = [honest, "--from", 10, "--output", tmp_path / "receipt.json"], []
    for more in ([], ["--with-places"]):
        result = run_train(*words, *more, **VERIFY)
        assert result.returncode == 0, result.text
        statements.append((tmp_path / "receipt.json").read_text())
    secrets = [str(honest.parent), socket.gethostname() + '"', getpass.getuser() + '"']
    assert [[secret for secret in secrets if secret in text] for text in statements] == [[], [str(honest.parent)]]
    found = json.loads(statements[0])
    assert [*found] == ["_type", "subject", "predicateType", "predicate"]
    assert {each["name"]: each["digest"] for each in found["subject"]} == {
        f"model/{name}": {"sha256": digest} for name, digest in files_in(honest / "model").items()}
    assert found["_type"] == "https://in-toto.io/Statement/v1" and found["predicate"]["steps"] == [11, 12]


@pytest.mark.slow
def test_kills_a_damaged_checkpoint_and_three_processes_verify_on_two(begun, run_dir, start_torchrun, run_torchrun):
    words, _ = begun
    words = [*words, "--run-dir", run_dir]
    for processes, step in ((1, 3), (3, 7)):
        launch = start_torchrun(processes, *words)
        launch.wait_for(lambda step=step: trained_steps(run_dir) > step, f"step {step}")
        launch.kill_all()
    damaged = newest_checkpoint(run_dir) / "state.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = run_torchrun(3, *words)
    assert result.code == 0 and "was renamed to damaged-step-" in result.out, result.text
    result = run_torchrun(2, run_dir, **VERIFY)
    assert result.code == 0 and f"verified: {run_dir}, steps 1 to 12" in result.out, result.text


def test_a_stretch_is_verified_from_the_checkpoint_before_it(honest, run_train):
    result = run_train(honest, "--from", 7, "--to", 7, **VERIFY)
    assert result.returncode == 0, result.text
    first, *rest = result.out.splitlines()
    assert first.startswith("computing steps 5 to 8 again, from ") and "step-0000000004-g1" in first
    assert [line.partition(":")[0] for line in rest if "before its" not in line] == [
        "step 5", "step 6", "step 8", "not verified", "verified in part"]
    assert "not verified: RUN/model, which is not of these steps" in rest


# --- changed files


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def without_line(file: Path, number: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:number] + lines[number + 1:]))


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def resealed(checkpoint: Path) -> None:
    changed_weights(checkpoint / "model.safetensors")
    seal(checkpoint, json.loads((checkpoint / "MANIFEST.json").read_text())["link"])


def from_another_run(checkpoint: Path) -> None:
    """Of a run with other records, which is whole in itself."""
    other = shutil.copytree(checkpoint.parents[1], checkpoint.parents[2] / "other")
    edited(other / "metrics.jsonl", '"loss": 0.', '"loss": 1.')
    rehash(other)
    shutil.rmtree(checkpoint)
    shutil.copytree(other / "checkpoints" / checkpoint.name, checkpoint)


FORGERIES = {
    "weights of the model": (lambda run: changed_weights(run / "model" / "model.safetensors"),
                             "model: model.safetensors: not what the run saved at step"),
    "config of the model": (lambda run: edited(run / "model" / "config.json", "tint0", "tint9"),
                            "model: config.json: not what the run saved at step"),
    "a bit of a checkpoint": (lambda run: flipped(newest_checkpoint(run) / "state.pt"), "damaged: state.pt: "),
    "a checkpoint of another run": (lambda run: from_another_run(newest_checkpoint(run)), "not a checkpoint of this"),
    "a checkpoint's name": (lambda run: shutil.copytree(run / "checkpoints" / "step-0000000004-g1",
                                                        run / "checkpoints" / "step-0000000013-g2"),
                            "the checkpoint of step 4 under another name"),
    "weights and their manifest": (lambda run: resealed(newest_checkpoint(run)), "its weights, state or position were"),
    "a manifest without a link": (lambda run: seal(newest_checkpoint(run), None), "not a checkpoint of this run"),
    "a record": (lambda run: edited(run / "metrics.jsonl", '"loss": 0.', '"loss": 1.'), "metrics.jsonl: a record was"),
    "a record less": (lambda run: without_line(run / "metrics.jsonl", 4), "metrics.jsonl: a record was"),
    "the first line less": (lambda run: without_line(run / FILE, 0), f"{FILE}: the line of step"),
    "a line less": (lambda run: without_line(run / FILE, 4), f"{FILE}: the line of step"),
    "a line": (lambda run: edited(run / FILE, '"start": 1', '"start": 2'), f"{FILE}: the line of step 0 was edited"),
    "a start": (lambda run: edited(run / "starts.jsonl", '"threads": 1', '"threads": 2'), "starts.jsonl: a line was"),
    "a setting": (lambda run: edited(run / "config.yaml", "seed: 0", "seed: 1"), "config.yaml: seed: not as in starts"),
    "a resolved value": (lambda run: edited(run / "auto.json", '"lr": 0.0', '"lr": 0.1'), "auto.json: lr: not as in"),
    "no JSON": (lambda run: edited(run / "auto.json", "{", "["), "auto.json: cannot be read (JSONDecodeError"),
    "no chain": (lambda run: (run / FILE).unlink(), f"{FILE}: it is missing"),
}


def test_nothing_is_found_in_an_honest_run(honest, begun):
    assert (findings(honest), findings(begun[1])) == ([], [])


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_was_changed_is_named(copied, forgery):
    change, words = FORGERIES[forgery]
    change(copied)
    found = findings(copied)
    assert len(found) == 1 and found[0].startswith(f"{copied}/") and words in found[0], found


def test_the_exit_code_and_a_receipt_say_that_files_differ(copied, run_train, tmp_path):
    assert run_train(copied, "--chain-only", **VERIFY).returncode == 0
    changed_weights(copied / "model" / "model.safetensors")
    file = tmp_path / "receipt.json"
    for words in (["--chain-only"], ["--output", file]):
        result = run_train(copied, *words, **VERIFY)
        assert result.returncode == Exit.DIFFERS and "model.safetensors: not what" in result.out, result.text
    receipt = receipt_in(tmp_path)
    assert (receipt["result"], "links" in receipt) == ("differs", False)
    said = [line for line in result.out.splitlines() if "model.safetensors" in line]
    assert [f"{copied}/{line}" for line in receipt["found"]] == said
    (copied / "starts.jsonl").write_text("no record\n")
    result = run_train(copied, "--chain-only", **VERIFY)
    assert result.returncode == Exit.DIFFERS and "starts.jsonl: cannot be read" in result.out, result.text


@pytest.mark.long
def test_a_model_of_a_step_that_the_run_went_back_from_is_named(photos, run_dir, run_train):
    """Every checkpoint since the evaluation of step 3 was damaged, and the next start evaluated nothing."""
    words = [*WORDS, "--data", photos, "--run-dir", run_dir]
    assert run_train(*words, "--keep-every", 1, "--stop-after", 5).returncode == Exit.STOPPED
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        if int(checkpoint.name.split("-")[1]) > 2:
            flipped(checkpoint / "state.pt")
    result = run_train(*words, "--eval-every", 100, "--stop-after", 2)
    assert result.returncode == Exit.STOPPED, result.text
    [found] = findings(run_dir)
    assert found.startswith(f"{run_dir}/model: it is what the run saved at step 3, but the run has gone back"), found
    assert run_train(*words).returncode == 0 and findings(run_dir) == []


def test_files_alone_give_no_receipt(copied, run_train, tmp_path):
    result = run_train(copied, "--chain-only", "--output", tmp_path / "receipt.json", **VERIFY)
    assert result.returncode == Exit.USAGE and "leave --chain-only out" in result.err, result.text
    assert not (tmp_path / "receipt.json").exists()


# --- a forger who computes all hashes anew


@pytest.mark.long
def test_weights_that_were_changed_between_two_starts_are_found(begun, run_dir, run_train, tmp_path):
    words, run = begun
    shutil.copytree(run, run_dir)
    changed_weights(newest_checkpoint(run_dir) / "model.safetensors")
    rehash(run_dir)
    assert run_train(*words, "--run-dir", run_dir).returncode == 0
    assert findings(run_dir) == []
    result = run_train(run_dir, "--output", tmp_path / "receipt.json", **VERIFY)
    assert result.returncode == Exit.DIFFERS and "step 5 differs: the content" in result.out, result.text
    receipt = receipt_in(tmp_path)
    agree = {step: link["content"] == receipt["computed"][step] for step, link in receipt["links"].items()}
    assert (receipt["result"], agree) == ("differs", {"0": True, "2": True, "3": True, "4": True, "5": False})
    result = run_train(run_dir, "--from", 8, **VERIFY)  # from there on it is what it says
    assert result.returncode == 0, result.text


@pytest.mark.long
def test_an_honest_run_with_better_figures_is_found(copied, run_train):
    edited(copied / "metrics.jsonl", '"split": "val", "step": 9, "epoch": 3.0, "samples": 171, "loss": 0.',
           '"split": "val", "step": 9, "epoch": 3.0, "samples": 171, "loss": 0.0')
    rehash(copied)
    assert findings(copied) == []
    result = run_train(copied, **VERIFY)
    assert result.returncode == Exit.DIFFERS, result.text
    assert "the val record of step 9 differs: loss 0.0" in result.out


def test_a_record_that_was_added_is_found(copied, run_train):
    file = copied / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    first = next(line for line in lines if json.loads(line)["split"] == "train")
    added = first.replace('"loss": ', '"loss": 0.0, "was": ')
    file.write_text("".join([added, *lines]))
    rehash(copied)
    assert findings(copied) == []
    result = run_train(copied, **VERIFY)
    assert result.returncode == Exit.DIFFERS, result.text
    assert "the train record of step 1 differs: loss 0.0 in the run" in result.out


# --- other machines, clear words


@pytest.mark.slow
def test_other_rounding_on_another_cpu_is_no_forgery(begun, run_dir, run_train, tmp_path):
    words, _ = begun
    old_cpu = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
    assert run_train(*words, "--run-dir", run_dir, "--max-steps", 4, env=old_cpu).returncode == 0
    result = run_train(run_dir, "--output", tmp_path / "receipt.json", **VERIFY)
    assert result.returncode == Exit.OTHER_RUN, result.text
    assert "\nhardware: " in result.out and f"\ncannot be compared here: {run_dir}" in result.out, result.out
    receipt = receipt_in(tmp_path)
    assert receipt["result"] == "cannot be compared here" and receipt["found"][-1].startswith("hardware: ")
    result = run_train(run_dir, **VERIFY, env=old_cpu)
    assert result.returncode == 0, result.text


def test_a_run_that_an_older_version_began_is_refused(begun, run_dir, run_train):
    """Also if this version has continued it."""
    words, run = begun
    shutil.copytree(run, run_dir)
    for name in (FILE, "starts.jsonl"):
        (run_dir / name).unlink()
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        seal(checkpoint, None)
    for is_continued in (False, True):
        if is_continued:
            assert run_train(*words, "--run-dir", run_dir).returncode == 0
        for more in (["--chain-only"], []):
            result = run_train(run_dir, *more, **VERIFY)
            assert result.returncode == Exit.NO_INPUT and "a version before 0.11 began this run" in result.err, (
                result.text)


@pytest.mark.long
def test_a_run_that_is_still_training_is_verified_on_two(photos, run_dir, start_torchrun, run_torchrun):
    """What rank 0 has read counts for both, though the run has saved more since."""
    words = [*WORDS, "--strategy", "exact", "--data", photos, "--run-dir", run_dir]
    live = start_torchrun(None, *words, "--epochs", 1000, "--save-every", 1, "--keep-every", 0)
    live.wait_for(lambda: trained_steps(run_dir) > 4, "five steps")
    result = run_torchrun(2, run_dir, "--to", 3, **VERIFY)
    assert live.process.poll() is None
    live.kill_all()
    assert result.code == 0 and f"{run_dir} is still training; it is compared up to step 3\n" in result.out, result.text
    assert f"verified in part: {run_dir}, steps 1 to 3: 4 links and all records are the same" in result.out


@pytest.mark.long
def test_a_run_whose_last_evaluation_was_abandoned_is_verified(own_photos, run_dir, start_torchrun, run_train):
    held = HeldImage(image_of(own_photos, "val", 0))
    live = start_torchrun(None, *WORDS, "--data", own_photos, "--run-dir", run_dir, "--eval-every", 100)
    live.wait_for(held.is_wanted, "the evaluation after the last step")
    live.process.send_signal(signal.SIGTERM)
    held.give()
    assert live.wait().returncode == Exit.STOPPED, live.wait().text
    result = run_train(run_dir, **VERIFY)
    assert result.returncode == 0 and "verified: " in result.out and "RUN/model" not in result.out, result.text
    with (run_dir / "metrics.jsonl").open("a") as file:  # after the last link
        file.write('{"split": "val", "step": 12, "loss": 0.001}\n')
    result = run_train(run_dir, **VERIFY)
    assert result.returncode == Exit.DIFFERS and "it has 1 record behind step 12" in result.out, result.text


def test_a_run_that_has_only_begun_is_no_forgery(begun, run_dir, run_train):
    run_dir.mkdir()
    for name in ("config.yaml", "auto.json", "starts.jsonl"):
        shutil.copy(begun[1] / name, run_dir)
    result = run_train(run_dir, "--chain-only", **VERIFY)
    assert result.returncode == Exit.NO_INPUT and "there is nothing to verify yet" in result.err, result.text


@pytest.mark.slow
@pytest.mark.parametrize("name, code", [("SIGINT", Exit.STOPPED), ("SIGKILL", -9)])
def test_a_verification_that_ends_early_leaves_nothing(honest, tmp_path, start_torchrun, name, code):
    launch = start_torchrun(None, honest, **VERIFY, env={"TMPDIR": str(tmp_path)})
    launch.wait_for(lambda: "step 3: " in (launch.folder / "out").read_text(), "step 3")
    assert len([*tmp_path.glob("lockstep-*")]) == 1
    launch.process.send_signal(getattr(signal, name))
    result = launch.wait()
    assert (result.returncode, "verified: " in result.out) == (code, False), result.text
    assert name == "SIGKILL" or "verify: stopped at step " in result.err, result.text
    deadline = time.monotonic() + 20
    while [*tmp_path.glob("lockstep-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- whatever a run has gone through

THROUGH = {  # the words of each of its starts
    "fp16": [["--precision", "fp16"]],
    "averages": [["--ema-decay", "0.5"]],
    "mixing": [["--mixup", "0.4", "--cutmix", "1"]],
    "an early stop": [["--epochs", "9", "--early-stop-patience", "2", "--best", "top1"]],
    "a stop before an evaluation": [["--stop-after", "6"]],
    "another best metric": [["--best", "loss", "--stop-after", "6"], ["--best", "top1"]],
    "another precision, and back": [["--stop-after", "3"], ["--precision", "bf16", "--stop-after", "4"], []],
    "other intervals": [["--stop-after", "6", "--eval-every", "5"], ["--eval-every", "2", "--save-every", "5"]],
    "saves by the clock": [["--save-every", "0.01s"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("through", THROUGH)
def test_a_run_is_verified_that_went_through(through, photos, run_dir, run_train, run_torchrun):
    words = [*WORDS, "--strategy", "exact", "--data", photos, "--run-dir", run_dir]
    for more in THROUGH[through]:
        result = run_torchrun(2, *words, *more)
        assert result.code in (0, Exit.STOPPED), result.text
    for stretch in ([], ["--from", 4], ["--to", 6]):
        result = run_train(run_dir, *stretch, **VERIFY)
        assert result.returncode == 0 and ("verified: " if not stretch else "verified") in result.out, result.text
