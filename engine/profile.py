"""--profile N: what N optimizer steps spend their time on, as torch.profiler sees it: a file for each rank.

RUN/profile/rank-R.pt.trace.json opens in https://ui.perfetto.dev, and in TensorBoard with its plugin torch-tb-profiler.
RUN/profile/operators.txt is rank 0's table.
"""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, schedule, supported_activities

from utils.distributed.world import World

SKIPPED = 2  # steps of this start: caches fill, and the profiler itself starts


class Profile:
    """Records steps of this start and writes the files; with 0 steps it does nothing."""

    def __init__(self, num_steps: int, folder: Path, world: World, note: Callable[[str], None]):
        self._folder, self._world, self._note, self._profile = folder, world, note, None
        if num_steps:
            kinds = {"CPU", world.device.type.upper()}
            self._profile = profile(
                activities=[each for each in supported_activities() if each.name in kinds],
                schedule=schedule(wait=SKIPPED - 1, warmup=1, active=num_steps, repeat=1), on_trace_ready=self._write)
            self._profile.start()

    def step(self) -> None:
        """An optimizer step is done."""
        if self._profile:
            self._profile.step()

    def close(self) -> None:
        """Write what there is, if the steps were fewer; then the end of the run is in it, too."""
        if self._profile:
            self._profile.stop()

    def _write(self, found: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        found.export_chrome_trace(str(self._folder / f"rank-{self._world.rank}.pt.trace.json"))
        if self._world.is_main:
            by = "self_cpu_time_total" if self._world.device.type == "cpu" else "self_device_time_total"
            (self._folder / "operators.txt").write_text(found.key_averages().table(sort_by=by, row_limit=50))
            self._note(f"profile: {self._folder}; rank-*.pt.trace.json open in https://ui.perfetto.dev")
