"""A batch is copied to a busy device before the work that was queued there is done; test_training.py.

    python tests/device/check_copies.py     fails if it does not
"""

import torch

from data.batch import Batch
from utils.hardware.devices import copy_stream

PRODUCTS = 20


def main() -> None:
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    size = 64 if device.type == "sim" else 8192  # of a matrix; the products take a GPU longer than the copy
    images = torch.arange(2**20, dtype=torch.uint8).view(16, -1)
    batch = Batch({"images": images}, torch.arange(16), torch.ones(16)).pin_memory()
    work = torch.full((size, size), 1 / size, device=device)
    batch.to(device).inputs["images"].long().sum(), work @ work  # a GPU loads a kernel when it is first used
    torch.accelerator.synchronize()

    for _ in range(PRODUCTS):
        work = work @ work
    busy = torch.accelerator.current_stream().record_event()
    copied = batch.to(device)
    total = copied.inputs["images"].long().sum()  # queued after the work
    with copy_stream(device):  # reading waits for the copies, and for nothing else
        read = [tensor.cpu() for tensor in (copied.inputs["images"], copied.labels)]
    assert not busy.query(), "the copy came after the work"
    assert torch.equal(read[0], images) and torch.equal(read[1], torch.arange(16))
    assert total.item() == images.long().sum().item()


if __name__ == "__main__":
    main()
