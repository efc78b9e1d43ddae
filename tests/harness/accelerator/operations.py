"""What operations do: what a GPU refuses is refused, where CUDA makes the host wait it waits, and the CPU computes.

run() is the fallback of the dispatch key PrivateUse1 and so gets every operation that concerns the device, in every
thread: on its tensors, by factories, and copies between it and the host (aten::_copy_from).
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.harness.accelerator.device import Device, copies, stack

NAME = "sim"
aten = torch.ops.aten
DEVICES: list[Device] = []

WAITS = {"_local_scalar_dense": "item", "is_nonzero": "item", "nonzero": "nonzero", "masked_select": "masked_select",
         "equal": "equal", "bincount": "bincount", "_unique": "unique", "_unique2": "unique", "unique_dim": "unique",
         "unique_consecutive": "unique", "unique_dim_consecutive": "unique", "repeat_interleave": "repeat_interleave"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
FILLING = {"fill", "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}  # by a scalar of the host
EMPTY = {"empty", "empty_strided"}  # torch makes its kin of these
LOWERED = {"_addmm_activation", "prelu", "_convolution", "_native_multi_head_attention", "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d",
           "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linalg_vecdot", "linear", "matmul",
           "mkldnn_rnn_layer", "mm", "scaled_dot_product_attention"}  # autocast's on the CPU
PROMOTED = {"cat", "index_copy", "stack"}


@dataclass(frozen=True)
class Traits:
    """What run() must know of an operation."""

    wait: str | None
    is_indexing: bool
    takes_host_scalars: bool
    is_random: bool
    is_empty: bool
    is_in_place: bool


@functools.cache
def traits_of(func: Any) -> Traits:
    """They follow from its name, schema and tags."""
    name = func._schema.name.removeprefix("aten::")
    return Traits(WAITS.get(name), name in INDEXING, torch.Tag.pointwise in func.tags or name in FILLING,
                  torch.Tag.nondeterministic_seeded in func.tags, name in EMPTY, func._schema.is_mutable)


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One operation. Raises RuntimeError where tensors of two devices meet."""
    if func is aten._copy_from.default:
        return copy(*args, **kwargs)
    traits, own, found = traits_of(func), {}, set()
    indices = [index for index in args[1] if index is not None] if traits.is_indexing else []

    def to_host(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [to_host(element) for element in value]
        if isinstance(value, torch.device):
            found.add(with_index(value))
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            if isinstance(value, torch.Generator): found.add(value.device)
            return value
        if value.device.type == NAME:
            found.add(value.device)
            host = torch.ops.sim.unwrap(value)
            own[id(host)] = (value, host)
            return host
        if not (any(value is index for index in indices) or (traits.takes_host_scalars and value.dim() == 0)):
            found.add(value.device)
        return value

    def to_device(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [to_device(element) for element in value]
        if not isinstance(value, Tensor):
            return value
        return own[id(value)][0] if id(value) in own else torch.ops.sim.wrap(value, device.index)

    host_args, host_kwargs = to_host(args), {name: to_host(value) for name, value in kwargs.items()}
    if len(found) > 1:
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                           f"{' and '.join(sorted(map(str, found)))}! ({func})")
    device = DEVICES[next(iter(found)).index]
    place = device.issue()
    if kind := _wait_of(traits, indices, kwargs):
        device.wait(place, kind)
    if traits.is_random:
        with device.random_numbers():
            result = func(*host_args, **host_kwargs)
    else:
        result = func(*host_args, **host_kwargs)
    if traits.is_empty:
        result.fill_(rubbish(result.dtype))
    if traits.is_in_place:
        for tensor, host in own.values():
            torch.ops.sim.adopt(tensor, host)
    return to_device(result)


def with_index(device: torch.device) -> torch.device:
    """`device`; the current one where it names none."""
    return torch.device(NAME, torch.sim.current_device()) if device.type == NAME and device.index is None else device


def rubbish(dtype: torch.dtype) -> float | int:
    """What memory holds that nothing was written to: NaN, or the type's largest number."""
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return (1 if dtype == torch.bool else torch.iinfo(dtype).max) if is_whole else float("nan")


def _wait_of(traits: Traits, indices: list[Tensor], kwargs: dict[str, Any]) -> str | None:
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return "masked index"  # its result has as many elements as the mask has ones
    if any(index.device.type != NAME for index in indices):
        return "copy to device"
    return None if kwargs.get("output_size") is not None else traits.wait


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, or a device and the host, as aten/src/ATen/native/cuda/Copy.cu does.

    The host does not wait where it asks for that, its memory is pinned, and nothing is to be converted or rearranged.
    Such a copy to the host arrives, and one to a device is checked, when the queue comes to it.
    """
    at_host = [torch.ops.sim.unwrap(tensor) if tensor.device.type == NAME else tensor for tensor in (source, target)]
    if source.device.type == target.device.type:
        if source.device != target.device: DEVICES[source.device.index].issue()
        DEVICES[target.device.index].issue()
        at_host[1].copy_(at_host[0])
        return target
    is_upload = target.device.type == NAME
    device, host = DEVICES[(target if is_upload else source).device.index], source if is_upload else target
    copies["to_device" if is_upload else "to_host"] += 1
    is_alike = source.dtype == target.dtype and any(
        source.is_contiguous(memory_format=form) and target.is_contiguous(memory_format=form)
        for form in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d))
    if not (non_blocking and is_alike and source.shape == target.shape and host.is_pinned()):
        device.wait(device.issue(), "copy to device" if is_upload else "copy to host")
        at_host[1].copy_(at_host[0])
    elif is_upload:
        snapshot, (path, line, _) = source.clone(), (stack() or [("?", 0, "")])[0]
        device.issue(lambda: require_unchanged(source, snapshot, f"{device.index}, issued at {path}:{line}"))
        at_host[1].copy_(source)
    else:
        values = at_host[0].clone()
        device.issue(lambda: arrive(target, values))
        target.copy_(torch.full_like(values, float("nan")) if values.is_floating_point() else ~values)
    return target


def arrive(target: Tensor, values: Tensor) -> None:
    """A late copy arrives, beside autograd: it is no operation of the host."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        target.copy_(values)


def require_unchanged(source: Tensor, snapshot: Tensor, which: str) -> None:
    """Raise RuntimeError unless the host left its memory alone until the copy was complete."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        now, before = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (source, snapshot))
        if not torch.equal(now, before):
            raise RuntimeError(f"host memory was written while it was being copied to {NAME}:{which}")


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """scaled_dot_product_attention by the kernel that it would choose on the CPU."""
    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.ops.sim.unwrap(tensor.detach()).requires_grad_(tensor.requires_grad)

    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    settings = {"scale": scale}
    choice = aten._fused_sdp_choice(*map(like, (query, key, value, attn_mask)), dropout_p, is_causal,
                                    scale=scale, enable_gqa=enable_gqa)
    if choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, **settings)[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **settings)[0]


def with_autocast(func: Any) -> Callable[..., Any]:
    """`func` under autocast, by the CPU's rule: float tensors to the lower precision, to fp32, or to the widest."""
    name = func._schema.name.removeprefix("aten::")

    def tensors(values: Iterable[Any]) -> Iterable[Tensor]:
        for value in values:
            if isinstance(value, list | tuple): yield from tensors(value)
            elif isinstance(value, Tensor): yield value

    def rule(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype(NAME)
        is_widest = name in PROMOTED and any(tensor.dtype == torch.float32 for tensor in tensors(args))
        dtype = lower if name in LOWERED or (name in PROMOTED and not is_widest) else torch.float32

        def cast(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [cast(element) for element in value]
            return torch.ops.sim.cast(dtype, value) if isinstance(value, Tensor) else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return func(*cast(args), **{key: cast(value) for key, value in kwargs.items()})

    return rule


def all_with(key: str, namespace: str, *others: str) -> dict[str, Any]:
    """{name: operation} of those that have a kernel of their own for `key`, and one for any of `others`."""
    names = [name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith(f"{namespace}::")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {}
    for name in names:
        if not others or any(has_kernel(name, other) for other in others):
            base, _, overload = name.partition("::")[2].partition(".")
            found[name] = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def install() -> list[torch.library.Library]:
    """Put run() in the place of the device's kernels. They live as long as what is returned."""
    everywhere, operators, collectives = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "c10d"))
    everywhere.fallback(run, "PrivateUse1")
    everywhere.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # What torch would compose on a device, and has a kernel for on the CPU.
    composed = all_with("CPU", "aten", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    composed |= {f"aten::{func.__name__.removesuffix('.default')}": func
                 for func in (aten.convolution.default, aten.convolution_backward.default)}
    for name, func in composed.items():
        operators.impl(name, functools.partial(run, func), "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        operators.impl("scaled_dot_product_attention", attention, key)
    for name, func in all_with("AutocastCPU", "aten").items():
        operators.impl(name, with_autocast(func), "AutocastPrivateUse1")
    for name, func in all_with("PrivateUse1", "c10d").items():  # gloo's collectives take tensors of the CPU
        collectives.impl(name, functools.partial(run, func), "PrivateUse1", allow_override=True)
    return [everywhere, operators, collectives]
