"""engine/audit.py: who is named, and who cannot be compared. On several processes: tests/faults, tests/contracts."""

from types import SimpleNamespace

import pytest
import torch

from engine import audit
from engine.audit import odd_ones, require_comparable
from utils.errors import Exit, UserError
from utils.settings.run_options import DeviceOptions, FaultOptions


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
    config = SimpleNamespace(device=DeviceOptions(**options), faults=FaultOptions(audit_every=5))
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
