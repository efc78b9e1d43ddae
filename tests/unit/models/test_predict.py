import csv
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import v2

from models.tasks import TASKS, image_classification
from models.vision.classifier import build_classifier, classify_images, load_model_folder, save_model_folder
from tests.harness.forked import run_forked
from tests.harness.predicting import ended
from utils.errors import Exit

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
CLASSES = ["cat", "dog, small", 'the "ü"']
DESCRIPTION = {
    "task": "image-classification", "architecture": "squeezenet1_1", "classes": CLASSES, "image_size": 32,
    "resize_size": 32, "interpolation": "bilinear", "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory whose model tells noise from noise."""
    folder = tmp_path_factory.mktemp("run") / "model"
    folder.mkdir()
    torch.manual_seed(0)
    model = build_classifier("squeezenet1_1", len(CLASSES))
    with torch.no_grad():  # all outputs pass the ReLU at its end, and each class is the largest for some images
        model.classifier[1].weight *= 20
        model.classifier[1].bias += torch.tensor([6, 9.8, 10.4])
    save_model_folder(model.state_dict(), DESCRIPTION, folder)
    return folder.parent


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (48, 40)) -> str:
    """A smooth picture; the name's ending says the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path)
    return str(path)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def command(*arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def test_rows_are_in_input_order_and_a_folders_images_in_path_order(run, tmp_path, capsys):
    folder = tmp_path / "folder"
    inside = [write_image(folder / name) for name in ("10.png", "B/x.JPG", "a.png", "b/c/ü.bmp", "b/d.webp")]
    (folder / "notes.txt").touch()
    (folder / ".hidden").mkdir()
    write_image(folder / ".hidden/1.png")
    (folder / "b/loop").symlink_to(folder)
    write_image(tmp_path / "elsewhere/1.png")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    inside.append(str(folder / "link/1.png"))
    single = write_image(tmp_path / "single.image.png")
    assert ended([str(run), single, str(folder), single]) == Exit.DONE
    assert [row["input"] for row in rows_of(capsys.readouterr().out)] == [single, *inside, single]


@pytest.mark.parametrize("said, side", [({"photo": True}, 37), ({"photo": False}, 32), ({"resize_size": 40}, 40)])
def test_probabilities_are_those_of_plain_torchvision(said, side, run, tmp_path, capsys, monkeypatch):
    # On a CPU without AVX2 torchvision resizes in float32, which rounds another way; our pixels are the same on any.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(run / "model/model.safetensors")
    (folder / "config.json").write_text(json.dumps(DESCRIPTION | said))
    paths = [write_image(tmp_path / f"{seed}.png", seed) for seed in range(8)]
    ended([str(folder), *paths])
    rows = rows_of(capsys.readouterr().out)

    model = torchvision.models.get_model("squeezenet1_1", num_classes=len(CLASSES))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    transform = v2.Compose([
        v2.Resize(side, antialias=True), v2.CenterCrop(32),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(DESCRIPTION["mean"], DESCRIPTION["std"])])
    images = torch.stack([transform(v2.functional.pil_to_tensor(Image.open(path))) for path in paths])
    theirs = model.eval()(images).softmax(1)
    ours = torch.tensor([[float(row[name]) for name in CLASSES] for row in rows])
    assert theirs.std(0).min() > 0.01  # the images do differ
    assert (ours - theirs).abs().max() < 1e-4  # six decimals, and the order of sums
    assert (ours.sum(1) - 1).abs().max() < 3e-6
    assert [row["prediction"] for row in rows] == [CLASSES[label] for label in theirs.argmax(1)]
    assert all(row["probability"] == row[row["prediction"]] for row in rows)


def test_a_model_of_bce_gives_sigmoids_and_the_same_predictions(run, tmp_path, capsys):
    (tmp_path / "bce").mkdir()
    save_model_folder(load_file(run / "model" / "model.safetensors"), DESCRIPTION | {"loss": "bce"}, tmp_path / "bce")
    paths, found = [write_image(tmp_path / f"{seed}.png", seed) for seed in range(5)], []
    for folder in (run, tmp_path / "bce"):
        assert ended([str(folder), *paths]) == Exit.DONE
        rows = rows_of(capsys.readouterr().out)
        found.append(([row["prediction"] for row in rows], torch.tensor([[float(row[name]) for name in CLASSES]
                                                                         for row in rows])))
    (predicted, softmax), (predicted_by_bce, sigmoid) = found
    assert predicted == predicted_by_bce
    # the odds of two classes under softmax are those of their logits
    odds = torch.logit(sigmoid[:, 1].double()) - torch.logit(sigmoid[:, 0].double())
    torch.testing.assert_close(odds, (softmax[:, 1].double() / softmax[:, 0]).log(), rtol=0.02, atol=0.02)


def test_class_names_with_commas_and_quotes_stay_one_column(run, tmp_path, capsys):
    ended([str(run), write_image(tmp_path / "a, b.png")])
    header, row = csv.reader(io.StringIO(capsys.readouterr().out, newline=""))
    assert header == ["input", "prediction", "probability", *CLASSES] and len(row) == len(header)


@pytest.mark.long
def test_batches_read_by_workers_give_the_rows_of_one_batch(run, tmp_path, capsys):
    paths = [write_image(tmp_path / f"{seed}.png", seed) for seed in range(8)]
    ended([str(run), *paths])
    one = rows_of(capsys.readouterr().out)
    ended([str(run), *paths, "--batch-size", "3"])
    several = rows_of(capsys.readouterr().out)
    assert [row["input"] for row in several] == paths
    for ours, theirs in zip(several, one, strict=True):  # another batch size is another order of sums
        assert [float(ours[name]) for name in CLASSES] == pytest.approx([float(theirs[name]) for name in CLASSES],
                                                                        abs=1e-5)


class Counted(list):
    """A list that counts the items of its slices."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 0
        return found


def test_the_work_for_a_batch_does_not_grow_with_the_batches_after_it(run, tmp_path):
    paths = Counted(write_image(tmp_path / f"{seed}.png", seed) for seed in range(9))
    model, description = load_model_folder(run / "model")
    batches = list(classify_images(model, description, paths, torch.device("cpu"), batch_size=2))
    assert [one.input for batch in batches for one in batch] == list(paths) and paths.copied <= len(paths)


def test_batches_larger_than_files_may_be_are_an_error_and_no_wait(run, tmp_path, capsys):
    """A worker hands its batch over in a file in shared memory."""
    paths, limits = [write_image(tmp_path / f"{seed}.png", seed) for seed in range(4)], resource.getrlimit(
        resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code = ended([str(run), *paths, "--batch-size", "2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == Exit.IO and "it is larger than ulimit -f allows" in capsys.readouterr().err


@pytest.mark.long
def test_out_of_memory_names_the_flag_of_predict(run, tmp_path, capsys, monkeypatch):
    def too_large(*arguments):
        yield torch.empty(2**55)

    monkeypatch.setattr(image_classification, "classify_images", too_large)
    assert ended([str(run), write_image(tmp_path / "image.png")]) == Exit.USAGE
    assert capsys.readouterr().err.startswith("predict: out of memory: use a smaller --batch-size (")


def test_a_gpu_where_there_is_none_is_64_with_the_way_out(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = run, write_image(tmp_path / "image.png"), "--device", "cuda"
    done = run_forked("models/predict.py", *words, folder=tmp_path)
    assert done.returncode == Exit.USAGE
    assert done.stderr == (f"predict: --device cuda: torch {torch.__version__} finds no accelerator here; "
                           "use --device cpu\n")


def test_unreadable_images_are_named_and_the_others_written(run, tmp_path, capsys):
    good = [write_image(tmp_path / f"{seed}.png", seed) for seed in range(2)]
    (bad := tmp_path / "bad.png").write_bytes(Path(good[0]).read_bytes()[:200])
    (text := tmp_path / "notes.txt").write_text("no image")
    assert ended([str(run), good[0], str(bad), str(text), good[1]]) == Exit.BAD_DATA
    captured = capsys.readouterr()
    assert [row["input"] for row in rows_of(captured.out)] == good
    assert f"{bad}: " in captured.err and f"{text}: not an image" in captured.err and "2 of 4" in captured.err


def test_a_table_gives_its_images_in_its_order_and_names_missing_ones(run, tmp_path, capsys):
    for name in ("b.png", "a.png"):
        write_image(tmp_path / "photos" / name)
    table = tmp_path / "table.csv"
    table.write_text("image,age\nphotos/b.png,1\nphotos/none.png,2\n photos/a.png ,3\n")
    assert ended([str(run), str(table)]) == Exit.BAD_DATA
    printed = capsys.readouterr()
    assert [Path(row["input"]).name for row in rows_of(printed.out)] == ["b.png", "a.png"]
    assert "cannot read" in printed.err and "none.png" in printed.err

    table.write_text("photo,age\nphotos/b.png,1\n")
    assert ended([str(run), str(table)]) == Exit.BAD_DATA
    assert f"{table}: there is no column image; it has photo, age" in capsys.readouterr().err


def test_missing_input_and_folder_without_images_are_66(run, tmp_path, capsys):
    """The message says what is there."""
    image = write_image(tmp_path / "image.png")
    assert ended([str(run), image, str(tmp_path / "gone.png")]) == Exit.NO_INPUT
    captured = capsys.readouterr()
    assert "gone.png" in captured.err and captured.out == ""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").touch()
    assert ended([str(run), str(tmp_path / "texts")]) == Exit.NO_INPUT
    assert "texts has a.txt" in capsys.readouterr().err


def test_run_without_a_model_is_66_and_says_to_train_first(tmp_path, capsys):
    image = write_image(tmp_path / "run/image.png")
    assert ended([str(tmp_path / "run"), image]) == Exit.NO_INPUT
    assert "train first" in capsys.readouterr().err
    assert ended([str(tmp_path / "gone"), image]) == Exit.NO_INPUT


@pytest.mark.parametrize(("content", "code"), [
    ("{", Exit.NO_INPUT), ("[]", Exit.NO_INPUT), ('{"model_type": "bert"}', Exit.NO_INPUT),
    ('{"architecture": "resnet18"}', Exit.NO_INPUT),
    (json.dumps(DESCRIPTION | {"architecture": "mobilenet_v3_small"}), Exit.BAD_DATA),
    (json.dumps(DESCRIPTION | {"classes": ["a"]}), Exit.BAD_DATA)])
def test_damaged_model_folder_is_refused_without_a_traceback(content, code, run, tmp_path, capsys):
    image = write_image(tmp_path / "image.png")
    (tmp_path / "model.safetensors").symlink_to(run / "model/model.safetensors")
    (tmp_path / "config.json").write_text(content)
    assert ended([str(tmp_path), image]) == code
    assert str(tmp_path) in (message := capsys.readouterr().err) and "Traceback" not in message


@pytest.mark.parametrize("content", [
    '["task"]', '"task"', "null",
    "", '{"task":'])
def test_model_folder_that_names_no_task_is_66_and_says_which_file(content, run, tmp_path, capsys):
    image = write_image(tmp_path / "image.png")
    (tmp_path / "config.json").write_text(content)
    assert ended([str(tmp_path), image]) == Exit.NO_INPUT
    assert capsys.readouterr().err.startswith(f"predict: {tmp_path}/config.json was not written by a run (")


def test_a_folder_of_a_hub_is_no_model_of_a_run_and_is_told_so(run, tmp_path, capsys):
    image = write_image(tmp_path / "image.png")
    described = {name: value for name, value in DESCRIPTION.items() if name != "task"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert ended([str(tmp_path), image]) == Exit.NO_INPUT
    assert f"{tmp_path} is not a model of train.py: its config.json names no task; train one" in capsys.readouterr().err


# the last two fail today
@pytest.mark.parametrize("task", ["image-segmentation", "", None, 3, ["image-classification"], {}])
def test_task_that_there_is_not_is_66_with_those_that_there_are(task, run, tmp_path, capsys):
    image = write_image(tmp_path / "image.png")
    (tmp_path / "config.json").write_text(json.dumps(DESCRIPTION | {"task": task}))
    assert ended([str(tmp_path), image]) == Exit.NO_INPUT
    message = capsys.readouterr().err
    assert f"{tmp_path}/config.json: unknown task {task};" in message and ", ".join(TASKS) in message
    assert "Traceback" not in message


def test_jsonl_says_of_each_input_what_csv_says(run, tmp_path, capsys):
    paths = [write_image(tmp_path / f'{seed}, "ü".png', seed) for seed in range(3)]
    ended([str(run), *paths])
    expected = [{
        "input": row["input"], "prediction": row["prediction"], "probability": float(row["probability"]),
        "probabilities": {name: float(row[name]) for name in CLASSES}} for row in rows_of(capsys.readouterr().out)]
    assert ended([str(run), *paths, "--format", "jsonl"]) == Exit.DONE
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.parametrize(("name", "words", "expected"), [
    ("out.jsonl", (), "jsonl"), ("out.csv", (), "csv"), ("out", (), "csv"), ("out.jsonl", ("--format", "csv"), "csv"),
    ("out.csv", ("--format", "jsonl"), "jsonl"), ("out.jsonl", ("--format", "jsonl"), "jsonl")])
def test_format_is_the_one_given_or_that_of_the_outputs_ending(name, words, expected, run, tmp_path, capsys):
    images = [write_image(tmp_path / f"{seed}.png", seed) for seed in range(2)]
    ended([str(run), *images, "--format", expected])
    printed = capsys.readouterr().out
    ended([str(run), *images, "--output", str(tmp_path / name), *words])
    assert (tmp_path / name).read_text() == printed and printed.startswith({"csv": "input,",
                                                                            "jsonl": '{"input": '}[expected])


def test_unreadable_images_have_no_line_in_jsonl(run, tmp_path, capsys):
    good, bad = write_image(tmp_path / "good.png"), tmp_path / "bad.png"
    bad.write_text("no image")
    assert ended([str(run), str(bad), good, "--format", "jsonl"]) == Exit.BAD_DATA
    assert [json.loads(line)["input"] for line in capsys.readouterr().out.splitlines()] == [good]


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("--format", "xml", "choose from csv, jsonl"),
    *[("--batch-size", value, "at least 1") for value in ("0", "-1", "1.5", "many")]])
def test_a_bad_value_is_a_typing_error_with_its_rule(name, value, rule, run, capsys):
    with pytest.raises(SystemExit) as left:
        ended([str(run), "a.png", name, value])
    assert left.value.code == Exit.USAGE
    assert f"argument {name}: " in (message := capsys.readouterr().err.replace("'", "")) and rule in message


def test_output_gets_its_name_once_it_is_complete(run, tmp_path, capsys, monkeypatch):
    image, output = write_image(tmp_path / "image.png"), tmp_path / "out.csv"
    assert ended([str(run), image, "--output", str(output)]) == Exit.DONE
    complete = output.read_bytes()
    assert len(rows_of(complete.decode())) == 1 and b"\r" not in complete and capsys.readouterr().out == ""

    def failing(*arguments):
        yield from ()
        raise OSError("out of order")

    monkeypatch.setattr(image_classification, "classify_images", failing)
    assert ended([str(run), image, "--output", str(output)]) == Exit.IO
    assert output.read_bytes() == complete and sorted(os.listdir(tmp_path)) == ["image.png", "out.csv"]


@pytest.mark.parametrize("name", [".", "gone/out.csv", "image.png/out.csv", "/dev/null"])
def test_output_that_cannot_be_written_is_73(name, run, tmp_path, capsys):
    image = write_image(tmp_path / "image.png")
    assert ended([str(run), image, "--output", str(tmp_path / name)]) == Exit.CANNOT_CREATE
    assert "--output" in capsys.readouterr().err and not Path("/dev/null").is_file()


def test_names_that_are_no_utf8_come_out_as_they_are(run, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.png"
    os.rename(write_image(tmp_path / "image.png"), path)
    ended([str(run), os.fsdecode(path), "--output", str(tmp_path / "out.csv")])
    assert path in (tmp_path / "out.csv").read_bytes()


@pytest.mark.long
def test_closed_pipe_ends_it_without_a_word(run, tmp_path):
    process = command("-m", "models.predict", str(run), write_image(tmp_path / "image.png"))
    process.stdout.close()  # as head does
    assert process.stderr.read() == "" and process.wait() == 141  # what a shell reports of SIGPIPE


def test_help_and_typing_errors_answer_before_torch_is_imported(run):
    for arguments, code in ((["--help"], Exit.DONE), ([str(run)], Exit.USAGE),
                            ([str(run), "a.png", "--ouput", "b"], Exit.USAGE)):
        _, errors = (process := command("-X", "importtime", "-m", "models.predict", *arguments)).communicate()
        assert process.returncode == code and "numpy" not in errors and " torch" not in errors
