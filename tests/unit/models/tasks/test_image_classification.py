"""The image task: an index that is mapped read-only, mixing and weights in the loss, augmentation by position."""

import math
import os
import warnings
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from data.images.decode import EncodedImage
from data.images.mixing import mix
from models.tasks import load_task
from tests.conftest import COUNTS
from utils.errors import Exit, UserError
from utils.numerics.seed import seed_micro_batch
from utils.rundir.lock import RunLock
from utils.rundir.run import Run
from utils.settings.command_line import parse_command_line


def test_the_most_frequent_class_of_train_is_the_baseline(photos, world, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    config = parse_command_line(["--data", str(photos)], {})
    run = Run(tmp_path, {}, {"start": 1, "cores_per_process": 1}, print, RunLock())
    with warnings.catch_warnings(action="error"):  # torch warns of arrays that cannot be written
        baselines = load_task("image-classification")(config, run, world).baselines()
    most = max(range(3), key=lambda label: COUNTS["train"][label])
    assert baselines == {"always the most frequent class": pytest.approx(COUNTS["val"][most] / sum(COUNTS["val"]))}


@pytest.mark.rows(1)
@pytest.mark.parametrize("split", ["train_set", "eval_set"])
@pytest.mark.parametrize("size", [8, 16])
def test_training_and_evaluation_read_the_packed_images(build, split, size, monkeypatch):
    """As they are, of 16 px, or resized to 8."""
    of_files, packed = (getattr(build(f"--image-size={size}", *words), split) for words in ([], ["--cache", "raw"]))
    expected = {index: of_files[0, index].image for index in range(0, len(of_files), 9)}
    monkeypatch.setattr(EncodedImage, "__init__", lambda self, source, white=None: pytest.fail("read a file"))
    assert all(torch.equal(packed[0, index].image, image) for index, image in expected.items())


class Flat(nn.Module):
    """One linear layer; NaN for an image with a pixel above `limit`, after normalisation."""

    def __init__(self, limit=math.inf):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.limit = nn.Linear(3 * 16 * 16, 3), limit

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        is_bad = images.flatten(1).amax(dim=1) > self.limit
        return torch.where(is_bad[:, None], torch.nan, logits)


@pytest.fixture
def build(photos, world, tmp_path, monkeypatch):
    """build(*words): the task on 16 px, as it is, in a run whose auto.json holds `kept`."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))

    def built(*words, kept=()):
        argv = ["--data", str(photos), "--image-size", "16", "--augmentation", "none", *words]
        run = Run(tmp_path, dict(kept), {"start": 1, "cores_per_process": 1, "code": "ours"}, print, RunLock())
        config = parse_command_line(argv, {})
        return load_task(config.run.task)(config, run, world)

    return built


@pytest.mark.parametrize("has_val", [True, False])
def test_samples_that_are_evaluated_have_the_groups_of_their_rows(build, photos, tmp_path, has_val):
    rows = [(path, path.parent.name, f"p{number // 3}", "val" if has_val and number % 24 > 17 else "train")
            for number, path in enumerate(sorted(photos.glob("train/*/*.*"))[:48]) if path.suffix in (".png", ".jpg")]
    lines = ["image,label,patient,split", *(",".join(map(str, row)) for row in rows), ""]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    task = build("--data", str(tmp_path / "t.csv"), "--group-column", "patient", "--val-fraction", "0.2")
    group_of = {str(path.resolve()): group for path, _, group, _ in rows}
    names = [os.path.realpath(name) for _, name in task.inputs()]
    assert task.groups() == [group_of[name] for name in names] and len(set(task.groups())) > 1
    assert build().groups() is None


@pytest.mark.parametrize("kind", ["folders", "table"])
def test_names_that_nobody_can_tell_apart_are_one_class(build, tmp_path, kind):
    rows = []
    for split in ("train", "val"):
        for label, name in enumerate(("cafe\u0301", "café", "tea")):
            file = tmp_path / "odd" / split / name / f"{label}.png"
            file.parent.mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(file)
            rows.append(f"{file},{name},{split}\n")
    (tmp_path / "odd.csv").write_text("image,label,split\n" + "".join(rows))
    task = build("--data", str(tmp_path / ("odd" if kind == "folders" else "odd.csv")))
    assert list(task.classes) == ["café", "tea"]
    assert [task.classes[label] for label in task.train_set.index.labels] == ["café", "café", "tea"]


def batch_of(task, indices):
    return replace(task.collate([task.train_set[0, i] for i in indices]), indices=tuple(indices))


def seeded_loss(task, model, batch):
    seed_micro_batch(0, step=5, index=2, device=torch.device("cpu"))
    return task.forward(model, batch).loss_sum


@pytest.mark.parametrize("technique", [["--mixup", "0.8"], ["--cutmix", "1"], ["--mixup", "0.8", "--cutmix", "1"]])
@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
def test_the_loss_of_mixed_samples_is_that_of_soft_labels(build, technique, loss):
    task = build(*technique, "--loss", loss, "--label-smoothing", "0.1", "--class-weights", "1,2,4")
    model, batch = Flat().train(), batch_of(task, [0, 20, 40, 50, 3])
    seed_micro_batch(0, step=5, index=2, device=torch.device("cpu"))
    pixels, partner, share = mix(batch.inputs["images"], batch.sample_weight, task._config.augment)
    assert 0.01 < share < 0.99
    own, other = F.one_hot(batch.labels, 3).float(), F.one_hot(batch.labels[partner], 3).float()
    weight = torch.tensor([1.0, 2, 4])
    logits = model((pixels.permute(0, 3, 1, 2) - task._mean) / task._std)
    if loss == "cross-entropy":
        expected = F.cross_entropy(logits, share * own + (1 - share) * other, weight, reduction="sum",
                                   label_smoothing=0.1)
    else:
        expected = sum(part * F.binary_cross_entropy_with_logits(
            logits, 0.9 * target + 0.1 / 3, weight=(target @ weight)[:, None], reduction="none").mean(dim=1).sum()
            for part, target in ((share, own), (1 - share, other)))
    assert seeded_loss(task, model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_evaluation_and_a_micro_batch_of_one_sample_are_not_mixed(build):
    task, plain = build("--mixup", "1", "--cutmix", "1"), build()
    for model, indices in ((Flat().eval(), [0, 20, 40]), (Flat().train(), [20])):
        batch = batch_of(task, indices)
        assert torch.equal(seeded_loss(task, model, batch), seeded_loss(plain, model, batch))


@pytest.mark.parametrize("technique", [["--mixup", "1"], ["--cutmix", "1"]])
def test_a_skipped_sample_leaves_no_trace_in_the_others(build, technique):
    task, model = build(*technique, "--class-weights", "balanced"), Flat().train()
    batch = replace(batch_of(task, [0, 20, 40, 50]), sample_weight=torch.tensor([1.0, 0, 1, 1]))
    images, labels = batch.inputs["images"].clone(), batch.labels.clone()
    images[1], labels[1] = 255 - images[1], 2 - labels[1]
    other = replace(batch, inputs={"images": images}, labels=labels)
    assert torch.equal(seeded_loss(task, model, batch), seeded_loss(task, model, other))


@pytest.mark.parametrize("words", [
    [], ["--augmentation", "small"], ["--augmentation", "photo"],
    ["--auto-augment", "randaugment"], ["--auto-augment", "trivialaugment"], ["--random-erasing", "1"]])
def test_a_samples_augmentation_depends_on_seed_epoch_and_index_alone(build, words):
    """Not on what was read before, nor on the state of torch's generator, which it leaves as it was."""
    items = [(epoch, index) for epoch in (0, 1) for index in (0, 7, 20, 56)]
    found, states = [], []
    for seed, order in (("0", items), ("0", items[::-1]), ("1", items)):
        samples = build(*words, "--seed", seed).train_set
        torch.manual_seed(len(found))
        state = torch.default_generator.get_state()
        read = {item: samples[item].image.numpy().tobytes() for item in order}
        found.append([read[item] for item in items])
        states.append(torch.equal(state, torch.default_generator.get_state()))
    assert found[0] == found[1] and all(states)
    if words:
        assert found[0] != found[2] and found[0][:4] != found[0][4:]


def test_the_normalizer_adds_up_class_weights_of_unmixed_labels(build):
    task = build("--class-weights", "1,2,4", "--mixup", "1")
    labels = task.train_set.index.labels
    assert task.normalizer(torch.tensor([0, 20, 40, 50])) == sum((1, 2, 4)[labels[i]] for i in (0, 20, 40, 50))
    assert build("--class-weights", "none").normalizer(torch.tensor([0, 20, 40])) == 3


def test_wrong_class_weights_and_mixing_are_refused_before_training(build):
    for words, found in ((["--class-weights", "1,2"], r"in the order tint0, tint1, tint2"),
                         (["--cutmix", "1", "--image-size", "1"], "no part that could be replaced")):
        with pytest.raises(UserError, match=found):
            build(*words)


@pytest.mark.parametrize("words, code, message", [
    (["--task", "image-regression", "--label-column", "label"], Exit.BAD_DATA,
     "train.csv line 2: label is tint0, which is not a finite number; correct or remove the row"),
    (["--label-column", "labels"], Exit.BAD_DATA, "labels of a sample that has several; give --multi-label"),
    (["--multi-label", "--loss", "cross-entropy"], Exit.USAGE, "--loss cross-entropy is for one class of each sample"),
    (["--image-column", "picture"], Exit.BAD_DATA, "there is no column picture; it has image, mask, label, labels"),
    (["--group-column", "patient"], Exit.BAD_DATA, "there is no column patient; it has"),
    (["--image-column", "label"], Exit.USAGE, "--image-column label: give one column, or several (A,B)"),
    (["--label-column", "kind"], Exit.BAD_DATA, "there is no column kind; it has"),
    (["--label-column", "brightness"], Exit.BAD_DATA, "this looks like regression"),
    (["--class-weights", "1,2"], Exit.USAGE, "there are 2 weights; give each of 3 classes")])
def test_a_table_that_does_not_suit_is_refused_before_there_is_a_model(build, photo_tables, words, code, message):
    with pytest.raises(UserError) as error:
        build("--data", str(photo_tables), *words)
    assert message in str(error.value) and error.value.code == code


@pytest.mark.parametrize("words, message", [
    (["--multi-label"], "class folders hold one class of each image"),
    (["--task", "image-regression"], "for numbers give a table"),
    (["--label-column", "kind"], "has no columns; leave it out, or give a table"),
    (["--group-column", "patient"], "has no columns; leave it out, or give a table")])
def test_folders_of_classes_have_no_columns(build, words, message):
    with pytest.raises(UserError) as error:
        build(*words)
    assert message in str(error.value)


def test_a_second_image_begins_without_influence_and_gets_a_gradient(build, photo_tables):
    words = ["--data", str(photo_tables), "--image-column", "image,mask", "--model", "resnet18"]
    task = build(*words)
    torch.manual_seed(0)
    two = task.build_model(initial_weights=True).eval()
    torch.manual_seed(0)
    one = build(*words[:2], "--model", "resnet18").build_model(initial_weights=True).eval()
    batch = task.collate([task.train_set[0, index] for index in range(2)])
    images = batch.inputs["images"].permute(0, 3, 1, 2).float()                                    # [2, 6, 16, 16]
    torch.testing.assert_close(two(images), one(images[:, :3]))
    two.train()(images).square().sum().backward()
    assert two.conv1.weight.shape == (64, 6, 7, 7) and two.conv1.weight.grad[:, 3:].abs().max() > 0
    assert [shown.shape for shown in task.preview(batch)] == [(16, 32, 3)] * 2


def test_weights_of_one_image_are_kept_for_two(build, photo_tables, tmp_path):
    torch.manual_seed(1)
    given = build("--model", "resnet18").build_model(initial_weights=True)
    torch.save(given.state_dict(), tmp_path / "given.pth")
    model = build("--data", str(photo_tables), "--image-column", "image,mask", "--model", "resnet18", "--weights",
                  str(tmp_path / "given.pth")).build_model(initial_weights=True)
    assert torch.equal(model.conv1.weight[:, :3], given.conv1.weight) and not model.conv1.weight[:, 3:].any()
    assert torch.equal(model.layer4[0].conv1.weight, given.layer4[0].conv1.weight)
