"""train.py with training images that are not numbers: NAN_SAMPLES=17,40 torchrun ... train_with_nan.py SETTINGS."""

import os
import sys
from dataclasses import replace
from functools import partial

import extras
from data import demo
from data.images.folder import ImageFolder
from models.tasks.image_classification import ImageTask
from train import main
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

NUM_TRAIN = 57
SPOILED = {int(index) for index in os.environ["NAN_SAMPLES"].split(",")}
original, original_preview = ImageFolder.__getitem__, ImageTask.preview


def spoiled(self, item):
    """The sample; its image NaN in all pixels if it is one of SPOILED and to be trained on."""
    sample = original(self, item)
    is_spoiled = len(self) == NUM_TRAIN and int(item[1]) in SPOILED
    return sample._replace(image=sample.image.float() * float("nan")) if is_spoiled else sample


def preview(self, batch):
    """The pictures of a batch; a picture has bytes, and NaN is black."""
    return original_preview(self, replace(batch, inputs={"images": batch.inputs["images"].nan_to_num().byte()}))


if __name__ == "__main__":
    watchdog = Watchdog()
    ImageFolder.__getitem__, ImageTask.preview = spoiled, preview
    exit_after(partial(main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
