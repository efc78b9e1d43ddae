"""utils/hardware/vendor.py: the GPUs that torch has code for, tested on a machine that may have none."""

import pytest

from utils.errors import UserError
from utils.hardware.vendor import require_architecture, require_code


@pytest.mark.parametrize("capability, built_for", [
    ((9, 0), ["sm_80", "sm_90"]), ((8, 6), ["sm_80"]), ((8, 9), ["sm_75", "sm_86"]),
    ((12, 0), ["sm_90", "compute_90"]), ((10, 3), ["sm_90", "sm_100"]), ((9, 0), ["sm_90a", "sm_90"])])
def test_a_gpu_runs_binaries_of_its_major_version_and_any_earlier_ptx(capability, built_for):
    assert require_architecture("a GPU", capability, built_for) is None


@pytest.mark.parametrize("capability, built_for", [
    ((7, 0), ["sm_75", "sm_80"]), ((8, 0), ["sm_86"]), ((12, 0), ["sm_90", "sm_100"]),
    ((6, 1), ["sm_75", "compute_90"]), ((9, 0), [])])
def test_a_gpu_that_torch_has_no_code_for_is_refused(capability, built_for):
    name = f"sm_{capability[0]}{capability[1]}"
    with pytest.raises(UserError, match=f"V is {name}, but this torch has code only for .*; .*--device cpu"):
        require_architecture("V", capability, built_for)


def test_amds_architectures_are_not_compared_with_cudas(monkeypatch):
    monkeypatch.setattr("torch.version.hip", "6.4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 4))
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["gfx90a", "gfx942"])
    assert require_code("cuda", 1) is None


def test_another_accelerator_is_not_compared_with_cudas(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: pytest.fail("asked"))
    assert require_code("xpu", 1) is None
