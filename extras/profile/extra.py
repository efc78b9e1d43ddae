"""--profile N: what N optimizer steps spend their time on, as torch.profiler sees it: a file for each rank.

RUN/profile/rank-R.pt.trace.json opens in https://ui.perfetto.dev, and in TensorBoard with its plugin torch-tb-profiler.
RUN/profile/operators.txt is rank 0's table.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.profiler import profile, schedule, supported_activities

from engine.training import Extra, Training
from extras.profile import OPTIONS
from utils.distributed.world import World
from utils.errors import counted

SKIPPED = 2  # steps of a start: caches fill, and the profiler itself starts
# Of a trace whose table is made. From one of 95 MB (100 micro-batches of ResNet-50) torch 2.14 makes it in 26 s and
# 1.9 GB, or in 59 s where others use the cores (two of an AMD EPYC, n = 4). The trace itself takes 2 to 6 s.
MOST_MB = 50


class EXTRA(Extra):
    """The first steps of a start."""

    _profile: "Profile | None" = None

    def opened(self, t: Training) -> None:
        """Begin to record."""
        self._profile = Profile(t.config.extra(OPTIONS).profile, t.run.path / "profile", t.world, t.log.note)

    def stepped(self, t: Training) -> None:
        """Collective after the last step that is recorded."""
        if self._profile.is_due():
            t.watchdog.enter("writing the profile", t.config.faults.section_timeout)
        self._profile.step()  # Collective if it is due.

    def finished(self, t: Training) -> Mapping[str, str]:
        """Write now: the many operations of a report are no part of it."""
        self._profile.close()
        return {}

    def closed(self) -> None:
        """Write what there is."""
        if self._profile:
            self._profile.close()


class Profile:
    """Records steps of this start and writes the files; with 0 steps it does nothing."""

    def __init__(self, num_steps: int, folder: Path, world: World, note: Callable[[str], None]):
        self._folder, self._world, self._note, self._profile = folder, world, note, None
        self._num_steps, self._num_done = num_steps, 0
        if num_steps:
            kinds = {"CPU", world.device.type.upper()}
            self._profile = profile(
                activities=[each for each in supported_activities() if each.name in kinds],
                schedule=schedule(wait=SKIPPED - 1, warmup=1, active=num_steps, repeat=1))
            self._profile.start()

    def is_due(self) -> bool:
        """Whether the next step() writes. The same on every rank."""
        return self._profile is not None and self._num_done + 1 == SKIPPED + self._num_steps

    def step(self) -> None:
        """An optimizer step is done. Collective if it is due: all ranks write, and wait for each other."""
        if self._profile is None:
            return
        is_due = self.is_due()
        self._num_done += 1
        if self._num_done == SKIPPED and self._world.is_main:  # none writes before its next step, which needs all ranks
            shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier start, maybe on more ranks
        if is_due:
            self._world.everywhere(self.close)  # Collective.
        else:
            self._profile.step()

    def close(self) -> None:
        """Write what there is; where the steps were fewer, the end of the run is in it, too.

        What cannot be written is noted, by rank 0: the training goes on without it.
        """
        try:
            if self._profile:
                self._stop()
        except OSError as error:
            self._note(f"profile: cannot write {self._folder}: {error.strerror or error}")

    def _stop(self) -> None:
        """Write the files, if a step was recorded."""
        found, self._profile = self._profile, None
        found.stop()
        if self._num_done <= SKIPPED:
            self._note(f"--profile {self._num_steps} wrote nothing: it begins with step {SKIPPED + 1} of a start, and"
                       f" this start took {counted(self._num_done, 'step')}")
            return
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"rank-{self._world.rank}.pt.trace.json"
        found.export_chrome_trace(str(trace))
        if not self._world.is_main:
            return
        without, size_mb = "", trace.stat().st_size / 1e6
        if size_mb <= MOST_MB:
            by = "self_cpu_time_total" if self._world.device.type == "cpu" else "self_device_time_total"
            (self._folder / "operators.txt").write_text(found.key_averages().table(sort_by=by, row_limit=50))
        else:
            without = f"; operators.txt is left out above {MOST_MB} MB, and this trace has {size_mb:.0f}"
        self._note(f"profile of {counted(self._num_done - SKIPPED, 'step')}: {self._folder};"
                   f" rank-*.pt.trace.json open in https://ui.perfetto.dev{without}")
