"""Sums that carry their checksum (--strategy exact): which faults of a transport are found, and where."""

import json

import pytest

SIGN_BITS = "two flipped sign bits in the result"


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_fault_of_the_transport_is_found_on_the_ranks_it_reaches(session_dir, run_torchrun, processes):
    """All but pairs of flipped sign bits: their weights are odd, so that both change the checksum by 2^63."""
    path = session_dir / f"sums-{processes}.json"
    result = run_torchrun(processes, path, script="tests/distributed/check_sums.py")
    assert result.returncode == 0, result.text
    counts = json.loads(path.read_text())
    missed = {kind: count for kind, count in counts.items() if count[0] != count[1]}
    assert (len(counts), counts["none"][1] > 900) == (11, True)
    assert missed == {SIGN_BITS: [40, 0, 40]}
