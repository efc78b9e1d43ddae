"""models.export: each file predicts what models.predict does, and one that does not is never written."""

import csv
import errno
import hashlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from data.texts.tokenizer import train_tokenizer
from models import export, exported, exported_images, predict, run_exported
from models.vision.classifier import image_set
from tests.conftest import ROOT
from tests.harness.encoders import write_encoder
from utils.errors import Exit, UserError

SHORT = ["--max-steps", "2", "--global-batch-size", "24", "--micro-batch-size", "8", "--threads", "1", "--workers", "0",
         "--precision", "fp32", "--device", "cpu"]
IMAGES = ["--model", "small-cnn", "--image-size", "16"]
TEXTS = ["--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32"]
KINDS = {  # by name: data, words
    "images": ("photos", IMAGES),
    "several images": ("photo_tables", ["--model", "mobilenet_v3_small", "--image-size", "32", "--image-column",
                                        "image,mask"]),
    "labels of images": ("photo_tables", [*IMAGES, "--image-column", "image", "--label-column", "labels",
                                          "--multi-label"]),
    "numbers of images": ("photo_tables", ["--task", "image-regression", *IMAGES, "--image-column", "image",
                                           "--label-column", "brightness,number"]),
    "texts": ("texts", [*TEXTS, "--text-column", "text"]),
    "pairs": ("texts", [*TEXTS, "--text-column", "text,more"]),
    "numbers of texts": ("text_tables", ["--task", "text-regression", *TEXTS[2:], "--text-column", "text",
                                         "--label-column", "length"]),
    "own texts": ("texts", ["--task", "text-classification", "--model", "bag-of-words", *TEXTS[4:], "--text-column",
                            "text"])}


@pytest.fixture(scope="module")
def runs(session_dir, run_train, request):
    """A run of each of KINDS by its name, trained when it is first asked for."""
    class Runs(dict):
        def __missing__(self, kind):
            name, words = KINDS[kind]
            self[kind] = session_dir / f"export-{kind.replace(' ', '-')}"
            result = run_train(*words, *SHORT, "--data", request.getfixturevalue(name), "--run-dir", self[kind])
            assert result.returncode == 0, result.text
            sharpen(self[kind])
            return self[kind]

    return Runs()


def sharpen(run: Path, factor: float = 20) -> None:
    """After so few steps all probabilities are alike: multiply the outputs of the head."""
    file = run / "model" / "model.safetensors"
    about, weights = described(run), load_file(file)
    num_outputs = len(about.get("classes", about.get("id2label")))
    heads = [name for name, param in weights.items() if param.ndim == 2 and len(param) == num_outputs]
    save_file(weights | {name: factor * weights[name] for name in heads}, file, metadata={"format": "pt"})
    assert heads


def described(run: Path) -> dict:
    return json.loads((run / "model" / "config.json").read_text())


def exports(run, *words) -> int:
    return export.main(export.PARSER.parse_args([str(run), *map(str, words)]))


def refused(capsys, run, *words) -> tuple[Exit, str]:
    """The code and the message; nothing new lies beside the output."""
    before = sorted(Path(run).rglob("*"))
    with pytest.raises(UserError) as caught:
        exports(run, *words)
    assert sorted(Path(run).rglob("*")) == before
    return caught.value.code, str(caught.value)


QUICK = {"images": "onnx", "several images": "torch", "labels of images": "onnx", "numbers of images": "onnx",
         "texts": "torch", "pairs": "onnx", "numbers of texts": "onnx", "own texts": "torch"}


@pytest.mark.rows(1)
@pytest.mark.parametrize(("kind", "format"), [
    pytest.param(kind, name, marks=[] if QUICK[kind] == name else [pytest.mark.slow])
    for kind in KINDS for name in export.NEEDS])
def test_each_kind_of_input_passes_the_gate(kind, format, runs, tmp_path, capsys):
    assert exports(runs[kind], "--format", format, "--output", tmp_path / "out") == Exit.DONE
    said, found = capsys.readouterr().out, json.loads((tmp_path / "out" / exported.ABOUT).read_text())
    assert "and 0 predictions differ" in said and 64 <= found["samples_compared"] <= 96
    assert found["largest_difference"] <= exported.TOLERANCE
    assert (tmp_path / "out" / exported.FILES[format]).stat().st_size > 10_000
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def test_a_program_that_knows_onnx_alone_predicts_from_the_folder(runs, photos, tmp_path, capsys):
    """By export.json, or by what stands in the file; any number of images at once."""
    import onnxruntime

    exports(runs["images"], "--format", "onnx", "--output", tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    told = {name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}
    beside = json.loads((tmp_path / "out" / "export.json").read_text())
    assert told == {name: value for name, value in beside.items() if name in told} and told["image_size"] == 16
    assert {"classes", "resize_size", "interpolation", "mean", "std"} <= set(told)
    weights = (runs["images"] / "model" / "model.safetensors").read_bytes()
    best = json.loads((runs["images"] / "summary.json").read_text())["best"]
    assert (told["step"], told["model_sha256"]) == (best["step"], hashlib.sha256(weights).hexdigest())

    paths = sorted((photos / "val").rglob("*.png"))[:7]
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths]).transpose(0, 3, 1, 2)  # they are 16 x 16
    capsys.readouterr()
    predict.main([str(runs["images"]), *map(str, paths)])
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    theirs = np.array([[float(row[name]) for name in told["classes"]] for row in rows])
    for part in (slice(0, 1), slice(0, 7)):
        [ours] = session.run(None, {"images": pixels[part]})
        assert np.abs(ours - theirs[part]).max() < 1e-4


def photo(number, size=(70, 50)):
    """A smooth one: at an edge, two ways of resizing differ."""
    x, y = np.meshgrid(np.linspace(0, 6, size[0]), np.linspace(0, 4, size[1]))
    waves = [np.sin(x + number), np.cos(y - number), np.sin(x + y)]
    return Image.fromarray((127 + 120 * np.stack(waves, axis=2)).astype(np.uint8))


def test_what_is_beside_an_export_prepares_any_image_as_the_run_did(tmp_path):
    """Turned by EXIF, transparent, of 16 bits, long, larger and smaller than the network's square."""
    clear = photo(1)
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = Image.fromarray(np.asarray(photo(2).convert("L")).astype(np.uint16) * 16)
    files = {"a.png": (clear, {}), "b.jpg": (photo(3, (300, 400)), {"quality": 95, "exif": exif}), "c.png": (grey, {}),
             "d.gif": (photo(4).quantize(64), {}), "e.png": (photo(5, (400, 20)), {}), "f.png": (photo(6, (9, 21)), {}),
             "g.tif": (photo(7).convert("CMYK"), {})}
    about = {"image_size": 32, "resize_size": 36, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3,
             "white_value": 4095, "classes": ["x", "y"], "task": "image-classification", "architecture": "resnet18"}
    for name, (image, how) in files.items():
        image.save(tmp_path / name, **how)
        expected = image_set(about, [str(tmp_path / name)])[0, 0].image.permute(2, 0, 1).numpy().astype(int)
        found = run_exported.prepare(str(tmp_path / name), about).astype(int)
        assert found.shape == (3, 32, 32) and np.abs(found - expected).mean() < 1.5, name
    names = ",".join(str(tmp_path / name) for name in ("a.png", "c.png"))
    both = run_exported.prepare(names, about | {"num_images": 2})
    assert both.shape == (6, 32, 32)


@pytest.mark.parametrize("kind, format", [("images", "onnx"), pytest.param(
    "several images", "torch", marks=pytest.mark.long)])
def test_an_export_of_images_runs_by_the_file_beside_it(kind, format, runs, photos, tmp_path, capsys):
    exports(runs[kind], "--format", format, "--output", tmp_path / "out")
    said, about = capsys.readouterr().out, json.loads((tmp_path / "out" / "export.json").read_text())
    assert f"python {tmp_path / 'out' / 'run.py'} IMAGE\n" in said and "try it: " in said
    assert about["run_largest_difference"] < exported_images.RUN_TOLERANCE and len(about["preparation"]) == 6

    def ran(*words):
        return subprocess.run([sys.executable, tmp_path / "out" / "run.py", *words], capture_output=True, text=True,
                              cwd=tmp_path, env={"PATH": "/usr/bin"})
    done = ran()
    assert (done.returncode, "the golden sample is predicted as it was" in done.stdout) == (0, True), done.stderr
    row, *_ = csv.DictReader((runs[kind] / "eval" / "samples.csv").open())
    values = dict(zip(*[iter(ran(row["input"]).stdout.split()[1:])] * 2, strict=True))
    capsys.readouterr()
    predict.main([str(runs[kind]), row["input"]])
    theirs, *_ = csv.DictReader(capsys.readouterr().out.splitlines())
    assert {name: float(value) for name, value in values.items()} == pytest.approx(
        {name: float(theirs[name]) for name in about["classes"]}, abs=1e-3)


def test_a_preparation_that_pillow_does_otherwise_is_left_out_in_words(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exported_images, "RUN_TOLERANCE", -1)
    exports(runs["images"], "--format", "onnx", "--output", tmp_path / "out")
    assert "run.py is left out: its predictions are off by up to" in capsys.readouterr().out
    assert not (tmp_path / "out" / "run.py").exists() and (tmp_path / "out" / "model.onnx").exists()


@pytest.mark.parametrize("format, name", [("onnx", "net.onnx"), ("torch", "net.pt2")])
def test_an_output_with_the_ending_of_a_file_is_a_file(format, name, runs, tmp_path):
    for _ in range(2):  # the second replaces the first
        assert exports(runs["images"], "--format", format, "--output", tmp_path / name) == Exit.DONE
        assert sorted(path.name for path in tmp_path.iterdir()) == ["net.json", name]
    (tmp_path / "net.json").unlink()
    with pytest.raises(UserError, match=r"net.* exists and is not of an export"):
        exports(runs["images"], "--format", format, "--output", tmp_path / name)


def test_free_dimensions_have_names(runs, tmp_path):
    import onnx

    exports(runs["pairs"], "--format", "onnx", "--output", tmp_path / "net.onnx")
    graph = onnx.load(tmp_path / "net.onnx").graph
    named = {each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim]
             for each in (*graph.input, *graph.output)}
    assert named["input_ids"] == ["batch", "tokens"] and named["probabilities"][0] == "batch"


@pytest.mark.long
def test_a_program_that_knows_torch_alone_predicts_texts(runs, tmp_path):
    """The tokenizer's files lie beside the model."""
    exports(runs["texts"], "--format", "torch", "--output", tmp_path / "out")
    program = ("import json, sys, torch, transformers\n"
               "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
               "inputs = tokenizer(['aaaa bbbb', 'cccc'], padding=True, return_tensors='pt')\n"
               "extra = {'export.json': ''}\n"
               "module = torch.export.load(sys.argv[1] + '/model.pt2', extra_files=extra).module()\n"
               "names = json.loads(extra['export.json'])['inputs']\n"
               "print(json.dumps(module(*(inputs[name] for name in names)).tolist()))")
    words = [sys.executable, "-c", program, tmp_path / "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = np.array(json.loads(done.stdout))
    pipeline = transformers.pipeline("text-classification", str(runs["texts"] / "model"), top_k=None)
    theirs = [{one["label"]: one["score"] for one in scores} for scores in pipeline(["aaaa bbbb", "cccc"])]
    names = [each for _, each in sorted(described(runs["texts"])["id2label"].items())]
    assert np.abs(ours - [[scores[name] for name in names] for scores in theirs]).max() < 1e-5


def plant_logits(network, change):
    logits = network.logits
    network.logits = lambda images: logits(change(images))
    return network


def by_batch(network):
    """Each BatchNorm normalises by the statistics of its batch, as in training."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
    return network


PLANTED = {
    "batch norm in training mode": by_batch,
    "another mean": lambda network: plant_logits(network, lambda images: images.float() + 4),
    "another order of channels": lambda network: plant_logits(network, lambda images: images.flip(1))}


@pytest.mark.rows(1)
@pytest.mark.parametrize("format", export.NEEDS)
@pytest.mark.parametrize("fault", PLANTED)
def test_an_export_that_predicts_something_else_is_not_written(fault, format, runs, monkeypatch, capsys):
    kind = exported.Exportable
    monkeypatch.setattr(exported, "Exportable", lambda *arguments: PLANTED[fault](kind(*arguments)))
    code, message = refused(capsys, runs["images"], "--format", format)
    assert code == Exit.BAD_DATA and "does not predict what the model of the run does" in message, message


def test_a_refused_export_leaves_the_one_before_it(runs, monkeypatch, tmp_path):
    words = [runs["images"], "--format", "torch", "--output", tmp_path / "out"]
    exports(*words)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(exported, "TOLERANCE", -1)
    with pytest.raises(UserError):
        exports(*words)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def test_batch_norm_in_training_mode_is_caught_or_put_right(runs, monkeypatch, capsys, tmp_path):
    """A .pt2 would compute as in training; torch.onnx exports it as in evaluation."""
    kind = exported.Exportable
    monkeypatch.setattr(exported, "Exportable", lambda *arguments: kind(*arguments).train())
    code, message = refused(capsys, runs["images"], "--format", "torch")
    assert code == Exit.BAD_DATA and "does not predict what the model of the run does" in message, message
    assert exports(runs["images"], "--format", "onnx", "--output", tmp_path / "out") == Exit.DONE


@pytest.mark.parametrize(("found", "is_fine"), [
    ([0.5, 0.5], True), ([0.5 - 1e-7, 0.5 + 1e-7], True),  # who is right about equal ones?
    ([0.5 - 1e-5, 0.5 + 1e-5], False), ([0.50005, 0.49995], True), ([0.502, 0.498], False), ([np.nan, 0.5], False)])
def test_the_verdict_counts_far_values_and_other_predictions(found, is_fine):
    description, known = {"classes": ["a", "b"]}, {"x": np.array([0.5, 0.5])}
    if is_fine:
        exported.compare(lambda names: np.array([found] * len(names)), known, description)
    else:
        with pytest.raises(UserError):
            exported.compare(lambda names: np.array([found] * len(names)), known, description)


def only_one_at_once(names):
    if len(names) > 1:
        raise RuntimeError("a shape is fixed")
    return np.array([[0.5, 0.5]])


@pytest.mark.parametrize("predict", [only_one_at_once, lambda names: np.array([[0.5, 0.5]])])
def test_an_export_of_one_batch_size_alone_is_refused_in_words(predict):
    with pytest.raises(UserError, match="the export cannot predict 2 samples at once") as caught:
        exported.compare(predict, {"x": np.array([0.5, 0.5])}, {"classes": ["a", "b"]})
    assert caught.value.code == Exit.BAD_DATA and "try the other --format" in str(caught.value)


@pytest.mark.parametrize("number", [63, 64])
def test_few_samples_are_called_a_weaker_check(number, capsys):
    known = {str(index): np.array([0.5, 0.5]) for index in range(number)}
    exported.compare(lambda names: np.array([[0.5, 0.5]] * len(names)), known, {"classes": ["a", "b"]})
    assert ("which repeat them (a weaker check)" in capsys.readouterr().out) == (number < 64)


@pytest.mark.rows(1)
@pytest.mark.parametrize("format", export.NEEDS)
def test_a_full_disk_is_called_that(format, runs, monkeypatch, tmp_path):
    limits, write_file = resource.getrlimit(resource.RLIMIT_FSIZE), exported.write_file

    def write_little(*given):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            write_file(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(exported, "write_file", write_little)
    with pytest.raises(OSError) as caught:
        exports(runs["images"], "--format", format, "--output", tmp_path / "out")
    assert caught.value.errno == errno.EFBIG and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
                                   KeyError("an operator that the exporter does not know")])
@pytest.mark.parametrize("place", ["write_file", "read_file"])
def test_lack_of_memory_is_not_the_models_fault(place, error, runs, monkeypatch, capsys):
    def fail(*given):
        raise error

    monkeypatch.setattr(exported, "write_file", lambda *given: None)
    monkeypatch.setattr(exported, place, fail)
    if isinstance(error, KeyError):
        code, message = refused(capsys, runs["images"], "--format", "torch")
        assert code == Exit.USAGE and "this model cannot be exported (KeyError: " in message
    else:
        with pytest.raises(type(error)):
            exports(runs["images"], "--format", "torch")


def test_a_folder_that_is_no_export_stays_and_is_named(runs, capsys):
    code, message = refused(capsys, runs["images"], "--format", "torch", "--output", ROOT / "docs")
    assert code == Exit.CANNOT_CREATE and "exists and is not of an export" in message


def test_a_folder_that_cannot_be_made_is_73_with_the_flag(runs, capsys, tmp_path):
    (tmp_path / "file").touch()
    found = refused(capsys, runs["images"], "--format", "torch", "--output", tmp_path / "file" / "out")
    assert found == (Exit.CANNOT_CREATE, f"cannot create {tmp_path / 'file'}: File exists; give --output FOLDER")


def test_a_missing_package_is_named_with_the_command(runs, monkeypatch, capsys):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else name)
    code, message = refused(capsys, runs["images"], "--format", "onnx")
    assert code == Exit.USAGE and f"{sys.executable} -m pip install onnxscript;" in message


@pytest.mark.long
def test_images_that_moved_are_found_and_missing_ones_named(runs, photo_tables, photos, tmp_path, capsys):
    """The rows of the validation have absolute paths; of texts they have the texts."""
    for kind, data, moved in (("images", photos, tmp_path / "moved"),
                              ("several images", photo_tables, tmp_path / "tables")):
        run = shutil.copytree(runs[kind], tmp_path / kind)
        rows = (run / "eval" / "samples.csv").read_text()
        shutil.copytree(photos, tmp_path / "photos", dirs_exist_ok=True)
        shutil.copytree(data, moved)
        gone = "/gone/photos"
        (run / "eval" / "samples.csv").write_text(rows.replace(str(photos), gone))
        config = run / "config.yaml"
        config.write_text(config.read_text().replace(f"data: {data}", f"data: {gone.replace('photos', data.name)}"))
        code, message = refused(capsys, run, "--format", "torch")
        assert code == Exit.NO_INPUT and gone in message and "--data PATH" in message
        assert exports(run, "--format", "torch", "--data", moved) == Exit.DONE
    run = shutil.copytree(runs["texts"], tmp_path / "texts")
    assert exports(run, "--format", "torch", "--data", "/gone") == Exit.DONE


@pytest.mark.parametrize(("num_images", "given", "found"), [
    (1, "/old/a, b/1.png", "/new/a, b/1.png"), (2, "/old/a/1.png,/old/b/1.png", "/new/a/1.png,/new/b/1.png")])
def test_a_comma_divides_paths_of_several_images_alone(num_images, given, found, tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "samples.csv").write_text(f'input,loss\n"{given}",1\n')
    (tmp_path / "config.yaml").write_text("data: /old\n")
    assert exported.samples_of(tmp_path, "/new", {"num_images": num_images})[0]["input"] == found


def test_without_validation_rows_it_is_66(runs, tmp_path, capsys):
    run = shutil.copytree(runs["images"], tmp_path / "run")
    shutil.rmtree(run / "eval")
    for place in (run, run / "model"):
        code, message = refused(capsys, place, "--format", "torch")
        assert code == Exit.NO_INPUT and message.endswith("name the directory of a run")


def test_a_run_of_several_labels_without_rows_is_explained(runs, tmp_path, capsys):
    """engine/saving.py writes none above MAX_SCORES."""
    run = shutil.copytree(runs["labels of images"], tmp_path / "run")
    shutil.rmtree(run / "eval")
    code, message = refused(capsys, run, "--format", "torch")
    assert code == Exit.NO_INPUT and "10,000,000 validation samples x labels: a larger one has no" in message


def test_masked_lm_is_refused_with_what_to_do_instead(run_dir, run_train, texts, capsys):
    result = run_train("--task", "masked-lm", *TEXTS[2:], *SHORT, "--data", texts, "--text-column", "text", "--run-dir",
                       run_dir)
    assert result.returncode == 0, result.text
    code, message = refused(capsys, run_dir, "--format", "onnx")
    assert code == Exit.USAGE and "fine-tune it" in message


def test_help_answers_without_torch():
    program = "import sys, models.export; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- architectures

VISION = {"resnet18": 64, "convnext_tiny": 64, "vit_b_16": 64, "swin_t": 64, "efficientnet_b0": 64,
          "mobilenet_v3_small": 64, "timm/efficientnet_lite0": 64, "small-cnn": 64}
ENCODERS = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert")


def calibrate(folder: Path, about: dict, paths: list[str]) -> None:
    """Few steps leave BatchNorm's statistics where they began, and activations vanish: take those of the images."""
    network, prepare = exported.load_images(folder, about)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    network.model.train()
    network.logits(prepare(paths)["images"])
    weights = {key: value.contiguous() for key, value in network.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("format", export.NEEDS)
@pytest.mark.parametrize("name", [*VISION, *ENCODERS])
def test_an_architecture_passes_the_gate(name, format, photos, texts, run_dir, run_train, capsys):
    """docs/deliver.md has the largest differences."""
    if name in VISION:
        words = ["--model", name, "--image-size", VISION[name], "--data", photos]
    else:
        with (texts / "train.csv").open() as file:
            tokenizer = train_tokenizer([row["text"] for row in csv.DictReader(file)], 200)
        write_encoder(run_dir.parent / "encoder", name, transformers.AutoModel, tokenizer)
        words = [*TEXTS[:2], "--model", run_dir.parent / "encoder", "--max-length", "32", "--data", texts,
                 "--text-column", "text"]
    result = run_train(*words, *SHORT, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    about, folder = described(run_dir), run_dir / "model"
    paths = [row["input"] for row in exported.samples_of(run_dir, None, about)]
    if name in VISION:
        calibrate(folder, about, paths)
    known = exported.predictions(folder, paths, exported.load_task(about["task"]).predict(
        folder, [], exported.CPU, 1).description)
    sharpen(run_dir, 4 / max(np.ptp(np.log(values)) for values in known.values()))  # neither alike nor all 0 and 1
    assert exports(run_dir, "--format", format) == Exit.DONE
    with capsys.disabled():
        print(f"\n{name} {format}: {capsys.readouterr().out}")
