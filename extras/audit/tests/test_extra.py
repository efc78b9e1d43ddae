"""extra.py: who is named, and who cannot be compared. On several processes: test_faults.py, test_contracts.py."""

from types import SimpleNamespace

import pytest
import torch

from data.loader import build_loader
from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from extras.audit import OPTIONS
from extras.audit import extra as audit
from extras.audit.extra import audited_by, odd_ones, require_comparable
from models.tasks import load_task
from utils.errors import Exit, UserError
from utils.rundir.lock import RunLock
from utils.rundir.run import Run
from utils.settings.command_line import parse_command_line
from utils.settings.run_options import DeviceOptions

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("found, odd", [
    ("aaa", []), ("aba", [1]), ("abb", [0]), ("abc", [0, 1, 2]), ("ab", [0, 1]), ("aabb", [0, 1, 2, 3]),
    ("aaab", [3]), ("aabcd", [0, 1, 2, 3, 4]), ("aabca", [2, 3])])
def test_the_odd_ones_are_those_without_a_majority(found, odd):
    assert odd_ones(dict(enumerate(found))) == odd


def start_of(device="cpu", other=None, **options):
    """A start on two processes; the other one's facts are those of this one but for `other`."""
    def gather(facts):
        return [facts, ["elsewhere", facts[1] | (other or {})]]

    world = SimpleNamespace(world_size=2, device=torch.device(device), gather=gather)
    config = SimpleNamespace(device=DeviceOptions(**options), extra=lambda kind: OPTIONS(audit_every=5))
    return SimpleNamespace(config=config, world=world)


@pytest.mark.parametrize("options, said", [
    ({"other": {"cpu": "an older one"}}, "an older one; use hosts that are alike"),
    ({"other": {"device": "a smaller one"}}, "a smaller one; use hosts that are alike"),
    ({"other": {"instructions": "those of no CPU"}}, "instructions"), ({"other": {"threads": 99}}, "threads"),
    ({"other": {"python": "2.7"}}, "python"), ({"other": {"packages": {"torch": "1.0"}}}, "packages"),
    ({"device": "meta"}, "repeats them with --deterministic alone"), ({"compile": True}, "--compile")])
def test_ranks_that_need_not_compute_the_same_bits_are_refused(options, said):
    with pytest.raises(UserError, match=said) as refused:
        require_comparable(start_of(**options))
    assert refused.value.code == Exit.USAGE and str(refused.value).startswith("--audit-every 5")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_that_are_alike_are_accepted(device, monkeypatch):
    monkeypatch.setattr(audit, "hardware_of", lambda device: {"device": device.type})
    require_comparable(start_of(device, deterministic=True))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_in_a_rotation_every_rank_is_audited_by_every_other_one(world_size):
    def audited(rank, step):
        return audited_by(SimpleNamespace(
            config=SimpleNamespace(extra=lambda kind: OPTIONS(audit_every=10)),
            world=SimpleNamespace(world_size=world_size), state=SimpleNamespace(progress=SimpleNamespace(step=step)),
            feed=SimpleNamespace(plan=SimpleNamespace(num_micro_batches=8))), rank)

    audits = [10 * number - 1 for number in range(1, world_size)]
    pairs = {(rank, audited(rank, step)) for rank in range(world_size) for step in audits}
    assert pairs == {(rank, other) for rank in range(world_size) for other in range(world_size) if rank != other}


@pytest.mark.parametrize("size", [11, 24])  # smaller and larger than the photos
def test_the_auditor_reads_the_micro_batch_that_a_loading_process_read(
        size, photos, world, tmp_path, monkeypatch):
    """A loading process has one thread, and the auditor several; images are cropped, resized and flipped."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    config = parse_command_line(["--data", str(photos), "--image-size", str(size), "--augmentation", "photo"], {})
    task = load_task("image-classification")(
        config, Run(tmp_path, {}, {"start": 1, "cores_per_process": 1}, print, RunLock()), world)
    sampler = ElasticDistributedSampler(BatchPlan(len(task.train_set), 24, 3), 0, 1, seed=0)
    loader = build_loader(task.train_set, task.collate, sampler, 1, world)
    sampler.set_position(0)
    loaded, requests = list(loader), list(sampler)
    torch.set_num_threads(2)
    try:
        read = [loader.dataset[request] for request in requests]
    finally:
        torch.set_num_threads(1)
    assert len(read) == len(loaded) > 5 and all(
        torch.equal(one, other) for a, b in zip(read, loaded, strict=True)
        for one, other in zip(a.tensors, b.tensors, strict=True))
