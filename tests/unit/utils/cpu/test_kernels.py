"""utils/cpu/kernels.py: masks are as torch's, independent, with the probability asked for, of any shape.

And softmax has torch's bits, the gradients of filters those of float32 but for rounding.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from utils.cpu.kernels import bernoulli_, replace_kernels
from utils.hardware.vendor import allow_16_bit_attention

ROOT = Path(__file__).parents[4]
P = [0.9, 0.5, 0.1, 0.999]


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    replace_kernels(True)
    torch.manual_seed(0)


@pytest.mark.rows(1)
@pytest.mark.parametrize("p", P)
def test_ones_are_as_frequent_as_asked(p):
    """Within five standard deviations of 4 million draws; rounding to 16 binary digits adds at most 1 / 131,072."""
    drawn = torch.empty(4_000_000).bernoulli_(p)
    assert set(drawn.unique().tolist()) == {0, 1}
    assert abs(drawn.double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / len(drawn)) + 2**-17


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 1000])
def test_values_do_not_depend_on_their_neighbours(distance):
    """Four come of one random number: their correlation is within five standard deviations of none."""
    drawn = torch.empty(1_000_000).bernoulli_(0.9).double() - 0.9
    correlation = (drawn[distance:] * drawn[:-distance]).mean() / drawn.square().mean()
    assert abs(correlation) < 5 / math.sqrt(len(drawn))


def test_a_seed_gives_the_same_mask_on_any_number_of_threads():
    masks, before = [], torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        torch.manual_seed(7)
        masks.append(F.dropout(torch.ones(300, 301), 0.1))
    torch.set_num_threads(before)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], F.dropout(torch.ones(300, 301), 0.1))


def test_a_generator_of_ones_own_is_used():
    first, second = (torch.empty(99).bernoulli_(0.5, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    others = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(others, torch.rand(3))


@pytest.mark.parametrize("size", [(), (0,), (1,), (3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_any_shape_and_type_is_filled(size, dtype):
    filled = torch.full(size, 7, dtype=dtype)
    assert filled.bernoulli_(0.5) is filled
    assert ((filled == 0) | (filled == 1)).all()


def test_memory_in_another_order_is_filled():
    image = torch.full((2, 3, 8, 8), 7.0).to(memory_format=torch.channels_last)
    column = torch.full((50, 2), 7.0)
    column[:, 1].bernoulli_(0.5)
    assert set(image.bernoulli_(0.5).unique().tolist()) == {0, 1}
    assert (column[:, 0] == 7).all() and set(column[:, 1].tolist()) == {0, 1}


@pytest.mark.parametrize(("p", "value"), [(0, 0), (1, 1), (2**-18, 0), (1 - 2**-18, 1)])
def test_certain_values_are_certain(p, value):
    assert (bernoulli_(torch.full((100_000,), 7.0), p) == value).all()


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(RuntimeError, match="to be in"):
        torch.empty(3).bernoulli_(p)


@pytest.mark.parametrize("is_allowed, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_attention_with_dropout_is_composed_in_16_bits(is_allowed, dtype):
    """And its outputs are those of float32 but for rounding: with the same seed both drop the same weights."""
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            made = operation(*args, **(kwargs or {}))
            if operation.overloadpacket.__name__ in ("bmm", "_softmax"):
                found.add(made.dtype)
            return made

    found, tensors = set(), [torch.randn(2, 3, 7, 4) for _ in range(3)]
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    allow_16_bit_attention(is_allowed)
    try:
        torch.manual_seed(5)
        with Products():
            attended = F.scaled_dot_product_attention(*(each.bfloat16() for each in tensors), dropout_p=0.3)
        torch.manual_seed(5)
        exact = F.scaled_dot_product_attention(*tensors, dropout_p=0.3)
    finally:
        allow_16_bit_attention(before)
    assert found == {dtype}
    torch.testing.assert_close(attended.float(), exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("p", [0.1, 0.3, 2**-16, 0.9])
def test_of_all_numbers_of_16_bits_the_share_p_gives_a_one(p, monkeypatch):
    numbers = torch.arange(-2**15, 2**15, dtype=torch.int16).view(torch.int64)
    monkeypatch.setattr(torch.Tensor, "random_", lambda tensor, *limits, generator: tensor.copy_(numbers))
    assert bernoulli_(torch.empty(2**16), p).sum() == round(p * 2**16)


def test_dropout_keeps_the_mean_and_its_gradient_is_the_mask():
    values = torch.ones(1000, 1000, requires_grad=True)
    (dropped := F.dropout(values, 0.1)).sum().backward()
    assert dropped.mean().item() == pytest.approx(1, abs=5 / 3 / 1000)
    assert torch.equal(values.grad, dropped)


def test_torch_calls_it_for_every_kind_of_dropout():
    """With a tensor of random bits in its place, each of them gives what follows from these."""
    for drop in (lambda: F.dropout(torch.ones(64), 0.5), lambda: F.dropout2d(torch.ones(8, 8, 1, 1), 0.5),
                 lambda: F.alpha_dropout(torch.ones(64), 0.5, training=True)):
        torch.manual_seed(3)
        kept = bernoulli_(torch.empty(64), 0.5)
        torch.manual_seed(3)
        given = drop().flatten()
        assert torch.equal(given == given.max(), kept == 1)


# Prints for how many scores, whatever is in them, a bit of the result or its gradient is not that of torch's kernel.
SCORES = """
import torch
from utils.cpu.kernels import replace_kernels

def computed():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in ((2, 3, 4, 5), (7,), (3, 0), (0, 3), (2, 1)):
            for row in (None, -torch.inf, torch.inf, torch.nan):
                for dim in range(-1, len(size)):
                    scores = torch.randn(size, dtype=dtype)
                    if scores.numel() and row is not None:
                        scores[0] = row  # along the last dimension a whole row, along others a place in each
                        scores[..., -1] = row
                    computed = torch._safe_softmax(scores.requires_grad_(), dim)
                    yield computed, *torch.autograd.grad(computed.square().sum(), scores)
    yield torch._safe_softmax(torch.randn(2, 3).bfloat16(), 1, torch.float32),

torchs = list(computed())
replace_kernels(True)
ours = list(computed())
def bits(tensor):
    return tensor.dtype, tensor.detach().contiguous().view(torch.uint8).tolist()

others = sum(list(map(bits, one)) != list(map(bits, two)) for one, two in zip(torchs, ours, strict=True))
zeros = [given for given, *_ in ours if given.numel() and bool((given == 0).all(-1).any())]
print(len(ours) > 100, others, any(bool(given.isnan().any()) for given, *_ in ours), len(zeros) > 5)
"""


@pytest.mark.long
def test_softmax_has_the_bits_of_torchs_own_whatever_the_scores():
    """In a process of its own, where torch's kernel is not replaced yet."""
    done = subprocess.run([sys.executable, "-c", SCORES], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0", "True", "True"] and "Warning" not in done.stderr


def test_attention_looks_through_all_scores_only_if_a_row_may_have_none():
    """A row of -inf gives zeros, and torch's search, which goes through all scores, is not made where there is none."""
    allowed = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    allowed[1, :, 1] = False
    searches = []
    for mask in allowed[:, None]:
        with torch.autograd.profiler.profile() as profile:
            attended = F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 3, 8), attn_mask=mask, dropout_p=1e-9)
        searches.append("aten::all" in {event.name for event in profile.function_events})
        assert torch.equal(attended[0, 0, :, 0], mask[0, 0].any(1).float())
    assert searches == [False, True]


# Images [B, I, H, W], filters [O, I, k, l], stride, padding: the filters are larger than what they are moved over.
LARGE_FILTERS = [
    ((64, 32, 1, 1), (16, 32, 3, 3), 1, 1),
    ((8, 16, 2, 2), (24, 16, 3, 3), 2, 1),
    ((64, 32, 1, 1), (16, 32, 3, 3), 2, 1),
    ((3, 40, 4, 6), (8, 40, 3, 5), 1, 2),
    ((2, 8, 5, 9), (6, 8, 2, 4), (2, 1), (0, 3)),
    ((9, 32, 2, 2), (4, 32, 1, 1), 2, 0),
    ((0, 4, 3, 3), (2, 4, 3, 3), 1, 1)]


def operations_of(work):
    """Its result, and the names of the operations that torch did for it."""
    with torch.autograd.profiler.profile() as profile:
        result = work()
    return result, {event.name for event in profile.function_events}


def gradients(images, filters, stride, padding, dtype, num_wanted):
    """Of images, filters and bias, the first `num_wanted`, in channels_last; fixed numbers that bf16 holds exactly."""
    torch.manual_seed(1)
    image = torch.randn(images).bfloat16().to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(filters).bfloat16().to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    bias = torch.zeros(len(weight), dtype=dtype, requires_grad=num_wanted == 3)
    made = F.conv2d(image, weight, bias, stride, padding)
    of = torch.randn(made.shape).bfloat16().to(dtype)
    return operations_of(lambda: torch.autograd.grad(made, [image, weight, bias][:num_wanted], of))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("images, filters, stride, padding", LARGE_FILTERS)
def test_gradients_of_large_filters_are_a_product_of_matrices(images, filters, stride, padding, has_bias):
    """Each is that of float32, rounded to bf16: within 2**-8 of its size, and 2**-9 of the largest for sums near 0.

    Those of images stay torch's, bit for bit: without AVX-512 these alone are off by more, as torch sums them in bf16.
    """
    (_, *exact), _ = gradients(images, filters, stride, padding, torch.float32, 2 + has_bias)
    (of_images, *found), operations = gradients(images, filters, stride, padding, torch.bfloat16, 2 + has_bias)
    (torchs,), others = gradients(images, filters, stride, padding, torch.bfloat16, 1)
    assert "aten::mm" in operations and "aten::mm" not in others
    assert torch.equal(of_images, torchs)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        largest = other.abs().max().item() if other.numel() else 0
        torch.testing.assert_close(one.float(), other, rtol=2**-8, atol=2**-9 * largest)
    assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("has_bias", [True, False])
def test_torchs_slow_kernel_is_not_called_for_filters_or_bias(monkeypatch, has_bias):
    """It computes both, if it is asked for one."""
    image, bias = torch.ones(2, 8, 1, 1).bfloat16(), torch.zeros(4).bfloat16().requires_grad_()
    weight = torch.ones(4, 8, 3, 3).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    made = F.conv2d(image, weight, bias if has_bias else None, 1, 1).sum()
    monkeypatch.setattr("utils.cpu.kernels._torchs_convolution_backward", None)
    found, *of_bias = torch.autograd.grad(made, [weight] + [bias] * has_bias)
    assert found[:, :, 1, 1].unique().tolist() == [2] and found.sum() == 2 * 4 * 8
    assert [each.tolist() for each in of_bias] == [[2] * 4] * has_bias


# Prints for how many of the convolutions that stay torch's a bit of a gradient differs: transposed, in groups, dilated,
# of one dimension, of small filters, in float32, with filters whose memory is in another order, with frozen filters.
CONVOLUTIONS = """
import sys
import torch
from torch.nn import functional as F
from utils.cpu.kernels import replace_kernels

torch.cpu._is_avx512_bf16_supported = lambda: sys.argv[1] in ("avx512_bf16", "amx")
torch.cpu._is_amx_tile_supported = lambda: sys.argv[1] == "amx"
last = {"memory_format": torch.channels_last}

def computed():
    torch.manual_seed(0)
    small, large, row = torch.randn(3, 8, 2, 2), torch.randn(3, 8, 9, 9), torch.randn(3, 8, 4)
    filters = torch.randn(8, 8, 3, 3)
    for dtype in (torch.bfloat16, torch.float32):
        for convolve, images, weights in (
                (lambda x, w: F.conv_transpose2d(x, w, padding=1), small, filters.to(**last)),
                (lambda x, w: F.conv2d(x, w, padding=1, groups=2), small, filters[:, :4].to(**last)),
                (lambda x, w: F.conv2d(x, w, padding=2, dilation=2), small, filters.to(**last)),
                (lambda x, w: F.conv1d(x, w, padding=1), row, filters[:, :, 0]),
                (lambda x, w: torch.convolution(x, w, None, [1], [1], [1], False, [0], 1), small, filters.to(**last)),
                (lambda x, w: F.conv2d(x, w, padding=1), large, filters.to(**last)),
                (lambda x, w: F.conv2d(x, w, padding=1), small, filters),
                (lambda x, w: F.conv2d(x, w.detach(), padding=1) + w.sum(), small, filters.to(**last))):
            x, w = (each.to(dtype).requires_grad_() for each in (images, weights))
            yield dtype, *torch.autograd.grad(convolve(x, w).square().sum(), [x, w])
    x, w = small.requires_grad_(), filters.to(**last).requires_grad_()
    yield torch.float32, *torch.autograd.grad(F.conv2d(x, w, padding=1).square().sum(), [x, w])

torchs = list(computed())
replace_kernels(True)
ours = list(computed())
print(len(ours), sum(not all(map(torch.equal, one[1:], two[1:])) for one, two in zip(torchs, ours, strict=True)))

weight = torch.ones(8, 8, 3, 3).bfloat16().to(**last).requires_grad_()
made = F.conv2d(torch.ones(3, 8, 2, 2).bfloat16(), weight, padding=1).sum()
with torch.autograd.profiler.profile() as profile:
    torch.autograd.grad(made, weight)
print("aten::mm" in {event.name for event in profile.function_events})
"""


@pytest.mark.long
@pytest.mark.parametrize("hardware, is_ours", [("avx512_bf16", "True"), ("amx", "False"), ("avx2", "False")])
def test_other_convolutions_have_the_bits_of_torchs_own(hardware, is_ours):
    """In a process of its own, where torch's kernel is not replaced yet; on other hardware it never is."""
    words = [sys.executable, "-c", CONVOLUTIONS, hardware]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["17", "0", is_ours] and "Warning" not in done.stderr


# What starts set, with the switch off, in another precision, and as they are. Each prints whether masks are ours and
# whether attention is in 16 bits.
STARTS = """
import sys
from pathlib import Path
import torch
from engine.resolve import resolve_arithmetic
from utils.distributed.world import World
from utils.rundir.run import Run
from utils.settings.run_options import DeviceOptions

def mask():
    torch.manual_seed(0)
    return torch.empty(1000).bernoulli_(0.5)

before = mask()
with World.from_env("cpu") as world:
    for cpu_kernels, precision in (("off", "bf16"), ("on", "fp16"), ("on", "bf16"), ("off", "bf16")):
        run = Run(Path(sys.argv[1]), {}, {"start": 1, "cores_per_process": 1}, print, None)
        resolve_arithmetic(DeviceOptions(precision=precision, cpu_kernels=cpu_kernels), run, world)
        print(not torch.equal(mask(), before), torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
"""


@pytest.mark.long
def test_one_switch_leaves_torchs_own_kernels_as_they_are(tmp_path):
    """Also where another start in this process had set ours. They are set without a warning."""
    words = [sys.executable, "-c", STARTS, tmp_path]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False False", "True False", "True True", "False False"]
    assert "Warning" not in done.stderr
