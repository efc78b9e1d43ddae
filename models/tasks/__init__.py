"""The tasks, as import paths: an image run never imports what only text needs."""

from importlib import import_module

TASKS = {
    "image-classification": "models.tasks.image_classification:ImageTask",
    "image-regression": "models.tasks.image_classification:ImageTask",
    "text-classification": "models.tasks.text_classification:LabelledTextTask",
    "text-regression": "models.tasks.text_classification:LabelledTextTask",
    "masked-lm": "models.tasks.masked_lm:MaskedLM",
}


def load_task(name: str) -> type:
    """The class of task `name`, a key of TASKS; imports its module. Raises UserError (64) for models/own.py."""
    from models.trial import require_own  # imports torch

    require_own()
    module, cls = TASKS[name].split(":")
    return getattr(import_module(module), cls)
