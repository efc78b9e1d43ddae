"""utils/settings/config.py: the program does what the line of a setting says, for every setting of every task."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from utils.errors import UserError
from utils.rundir.identity import compare, identity, kept_settings, require_same_program, run_path
from utils.rundir.run import open_run
from utils.settings.command_line import parse_command_line
from utils.settings.config import CONFIGS, facts, flag, settings, with_values
from utils.settings.habits import FORMER, WITHOUT_EFFECT
from utils.settings.option import DEFINING, NAME_OR_PATH, OPERATIONAL, PATH, TOLERATED, Interval

pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")
# each setting once, with a task that has it
ALL = list({(name, known): (task, name) for task, config in CONFIGS.items()
            for name, known in facts(config()).items()}.values())
OUTSIDE = {"at_least": -1, "above": 0, "at_most": 1, "below": 0}  # added to a bound: the nearest number that breaks it
BOUNDS = [(task, name, bound) for task, name in ALL for bound in OUTSIDE
          if getattr(facts(CONFIGS[task]())[name], bound) is not None]


def facts_of(task, name):
    return facts(CONFIGS[task]())[name]


def words_of(task, name, number):
    default = settings(CONFIGS[task]())[name]
    count = 3 if name in ("mean", "std") else len(default) if isinstance(default, tuple) else 1
    return [flag(name), *[str(number)] * count]


def changed(config, name):
    """The config with another value of setting `name`."""
    value = settings(config)[name]
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, tuple):
        other = tuple(number / 2 for number in value)
    else:
        other = Interval("7") if isinstance(value, Interval) else "other"
    return with_values(config, {name: other})


def begun(config, path):
    """A run directory of `config` that has begun to train, as far as compare() looks at it."""
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(kept_settings(config)))
    (path / "auto.json").write_text("{}")
    return path


@pytest.mark.parametrize("task, name, bound", BOUNDS)
def test_a_number_outside_a_bound_is_refused_with_the_rule(task, name, bound, capsys):
    limit = getattr(facts_of(task, name), bound)
    words = words_of(task, name, limit + OUTSIDE[bound])
    with pytest.raises(SystemExit) as refused:
        parse_command_line([f"--task={task}", *words], {})
    shown, rule = capsys.readouterr().err.split(": must be ")
    assert (refused.value.code, shown.split()[:2]) == (64, ["train.py:", flag(name)])
    assert [float(word) for word in shown.split()[2:]] == [float(word) for word in words[1:]]
    assert f"{bound.replace('_', ' ')} {limit}" in rule


@pytest.mark.parametrize("task, name, bound", [case for case in BOUNDS if case[2].startswith("at_")])
def test_a_number_at_its_bound_is_taken(task, name, bound):
    limit = getattr(facts_of(task, name), bound)
    value = settings(parse_command_line([f"--task={task}", *words_of(task, name, limit)], {}))[name]
    assert value in (limit, (limit, limit))


@pytest.mark.parametrize("task", CONFIGS)
def test_all_settings_but_operational_ones_name_the_run(task):
    config = CONFIGS[task]()
    names = set(settings(config)) - {"run_dir"}  # which is the name
    naming = {name for name in names if run_path(changed(config, name)).name[-8:] != run_path(config).name[-8:]}
    assert naming == {name for name in names if facts_of(task, name).kind != OPERATIONAL}


@pytest.mark.rows(1)
@pytest.mark.parametrize("task", CONFIGS)
def test_a_used_run_directory_takes_what_the_kind_allows(task):
    """Refuses a defining setting, notes a tolerated one, takes an operational one; asks for no resolved one."""
    config = CONFIGS[task]()
    path, found, expected = begun(config, Path("run")), {}, {}
    for name in settings(config):
        notes = []
        try:
            compare(changed(config, name), path, notes.append)
            found[name] = TOLERATED if any(flag(name) in note for note in notes) else OPERATIONAL
        except UserError as error:
            assert flag(name) in str(error)
            found[name] = DEFINING
        known = facts_of(task, name)
        expected[name] = OPERATIONAL if known.resolved else known.kind
    assert found == expected


@pytest.mark.parametrize("task", CONFIGS)
def test_config_yaml_holds_the_settings_that_are_kept(task, world):
    config = CONFIGS[task]()
    for name in settings(config):
        config = config if name in ("run_dir", "eval_only", "output", "split") else changed(config, name)
    with open_run(config, world, print) as run:
        found = set(yaml.safe_load((run.path / "config.yaml").read_text()))
    assert found == {name for name in settings(config) if facts_of(task, name).kept}


@pytest.mark.parametrize("task", CONFIGS)
def test_config_yaml_says_nothing_about_one_launch(task):
    not_kept = {name for name, known in facts(CONFIGS[task]()).items() if not known.kept}
    assert not_kept == {"run_dir", "config", "fresh", "eval_only", "split", "output", "nproc_per_node",
                        "stop_after"}


@pytest.mark.rows(1)
@pytest.mark.parametrize("task", CONFIGS)
def test_nodes_may_differ_in_the_settings_that_are_per_node(task, monkeypatch):
    monkeypatch.setattr("utils.rundir.identity.code_digest", lambda: "the same on all")  # it takes a while

    def in_common(config):
        told = {}
        require_same_program(config, SimpleNamespace(
            require_same=lambda value, what: told.update({what: value}), gather=lambda value: [value]))
        return told

    config = CONFIGS[task]()
    own = in_common(config)
    may_differ = {name for name in settings(config) if in_common(changed(config, name)) == own}
    assert may_differ == {name for name in settings(config) if facts_of(task, name).per_node}


@pytest.mark.parametrize("task", CONFIGS)
@pytest.mark.parametrize("exists", [False, True])
def test_paths_are_absolute_in_what_names_the_run(task, exists, tmp_path):
    """A PATH always, and NAME_OR_PATH if it exists; a default is no path, even if there is a folder of that name."""
    Path("demo").mkdir()
    config = CONFIGS[task]()
    for name in settings(config):
        config = changed(config, name)
    if exists:
        Path("other").mkdir()
    absolute = {name for name, value in identity(config).items() if value == str(tmp_path / "other")}
    kinds = (PATH, NAME_OR_PATH) if exists else (PATH,)
    paths = {name for name in identity(config) if facts_of(task, name).path in kinds}
    assert (absolute, identity(CONFIGS[task]())["data"]) == (paths, "demo")


@pytest.mark.parametrize("task, name", ALL)
def test_a_file_may_hold_the_settings_that_say_so(task, name):
    value = settings(CONFIGS[task]())[name]
    Path("settings.yaml").write_text(json.dumps({name: value}))  # JSON is YAML
    try:
        found = settings(parse_command_line([f"--task={task}", "--config=settings.yaml"], {}))[name]
        assert facts_of(task, name).in_file and found == value
    except SystemExit as refused:
        assert (facts_of(task, name).in_file, refused.code) == (False, 64)


@pytest.mark.parametrize("task", CONFIGS)
def test_the_kinds_are_those_of_the_contract(task):
    """A setting of another kind gives runs other names: they would begin anew."""
    by_kind = {kind: {name for name, known in facts(CONFIGS[task]()).items() if known.kind == kind}
               for kind in (TOLERATED, OPERATIONAL)}
    assert by_kind[TOLERATED] == {"precision", "compile", "deterministic", "strategy", "micro_batch_size",
                                  "eval_batch_size", "threads", "device", "ema_decay", "checkpoint_activations", "best",
                                  "cpu_kernels"}
    assert by_kind[OPERATIONAL] == {
        "run_dir", "config", "fresh", "eval_only", "split", "nproc_per_node", "devices_per_process", "workers",
        "find_unused_parameters", "save_every", "keep", "eval_every", "log_every", "stop_after",
        "bad_samples", "keep_every", "output", "step_timeout", "max_nonfinite"}


def test_a_file_may_have_a_setting_that_is_gone_if_it_stands_as_it_is_now():
    """A run's own file, too. Else one message says what to do instead. Some had no effect with the other settings."""
    config, wrong, idle = CONFIGS["image-classification"](), [], {"", "step_epochs", "early_stop_min_delta"}
    path = begun(config, Path("run"))
    for name in ("", *FORMER):
        old = {each: str(value) for each, value in FORMER.items()} | {"step_factor": "1e-1", "min_lr": 0.0}
        old |= {name: "other"} if name else {}
        (path / "config.yaml").write_text(yaml.safe_dump(kept_settings(config) | old))
        for read, taken in ((lambda: compare(config, path), idle | {*WITHOUT_EFFECT}),
                            (lambda: parse_command_line(["--config=run/config.yaml"], {}), idle)):
            try:
                read()
                wrong += [name] if name not in taken else []
            except (UserError, SystemExit) as refused:
                wrong += [] if name not in taken and refused.code == 64 else [name, refused]
    assert wrong == []


@pytest.mark.parametrize("words, name", [
    (["--lr=0.3"], "image-classification-resnet18-d-1053249a"),
    (["--task=text-classification", "--epochs=4", "--compile"], "text-classification-bert-small-d-e8e73533"),
    (["--task=masked-lm", "--betas", "0.8", "0.9", "--micro-batch-size=8", "--max-steps=7"],
     "masked-lm-bert-small-d-b6d9fc0f")])
def test_a_run_has_the_name_that_earlier_versions_gave_it(words, name):
    assert run_path(parse_command_line([*words, "--data=/d"], {})) == Path("runs") / name


def test_a_run_whose_folder_has_the_name_of_an_own_model_goes_on():
    words = ["--model=small-cnn", "--run-dir=small-cnn", "--data=/d"]
    config = parse_command_line(words, {})
    path = begun(config, Path("small-cnn"))
    again = parse_command_line(words, {})
    compare(again, path)
    assert (again, again.model.pretrained) == (config, False)


def test_a_run_whose_schedule_step_counted_epochs_is_refused():
    """It has thirds now. With another schedule nothing has changed."""
    Path("old.yaml").write_text("schedule: step\nstep_epochs: 30\n")
    with pytest.raises(SystemExit) as refused:
        parse_command_line(["--config=old.yaml"], {})
    assert refused.value.code == 64
