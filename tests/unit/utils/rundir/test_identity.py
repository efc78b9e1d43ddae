"""utils/rundir/identity.py: a run's settings name it, and its run directory is for no others."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.unit.utils.conftest import config_of, refusal, start
from utils.errors import Exit, UserError
from utils.rundir import identity as identity_module
from utils.rundir.identity import compare, kept_settings, require_same_program, run_path
from utils.rundir.run import open_run
from utils.settings.config import ImageClassificationConfig
from utils.settings.option import option, options
from utils.settings.run_options import BatchOptions

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")


# --- name


def test_a_runs_name_says_task_model_and_data_and_ends_in_a_hash():
    path = run_path(config_of("--data=/srv/my photos!", "--model=resnet50"))
    assert re.fullmatch(r"runs/image-classification-resnet50-my-photos--[0-9a-f]{8}", str(path))


@options
class LaterOptions:
    """Settings that a later version adds"""

    rotation: int = option(0, "degrees")


@dataclass(frozen=True, kw_only=True)
class LaterConfig(ImageClassificationConfig):
    """The settings of a later version of the program"""

    later: LaterOptions = LaterOptions()


def later_config(rotation):
    values = {item.name: getattr(config_of("--lr=0.3"), item.name) for item in fields(ImageClassificationConfig)}
    return LaterConfig(**values, later=LaterOptions(rotation=rotation))


def test_a_new_setting_at_its_default_renames_no_run():
    assert run_path(later_config(rotation=0)) == run_path(config_of("--lr=0.3"))
    assert run_path(later_config(rotation=9)) != run_path(config_of("--lr=0.3"))


def test_a_setting_newer_than_the_run_counts_as_its_default(world):
    start(world, "--lr=0.3")
    path = run_path(config_of("--lr=0.3"))
    compare(later_config(rotation=0), path)
    with pytest.raises(UserError, match="--rotation was 0 and is now 9"):
        compare(later_config(rotation=9), path)


@pytest.mark.parametrize("flag, path", [("data", "photos"), ("model", "old/model"), ("weights", "file.pth")])
def test_a_relative_and_an_absolute_path_are_one_run(tmp_path, flag, path):
    (tmp_path / path).mkdir(parents=True)  # a name with a slash that is no path is a library's
    assert run_path(config_of(f"--{flag}={path}")) == run_path(config_of(f"--{flag}={tmp_path / path}"))


def test_a_path_seen_from_another_folder_is_another_run(tmp_path, monkeypatch):
    here = run_path(config_of("--data=photos"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run_path(config_of("--data=photos")) != here


def test_a_given_run_dir_is_the_run_dir():
    assert run_path(config_of("--run-dir=here/there")) == Path("here/there")


def test_the_hash_does_not_depend_on_the_process():
    program = ("from utils.settings.command_line import parse_command_line\n"
               "from utils.rundir.identity import run_path\nprint(run_path(parse_command_line(['--data=/x'], {})))")
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(run_path(config_of("--data=/x")))


# --- settings


@pytest.mark.parametrize("words", [
    "", "--data=photos --weights=file.pth --max-steps=7 --mean 0.1 0.2 0.3 --lr=1e-05 --pretrained --seed=3",
    "--micro-batch-size=8 --precision=fp16 --warmup-steps=4 --eval-every=5 --save-every=5min --threads=2"])
def test_config_yaml_gives_the_same_run_again_by_config(world, tmp_path, monkeypatch, words):
    start(world, *words.split())
    path = run_path(config_of(*words.split()))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # paths in it are absolute
    assert run_path(config_of(f"--config={tmp_path / path / 'config.yaml'}")) == path


@pytest.mark.parametrize("first, then, message", [
    (["--lr=1e-05"], ["--lr=0.3"], "--lr was 1e-05 and is now 0.3"),
    (["--epochs=3"], ["--epochs=4"], "--epochs was 3 and is now 4"),
    ([], ["--max-steps=4"], "--max-steps was None and is now 4"),
    (["--max-steps=4"], [], "--max-steps was 4 and is now None"),
    (["--mean", *"456"], ["--mean", *"123"], "--mean was [4.0, 5.0, 6.0] and is now [1.0, 2.0, 3.0]"),
    ([], ["--pretrained"], "--pretrained was False and is now True")])
def test_another_defining_value_in_a_given_run_dir_is_78(world, first, then, message):
    """The message has the key and both values."""
    start(world, "--run-dir=run", *first)
    error = refusal(world, "--run-dir=run", *then)
    assert (error.code, f"run was created with different settings: {message}." in str(error)) == (Exit.OTHER_RUN, True)


def test_a_refused_start_changes_nothing_in_the_run(world):
    start(world, "--run-dir=run")
    before = {path: path.read_bytes() for path in Path("run").iterdir() if path.name != ".lock"}
    refusal(world, "--run-dir=run", "--lr=0.3")
    assert {path: path.read_bytes() for path in Path("run").iterdir() if path.name != ".lock"} == before


@pytest.mark.parametrize("word, name", [
    ("--compile", "compile"), ("--strategy=exact", "strategy"), ("--deterministic", "deterministic")])
def test_another_tolerated_value_is_taken_with_one_note(world, word, name):
    start(world, "--run-dir=run")
    [note] = start(world, "--run-dir=run", word)
    assert (name in note, "not bit-exact from here" in note) == (True, True)


def test_another_best_is_noted_but_changes_no_bits(world):
    start(world, "--run-dir=run")
    assert start(world, "--run-dir=run", "--best=loss") == ["--best was auto and is now loss"]


def test_another_operational_value_is_taken_without_a_word(world):
    start(world, "--run-dir=run")
    assert start(world, "--run-dir=run", "--keep=9", "--save-every=5min", "--workers=1") == []


def test_before_training_began_other_settings_take_the_place_of_the_first(world):
    with open_run(config_of("--run-dir=run", "--lr=300"), world, print):
        pass  # whatever was wrong came out before keep_settled
    notes = start(world, "--run-dir=run", "--lr=0.3")
    assert (notes, yaml.safe_load(Path("run/config.yaml").read_text())["lr"]) == ([], 0.3)


@pytest.mark.parametrize("name", ["checkpoints/step-0000000001-g1/model", "metrics.jsonl",
                                  "model/net.py", "eval/figures.txt", "thesis.txt", "cats/1.jpg"])
def test_a_folder_of_other_things_is_78_and_keeps_what_it_has(world, name):
    file = Path("run", name)
    file.parent.mkdir(parents=True)
    file.write_text('{"epoch": 1}\n')
    refused, [top, *_] = refusal(world, "--run-dir=run"), Path(name).parts
    assert refused.code == Exit.OTHER_RUN and f"run has {top} but no auto.json" in str(refused)
    assert file.read_text() == '{"epoch": 1}\n' and {path.name for path in Path("run").iterdir()} == {top, ".lock"}


@pytest.mark.parametrize("name", ["train.log", "slurm-7.out", "log.txt", "config.yaml", ".nfs01"])
def test_what_a_shell_or_an_earlier_start_wrote_bars_no_first_start(world, name):
    Path("run").mkdir()
    Path("run", name).write_text("lr: 0.1\n")
    assert start(world, "--run-dir=run") == []


def test_a_start_that_was_killed_while_it_cleaned_up_may_start_again(world):
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    assert start(world, "--run-dir=run") == []


class Told:  # a World that notes what all nodes must have in common
    def __init__(self):
        self.values = {}

    def require_same(self, value, what):
        self.values[what] = value

    def gather(self, value):
        return [value]


def in_common(*words):
    world = Told()
    require_same_program(config_of(*words), world)
    return world.values


@pytest.mark.parametrize("words, differ", [
    (["--lr=0.5"], ["the settings"]), (["--pretrained"], ["--pretrained"]),
    (["--save-every=7"], ["the settings"]),  # an operational one that ranks must agree on
    (["--data=elsewhere"], []), (["--run-dir=mounted/there"], []), (["--workers=7"], [])])
def test_nodes_must_have_the_settings_in_common_but_not_paths_and_workers(words, differ):
    one, other = in_common(), in_common(*words)
    assert [what for what in one if one[what] != other[what]] == differ


def test_a_model_folder_that_one_node_lacks_is_named_first():
    """--pretrained is on where the folder is."""
    world = Told()
    world.gather = lambda value: [[True, "a"], [False, "b"]]
    with pytest.raises(UserError, match="b has no folder m, but other nodes have") as raised:
        require_same_program(config_of("--model=m"), world)
    assert raised.value.code == Exit.NO_INPUT and list(world.values) == ["the program", "the extras", "the settings"]


def test_a_task_may_have_neither_model_nor_pretrained():
    """As the task that docs/changing.md adds."""
    @dataclass(frozen=True)
    class Bare:
        batch: BatchOptions = BatchOptions()
        extras: tuple = ()

    world = Told()
    require_same_program(Bare(), world)
    assert json.loads(world.values["the settings"])["global_batch_size"] == "auto"


@pytest.mark.parametrize("name, value, what", [
    ("code_digest", lambda: "other", "the program"), ("extras_digest", lambda: "other", "the extras"),
    ("metadata", SimpleNamespace(version=lambda name: "another"), "torch's version")])
def test_nodes_must_have_the_program_and_torch_in_common(monkeypatch, name, value, what):
    before = in_common()
    monkeypatch.setattr(identity_module, name, value)
    after = in_common()
    assert [each for each in before if before[each] != after[each]] == [what]


def begun(kept, *words):
    """The run directory of these words, after its first step by a version that kept `kept`."""
    path = Path("begun")
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(kept_settings(config_of(*words))))
    (path / "auto.json").write_text(json.dumps({"names_as_written": False} | kept))
    return path


def test_a_fixed_setting_is_compared_by_what_it_became():
    """`auto` goes on with it; the value itself is the same run; another one is another run."""
    path = begun({"lr": 0.5})
    for words in ([], ["--lr=0.5"]):
        compare(config_of(*words), path)
    with pytest.raises(UserError, match=r"--lr was 0.5 and is now 0.25") as error:
        compare(config_of("--lr=0.25"), path)
    assert error.value.code == Exit.OTHER_RUN


@pytest.mark.parametrize("gone, goes_on", [
    ({"start_timeout": 86400, "section_timeout": 900.0, "debug_distributed": True}, True), ({"min_lr": 0}, True),
    ({"min_lr": 0.1}, False)])
def test_a_run_with_a_removed_setting_goes_on_if_it_computes_the_same(gone, goes_on):
    file = begun({"lr": 0.5}) / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | gone))
    with nullcontext() if goes_on else pytest.raises(UserError, match="needs the version that began it"):
        compare(config_of(), file.parent)
