"""Nested dicts and lists of tensors, split into JSON and tensors and put together again: no pickle."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def take_apart(nest: Any, tensors: list[Tensor]) -> Any:
    """The nest as JSON; its tensors are appended to `tensors`, in the order in which put_together reads them.

    Keys are strings, and leaves are tensors or JSON values (floats keep every bit); a tuple becomes a list.
    """
    if isinstance(nest, Tensor):
        tensors.append(nest)
        strides = torch.empty_like(nest, device="meta").stride()  # the tensor's own if it is dense (channels_last, say)
        return {"tensor": [str(nest.dtype).removeprefix("torch."), list(nest.shape), list(strides)]}
    if isinstance(nest, dict):
        return {"dict": {name: take_apart(part, tensors) for name, part in nest.items()}}
    if isinstance(nest, list | tuple):
        return {"list": [take_apart(part, tensors) for part in nest]}
    return {"value": nest}


def put_together(description: Any, tensor_of: Callable[[torch.dtype, list[int], list[int]], Tensor]) -> Any:
    """The nest that take_apart described. tensor_of(dtype, shape, strides) returns its tensors one by one, in order."""
    [(kind, content)] = description.items()
    if kind == "tensor":
        dtype, shape, strides = content
        return tensor_of(getattr(torch, dtype), shape, strides)
    if kind == "dict":
        return {name: put_together(part, tensor_of) for name, part in content.items()}
    return [put_together(part, tensor_of) for part in content] if kind == "list" else content
