"""Run a script with the device registered, as `python SCRIPT` would run it.

    python -m tests.harness.accelerator SCRIPT ARGUMENT...      with the repository's folder in PYTHONPATH
"""

import runpy
import sys
from pathlib import Path

from tests.harness import accelerator

report = accelerator.register()
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    report()
