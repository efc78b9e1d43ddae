"""engine/resolve.py: what --micro-batch-size and --eval-batch-size mean in a run, and that it keeps it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from data.plan import BatchPlan, cut
from engine.resolve import (
    AUTO_LIMIT,
    require_partners,
    resolve_eval_batch,
    resolve_optim,
    resolve_plan,
    usual_threads,
)
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.settings.config import ImageClassificationConfig, TextClassificationConfig
from utils.settings.image_options import MixOptions
from utils.settings.run_options import BatchOptions, OptimOptions

NO_BATCH_NORM, BATCH_NORM = nn.Linear(1, 1), nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))


def resolved(run, world_size, num_samples=1000, model=NO_BATCH_NORM, is_invariant=False, fit=None, **options):
    return resolve_plan(start_of(run, BatchOptions(**{"global_batch_size": 64} | options), num_samples, world_size),
                        strategy_of(model, is_invariant), fit)


def strategy_of(model=NO_BATCH_NORM, is_invariant=False, is_sharded=False):
    return SimpleNamespace(module=model, is_invariant=is_invariant, is_sharded=is_sharded, lanes=1)


def start_of(run, options, num_samples=1000, world_size=1):
    run.keep(global_batch_size=options.global_batch_size)
    return SimpleNamespace(config=SimpleNamespace(batch=options), run=run, world=world_of(world_size),
                           task=SimpleNamespace(train_set=range(num_samples)))


def world_of(world_size):
    return World(0, 0, world_size, world_size, torch.device("cpu"), cpu_group=None)


def run_in(tmp_path, notes, kept=None):
    facts = {"start": 1, "cores_per_process": 1}
    return Run(tmp_path, kept if kept is not None else {}, lock=None, note=notes.append, facts=facts)


@pytest.mark.parametrize("num_samples, batch, world_size, expected", [
    (1000, 128, 1, 2), (1000, 128, 2, 2), (1000, 128, 3, 3), (1000, 1000, 3, 18), (1000, 64, 1, 1), (1000, 65, 1, 2),
    (10, 128, 4, 4)])
def test_auto_is_the_least_multiple_of_the_processes_in_the_limit(tmp_path, num_samples, batch, world_size, expected):
    run = run_in(tmp_path, [])
    resolved(run, world_size, num_samples, global_batch_size=batch)
    assert run.resolved.micro_batches == expected


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 9))
def test_auto_keeps_micro_batches_within_the_limit_for_any_numbers(tmp_path_factory, num_samples, batch, world_size):
    plan = resolved(run_in(tmp_path_factory.getbasetemp(), []), world_size, num_samples, global_batch_size=batch)
    count, n = plan.num_micro_batches, min(batch, num_samples)
    world_size = min(world_size, n)  # the other ranks are idle
    fewer = count - world_size  # the next smaller multiple would not do
    assert (count % world_size, plan.sizes[1] <= AUTO_LIMIT) == (0, True)
    assert fewer == 0 or -(-n // fewer) > AUTO_LIMIT


@pytest.mark.parametrize("kind, expected", [
    ({}, (4, 256)), ({"is_sharded": True}, (16, 64)), ({"is_invariant": True}, (32, 64))])
def test_on_an_accelerator_auto_is_larger_where_it_is_tried(tmp_path, kind, expected):
    run = run_in(tmp_path, [])
    start, strategy = start_of(run, BatchOptions(global_batch_size=1000)), strategy_of(**kind)
    start.world = replace(start.world, device=torch.device("cuda", 0))
    plan = resolve_plan(start, strategy)
    assert (plan.num_micro_batches, resolve_eval_batch(start, strategy, plan)) == expected


@pytest.mark.parametrize("world_size, fit, count", [(1, 12, 6), (2, 12, 6), (2, 16, 4), (3, 5, 15)])
def test_a_size_that_fits_takes_the_place_of_autos_limit_and_is_kept(tmp_path, world_size, fit, count):
    run = run_in(tmp_path, notes := [])
    before = resolved(run, world_size).num_micro_batches
    plan = resolved(run, world_size, fit=fit)
    assert plan.num_micro_batches == run.resolved.micro_batches == count and plan.sizes[1] <= fit
    assert notes == [f"out of memory: a global batch is cut into {count} micro-batches instead of {before},"
                     f" each of at most {fit} samples"]


def test_auto_is_kept_when_fewer_processes_go_on(tmp_path):
    plan = resolved(run_in(tmp_path, notes := [], {"micro_batches": 6}), 1)
    assert (plan.num_micro_batches, notes) == (6, [])


def test_auto_is_cut_finer_for_more_processes_with_a_note(tmp_path):
    run = run_in(tmp_path, notes := [], {"micro_batches": 4})
    plan = resolved(run, 6)
    assert (plan.num_micro_batches, run.resolved.micro_batches, len(notes)) == (8, 8, 1)
    assert "8 micro-batches" in notes[0]
    assert "not bit-exact from here" in notes[0]


@pytest.mark.parametrize("batch, model, expected", [  # global batch / 8, at least 4 (BatchNorm: 16), at most 32 samples
    (64, BATCH_NORM, 4), (64, NO_BATCH_NORM, 8), (128, BATCH_NORM, 8), (100, NO_BATCH_NORM, 8), (24, NO_BATCH_NORM, 6),
    (16, BATCH_NORM, 1), (512, BATCH_NORM, 16), (4096, NO_BATCH_NORM, 32), (3, NO_BATCH_NORM, 1)])
@pytest.mark.parametrize("world_size", [1, 3, 40])
def test_auto_of_an_invariant_strategy_ignores_the_processes(tmp_path, batch, model, expected, world_size):
    run = run_in(tmp_path, [])
    resolved(run, world_size, 1000, model, is_invariant=True, global_batch_size=batch)
    assert run.resolved.micro_batches == expected


def test_a_run_that_becomes_invariant_keeps_its_micro_batches(tmp_path):
    run = run_in(tmp_path, notes := [], {"micro_batches": 3})
    assert resolved(run, 3, is_invariant=True).num_micro_batches == 3
    assert (run.resolved.micro_batches, notes) == (3, [])


@pytest.mark.parametrize("size, wanted", [("auto", "--micro-batch-size 12"), (16, "--micro-batch-size 12")])
def test_idle_ranks_are_named_with_the_size_that_gives_them_work(tmp_path, size, wanted):
    run = run_in(tmp_path, notes := [])
    plan = resolved(run, 6, model=BATCH_NORM, is_invariant=True, global_batch_size=64, micro_batch_size=size)
    assert plan.num_micro_batches == 4
    [note] = notes
    assert "rank 4, 5 only takes part in the sums" in note
    assert wanted in note
    assert cut(1000, 64, 12).num_micro_batches >= 6


def test_idle_ranks_where_no_size_helps_are_told_of_a_larger_batch(tmp_path):
    resolved(run_in(tmp_path, notes := []), 9, num_samples=8, is_invariant=True)
    assert "a larger --global-batch-size" in notes[0]


@pytest.mark.parametrize("model", [NO_BATCH_NORM, BATCH_NORM])
def test_ranks_beyond_a_given_cut_are_idle(tmp_path, model):
    run = run_in(tmp_path, notes := [])
    plan = resolved(run, 6, model=model, global_batch_size=128, micro_batch_size=32)
    assert (plan.num_micro_batches, run.resolved.micro_batches) == (4, 4)
    assert "rank 4, 5 only takes part in the sums; --micro-batch-size 25 in a new run" in notes[0]


@pytest.mark.parametrize("world_size", range(1, 40))
@pytest.mark.parametrize("num_samples, batch", [(40, 16), (97, 16), (15, 16), (33, 64)])
def test_auto_leaves_ranks_idle_rather_than_batch_norm_without_two_samples(tmp_path, world_size, num_samples, batch):
    plan = resolved(run_in(tmp_path, []), world_size, num_samples, BATCH_NORM, global_batch_size=batch)
    assert plan.sizes[0] >= 2


def test_a_given_cut_takes_the_place_of_the_kept_one_with_a_note(tmp_path):
    run = run_in(tmp_path, notes := [], {"micro_batches": 4})
    resolved(run, 1, global_batch_size=128, micro_batch_size=16)
    assert (run.resolved.micro_batches, len(notes)) == (8, 1)


def test_a_model_with_batch_norm_needs_two_samples_in_each_micro_batch(tmp_path):
    outcomes = []
    for model in (NO_BATCH_NORM, BATCH_NORM):
        try:
            plan = resolved(run_in(tmp_path, []), 1, 80, model, global_batch_size=8, micro_batch_size=1)
            outcomes.append(plan.num_micro_batches)
        except UserError as error:
            outcomes.append(error.code)
    assert outcomes == [8, Exit.USAGE]


@pytest.mark.parametrize("options, processes, batch, count, way_out", [
    ({"mixup": 0.2}, 1, 8, 8, "--mixup 0.2.* use --micro-batch-size 2$"),               # --micro-batch-size 1
    ({"mixup": 0.2, "cutmix": 1.0}, 4, 4, 4, "--mixup 0.2 --cutmix 1.0.* use a larger"),  # auto, for four processes
    ({"cutmix": 1.0}, 2, 8, 8, "use --micro-batch-size 2$")])                           # memory had room for one sample
def test_mixing_is_refused_where_no_micro_batch_has_two_samples(tmp_path, options, processes, batch, count, way_out):
    with pytest.raises(UserError, match=way_out) as refused:
        mixing_in(tmp_path, [], options, processes, BatchPlan(80, batch, count))
    assert refused.value.code == Exit.USAGE
    if "micro-batch" in way_out:
        mixing_in(tmp_path, notes := [], options, processes, cut(80, batch, 2))
        assert notes == []


@pytest.mark.parametrize("options, noted", [({"mixup": 0.2}, True), ({}, False)])
def test_micro_batches_too_short_to_be_mixed_are_noted(tmp_path, options, noted):
    """13 samples in batches of 6 in 3 micro-batches: the last batch has 3 samples."""
    mixing_in(tmp_path, notes := [], options, 1, cut(13, 6, 6))
    assert notes == []
    mixing_in(tmp_path, notes, options, 1, BatchPlan(13, 6, 3))
    assert notes == ["--mixup 0.2: some micro-batches have one sample, which is not mixed; to mix all, use"
                     " --micro-batch-size 6"] * noted


def test_a_task_without_images_needs_no_partners(tmp_path):
    start = SimpleNamespace(config=TextClassificationConfig(), run=run_in(tmp_path, []), world=world_of(1))
    require_partners(start, SimpleNamespace(is_invariant=False), BatchPlan(8, 8, 8))


def mixing_in(tmp_path, notes, options, processes, plan):
    config = ImageClassificationConfig(augment=MixOptions(**options))
    start = SimpleNamespace(config=config, run=run_in(tmp_path, notes), world=world_of(processes))
    require_partners(start, SimpleNamespace(is_invariant=False), plan)


@pytest.mark.parametrize("given_size, micro_batches, expected", [
    ("auto", 8, 16), ("auto", 1, 64), ("auto", 64, 2), (7, 8, 7)])
def test_an_evaluation_batch_is_twice_the_micro_batch_and_kept(tmp_path, given_size, micro_batches, expected):
    run = run_in(tmp_path, [])
    options = BatchOptions(global_batch_size=64, eval_batch_size=given_size)
    assert resolve_eval_batch(start_of(run, options), strategy_of(), BatchPlan(1000, 64, micro_batches)) == expected
    start = start_of(run, BatchOptions(global_batch_size=64))
    assert resolve_eval_batch(start, strategy_of(), BatchPlan(1000, 64, 2)) == expected


@pytest.mark.parametrize("optimizer, batch, expected", [
    ("adamw", 64, 1e-3), ("adamw", 256, 2e-3), ("adam", 16, 5e-4), ("sgd", 64, 0.05), ("sgd", 256, 0.2),
    ("sgd", 4096, 0.781)])  # the last: 1,000 samples make a global batch of 1,000
def test_the_learning_rate_grows_with_the_global_batch(tmp_path, optimizer, batch, expected):
    run = run_in(tmp_path, [])
    optim = resolve_optim(start_for(run, OptimOptions(optimizer=optimizer), batch))
    assert (optim.lr, run.resolved.lr) == (expected, expected)


def test_a_given_or_kept_learning_rate_is_taken_as_it_is(tmp_path):
    assert resolve_optim(start_for(run_in(tmp_path, []), OptimOptions(lr=0.3), 256)).lr == 0.3
    assert resolve_optim(start_for(run_in(tmp_path, [], {"lr": 0.7}), OptimOptions(), 256)).lr == 0.7


@pytest.mark.parametrize("options, of_task, kept, expected", [
    ({}, 10, {}, 10), ({}, 1, {}, 1), ({"optimizer": "sgd"}, 10, {}, 1), ({"lr": 0.1}, 10, {}, 1),
    ({}, 10, {"lr": 1e-3, "head_lr_factor": 5}, 5)])
def test_a_head_learns_faster_if_the_task_says_so_and_lr_is_auto(tmp_path, options, of_task, kept, expected):
    run = run_in(tmp_path, [], kept)
    resolve_optim(start_for(run, OptimOptions(**options), 64, of_task))
    assert run.resolved.head_lr_factor == expected


def test_a_fitted_head_and_one_that_is_kept_learn_at_the_rate_of_the_rest(tmp_path):
    for has_new_head, head_init in ((True, "features"), (False, "random")):
        run = run_in(tmp_path, [], {"head_init": head_init})
        resolve_optim(start_for(run, OptimOptions(), 64, 10, has_new_head))
        assert run.resolved.head_lr_factor == 1


@pytest.mark.parametrize("has_weights, optimizer, lr", [
    (True, "adamw", 2e-3), (True, "sgd", 0.2), (False, "adamw", 2e-2)])
def test_a_head_on_a_frozen_backbone_has_a_rate_of_its_own_and_no_factor(tmp_path, has_weights, optimizer, lr):
    """Of 256 samples a batch: the root of four times it, with SGD four times."""
    run = run_in(tmp_path, [])
    start = start_for(run, OptimOptions(freeze="backbone", optimizer=optimizer), 256, 10, has_weights)
    start.task.base_lr = {"adamw": 1e-2, "sgd": 0.05}
    assert (resolve_optim(start).lr, run.resolved.head_lr_factor) == (lr, 1)


def start_for(run, optim, batch, head_lr_factor=1.0, has_new_head=True):
    config = ImageClassificationConfig(optim=optim, batch=BatchOptions(global_batch_size=batch))
    if run.resolved.head_init is UNSET:
        run.keep(head_init="random")
    task = SimpleNamespace(train_set=range(1000), base_lr={"adamw": 1e-3, "sgd": 0.05}, head_lr_factor=head_lr_factor,
                           has_new_head=has_new_head, has_weights=has_new_head)
    return SimpleNamespace(config=config, run=run, task=task)


@pytest.mark.parametrize("value, environment, threads", [
    (None, {}, 4), ("2", {}, 2), ("9", {}, 4), ("0", {}, 4), ("", {}, 4), ("abc", {}, 4), ("2,4", {}, 2),
    ("1", {}, 1), ("1", {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 4),
    ("1", {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1"}, 1),
    ("1", {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "LOCKSTEP_LAUNCH_ID": "y"}, 1),
    ("2", {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 2)])
def test_the_users_number_of_threads_counts_and_that_of_torchrun_does_not(monkeypatch, value, environment, threads):
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "LOCKSTEP_LAUNCH_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in (environment | ({} if value is None else {"OMP_NUM_THREADS": value})).items():
        monkeypatch.setenv(name, text)
    assert usual_threads(4) == threads
