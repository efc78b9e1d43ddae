"""utils/rundir/chain.py: a hash is of what a checkpoint means; the file is complete after a kill at any moment."""

import copy
import json

import pytest
import torch

from tests.harness.run_directory import begins_with
from utils.rundir.chain import FILE, Chain, content_hash, digest_of, files_in, read_lines, valid_links

# --- what a checkpoint means

WEIGHTS = {"conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2), "conv.bias": torch.tensor([1.0, -0.0])}
STATE = {"optimizer": {"conv.bias": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
         "scaler": {"scale": 65536.0, "_growth_tracker": 3},
         "coverage": {"epoch": 1, "samples": torch.tensor([7, 0], dtype=torch.uint8)}}
TRAINER = {"format": 1, "progress": {"epoch": 1, "step": 3}, "processes": 2,
           "best": {"step": 2, "metric": "top1", "value": 0.1}}
MEANING = {"weights": WEIGHTS, "state": STATE, "trainer": TRAINER}


def changed(*path, to):
    """The hash with one leaf of MEANING in another way."""
    nest = copy.deepcopy(MEANING)
    part = nest
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = to
    return content_hash(**nest)


def test_a_hash_depends_neither_on_who_saved_it_nor_on_order_or_layout():
    same = [changed("trainer", "processes", to=3), changed("trainer", "format", to=2),
            changed("weights", to=dict(reversed(WEIGHTS.items()))),
            changed("weights", "conv.weight", to=WEIGHTS["conv.weight"].to(memory_format=torch.channels_last)),
            changed("weights", "conv.bias", to=torch.tensor([1.0, 9.0, -0.0])[::2])]
    assert set(same) == {content_hash(**MEANING)}


@pytest.mark.parametrize("path, to", [
    (("weights", "conv.bias"), torch.tensor([1.0, 0.0])),  # one bit: the zero's sign
    (("weights", "conv.bias"), torch.tensor([1.0, -0.0], dtype=torch.float64)),
    (("weights", "conv.bias"), torch.tensor([[1.0, -0.0]])),
    (("weights", "conv.extra"), torch.zeros(0)),
    (("state", "optimizer", "conv.bias", "step"), torch.tensor(4.0)),
    (("state", "scaler", "scale"), 32768.0),
    (("state", "coverage", "samples"), torch.tensor([7, 1], dtype=torch.uint8)),
    (("state", "ema"), {"conv.bias": torch.ones(2)}),
    (("trainer", "progress", "step"), 4),
    (("trainer", "best", "value"), 0.1 + 2**-56)])
def test_a_hash_depends_on_every_bit_of_the_state(path, to):
    assert changed(*path, to=to) != content_hash(**MEANING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_every_type_are_hashed(dtype):
    hashes = {changed("weights", "conv.bias", to=torch.tensor(value).to(dtype)) for value in ([], 1, 0, [1, 0])}
    assert len(hashes) == 4


def test_a_model_of_several_files_is_named_file_by_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    assert {name: digest[:8] for name, digest in files_in(tmp_path).items()} == {"a": "e3b0c442", "sub/b": "ba7816bf"}
    assert files_in(tmp_path / "none") == {}


def test_what_is_appended_to_records_changes_no_earlier_hash(tmp_path):
    path = tmp_path / "metrics.jsonl"
    none = begins_with(path, 0)
    path.write_bytes(b"one\n")
    one = begins_with(path, 4)
    path.write_bytes(b"one\ntwo\n")
    assert (begins_with(path, 0), begins_with(path, 4), begins_with(path, 8)["bytes"]) == (none, one, 8)


# --- the file


def link(chain, step, content="", start=1, awaits_evaluation=False):
    """Of a checkpoint that is about to be written."""
    return chain.next(step, start=start, awaits_evaluation=awaits_evaluation, content=content or f"content {step}")


def begun(run_dir, *steps):
    """The chain of a run that has saved these steps, and the links."""
    chain, links = Chain(run_dir), []
    for step in steps:
        links.append(link(chain, step))
        chain.append(links[-1])
    return chain, links


def steps(run_dir):
    """Those of the links that count, with their contents; each holds the hash of the one before."""
    links = valid_links(read_lines(run_dir))
    assert [each["previous"] for each in links] == ["", *(each["link"] for each in links)][:len(links)]
    assert all(digest_of(each) == each["link"] for each in links)
    return [(each["step"], each["content"]) for each in links]


def test_each_link_holds_the_hash_of_the_one_before(tmp_path):
    begun(tmp_path, 0, 10, 20)
    assert steps(tmp_path) == [(0, "content 0"), (10, "content 10"), (20, "content 20")]


def test_of_two_lines_of_a_step_the_last_one_counts(tmp_path):
    """Versions before 0.14 wrote one before its evaluation, and one after it."""
    chain, _ = begun(tmp_path, 0, 10)
    chain.append(link(chain, 20, "before", awaits_evaluation=True))
    chain.append(link(chain, 20, "after"))
    chain.append(link(chain, 30))
    assert steps(tmp_path) == [(0, "content 0"), (10, "content 10"), (20, "after"), (30, "content 30")]


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["lost", "cut in half", "without its end of line"])
def test_a_line_that_a_kill_kept_away_is_written_at_the_next_start(tmp_path, share):
    _, links = begun(tmp_path, 0, 10, 20)
    path = tmp_path / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:int(share * (len(lines[-1]) - 1))])
    chain = Chain(tmp_path)
    chain.resume(links[-1], 20)
    links.append(link(chain, 30, start=2))
    chain.append(links[-1])
    assert [step for step, _ in steps(tmp_path)] == [0, 10, 20, 30]
    again = path.read_bytes()
    Chain(tmp_path).resume(links[-1], 30)
    assert path.read_bytes() == again


def test_what_awaits_its_evaluation_has_no_line(tmp_path):
    chain, links = begun(tmp_path, 0, 10)
    pending = link(chain, 20, awaits_evaluation=True)
    chain = Chain(tmp_path)
    chain.resume(pending, 20)
    assert [step for step, _ in steps(tmp_path)] == [0, 10]
    assert valid_links(read_lines(tmp_path), pending) == [*links, pending]
    chain.append(link(chain, 20, "evaluated"))
    assert steps(tmp_path)[-1] == (20, "evaluated")
    assert valid_links(read_lines(tmp_path), pending)[-1]["content"] == "evaluated"


def test_a_line_is_appended_and_changes_none_before_it(tmp_path):
    chain, _ = begun(tmp_path, 0, 10)
    before, file = (tmp_path / FILE).read_bytes(), (tmp_path / FILE).stat().st_ino
    chain.append(link(chain, 20))
    assert (tmp_path / FILE).read_bytes().startswith(before) and (tmp_path / FILE).stat().st_ino == file


def test_links_beyond_the_step_of_a_resume_are_abandoned_and_repeated(tmp_path):
    _, links = begun(tmp_path, 0, 10, 20, 30)
    chain = Chain(tmp_path)
    chain.resume(links[1], 10)
    assert [step for step, _ in steps(tmp_path)] == [0, 10]
    for step in (20, 40):
        chain.append(link(chain, step, start=2))
    assert steps(tmp_path) == [(0, "content 0"), (10, "content 10"), (20, "content 20"), (40, "content 40")]
    assert [line.get("step", line.get("resumed")) for line in read_lines(tmp_path)] == [0, 10, 20, 30, 10, 20, 40]


def test_a_fall_back_to_before_the_evaluation_abandons_its_link(tmp_path):
    chain, _ = begun(tmp_path, 0, 10)
    pending = link(chain, 20, "before", awaits_evaluation=True)
    chain.append(link(chain, 20, "after"))
    chain = Chain(tmp_path)
    chain.resume(pending, 20)  # the checkpoint of "after" is damaged
    assert steps(tmp_path) == [(0, "content 0"), (10, "content 10")]
    chain.append(link(chain, 20, "after", start=2))
    assert steps(tmp_path)[-1] == (20, "after")


def test_a_run_of_a_version_without_links_has_them_from_here_on(tmp_path):
    chain = Chain(tmp_path)
    chain.resume(None, 500)
    assert not (tmp_path / FILE).exists()
    chain.append(link(chain, 600))
    assert steps(tmp_path) == [(600, "content 600")]


def test_lines_that_are_none_stop_no_run(tmp_path):
    _, links = begun(tmp_path, 0, 10)
    path = tmp_path / FILE
    none = b'\0\0\xff\n[1]\n{}\n7\n\n{"resumed": "x"}\n{"step": null, "link": ""}\n'
    path.write_bytes(none + path.read_bytes() + b"\0\0\0")
    chain = Chain(tmp_path)
    chain.resume(links[1], 10)
    chain.append(link(chain, 20))
    assert [step for step, _ in steps(tmp_path)] == [0, 10, 20]


def test_a_link_that_was_edited_has_another_hash(tmp_path):
    _, [_, last] = begun(tmp_path, 0, 10)
    edited = json.loads(json.dumps(last)) | {"content": "other"}
    assert digest_of(last) == last["link"] != digest_of(edited)
