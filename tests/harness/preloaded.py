"""What the parent of all forks imports (see forked.py): what train.py imports in any task. It must have one thread."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as launches have it; torch and numpy read it when they are loaded

import importlib

from models.tasks import TASKS, load_task
from utils.strategies import STRATEGIES, load_strategy

for name in ("torch.distributed.run", "train", "torchvision", "torch.utils.tensorboard", "transformers"):
    importlib.import_module(name)
for name in TASKS:
    load_task(name)
for name in STRATEGIES:
    load_strategy(name)
gc.freeze()  # a fork need not copy what it never changes
