"""The fixtures of tests/, for the tests of extras."""

from tests.conftest import (  # noqa: F401
    data_of,
    demo_run,
    launch,
    own_photos,
    photo_tables,
    photos,
    run_dir,
    run_torchrun,
    run_train,
    session_dir,
    start_torchrun,
    text_tables,
    texts,
)
from tests.faults.conftest import undisturbed  # noqa: F401
from tests.unit.conftest import prepare, world  # noqa: F401


def pytest_pycollect_makemodule() -> None:
    """Called before a file of this folder is imported. The process that gives files to others imports none."""
    prepare()
