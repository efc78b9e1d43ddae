"""What is saved beside a checkpoint."""

from contextlib import nullcontext
from types import SimpleNamespace

from engine import saving


def test_a_card_that_cannot_be_written_does_not_end_a_save(monkeypatch, tmp_path):
    """It is no part of the model."""
    def fail(*given):
        raise KeyError("model")

    notes, written = [], []
    monkeypatch.setattr(saving, "write_card", fail)
    saving.save(SimpleNamespace(
        state=SimpleNamespace(progress=SimpleNamespace(step=1)), clock=SimpleNamespace(on=lambda name: nullcontext()),
        log=SimpleNamespace(flush=lambda: None, written=dict, note=notes.append),
        task=SimpleNamespace(save_model=lambda weights, folder: written.append(folder)),
        run=SimpleNamespace(replace_folder=lambda name, write: write(tmp_path / name)),
        watchdog=SimpleNamespace(enter=lambda *given, **more: None),
        checkpoints=SimpleNamespace(limit_s=1, save=lambda state, beside, awaits: beside.write({}))), {"top1": 0.5})
    assert written == [tmp_path / "model"]
    assert notes == ["the model card could not be written (KeyError: 'model')"]
