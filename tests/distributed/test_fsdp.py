"""--strategy fsdp computes what ddp computes, on 2 processes and, with uneven shares, on 4: check_fsdp.py."""

import json
from functools import cache

import pytest

NUMBERS = (2, pytest.param(4, marks=pytest.mark.slow))  # six micro-batches: three each; 2, 2, 1 and 1
CASES = "mobilenet_v3_small", "text-classification", "masked-tokens"


@pytest.fixture(scope="module")
def told(session_dir, run_torchrun, texts):
    """told(W)[rank][check]: what check_fsdp.py found on W processes."""
    folder = session_dir / "fsdp"
    folder.mkdir()
    (folder / "texts").symlink_to(texts)

    @cache
    def run(processes):
        result = run_torchrun(processes, folder, script="tests/distributed/check_fsdp.py")
        assert result.returncode == 0, result.text
        return json.loads((folder / f"fsdp-{processes}.json").read_text())

    return run


@pytest.mark.long
@pytest.mark.parametrize("processes", NUMBERS)
def test_gradients_and_buffers_are_ddps(told, processes):
    """In fp32: the sums are rounded in another order, nothing else differs."""
    for found in told(processes):
        assert set(found["gradients"]) == {f"{case} {step}" for case in CASES for step in ("first", "uneven last")}
        for step, distance in found["gradients"].items():
            assert distance["gradient"] < 1e-6, (step, distance)
            assert distance["buffer"] < 1e-6, (step, distance)


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_process_keeps_its_part_of_the_parameters(told, processes):
    """Tensors are cut by rows, and the first rank has the longest part."""
    for case in CASES:
        shares = [found["parts_of_parameters"][case] for found in told(processes)]
        assert sum(shares) == pytest.approx(1) and max(shares) < 1.1 / processes, case


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_run_that_changes_its_strategy_keeps_weights_and_moments(told, processes):
    """ddp -> fsdp -> exact -> ddp; and ddp's next step does not show that its state went through fsdp."""
    for found in told(processes):
        assert found["changes_of_strategy"] == {
            f"{case}": [True] * 4
            for case in ("mobilenet_v3_small adamw", "mobilenet_v3_small sgd", "masked-tokens adamw")}


@pytest.mark.parametrize("processes", NUMBERS)
def test_an_optimizer_step_is_that_of_ddp_and_a_void_one_changes_nothing(told, processes):
    for found in told(processes):
        for optimizer, (is_void, distance) in found["steps_of_the_optimizer"].items():
            assert is_void and distance < 1e-6, (optimizer, distance)


@pytest.mark.parametrize("processes", NUMBERS)
def test_an_evaluation_of_the_same_weights_has_the_same_digits(told, processes):
    assert [found["evaluation"] for found in told(processes)] == [dict.fromkeys(CASES, True)] * processes


@pytest.mark.parametrize("processes", NUMBERS)
def test_a_gradient_infinite_in_one_ranks_part_voids_the_step_of_all(told, processes):
    for found in told(processes):
        assert found["a_gradient_that_is_infinite_in_one_part"] == {
            "fp32": [False, True, 1.0, 1.0], "fp16": [False, True, 65536.0, 32768.0]}
