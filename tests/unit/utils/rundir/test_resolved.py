"""utils/rundir/resolved.py: what RUN/auto.json holds."""

from dataclasses import replace

from utils.rundir.resolved import UNSET, Resolved


def test_what_is_not_resolved_is_not_in_the_file_and_null_is():
    resolved = replace(Resolved(), threads=2, first_position=None)
    written = resolved.as_dict()
    assert {name: written[name] for name in ("threads", "first_position")} == {"threads": 2, "first_position": None}
    assert "lr" not in written and Resolved.of(written) == resolved


def test_keys_of_another_version_are_left_out():
    assert Resolved.of({"lr": 0.5, "unknown": 1}) == replace(Resolved(), lr=0.5)


def test_a_run_of_0_9_goes_on_as_it_trained_and_a_new_one_does_not():
    """It kept no such keys. What it kept counts."""
    names = ("undecayed_tables", "names_as_written", "white_value", "padding_side", "first_position")
    begun = Resolved.of({"data": "hash", "fast_convolutions": True})
    assert [getattr(begun, name) for name in names] == [False, True, 65535, "right", None]
    assert [getattr(Resolved.of({"code": "hash"}), name) for name in names] == [True, False, UNSET, UNSET, UNSET]
    assert Resolved.of({"data": "hash", "white_value": 4095}).white_value == 4095
    new = replace(Resolved(), data="hash", white_value=4095)
    assert Resolved.of(new.as_dict()) == new
