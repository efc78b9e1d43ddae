"""What the tests of checkpoints share: a small state, checkpoints of a run, damage."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.numerics.optimizers import build_optimizer
from utils.rundir.chain import NO_RECORDS
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.resolved import Resolved
from utils.rundir.snapshot import Beside
from utils.rundir.state import TrainState
from utils.settings.run_options import OptimOptions, RecordOptions
from utils.strategies.ddp import DDP

FILES = ("model.safetensors", "state.pt", "samples.safetensors", "trainer.json", "MANIFEST.json")


def build_net(channels=4):
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.Flatten(), nn.Linear(channels * 4, 5))


def build_state(world, optimizer="sgd", model=None):
    """A state that has never trained."""
    model = model or build_net().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, OptimOptions(optimizer=optimizer, lr=0.001))
    return TrainState(DDP(model, world), optimizer, torch.amp.GradScaler("cpu"))


def train_step(state):
    state.strategy.module(torch.randn(8, 3, 4, 4)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.progress = state.progress.after(0, 8 * (state.progress.step + 1))


def beside(write=lambda weights: None, records=NO_RECORDS, **about):
    """What a checkpoint refers to."""
    return Beside(records, write, **about)


def save(checkpoints, state, write=lambda weights: None, **about):
    """Save, and wait until it is on disk."""
    checkpoints.save(state, beside(write, **about))
    checkpoints.flush()


@pytest.fixture
def folder(run_dir):
    return run_dir / "checkpoints"


@pytest.fixture
def checkpoints_of(world, folder):
    """Checkpoints of one start of a run, and the notes to the user."""
    def build(start=1, **options):
        notes = []
        run = SimpleNamespace(path=folder.parent, start=start, note=notes.append, writes=True, resolved=Resolved())
        return Checkpoints(run, world, RecordOptions(**options)), notes
    return build


@pytest.fixture
def saved(world, checkpoints_of, folder):
    """Three checkpoints, of steps 1, 2 and 3."""
    torch.manual_seed(0)
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    for _ in range(3):
        train_step(state)
        save(checkpoints, state)
    return [folder / f"step-{step:010d}-g1" for step in (1, 2, 3)]


def everything(state):
    """All that a state is, comparable bit for bit."""
    def plain(value):
        return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value

    optimizer = {name: {key: plain(value) for key, value in values.items()}
                 for name, values in state.state_dict()["optimizer"].items()}
    weights = {name: plain(tensor) for name, tensor in state.strategy.model_state().items()}
    return weights, optimizer, state.scaler.state_dict(), state.progress, state.best


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def names_of(folder):
    """Of its checkpoints, where there may be none yet."""
    return sorted(path.name for path in folder.glob("step-*"))


def contents(folder):
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


def flip(file, place, mask=1):
    data = bytearray(file.read_bytes())
    data[place] ^= mask
    file.write_bytes(data)
