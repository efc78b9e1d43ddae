"""What an operation does: refused where a GPU refuses it, waited for where CUDA has the host wait, computed by the CPU.

run() gets every operation that concerns the device, in every thread: it is the fallback of torch's dispatch key
PrivateUse1. What torch composes of other operations for a device, and has a kernel for on the CPU, it gets whole.
"""

from functools import partial
from re import fullmatch
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import lookup_op
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.harness.accelerator.device import DEVICES, LOCK, Device, copies, stack

CPU, aten, sim = torch.device("cpu"), torch.ops.aten, torch.ops.sim
WAITS = {"_local_scalar_dense": "item"} | {name: name for name in ("nonzero", "masked_select", "equal", "bincount",
         "repeat_interleave")} | dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive"), "unique")
# Autocast on the CPU: to the lower precision, to the widest type among the tensors; all others of its list to fp32.
LOWERED = ("_?conv.*|_?addmm.*|addbmm|baddbmm|bmm|mm|matmul|linear|linalg_vecdot|prelu|mkldnn_rnn_layer"
           "|scaled_dot_product_attention|_native_multi_head_attention")
PROMOTED = "cat|stack|index_copy"


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One operation. Raises RuntimeError where tensors of two devices meet, but for indices and scalars of the host."""
    name, own, found = func.overloadpacket.__name__, {}, set()
    if name == "_copy_from": return copy(*args, **kwargs)
    if name == "record_stream": return sim.share(args[0], args[1].stream_id)
    takes_scalars = torch.Tag.pointwise in func.tags or fullmatch("(masked_|index_)?fill_?", name)
    is_indexing = fullmatch("_?(unsafe_)?index(_put(_impl)?_?)?", name)
    indices = [index for index in args[1] if index is not None] if is_indexing else []

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            found.add(torch.device("sim", torch.sim.current_device()) if value.index is None else value)
            return CPU
        if isinstance(value, Tensor) and value.is_sim:
            found.add(value.device)
            host = unwrapped(value)
            own[id(host)] = value, host
            return host
        is_scalar = takes_scalars and isinstance(value, Tensor) and value.dim() == 0
        if isinstance(value, Tensor | torch.Generator) and not (is_scalar or any(value is index for index in indices)):
            found.add(value.device)
        return value

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    if len(found) > 1:
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                           f"{' and '.join(sorted(map(str, found)))}! ({func})")
    device, schema = DEVICES[found.pop().index], func._schema
    place = device.issue()
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices): device.wait(place, "masked index")
    elif any(index.device == CPU for index in indices): device.wait(place, "copy to device")
    elif name in WAITS and kwargs.get("output_size") is None: device.wait(place, WAITS[name])
    is_number = [str(argument.type) == "Tensor" and isinstance(value, int | float)
                 for value, argument in zip(args, schema.arguments, strict=False)]
    compute = partial(func.overloadpacket if any(is_number) else func, *host_args, **host_kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        with LOCK, torch.random.fork_rng([]):  # the CPU's generator stands in for the device's
            torch.set_rng_state(device.random_state)
            result = compute()
            device.random_state = torch.get_rng_state()
    else:
        result = compute()
    if name in ("empty", "empty_strided"):  # torch makes their kin of them
        is_float = result.is_floating_point() or result.is_complex()
        result.fill_(torch.nan if is_float else 2 ** (8 * result.itemsize - 2))
    elif func.namespace == "aten" and (made := numbers(result if schema.returns else host_args, own)):
        device.flip(name, made[0])
    for tensor, host in own.values() if schema.is_mutable else ():
        sim.adopt(tensor, host)
    return tree_map_only(Tensor, lambda host: (own.get(id(host)) or [sim.wrap(host, device.index)])[0], result)


def numbers(result: Any, own: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The tensors of a result that were computed, or changed in place, but for views of arguments.

    Of an operation without a result: its arguments, of which it changes the first.
    """
    addresses = {host.untyped_storage().data_ptr() for _, host in own.values()}
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()
            and leaf.numel() > 0 and (id(leaf) in own or leaf.untyped_storage().data_ptr() not in addresses)]


def unwrapped(tensor: Tensor) -> Tensor:
    """The CPU tensor on the memory of a device tensor. Raises RuntimeError where the current stream may not use it."""
    host = sim.unwrap(tensor)
    DEVICES[tensor.device.index].require_arrived(host)
    return host


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices, or a device and the host, as aten/src/ATen/native/cuda/Copy.cu does it.

    The host waits, unless it asks not to, its memory is pinned, and nothing is to be converted or rearranged. A copy
    that it does not wait for is under way until its queue comes to it: the host may not read the target, or write the
    source. Other streams must wait for it before they use the target.
    """
    values, memory = (unwrapped(each) if each.is_sim else each for each in (source, target))
    if source.is_sim and target.is_sim:
        for index in {source.device.index, target.device.index}: DEVICES[index].issue()
        memory.copy_(values)
        return target
    on_device, host, way = (target, source, "to device") if target.is_sim else (source, target, "to host")
    is_plain = source.dtype == target.dtype and source.stride() == target.stride()
    device, copies[way] = DEVICES[on_device.device.index], copies[way] + 1
    if not (non_blocking and is_plain and host.is_pinned()):
        device.wait(device.issue(), f"copy {way}")
        memory.copy_(values)
        return target
    snapshot, (path, _, line) = values.clone(), (stack() or [("?", "?", 0)])[0]

    def deliver() -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # beside autograd: no operation of the host
            target.copy_(snapshot)

    def check() -> None:
        if not torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (source, snapshot))):
            raise RuntimeError(f"host memory was written while it was being copied to {target.device},"
                               f" issued at {path}:{line}")

    if host is source:
        device.begin_copy(memory, check)
        memory.copy_(values)
    else:
        device.issue(complete=deliver)
        is_float = values.is_floating_point() or values.is_complex()
        memory.copy_(torch.full_like(values, torch.nan) if is_float else ~values)
    return target


def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """As torch composes it on the CPU."""
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_((1 - p) or 1) if train and p else tensor


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, **options: Any) -> Tensor:
    """scaled_dot_product_attention by the kernel that torch chooses on the CPU."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    tensors, settings = (query, key, value, attn_mask), (dropout_p, is_causal)
    hosts = [each if each is None else unwrapped(each.detach()).requires_grad_(each.requires_grad) for each in tensors]
    if aten._fused_sdp_choice(*hosts, *settings, **options) == torch.nn.attention.SDPBackend.MATH.value:
        return aten._scaled_dot_product_attention_math(*tensors, *settings, **options)[0]
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, *settings, attn_mask=attn_mask, scale=options.get("scale"))[0]


def autocast(func: Any, *args: Any, **kwargs: Any) -> Any:
    """`func` under autocast, with its tensors cast as on the CPU."""
    name = func.overloadpacket.__name__
    is_wide = any(isinstance(leaf, Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(args))
    is_lowered = fullmatch(LOWERED, name) or (fullmatch(PROMOTED, name) and not is_wide)
    dtype = torch.get_autocast_dtype("sim") if is_lowered else torch.float32
    args, kwargs = tree_map_only(Tensor, lambda tensor: sim.autocast(tensor, dtype), (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return func(*args, **kwargs)


def record(index: int, stream: int) -> int:
    """An event: the place, the stream and the device in one number; stream -1: all streams of the device."""
    return DEVICES[index].last_place() << 10 | (1 + stream) << 6 | index


def parts(event: int) -> tuple[Device, int, int]:
    """The device, the place and the stream of an event."""
    return DEVICES[event & 63], event >> 10, (event >> 6 & 15) - 1


def wait(event: int, kind: str) -> None:
    """The host waits for an event."""
    device, place, stream = parts(event)
    device.wait(place, kind, stream)


def block(event: int, index: int, stream: int) -> None:
    """A stream waits for an event."""
    DEVICES[index].block(stream, *parts(event))


def query(event: int) -> bool:
    """Whether what an event stands for is done."""
    device, place, stream = parts(event)
    return device.query(place, stream)


def install() -> Any:
    """Make all this the device's, for as long as what is returned lives."""
    kept = {name: torch.library.Library(name, "IMPL") for name in ("_", "aten", "c10d", "sim")}
    kept["_"].fallback(run, "PrivateUse1")
    kept["_"].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    composites = {"CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, name = qualified.split("::")
        keys = {key for key in {"CPU", "AutocastCPU", "PrivateUse1"} | composites
                if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)}
        is_whole = ("CPU" in keys and keys & composites) or fullmatch("convolution(_backward)?", name)
        if (namespace == "aten" and is_whole) or (namespace == "c10d" and "PrivateUse1" in keys):
            kept[namespace].impl(name, partial(run, lookup_op(qualified)), "PrivateUse1", allow_override=True)
        if namespace == "aten" and "AutocastCPU" in keys:
            kept["aten"].impl(name, partial(autocast, lookup_op(qualified)), "AutocastPrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        kept["aten"].impl("dropout", dropout, key)
        kept["aten"].impl("scaled_dot_product_attention", attention, key)
    for name, function in {"record": record, "wait": wait, "block": block, "query": query}.items():
        kept["sim"].impl(name, function, "CompositeExplicitAutograd")
    return kept
