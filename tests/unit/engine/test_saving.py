"""What is saved beside a checkpoint."""

from contextlib import nullcontext
from types import SimpleNamespace

from engine import saving
from engine.training import Extra, Extras
from utils.rundir.state import Progress
from utils.settings.run_options import RecordOptions, RunOptions


class Failing(Extra):
    def exported(self, t, step, values, folder):
        raise KeyError("model")


def test_an_extra_that_fails_does_not_end_a_save(tmp_path):
    """What it writes is no part of the model."""
    notes, written = [], []
    saving.save(SimpleNamespace(
        state=SimpleNamespace(progress=Progress(step=1, evaluated_step=1, sample_offset=8)), total_steps=9, last_step=9,
        config=SimpleNamespace(record=RecordOptions(), run=RunOptions()), flags=SimpleNamespace(save=False, stop=False),
        clock=SimpleNamespace(on=lambda name: nullcontext()),
        extras=Extras([Failing()]), log=SimpleNamespace(flush=lambda: None, written=dict, note=notes.append),
        task=SimpleNamespace(save_model=lambda weights, folder: written.append(folder)),
        run=SimpleNamespace(replace_folder=lambda name, write: write(tmp_path / name)),
        watchdog=SimpleNamespace(enter=lambda *given, **more: None),
        checkpoints=SimpleNamespace(limit_s=1, is_due=lambda step: False,
                                    save=lambda state, beside, awaits_evaluation: beside.write({}))), {"top1": 0.5})
    assert written == [tmp_path / "model"]
    assert len(notes) == 1 and "failed (KeyError: 'model'); the run is whole without it" in notes[0]
