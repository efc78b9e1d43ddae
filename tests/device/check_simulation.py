"""What the simulated accelerator promises, one function each; test_simulation.py starts them.

    python -m tests.harness.accelerator tests/device/check_simulation.py    a JSON line: {promise: "" or what failed}
    ... check_simulation.py after_a_fault       a second start of it
    torchrun ... check_simulation.py together   two processes

They need settings: 64 MiB of memory; device 3 fails, and device 2 hangs, from operation 10 of rank 0 on.
"""

import hashlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.harness.accelerator import device as simulation

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


@contextmanager
def waits(*kinds: str) -> Iterator[None]:
    """The host waits this often, for these reasons."""
    before = simulation.waits.copy()
    yield
    found = sorted(kind for (kind, _), count in (simulation.waits - before).items() for _ in range(count))
    assert found == sorted(kinds), f"waits: {found}"


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# devices


@check
def current_device_is_one_truth_and_each_threads_own() -> None:
    seen = []
    torch.accelerator.set_device_index(1)
    thread = threading.Thread(target=lambda: seen.append(torch.sim.current_device()))
    thread.start()
    thread.join()
    seen += [torch.sim.current_device(), torch.ones(1, device="sim").device.index, torch.accelerator.device_count()]
    torch.sim.set_device("sim:0")
    assert [*seen, torch.accelerator.current_device_index()] == [0, 1, 1, 4, 0]


@check
def a_device_that_does_not_exist_is_refused() -> None:
    with raises(RuntimeError, "invalid device ordinal"):
        torch.accelerator.set_device_index(4)


@check
def an_operation_on_two_devices_is_refused() -> None:
    on_0, on_1, on_host = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1"), torch.ones(2)
    for other in (on_1, on_host):
        with raises(RuntimeError, "on the same device"):
            on_0 + other
    with raises(RuntimeError, "on the same device"):
        torch.stack([on_0, on_1])
    with raises(RuntimeError, "on the same device"):
        torch.dot(on_0, torch.tensor(1.0))
    with raises(RuntimeError, "on the same device"):
        torch.empty(2, device="sim").normal_(generator=torch.Generator())


@check
def scalars_and_indices_of_the_host_are_allowed() -> None:
    values = torch.arange(4.0, device="sim")
    with waits():
        product = values * torch.tensor(2.0)
        values.masked_fill_(values > 2, torch.tensor(7.0))
    with waits("copy to device"):
        picked = values[torch.tensor([3, 0])]
    assert (product.tolist(), picked.tolist()) == ([0, 2, 4, 6], [7, 0])


@check
def a_module_moved_to_a_device_keeps_its_tied_weights() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    model.to("sim:1")
    assert model[1].weight is model[0].weight and model[0].weight.device == torch.device("sim:1")


@check
def an_operation_in_place_changes_the_shape() -> None:
    tensor = torch.arange(6.0, device="sim").view(2, 3)
    tensor.t_().unsqueeze_(0)
    grown = torch.empty(0, device="sim")
    torch.add(tensor, 1, out=grown)
    assert tensor.shape == grown.shape == (1, 3, 2) and grown.cpu().tolist() == (tensor.cpu() + 1).tolist()


@check
def a_fork_may_not_touch_the_devices() -> None:
    tensor, event = torch.ones(2, device="sim"), torch.Event("sim")
    event.record()
    child = os.fork()
    if child == 0:
        code = 0
        for touch in (lambda: tensor + 1, lambda: torch.ones(2, device="sim"), event.synchronize,
                      torch.sim.synchronize):
            try:
                touch()
            except RuntimeError as error:
                code += "Cannot re-initialize sim in forked subprocess" in str(error)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


# late copies


@check
def a_late_copy_to_the_host_is_rubbish_until_waited_for() -> None:
    for values in (sample(3), torch.tensor([True, False]), torch.tensor([1, -2])):
        on_device = values.to("sim")
        arriving = on_device.to("cpu", non_blocking=True)
        target = torch.empty_like(values, pin_memory=True).copy_(on_device, non_blocking=True)
        for late in (arriving, target):
            assert late.is_pinned() and not (late == values).any(), late
        torch.accelerator.synchronize()
        assert torch.equal(arriving, values) and torch.equal(target, values)


@check
def a_copy_arrives_with_the_values_of_its_place_in_the_queue() -> None:
    tensor = torch.ones(2, device="sim")
    arriving = tensor.to("cpu", non_blocking=True)
    tensor.zero_()
    torch.accelerator.synchronize()
    assert arriving.tolist() == [1, 1]


@check
def an_event_delivers_only_copies_that_were_issued_before_it() -> None:
    tensor, before, after = torch.ones(1, device="sim"), torch.Event("sim"), torch.Event("sim")
    before.record()
    arriving = tensor.to("cpu", non_blocking=True)
    after.record()
    second = tensor.to("cpu", non_blocking=True)
    before.synchronize()
    assert arriving.isnan().all()
    after.synchronize()
    assert arriving.item() == 1 and second.isnan().all()
    torch.accelerator.current_stream().synchronize()
    assert second.item() == 1


@check
def a_blocking_read_delivers_what_is_before_it_on_its_device() -> None:
    on_0, on_1 = torch.ones(1, device="sim:0"), torch.ones(1, device="sim:1")
    arriving = on_0.to("cpu", non_blocking=True)
    on_1.item()
    torch.accelerator.synchronize(1)
    assert arriving.isnan().all()
    on_0.cpu()
    assert arriving.item() == 1


@check
def an_event_is_there_when_it_is_queried_again() -> None:
    tensor, event = torch.ones(1, device="sim"), torch.Event("sim")
    arriving = tensor.to("cpu", non_blocking=True)
    event.record()
    with waits():
        assert (event.query(), event.query(), arriving.item()) == (False, True, 1)


@check
def writing_memory_that_is_being_copied_to_a_device_is_an_error() -> None:
    source = sample(4).pin_memory()
    on_device = source.to("sim", non_blocking=True)
    line = sys._getframe().f_lineno - 1
    source.zero_()
    with raises(RuntimeError, f"being copied to sim:0, issued at tests/device/check_simulation.py:{line}"):
        torch.accelerator.synchronize()
    assert torch.equal(on_device.cpu(), sample(4))


@check
def memory_may_be_written_once_its_copy_has_been_waited_for() -> None:
    source, event = torch.tensor([torch.nan, 1.0]).pin_memory(), torch.Event("sim")
    source.to("sim", non_blocking=True)
    event.record()
    event.synchronize()
    source.zero_()
    torch.accelerator.synchronize()


# streams


@check
def a_stream_must_wait_for_what_another_one_copies() -> None:
    default, stream, pinned = torch.accelerator.current_stream(), torch.Stream("sim"), sample(3).pin_memory()
    with stream:
        on_device = pinned.to("sim", non_blocking=True)
        on_device + 1  # in the same stream, after it
    on_device.record_stream(default)
    late = f"memory that stream {stream.stream_id} copies to is used on stream 0, which has not waited for it"
    for use in (lambda: on_device + 1, on_device.zero_, on_device.cpu, lambda: on_device.view(3, 1).sum()):
        with raises(RuntimeError, late):
            use()
    default.wait_stream(stream)
    assert torch.equal((on_device + 1).cpu(), sample(3) + 1)


@check
def streams_have_queues_of_their_own() -> None:
    default, stream, device = torch.accelerator.current_stream(), torch.Stream("sim"), torch.device("sim", 0)
    assert stream != default and stream.device == default.device == device
    tensor, source = torch.ones(1, device="sim"), sample(3).pin_memory()
    with stream:
        assert torch.accelerator.current_stream() == stream
        copied = source.to("sim", non_blocking=True)
    late = tensor.to("cpu", non_blocking=True)
    stream.synchronize()
    assert torch.accelerator.current_stream() == default and late.isnan().all()  # the other queue has not moved
    copied.record_stream(default)
    assert torch.equal(copied.cpu(), source) and late.item() == 1  # the host has waited for the one, now for the other


@check
def a_queue_that_waits_for_another_moves_it() -> None:
    default, stream, source = torch.accelerator.current_stream(), torch.Stream("sim"), sample(3).pin_memory()
    with stream:
        source.to("sim", non_blocking=True)
    default.wait_stream(stream)
    source.zero_()
    with raises(RuntimeError, "host memory was written while it was being copied to sim:0"):
        default.synchronize()


@check
def memory_of_another_stream_is_refused_unless_torch_was_told() -> None:
    default, stream = torch.accelerator.current_stream(), torch.Stream("sim")
    with stream:
        theirs, told = torch.ones(2, device="sim"), torch.ones(2, device="sim")
    told.record_stream(default)
    default.wait_stream(stream)
    with raises(RuntimeError, "memory of another stream is used on stream 0 without record_stream"):
        theirs + 1
    assert (told + 1).tolist() == [2, 2]
    with torch.Stream("sim"), raises(RuntimeError, "without record_stream"):
        told + 1


@check
def pinned_memory_is_known_as_such() -> None:
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and pinned[2:].is_pinned() and torch.empty(0).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned() and not torch.ones(4).is_pinned()
    [batch] = DataLoader([sample(3)] * 2, batch_size=2, num_workers=1, pin_memory=True)
    assert batch.is_pinned() and torch.equal(batch[1], sample(3))


# waits


@check
def every_wait_of_the_host_is_counted_with_its_kind() -> None:
    values = torch.tensor([3, 1, 1, 0]).pin_memory().to("sim", non_blocking=True)
    mask = values > 0
    cases = {
        "item": lambda: bool(mask.any()), "copy to host": lambda: values.tolist(),
        "copy to device": lambda: torch.tensor(3.0, device="sim"), "synchronize": torch.accelerator.synchronize,
        "nonzero": lambda: values.nonzero(), "masked index": lambda: values[mask], "unique": lambda: values.unique(),
        "masked_select": lambda: values.masked_select(mask), "bincount": lambda: values.bincount(),
        "repeat_interleave": lambda: values.repeat_interleave(values), "equal": lambda: torch.equal(values, values),
    }
    for kind, act in cases.items():
        with waits(kind):
            act()
    with waits("masked index"):
        values[mask] = torch.tensor([1, 2, 3]).pin_memory().to("sim", non_blocking=True)
    with waits():
        values.repeat_interleave(values, output_size=6), values[values * 0], values.masked_fill(mask, 0)


@check
def only_plain_copies_from_pinned_memory_do_not_wait() -> None:
    plain = sample(2, 3)
    pinned = plain.pin_memory()
    with waits():
        pinned.to("sim", non_blocking=True)
        sample(1, 2, 3, 3).contiguous(memory_format=torch.channels_last).pin_memory().to("sim", non_blocking=True)
    for act in (lambda: plain.to("sim", non_blocking=True), lambda: pinned.to("sim"),
                lambda: torch.zeros((), device="sim").copy_(plain[0, 0]),
                lambda: pinned.to("sim", torch.bfloat16, non_blocking=True),
                lambda: torch.empty(2, 3, device="sim").copy_(sample(3, 2).pin_memory().t(), non_blocking=True)):
        with waits("copy to device"):
            act()
    with waits("copy to host"):
        torch.empty(2, 3).copy_(torch.ones(2, 3, device="sim"), non_blocking=True)


@check
def a_wait_names_the_functions_that_led_to_it() -> None:
    def inner() -> None:
        torch.ones(1, device="sim").item()

    before = simulation.waits.copy()
    inner()
    [(_, frames)] = simulation.waits - before
    file = "tests/device/check_simulation.py"
    functions = ("inner", "a_wait_names_the_functions_that_led_to_it", "main", "<module>")
    assert frames == tuple(f"{file}:{function}" for function in functions), frames


# memory


@check
def living_storages_are_counted_and_freed() -> None:
    weight = torch.ones(2**20, device="sim:1", requires_grad=True)  # 4 MiB
    for _ in range(20):  # 8 MiB for each, in turn
        grown = (weight.exp() * 2).view(2, -1)[:, 1:]
        del grown
    assert 12 <= simulation.LIBRARY.peak_bytes(1) / 2**20 < 17


@check
def memory_above_the_budget_is_refused() -> None:
    weight = torch.ones(2**20, device="sim:1", requires_grad=True)  # 4 MiB
    kept = weight
    with raises(torch.OutOfMemoryError, "sim out of memory. Tried to allocate 4.00 MiB. Device 1 has a total capacity"):
        for _ in range(16):
            kept = kept.exp()  # autograd keeps it
    del kept
    torch.ones(12 * 2**20, device="sim:1")


@check
def empty_memory_is_nan_or_a_large_number() -> None:
    one = torch.ones(2, device="sim")
    for made in (torch.empty(2, device="sim"), torch.empty_like(one), one.new_empty(2),
                 torch.empty_strided((2,), (1,), device="sim"), one.new_empty_strided((2,), (1,)),
                 torch.empty(2, device="sim", dtype=torch.bfloat16)):
        assert made.isnan().all()
    assert torch.empty(2, device="sim", dtype=torch.int64).min() > 2**60


# faults


@check
def a_device_that_failed_fails_for_good() -> None:
    tensor = torch.ones(1, device="sim:3")
    for _ in range(2):
        with raises(torch.AcceleratorError, "sim error: uncorrectable ECC error encountered"):
            for _ in range(10):
                tensor = tensor + 1
    with raises(torch.AcceleratorError, "uncorrectable"):
        torch.accelerator.synchronize(3)
    assert torch.ones(1, device="sim:0").item() == 1


@check
def a_wait_for_a_device_that_hangs_never_ends() -> None:
    tensor, event = torch.ones(1, device="sim:2"), torch.Event("sim:2")
    with torch.accelerator.device_index(2):
        event.record()
    for _ in range(20):
        tensor = tensor + 1
    event.synchronize()  # of what came before
    waiting = threading.Thread(target=lambda: tensor.item(), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and tensor.add(1).shape == (1,)


# random numbers


@check
def a_device_has_random_numbers_of_its_own() -> None:
    torch.default_generator.manual_seed(1)
    unseeded, on_cpu = torch.rand(4, device="sim:1").cpu(), torch.rand(4)
    torch.sim.manual_seed_all(1)
    seeded = [torch.rand(4, device=f"sim:{index}").cpu() for index in (0, 1)]
    state = torch.sim.get_rng_state(1)
    again = torch.rand(4, device="sim:1").cpu()
    torch.sim.set_rng_state(state, 1)
    assert not torch.equal(unseeded, on_cpu) and torch.equal(seeded[0], on_cpu) and torch.equal(seeded[1], on_cpu)
    assert torch.equal(again, torch.rand(4, device="sim:1").cpu()) and not torch.equal(again, on_cpu)
    torch.default_generator.manual_seed(1)
    assert torch.equal(torch.rand(4), on_cpu)


@check
def torch_seeds_the_devices_too() -> None:
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="sim:1").cpu(), torch.randn(4))


@check
def a_checkpointed_layer_draws_the_same_numbers_again() -> None:
    torch.manual_seed(5)
    for device in ("sim:0", "sim:1"):
        tensor = sample(64).to(device).requires_grad_()
        drawn = checkpoint(F.dropout, tensor, use_reentrant=False)
        torch.rand(4, device=device)  # of a later layer
        drawn.sum().backward()
        assert torch.equal(tensor.grad != 0, drawn != 0) and 0 < int((drawn == 0).sum()) < 64


# results


def results(
    act: Callable[..., Tensor], shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype | None
) -> list[Tensor]:
    """Output and gradients of `act` on samples of these shapes."""
    inputs = [sample(*shape, seed=seed).to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    torch.manual_seed(7)
    with torch.autocast(device, dtype) if dtype else nullcontext():
        output = act(*inputs)
    output.backward(sample(*output.shape, seed=9).to(output))
    return [output.detach().cpu(), *(each.grad.cpu() for each in inputs)]


def operations() -> dict[str, tuple]:
    attend, image, qkv = F.scaled_dot_product_attention, (2, 4, 6, 6), [(2, 2, 9, 8)] * 3
    mask = (sample(2, 1, 9, 9) > 0).logical_or(torch.eye(9, dtype=torch.bool))
    labels = torch.tensor([1, 0, 3])
    return {
        "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), image, (3, 4, 3, 3), (3,)),
        "linear 2D": (F.linear, (5, 8), (4, 8), (4,)),
        "linear 3D": (F.linear, (5, 3, 8), (4, 8), (4,)),
        "linear twice": (lambda x, w: F.linear(F.linear(x, w), w), (5, 8), (8, 8)),  # autocast casts w once
        "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), image, (4,), (4,)),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (5, 8), (8,), (8,)),
        "embedding": (lambda w: F.embedding(labels.to(w.device), w, padding_idx=0), (4, 8)),
        "cross_entropy": (lambda x: F.cross_entropy(
            x, labels.to(x.device), reduction="none", label_smoothing=0.1), (3, 4)),
        "gelu": (F.gelu, (5, 8)),
        "softmax": (lambda x, y: F.softmax(x @ y, -1), (5, 5), (5, 5)),
        "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), image),
        "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), image),
        "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image),
        "cat": (lambda x, y: torch.cat([x @ y, x]), (5, 5), (5, 5)),
        "stack": (lambda x, y: torch.stack([x @ y, y @ x]), (5, 5), (5, 5)),
        "dropout": (lambda x: F.dropout(x, 0.3), (20, 20)),
        "attention": (attend, *qkv), "attention, mask": (lambda q, k, v: attend(q, k, v, mask.to(q.device)), *qkv),
        "attention, causal": (lambda q, k, v: attend(q, k, v, is_causal=True), *qkv),
        "attention, additive mask": (lambda q, k, v: attend(q, k, v, mask.float().to(q.device)), *qkv),
        "attention, mask and dropout": (lambda q, k, v: attend(q, k, v, mask.to(q.device), dropout_p=0.2), *qkv),
    }


@check
def an_operation_gives_the_cpus_bits_forward_and_backward() -> None:
    for name, (act, *shapes) in operations().items():
        for dtype in (None, torch.bfloat16, torch.float16):
            for ours, cpus in zip(results(act, shapes, "sim", dtype), results(act, shapes, "cpu", dtype), strict=True):
                assert ours.dtype == cpus.dtype and torch.equal(ours, cpus), f"{name}, {dtype}"


def small_net() -> tuple[nn.Module, Callable[[nn.Module, int, torch.device], Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                        nn.Dropout(0.1), nn.Linear(4, 5))
    return net, lambda net, step, device: F.cross_entropy(
        net(sample(8, 3, 6, 6, seed=step).to(device)), torch.arange(8).to(device) % 5, label_smoothing=0.1)


def small_bert() -> tuple[nn.Module, Callable[[nn.Module, int, torch.device], Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    bert = BertForMaskedLM(BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, attn_implementation="sdpa"))
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7], [9]])).long()
    return bert, lambda model, step, device: model(
        input_ids=((tokens + step) % 50).to(device), attention_mask=mask.to(device), labels=tokens.to(device)).loss


def train(
    build: Callable, device: str, dtype: torch.dtype | None = None, fused: bool = True
) -> tuple[str, list[float]]:
    """The sha256 of the weights after three steps, and the losses."""
    model, loss_of = build()
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler, losses = torch.amp.GradScaler(device, enabled=dtype == torch.float16), []
    torch.manual_seed(1)
    for step in range(3):
        with torch.autocast(device, dtype) if dtype else nullcontext():
            loss = loss_of(model, step, torch.device(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest(), losses


@check
def three_steps_of_a_convolutional_net_give_the_cpus_weights() -> None:
    assert train(small_net, "sim") == train(small_net, "cpu")
    assert train(small_net, "sim", fused=False) == train(small_net, "cpu", fused=False)


@check
def three_steps_of_bert_give_the_cpus_weights() -> None:
    assert train(small_bert, "sim") == train(small_bert, "cpu")


@check
def steps_under_autocast_give_the_cpus_losses() -> None:
    for build in (small_net, small_bert):
        for dtype in (torch.bfloat16, torch.float16):  # fp16 with a GradScaler
            assert train(build, "sim", dtype) == train(build, "cpu", dtype), (build, dtype)


@check
def fused_sgd_gives_the_cpus_weights() -> None:
    found = []
    for device in ("cpu", "sim"):
        weight = sample(5).to(device).requires_grad_()
        weight.grad = sample(5, seed=1).to(device)
        torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True).step()
        found.append(weight.detach().cpu())
    assert torch.equal(*found)


def together() -> None:
    """Two processes: collectives, then DistributedDataParallel on devices and on the CPU."""
    rank = int(os.environ["RANK"])
    place = torch.device("sim", rank)
    torch.sim.set_device(place)
    assert dist.get_default_backend_for_device(place) == "gloo"
    dist.init_process_group("gloo", device_id=place)

    summed, sent = torch.tensor([rank + 1, 2**40], device=place), torch.tensor([rank + 5.0], device=place)
    work = dist.all_reduce(summed, async_op=True)
    dist.broadcast(sent, 1)
    gathered = [torch.empty(1, device=place) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)], device=place))
    work.wait()
    assert (summed.tolist(), sent.tolist(), [each.item() for each in gathered]) == ([3, 2**41], [6], [0, 1])

    def all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 2)

    weights = []
    for device in ("cpu", "sim"):
        net, loss_of = small_net()
        device_ids = [rank] if device == "sim" else None
        model = nn.parallel.DistributedDataParallel(
            net.to(device), device_ids, gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
        model.register_comm_hook(None, all_reduce)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for step in range(3):
            loss_of(model, 2 * step + rank, next(model.parameters()).device).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([value.detach().cpu() for value in model.state_dict().values()])
    assert all(map(torch.equal, *weights))
    dist.destroy_process_group()
    # as train.py ends: autograd's threads for devices run Python, and now and then abort an interpreter that ends
    os._exit(0)


def after_a_fault() -> None:
    """A fault that is to strike once has struck; then memory is written while it is copied, and nobody waits."""
    tensor = torch.ones(1, device="sim:3")
    for _ in range(20):
        tensor = tensor + 1
    assert tensor.item() == 21
    source = torch.ones(3).pin_memory()
    source.to("sim", non_blocking=True)
    source.zero_()
    os._exit(0)


def main() -> None:
    outcomes = {}
    for name, act in CHECKS.items():
        try:
            torch.sim.set_device(0)
            act()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes), flush=True)
    os._exit(0)  # a thread waits for a device that hangs


if __name__ == "__main__":
    {"together": together, "after_a_fault": after_a_fault}.get(sys.argv[-1], main)()
