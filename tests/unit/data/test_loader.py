"""data/loader.py: the same batches from any number of workers; what becomes of unreadable samples."""

import mmap
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

from data import demo
from data.batch import Batch
from data.images.augment import CentreCrop, build_transforms
from data.images.folder import ImageFolder
from data.images.scan import build_index
from data.loader import BadSamples, build_loader, num_workers
from data.plan import BatchPlan, cut
from data.sampler import ElasticDistributedSampler, EvaluationSampler
from data.splits import ValSplit
from utils.distributed.world import World
from utils.errors import Exit, RankError, UserError, explain

ROOT = Path(__file__).parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Item(NamedTuple):
    epoch: int
    index: int
    bad: str | None


class Numbers(Dataset):
    """Sample i of an epoch is (epoch, i); those in `bad` cannot be read."""

    def __init__(self, bad=()):
        self.bad = bad

    def __getitem__(self, position):
        epoch, index = position
        return Item(epoch, index, f"{index}.png: truncated" if index in self.bad else None)


def collate(items):
    return Batch(
        inputs={"epochs": torch.tensor([item.epoch for item in items])},
        labels=torch.tensor([item.index for item in items]),
        sample_weight=torch.tensor([0.0 if item.bad else 1.0 for item in items]),
        bad=tuple(item.bad for item in items if item.bad))


def world_of(world_size=1, device=CPU):
    return World(0, 0, world_size, world_size, device, cpu_group=None, section_timeout=timedelta(0))


def items_of(samples, plan, epochs=(0,), workers=0, rank=0, world_size=1, collate=collate):
    """[steps] [share] Batch over the epochs, from one loader."""
    sampler = ElasticDistributedSampler(plan, rank, world_size, seed=0)
    loader = build_loader(samples, collate, sampler, workers, world_of(world_size))
    items, share = [], len(sampler.share)
    for epoch in epochs:
        sampler.set_position(epoch)
        items += list(loader)
    return [items[i:i + share] for i in range(0, len(items), share)]


def as_values(items):
    return [[(b.index, b.labels.tolist(), b.sample_weight.tolist(), b.bad, {k: v.tolist() for k, v in b.inputs.items()})
             for b in share]
            for share in items]


def image_batches(tmp_path, workers):
    index = build_index(str(demo.unpack_demo("image-classification", tmp_path)), ValSplit(0.1, 0), tmp_path)
    train_transform, _ = build_transforms("photo", CentreCrop(32, "bilinear", 37))  # a random crop and flip per sample
    samples = ImageFolder(index.splits["train"], train_transform, seed=0)

    def collate_images(items):
        return Batch({"images": torch.stack([item.image for item in items])},
                     torch.tensor([item.label for item in items]),
                     torch.ones(len(items)))

    return items_of(samples, cut(70, 32, 8), epochs=(0, 1), workers=workers, collate=collate_images)


def test_workers_give_the_same_augmented_images_as_the_process_itself(tmp_path):
    assert as_values(image_batches(tmp_path, 0)) == as_values(image_batches(tmp_path, 2))


def test_persistent_workers_see_the_epoch():
    epochs = [share[0].inputs["epochs"].unique().tolist()
              for share in items_of(Numbers(), cut(8, 4, 4), epochs=(0, 1, 5), workers=2)]
    assert epochs == [[0], [0], [1], [1], [5], [5]]


def test_a_worker_without_room_in_shared_memory_is_heard(monkeypatch):
    """Torch would share the batch in a thread of the worker that prints its error and goes on."""
    def share(tensor):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_71>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", share)
    with pytest.raises(RuntimeError, match="in DataLoader worker") as error:
        items_of(Numbers(), cut(8, 4, 4), workers=1)
    message, code = explain(error.value)
    assert (code, "--shm-size" in message, "--workers" in message) == (Exit.IO, True, True)


def test_items_are_a_ranks_shares_of_the_global_batches():
    # four micro-batches in each of three
    ranks = [items_of(Numbers(), cut(22, 8, 2), rank=rank, world_size=3) for rank in range(3)]
    assert [[[batch.index for batch in share] for share in items] for items in ranks] == [[[0, 3]] * 3, [[1]] * 3,
                                                                                          [[2]] * 3]


def test_a_stand_in_has_weight_zero():
    [share] = items_of(Numbers(), BatchPlan(3, 8, num_micro_batches=5))
    assert [(len(batch.labels), batch.sample_weight.sum().item()) for batch in share] == [(1, 1), (1, 1), (1, 1),
                                                                                          (1, 0), (1, 0)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_names_its_samples_and_a_stand_in_none(workers):
    [share] = items_of(Numbers(), BatchPlan(3, 8, num_micro_batches=5), workers=workers)
    assert [batch.indices for batch in share] == [*((int(batch.labels),) for batch in share[:3]), (), ()]


def test_a_batch_names_its_samples_in_the_order_of_its_rows():
    items = items_of(Numbers(), cut(22, 8, 4), epochs=(0, 1))
    assert [list(batch.indices) for share in items for batch in share] == [batch.labels.tolist() for share in items
                                                                           for batch in share]


def test_all_ranks_together_weigh_each_evaluated_sample_once():
    """Summed over ranks, the weights of an evaluation are those of the samples; stand-ins have weight 0."""
    loaders = [build_loader(Numbers(), collate, EvaluationSampler(10, 4, rank, 2), 0, world_of(2)) for rank in range(2)]
    assert [[batch.sample_weight.sum().item() for batch in loader] for loader in loaders] == [[4, 2], [4, 0]]


class Counted(Numbers):
    """Counts what is read, also in workers."""

    def __init__(self):
        super().__init__()
        self.counts = memoryview(mmap.mmap(-1, 8 * 2**16)).cast("q")  # [epoch * 4096 + index]

    def __getitem__(self, position):
        epoch, index = position
        self.counts[epoch * 4096 + index] += 1
        return super().__getitem__(position)


@pytest.mark.parametrize("batch", [64, 4096])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_loaded_ahead_does_not_grow_with_the_global_batch(batch, workers):
    samples, size = Counted(), 16
    sampler = ElasticDistributedSampler(cut(4096, batch, size), 0, 1, seed=0)
    loader = build_loader(samples, collate, sampler, workers, world_of())
    ahead = [sum(samples.counts) - size * taken for taken, _ in zip(range(1, 30), loader, strict=False)]
    assert 0 <= max(ahead) <= 2 * workers * size  # torch's prefetch_factor: two items a worker


def test_the_next_epoch_is_loaded_before_this_one_is_over():
    samples = Counted()
    sampler = ElasticDistributedSampler(cut(64, 32, 16), 0, 1, seed=0)
    sampler.set_position(0, epochs=2)
    items = iter(build_loader(samples, collate, sampler, 1, world_of()))
    for _ in range(4):  # all of epoch 0
        assert next(items).inputs["epochs"].unique().tolist() == [0]
    assert becomes(lambda: sum(samples.counts[4096:8192]) > 0, True)


def test_the_limit_of_open_files_is_raised_to_what_is_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        build_loader(Numbers(), collate, EvaluationSampler(9, 2, 0, 1), 0, world_of())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_making_an_iterator_draws_nothing_from_torchs_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    items_of(Numbers(), cut(8, 4, 4), workers=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("given, device, cores, expected", [
    (3, CPU, 4, 3), (0, CUDA, 16, 0), ("auto", CPU, 1, 0), ("auto", CPU, 2, 1), ("auto", CPU, 16, 1),
    ("auto", CUDA, 1, 1), ("auto", CUDA, 4, 3), ("auto", CUDA, 6, 5), ("auto", CUDA, 13, 12), ("auto", CUDA, 64, 16)])
def test_auto_workers_are_the_spare_cores_of_a_process_within_limits(monkeypatch, given, device, cores, expected):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=64 * 2**30))
    assert num_workers(given, replace(world_of(8, device), cores=cores)) == expected


@pytest.mark.parametrize("gib, processes, expected", [(0.0625, 1, 8), (5, 1, 10), (64, 1, 16), (10, 2, 10)])
def test_more_than_8_workers_need_shared_memory(monkeypatch, gib, processes, expected):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=gib * 2**30))
    assert num_workers("auto", replace(world_of(processes, CUDA), cores=64, local_world_size=processes)) == expected


def test_without_shared_memory_workers_are_none_or_refused(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/dev/shm")
    assert [num_workers(given, replace(world_of(8, CPU), cores=4)) for given in ("auto", 0)] == [0, 0]
    with pytest.raises(RankError, match=r"--workers 2: data loading processes need /dev/shm, .*--workers 0") as refused:
        num_workers(2, world_of(8, CPU))
    assert refused.value.code == Exit.IO


# --- bad samples


def bad_share(indices):
    [share] = items_of(Numbers(bad=indices), cut(6, 6, 6))
    return share[0]


class Alone:  # a World of one process
    def gather(self, value):
        return [value]


def test_an_unreadable_sample_stops_the_run_with_65_and_its_path(tmp_path):
    bad_samples = BadSamples("stop", tmp_path / "bad.txt")
    bad_samples.check(bad_share({3}))
    with pytest.raises(UserError, match=r"3\.png: truncated; repair or restore.*--bad-samples skip") as stopped:
        bad_samples.stop(Alone())
    assert stopped.value.code == Exit.BAD_DATA


def test_an_unreadable_sample_makes_the_gradient_of_its_batch_nan(tmp_path):
    weight = BadSamples("stop", None).check(bad_share({3})).sample_weight
    assert weight.isnan().all()


def test_good_samples_do_not_stop_a_run(tmp_path):
    bad_samples, batch = BadSamples("stop", tmp_path / "bad.txt"), bad_share(set())
    assert bad_samples.check(batch) is batch
    assert bad_samples.stopped_by == []


def test_a_skipped_sample_has_weight_zero():
    batch = bad_share({3, 5})
    assert batch.labels[batch.sample_weight == 0].sort().values.tolist() == [3, 5]


def test_a_skipped_sample_is_listed_once_also_after_another_start(tmp_path):
    file = tmp_path / "bad.txt"
    for _ in range(2):  # starts of the run
        bad_samples = BadSamples("skip", file)
        for indices in ({3}, {3, 4}, {4}):
            bad_samples.check(bad_share(indices))
    assert file.read_text() == "3.png: truncated\n4.png: truncated\n"


def test_without_a_file_skipped_samples_are_named_on_standard_error(capsys):
    BadSamples("skip", None).check(bad_share({3}))
    assert capsys.readouterr() == ("", "3.png: truncated\n")


def test_the_end_of_a_run_tells_how_many_were_skipped(tmp_path):
    file, notes = tmp_path / "bad.txt", []
    bad_samples = BadSamples("skip", file)
    bad_samples.report(notes.append)
    bad_samples.check(bad_share({3, 4}))
    bad_samples.report(notes.append)
    assert notes == [f"skipped 2 unreadable samples, see {Path(file)}"]


STORM = """
import os, signal, threading, time
import torch
from types import SimpleNamespace
from data.loader import build_loader
from data.sampler import EvaluationSampler
from data.batch import Batch
from utils.distributed.watchdog import Watchdog

class Numbers:
    def __getitem__(self, item):
        return item[1]

def collate(samples):
    return Batch({}, torch.tensor(samples), torch.ones(len(samples)))

def storm():
    while True:
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.0005)

signal.alarm(100)
watchdog = Watchdog()
watchdog.save_on_stop()  # the process itself goes on
threading.Thread(target=storm, daemon=True).start()
for _ in range(4):
    world = SimpleNamespace(device=torch.device("cpu"))
    loader = build_loader(Numbers(), collate, EvaluationSampler(9, 2, 0, 1), 2, world)
    print([int(number) for batch in loader for number in batch.labels], flush=True)
print(watchdog.reason, flush=True)
os._exit(0)  # as train.py leaves
"""


@pytest.mark.long
def test_workers_survive_signals_to_the_process_group():
    """From their first moment on."""
    done = subprocess.run([sys.executable, "-c", STORM], cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, start_new_session=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{list(range(9))}\n" * 4 + "SIGTERM\n"), done.stderr


# --- a read that does not come back


LIMIT_S = 60


class Pipes(Numbers):
    """Sample i is what is written to the named pipe i, so whoever reads it waits."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        for index in range(4):
            os.mkfifo(folder / str(index))

    def __getitem__(self, position):
        (self.folder / self.name(position[1])).read_bytes()
        return super().__getitem__(position)

    def name(self, index):
        return str(index)


def becomes(answer, expected):
    """The answer once it is the expected one, or whatever it is after so long."""
    deadline = time.monotonic() + LIMIT_S
    while (found := answer()) != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_being_read_can_be_asked_of_the_process_and_its_workers(tmp_path, workers):
    # batches of 0, 1 and of 2, 3
    loader = build_loader(Pipes(tmp_path), collate, EvaluationSampler(4, 2, 0, 1), workers, world_of())
    reading, batches = loader.dataset.reading, []
    names = ["0, 2", "1, 2", "2", "3"] if workers == 2 else ["0", "1", "2", "3"]
    expected, seen = ["", *(f" ({name} is being read)" for name in names), ""], [reading()]
    iterator = iter(loader)  # workers begin here, and end with this thread
    reader = Thread(target=lambda: batches.extend(batch.indices for batch in iterator))
    reader.start()
    for index in range(4):
        seen.append(becomes(reading, expected[index + 1]))
        (tmp_path / str(index)).write_bytes(b"")
    seen.append(becomes(reading, ""))
    reader.join(LIMIT_S)
    assert (seen, batches) == (expected, [(0, 1), (2, 3)])


ORPHANS = """
import os, sys, time
import torch
from pathlib import Path
from types import SimpleNamespace
from data.loader import build_loader
from data.sampler import EvaluationSampler

class Pipes:
    def __getitem__(self, item):
        return (Path(sys.argv[1]) / self.name(item[1])).read_bytes()

    def name(self, index):
        return str(index)

loader = build_loader(Pipes(), list, EvaluationSampler(2, 1, 0, 1), 2, SimpleNamespace(device=torch.device("cpu")))
iterator = iter(loader)
while loader.dataset.reading() != " (0, 1 is being read)":
    time.sleep(0.001)
print("reading", flush=True)
next(iterator)
"""


@pytest.mark.long
def test_workers_end_with_their_killed_parent_even_in_the_middle_of_a_read(tmp_path):
    for index in range(2):
        os.mkfifo(tmp_path / str(index))
    process = subprocess.Popen([sys.executable, "-c", ORPHANS, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    said, ends = process.stdout.readline(), []
    process.kill()
    # ends when the last worker, which could write, does
    rest = Thread(target=lambda: ends.append(process.stdout.read()), daemon=True)
    rest.start()
    rest.join(4)  # torch's workers look after their parent every 5 s, and not at all in a read
    for index in range(2):  # whoever lives may go
        os.close(os.open(tmp_path / str(index), os.O_RDWR | os.O_NONBLOCK))
    process.wait()
    assert (said, ends) == ("reading\n", [""])
