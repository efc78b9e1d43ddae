"""utils/rundir/resolved.py: what RUN/auto.json holds."""

from dataclasses import replace

from utils.rundir.resolved import Resolved


def test_what_is_not_resolved_is_not_in_the_file_and_null_is():
    resolved = replace(Resolved(), threads=2, first_position=None)
    written = resolved.as_dict()
    assert {name: written[name] for name in ("threads", "first_position")} == {"threads": 2, "first_position": None}
    assert "lr" not in written and Resolved.of(written) == resolved


def test_keys_of_another_version_are_left_out():
    assert Resolved.of({"lr": 0.5, "unknown": 1}) == replace(Resolved(), lr=0.5)
