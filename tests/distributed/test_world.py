"""What ranks do together, on 1 to 4 of them. One launch per number of processes serves all checks: check_world.py."""

import json
import socket

import pytest

from utils.errors import Exit
from utils.hardware.cores import available_cores

NUMBERS = (1, 2, 3, 4)
# six micro-batches are added in another order, nothing else differs
TOLERANCE = {"torch.float32": 1e-6, "torch.float64": 1e-12}
# besides, exact rounds every value to 2^-50: of half a million weights that is 1e-12
TO_EXACT = TOLERANCE | {"torch.float64": 4e-12}


@pytest.fixture(scope="module")
def told(session_dir, run_torchrun, texts):
    """told[W][rank][check]: what check_world.py found."""
    folder = session_dir / "world"
    folder.mkdir()
    (folder / "texts").symlink_to(texts)
    for processes in NUMBERS:  # one process comes first: its gradients are the reference
        result = run_torchrun(processes, folder, script="tests/distributed/check_world.py")
        assert result.returncode == 0, result.text
    return {processes: json.loads((folder / f"on-{processes}.json").read_text()) for processes in NUMBERS}


def by_rank(told, processes, check):
    return [found[check] for found in told[processes]]


def gradient_cases(told):
    return [(processes, case) for processes in NUMBERS for case in told[processes][0]["gradients"]]


@pytest.mark.parametrize("processes", NUMBERS)
def test_once_gives_rank_0s_value_to_all(told, processes):
    assert by_rank(told, processes, "once_returns_rank_0s_value") == [{"answer": [0, 1.5, None]}] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_once_raises_an_error_of_rank_0_on_all_with_its_code(told, processes):
    assert by_rank(told, processes, "once_tells_rank_0s_error") == [
        ["UserError", "rank 0 refused", Exit.CANNOT_CREATE]] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_once_per_node_raises_an_error_of_another_node_on_all(told, processes):
    host = "" if processes == 1 else f"{socket.gethostname()}: "
    refused = ["UserError", f"{host}the last node refused", Exit.IO]
    assert by_rank(told, processes, "once_tells_another_nodes_error") == [refused] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_once_per_node_returns_the_value_of_its_own_node(told, processes):
    values = by_rank(told, processes, "once_per_node_returns_the_value_of_its_node")
    assert values == ["of rank 0"] * (processes - 1) + [f"of rank {processes - 1}"]


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_name_of_the_hub_is_rank_0s_commit_on_all_nodes(told, processes):
    assert by_rank(told, processes, "a_name_of_the_hub_on_two_nodes") == ["a" * 40] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_once_turns_a_failing_disk_of_rank_0_into_74_on_all(told, processes):
    found = by_rank(told, processes, "once_tells_a_failing_disk")
    assert [(kind, code) for kind, _, code in found] == [("UserError", Exit.IO)] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_everywhere_returns_each_ranks_own_result(told, processes):
    assert by_rank(told, processes, "everywhere_gives_each_rank_its_own_result") == list(range(processes))


@pytest.mark.parametrize("processes", NUMBERS)
def test_everywhere_raises_the_first_error_on_all_ranks(told, processes):
    """With its code; the host is named where others did not fail; of a bug the rank that has it keeps the traceback."""
    host = "" if processes == 1 else f"{socket.gethostname()}: "
    first = max(0, processes - 2)  # that fails by the bug
    for rank, (some, all_of_them, bug) in enumerate(by_rank(told, processes, "everywhere_raises_what_failed_on_some")):
        assert some == ["UserError", f"{host}there is no file w.pth", Exit.NO_INPUT]
        assert all_of_them == [
            "UserError", "FileNotFoundError: [Errno 2] No such file or directory: '/nonexistent/file'", Exit.IO]
        assert bug == (
            ["KeyError", "'a bug'", -1] if rank == first else ["PeerError", f"rank {first}: 'a bug'", Exit.INTERNAL])


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_folder_that_one_node_lacks_is_refused_on_all(told, processes):
    for there, nowhere, (kind, message, code) in by_rank(told, processes, "a_folder_that_the_last_rank_lacks"):
        assert (there, nowhere) == (["no error", True, None], ["no error", False, None])
        assert processes == 1 or (kind, message.split(" /")[0], code) == (
            "UserError", f"{socket.gethostname()} has no folder", Exit.NO_INPUT)


@pytest.mark.parametrize("processes", NUMBERS)
def test_gather_gives_every_ranks_value_by_rank_to_all(told, processes):
    values = [{"rank": rank, "text": "ü" * 10 * rank} for rank in range(processes)]
    assert by_rank(told, processes, "gather_is_by_rank") == [values] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_precision_auto_is_what_the_hardware_of_all_ranks_does(told, processes):
    """A run that keeps bf16 goes on in bf16, with a warning; a given precision is taken as it is."""
    host = socket.gethostname()
    new = ["fp32", [f"--precision auto is fp32: {host} does not compute in bf16, and other nodes do"]]
    kept = ["bf16", [f"warning: the run keeps bf16, and {host} emulates bf16, which is slow; --precision fp32 is"
                     " faster there, but the run is not bit-exact from there on"]]
    expected = [new, kept, ["bf16", []]] if processes > 1 else [["bf16", []]] * 3
    assert by_rank(told, processes, "hardware_that_differs") == [expected] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_device_that_one_node_lacks_is_refused_by_name_on_all(told, processes):
    host, nothing = socket.gethostname(), ["no error", "cpu", None]
    mixed = ["UserError", f"--device auto: {host} has no xpu device, but other nodes have one; all nodes"
             f" need the same kind: leave {host} out, or use --device cpu", Exit.USAGE]
    few = f"{host}: too few devices" if processes > 1 else "too few devices"
    expected = [mixed if processes > 1 else nothing, nothing, ["UserError", few, Exit.USAGE]]
    assert by_rank(told, processes, "a_device_that_one_rank_lacks") == [expected] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_the_ranks_of_a_node_share_its_cores(told, processes):
    assert by_rank(told, processes, "cores_of_a_rank") == [max(1, available_cores() // processes)] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_what_differs_between_ranks_is_refused_on_all(told, processes):
    found = by_rank(told, processes, "what_differs_between_ranks")
    assert [kind for kind, _, _ in found] == ["no error" if processes == 1 else "UserError"] * processes
    assert processes == 1 or {(message[:20], code) for _, message, code in found} == {
        ("the data set must be", Exit.BAD_DATA)}


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_flag_of_one_rank_is_known_to_all_exactly_one_exchange_later(told, processes):
    # stop, save, error, bad_sample, wrong; save and wrong are of one exchange, the others stay
    nothing, raised, after = [False] * 5, [True] * 5, [True, False, True, True, False]
    assert by_rank(told, processes, "a_flag_of_the_last_rank") == [
        [nothing, nothing, nothing, raised, after, after]] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_flags_are_independent_of_each_other(told, processes):
    alone = [[number == raised for number in range(5)] for raised in range(5)]
    assert by_rank(told, processes, "one_flag_at_a_time") == [alone] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_waiting_finishes_an_exchange_under_way_and_only_once(told, processes):
    assert by_rank(told, processes, "a_flag_before_a_wait") == [
        [[False, False], [True, True], [True, False]]] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_rank_0_reads_a_checkpoint_for_all_ranks(told, processes):
    """The others see no file of it; what rank 0 cannot read is 74 on all."""
    found = by_rank(told, processes, "a_checkpoint_that_rank_0_alone_sees")
    for saved, restored, best, step, (kind, message, code) in found:
        assert (restored, best, step) == (saved, 0.1 + 0.2, 1)
        assert (kind, "step-0000000009-g1" in message, code) == ("UserError", True, Exit.IO)


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_nest_with_tensors_arrives_as_it_was_sent(told, processes):
    assert by_rank(told, processes, "a_nest_on_every_rank") == [[True, True, True]] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_save_that_failed_is_known_to_rank_0_and_74_on_all_by_flush(told, processes):
    found = by_rank(told, processes, "a_save_that_fails")
    assert found == [[rank == 0, ["UserError", "the disk is full", Exit.IO]] for rank in range(processes)]


def test_a_steps_gradients_and_buffers_agree_on_1_2_3_and_4_processes(told):
    for processes, case in gradient_cases(told):
        distances = told[processes][0]["gradients"][case]["ddp to one process"]
        assert max(distances.values()) <= TOLERANCE[case.split()[1]], (processes, case, distances)


def test_every_rank_holds_the_same_summed_gradient(told):
    for processes, case in gradient_cases(told):
        for strategy in ("ddp", "exact"):
            assert len({found["gradients"][case][f"{strategy} sha256"] for found in told[processes]}) == 1, (
                processes, case, strategy)


def test_exact_has_the_same_gradients_and_buffers_to_the_bit_on_1_to_4(told):
    for _, case in gradient_cases(told):
        assert len({told[processes][0]["gradients"][case]["exact sha256"] for processes in NUMBERS}) == 1, case


def test_ddp_agrees_with_exact_to_rounding(told):
    for processes, case in gradient_cases(told):
        distances = told[processes][0]["gradients"][case]["ddp to exact"]
        assert max(distances.values()) <= TO_EXACT[case.split()[1]], (processes, case, distances)


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_nan_inf_or_overflow_makes_the_norm_non_finite_on_every_rank(told, processes):
    for found in by_rank(told, processes, "planted_values_make_the_norm_non_finite"):
        exact, ddp = found["exact"], found["ddp"]
        assert exact.pop("nothing") and not any(exact.values()), exact
        assert ddp["nothing"] and not any(ddp[what] for what in ddp if "NaN" in what or "inf" in what), ddp


@pytest.mark.parametrize("processes", NUMBERS)
def test_an_unused_weight_is_named_and_frozen_on_all_ranks_and_steps_work(told, processes):
    note = "2 parameters get no gradient and are frozen: left_over.weight, left_over.bias"
    found = by_rank(told, processes, "an_unused_weight")
    for strategy in ("ddp", "exact"):
        assert [rank[strategy]["frozen"] for rank in found] == [["left_over.weight", "left_over.bias"]] * processes
        assert [rank[strategy]["notes"] for rank in found] == [[note]] * processes
        assert {norm for rank in found for norm in rank[strategy]["norms"]} == {found[0]["ddp"]["norms"][0]} != {0.0}


@pytest.mark.parametrize("processes", NUMBERS)
def test_ranks_without_work_have_the_same_gradients_under_exact(told, processes):
    found = by_rank(told, processes, "ranks_without_work")
    assert [count for count, _ in found] == {1: [2], 2: [1, 1], 3: [1, 1, 0], 4: [1, 1, 0, 0]}[processes]
    assert {digest for _, digest in found} == {told[1][0]["ranks_without_work"][1]}


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_layer_that_is_skipped_at_random_is_not_frozen(told, processes):
    """And under exact every rank takes its sum, also one that skips it itself, as in every micro-batch before."""
    alone = told[1][0]["a_layer_that_is_skipped_at_random"]["exact"][1]["norms"]
    for rank in by_rank(told, processes, "a_layer_that_is_skipped_at_random"):
        assert (rank["exact"][0], rank["exact"][1]["frozen"], rank["exact"][1]["norms"]) == ("no error", [], alone)
        if processes == 1:
            assert (rank["ddp"][0], rank["ddp"][1]["frozen"]) == ("no error", [])
        else:  # DDP would fail in the next step, in words of its own
            assert rank["ddp"][::2] == ["UserError", Exit.USAGE]
            assert "--strategy exact" in rank["ddp"][1] and "--find-unused-parameters" in rank["ddp"][1]
        assert (rank["finding"][0], rank["finding"][1]["frozen"]) == ("no error", [])
        assert rank["finding"][1]["norms"] == pytest.approx(alone, rel=1e-6)


def test_torchrun_restarts_after_a_crash_until_all_ranks_meet(run_dir, run_torchrun):
    result = run_torchrun(2, run_dir, script="tests/distributed/crash_and_meet.py",
                          torchrun=("--max-restarts=3", "--monitor-interval=0.1"))
    assert result.returncode == 0, result.text
    assert run_dir.read_text() == "[[3, 3], [3, 3]]"  # in the fourth start; 1 + 2 summed over ranks
