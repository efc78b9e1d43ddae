"""utils/settings/command_line.py: the command line is a contract."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data import demo
from utils import __version__
from utils.settings.command_line import parse_command_line
from utils.settings.config import CONFIGS, FIRST, flag, settings

ROOT = Path(__file__).parents[4]
FOLDER = "--data=elsewhere"  # not the built-in data, so that its settings are out of the way


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        (tmp_path / "settings.yaml").write_text(text)
        return f"--config={tmp_path / 'settings.yaml'}"
    return write


def values_of(*words, demo_settings=None):
    return settings(parse_command_line(words, demo_settings or {}))


def code_of(*words):
    with pytest.raises(SystemExit) as left:
        parse_command_line(words, demo.SETTINGS)
    return left.value.code


# --- precedence


def test_later_sources_come_before_earlier_ones(yaml_file):
    """Defaults, settings of the built-in data, the file, the command line."""
    file = yaml_file("lr: 0.3\nepochs: 7\n")
    demo_settings = {"image-classification": {"lr": 0.2, "epochs": 6, "image_size": 99}}
    values = values_of(file, "--lr", "0.4", demo_settings=demo_settings)
    assert (values["lr"], values["epochs"], values["image_size"], values["seed"]) == (0.4, 7, 99, 0)


def test_a_mapping_in_the_file_is_a_value_for_each_name(yaml_file):
    assert values_of(yaml_file("class_weights: {cat: 1, Golden Retriever: 2.5, 3: 4}\n"))["class_weights"] == (
        "cat=1,Golden Retriever=2.5,3=4")


def test_the_command_line_comes_first_wherever_config_stands(yaml_file):
    file = yaml_file("lr: 0.3\n")
    assert [values_of(file, "--lr=0.4")["lr"], values_of("--lr=0.4", file)["lr"]] == [0.4, 0.4]


@pytest.mark.parametrize("words", [[FOLDER], ["--data", "elsewhere"]])
def test_the_demos_settings_are_for_the_demo_only(words):
    assert values_of(*words, demo_settings=demo.SETTINGS) == values_of(*words)


def test_data_in_the_file_turns_the_demos_settings_off(yaml_file):
    assert values_of(yaml_file("data: elsewhere"), demo_settings=demo.SETTINGS)["image_size"] == "auto"


def test_a_list_on_the_command_line_replaces_the_demos():
    values = values_of("--mean", "0.1", "0.2", "0.3", demo_settings=demo.SETTINGS)
    assert (values["mean"], values["std"]) == ((0.1, 0.2, 0.3), (0.354, 0.354, 0.354))


# --- spelling


@pytest.mark.parametrize("words", ["--global-batch-size 48", "--global_batch_size 48", "--global-batch-size=48"])
def test_a_flag_has_dashes_or_underscores_and_a_space_or_an_equals_sign(words):
    assert values_of(*words.split())["global_batch_size"] == 48


@pytest.mark.parametrize("key", ["global-batch-size", "global_batch_size"])
def test_yaml_keys_are_written_with_dashes_or_underscores(yaml_file, key):
    assert values_of(yaml_file(f"{key}: 48"))["global_batch_size"] == 48


@pytest.mark.parametrize("text, value", [("1e-3", 0.001), ("1.0e-3", 0.001), ("3", 3.0)])
def test_a_float_in_yaml_is_read_as_on_the_command_line(yaml_file, text, value):
    assert values_of(yaml_file(f"lr: {text}"))["lr"] == value  # in YAML 1.1, 1e-3 is a string


@pytest.mark.parametrize("text, value", [("true", True), ("false", False), ("on", True)])
def test_a_switch_in_yaml_is_a_truth_value(yaml_file, text, value):
    assert values_of(yaml_file(f"pretrained: {text}"))["pretrained"] is value


@pytest.mark.parametrize("text, value", [("off", "off"), ("on", "on"), ("'off'", "off")])
def test_on_and_off_in_yaml_are_words_where_words_are_wanted(yaml_file, text, value):
    """YAML 1.1 reads them as truth values."""
    assert values_of(yaml_file(f"cpu_kernels: {text}"))["cpu_kernels"] == value


def test_the_command_line_turns_a_switch_of_the_file_off(yaml_file):
    assert values_of(yaml_file("pretrained: true"), "--no-pretrained")["pretrained"] is False


def test_yaml_holds_tuples_as_lists_and_none_as_null(yaml_file):
    values = values_of(yaml_file("mean: [0.1, 0.2, 0.3]\nmax_steps: null\nbetas: [0.8, 0.9]"))
    assert (values["mean"], values["max_steps"], values["betas"]) == ((0.1, 0.2, 0.3), None, (0.8, 0.9))


def test_an_empty_file_sets_nothing(yaml_file):
    file = yaml_file("# nothing\n")
    assert values_of(file) == values_of() | {"config": file.removeprefix("--config=")}


@pytest.mark.parametrize("text", ["lr: 0.1\nepochs: 2\nlr: 0.1", "global_batch_size: 4\nglobal-batch-size: 8"])
def test_a_key_that_stands_twice_in_the_file_is_64(yaml_file, text, capsys):
    assert code_of(yaml_file(text)) == 64 and "stands there twice" in capsys.readouterr().err


# --- what is wrong exits with 64


@pytest.mark.parametrize("words", [
    "--lr fast", "--lr -1", "--lr nan", "--lr inf", "--epochs 0", "--epochs 1.5", "--global-batch-size 0",
    "--micro-batch-size 0", "--micro-batch-size small", "--mean 1 2", "--mean nan 0 0", "--std 1 0 1",
    "--val-fraction 1", "--label-smoothing 1", "--momentum 1", "--betas 1.5 0.9", "--split dev",
    "--precision int8", "--strategy deepspeed", "--eval-every 0", "--eval-every never", "--save-every 5weeks",
    "--save-every 0", "--save-every None", "--stop-after soon", "--keep 0", "--threads 0", "--workers -1",
    "--max-steps 0", "--seed -1", "--log-every 0", "--eval-batch-size 0", "--image-size 0", "--warmup-steps -1",
    "--weight-decay -1", "--max-grad-norm -1", "--nproc-per-node 0",
    "--step-timeout 0.5", "--step-timeout nan", "--max-nonfinite -1", "--max-nonfinite 1.5", "--task",
    "--lr", "--no-lr", "stray", "--fresh=maybe"])
def test_a_bad_value_exits_64(words):
    assert code_of(*words.split()) == 64


@pytest.mark.parametrize("text", [
    "lr: fast", "lr: [1, 2]", "pretrained: perhaps", "- lr", "lr", "lr: {", "mean: 0.5", "epochs: null"])
def test_a_bad_value_in_the_file_exits_64(yaml_file, text):
    assert code_of(yaml_file(text)) == 64


def test_a_file_that_is_not_there_exits_66():
    assert code_of("--config=nowhere.yaml") == 66


def test_eval_only_in_a_folder_that_is_no_run_exits_66(tmp_path):
    assert code_of("--eval-only", "--run-dir", str(tmp_path)) == 66


def test_eval_only_takes_the_runs_own_settings_in_place_of_the_file(tmp_path, yaml_file):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("lr: 0.7\nepochs: 9\n")
    values = values_of(yaml_file("lr: 0.3"), "--eval-only", "--run-dir", str(tmp_path / "run"), "--epochs=10")
    assert (values["lr"], values["epochs"]) == (0.7, 10)


# --- tasks

TEXT_TASKS = ("text-classification", "text-regression", "masked-lm")


@pytest.mark.parametrize("task, expected", [
    ("image-classification", (0.05, "cosine")), ("text-classification", (0.01, "linear")),
    ("masked-lm", (0.01, "linear"))])
def test_each_task_has_its_own_weight_decay_and_schedule(task, expected):
    values = values_of("--task", task, FOLDER)
    assert (values["task"], (values["weight_decay"], values["schedule"])) == (task, expected)


@pytest.mark.parametrize("words, keeps", [
    ([], True), (["--optimizer=adamw"], True), (["--model=bert-tiny"], True), (["--model=bert-mini"], False),
    (["--optimizer", "sgd"], False)])
def test_the_rate_for_built_in_data_is_for_their_model_and_optimizer_alone(words, keeps):
    demo_of = demo.SETTINGS["masked-lm"]
    values = values_of("--task=masked-lm", *words, demo_settings=demo.SETTINGS)
    assert values["lr"] == (demo_of["lr"] if keeps else "auto")
    assert all(values[name] == demo_of[name] for name in set(demo_of) - {"model", "lr"})


@pytest.mark.parametrize("words, loads", [
    (["--model=resnet50"], False), (["--model=."], True), (["--model=.", "--no-pretrained"], False),
    (["--model=resnet50", "--pretrained"], True), (["--task=masked-lm", "--model=bert-tiny"], False),
    (["--task=masked-lm", "--model=google-bert/bert-base-uncased"], True), (["--task=masked-lm"], False),
    (["--task=masked-lm", "--model=a/b", "--no-pretrained"], False)])
def test_a_folder_and_a_name_of_the_hub_load_their_weights(words, loads):
    assert values_of(*words)["pretrained"] is loads


def test_a_model_in_a_file_loads_its_weights_too(yaml_file):
    words = [yaml_file("model: .\ntask: text-classification"), FOLDER]
    assert [values_of(*words, *more)["pretrained"] for more in ([], ["--no-pretrained"])] == [True, False]


def test_the_task_may_stand_in_the_file(yaml_file):
    values = values_of(yaml_file("task: masked-lm"), FOLDER)
    assert values | {"config": None} == values_of("--task=masked-lm", FOLDER)


@pytest.mark.parametrize("task, words", [
    *[(task, words) for task in TEXT_TASKS
      for words in (["--image-size", "32"], ["--mean", "0", "0", "0"], ["--augmentation", "none"])],
    ("image-classification", ["--max-length", "64"]), ("image-classification", ["--text-column", "text"]),
    ("image-regression", ["--mixup", "0.2"]), ("masked-lm", ["--label-column", "label"])])
def test_a_flag_of_another_task_is_refused_by_name(task, words, capsys):
    code = code_of("--task", task, *words)
    assert (code, words[0] in capsys.readouterr().err) == (64, True)


@pytest.mark.parametrize("task, key", [("masked-lm", "image_size: 32"), ("image-classification", "max_length: 64")])
def test_a_key_of_another_task_is_refused(yaml_file, task, key):
    assert code_of(yaml_file(key), "--task", task) == 64


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_the_smallest_values_of_a_text_task_are_taken(task):
    values = values_of("--task", task, "--max-length", "8", "--vocab-size", "64")
    assert (values["max_length"], values["vocab_size"]) == (8, 64)


@pytest.mark.parametrize("task", CONFIGS)
def test_help_lists_the_settings_of_its_task_and_no_others(task, capsys):
    code = code_of("--task", task, "--help-all")
    shown = set(re.findall(r"--([a-z][a-z0-9-]*)", capsys.readouterr().out))
    names = {name for config in CONFIGS.values() for name in settings(config())}
    shown = {name for name in names if name.replace("_", "-") in shown}
    assert (code, shown, "text_column" in shown) == (0, set(settings(CONFIGS[task]())), task in TEXT_TASKS)


@pytest.mark.parametrize("words, expected", [
    ([], {"image-size": "32", "epochs": "8", "lr": "auto", "mean": "0.287 0.287 0.287"}),
    (["--task=masked-lm"], {"model": "bert-tiny", "lr": "0.002", "max-length": "64"}),
    ([FOLDER], {"image-size": "auto", "epochs": "auto", "lr": "auto"}),
    ([FOLDER, "--lr=0.3", "--config"], {"lr": "0.7", "epochs": "auto"})])
def test_help_shows_the_defaults_that_this_command_would_use(words, expected, capsys, yaml_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = [*words[:-1], yaml_file("lr: 0.7")] if words[-1:] == ["--config"] else words
    assert code_of(*words, "--help-all") == 0
    text = " ".join(capsys.readouterr().out.split())
    shown = {name: re.search(rf" --{name} (?:(?! --[a-z]).)*?\(default: ([^)]*)\)", text)[1] for name in expected}
    assert shown == expected


def test_help_has_choices_no_noise_and_no_rare_settings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code_of("--help")
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert all(word in text for word in (f"--task {{{','.join(CONFIGS)}}}", "--split {train,val,test}", "--help-all"))
    noise = ("None", "STR", "--no-fresh", "default: )", "False", "-timeout")
    assert not any(word in text for word in noise)
    assert (max(map(len, lines)) <= 100, len(lines) < 130) == (True, True)


@pytest.mark.parametrize("task", CONFIGS)
def test_help_begins_with_what_is_used_most_and_has_each_setting_once(task, capsys):
    code_of("--task", task, "--help-all")
    shown = re.findall(r"^  --([a-z][a-z0-9-]*)", capsys.readouterr().out, re.M)
    assert tuple(name.replace("-", "_") for name in shown[:len(FIRST)]) == FIRST
    assert len(shown) == len({*shown}) == len(settings(CONFIGS[task]()))


# --- launchers


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_numbers_of_nodes_from_a_platform_exit_64(monkeypatch, environment, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert code_of() == 64


def test_the_numbers_of_torchrun_are_welcome(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert values_of() == settings(CONFIGS["image-classification"]())


@pytest.mark.parametrize("words", ["--local-rank=3", "--local_rank=3", "--local-rank 3", "--local_rank 3"])
def test_the_local_rank_of_the_old_launcher_is_ignored(words):
    assert values_of(*words.split(), "--lr=0.4") == values_of("--lr=0.4")


def test_the_first_process_of_a_later_node_prints_what_its_files_lack(capsys, monkeypatch):
    for name, value in {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as refused:
        parse_command_line(["--config", "/missing"], {})
    assert (refused.value.code, capsys.readouterr().err) == (66, "train.py: --config /missing: there is no such file\n")


@pytest.mark.parametrize("words", ["--help", "--version", "--epochs 0", "--nonsense", "--lr fast", "--task x"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_alone_prints(monkeypatch, capsys, words, rank):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code_of(*words.split())
    output = capsys.readouterr()
    assert bool(output.out + output.err) == (rank == "0")


@pytest.mark.long
def test_nproc_per_node_starts_the_same_command_by_the_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nfrom utils.settings.command_line import parse_command_line\n"
                      "config = parse_command_line(sys.argv[1:], {})\n"
                      f"with open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w') as file:\n"
                      "    file.write(f'{config.optim.lr} {config.run.nproc_per_node}')")
    subprocess.run([sys.executable, script, "--nproc-per-node", "2", "--lr=0.4"], check=True, timeout=60,
                   capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0.4 2"] * 2


def test_torchrun_receives_signals_although_the_watchdog_blocked_them(tmp_path):
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    in_place_of_torchrun = "import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    (folder / "run.py").write_text(f"{in_place_of_torchrun}\nimport sys\nsys.exit()")
    errors = folder / "elastic" / "multiprocessing" / "errors.py"
    errors.parent.mkdir(parents=True)
    errors.write_text("ChildFailedError = OSError")
    program = ("import sys\nfrom utils.settings.command_line import parse_command_line\n"
               "from utils.distributed.watchdog import Watchdog\nWatchdog()\nparse_command_line(sys.argv[1:], {})")
    done = subprocess.run([sys.executable, "-c", program, "--nproc-per-node", "2"], capture_output=True, text=True,
                          timeout=60, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("task", demo.SETTINGS)
def test_the_demos_settings_are_settings_of_its_task(task):
    values = values_of(f"--task={task}", demo_settings=demo.SETTINGS)
    assert {name: values[name] for name in demo.SETTINGS[task]} == demo.SETTINGS[task]


def test_a_safe_path_of_python_hides_no_module_of_the_program(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "train.py", "--version"], capture_output=True, text=True,
                          cwd=tmp_path, env=os.environ | {"PYTHONSAFEPATH": "1"})
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["lockstep"]), done.stderr


# --- speed


def test_help_lists_every_setting_in_a_moment_and_without_torch():
    program = ("import json, sys\nfrom data import demo\nfrom utils.settings.command_line import parse_command_line\n"
               "import utils.rundir.identity, utils.rundir.restart\nparse_command_line([], demo.SETTINGS)\n"
               "try: parse_command_line(['--help-all'], demo.SETTINGS)\n"
               "except SystemExit as left: print(json.dumps([left.code, 'torch' in sys.modules]))")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    missing = [name for name in values_of() if flag(name) not in done.stdout]
    assert (json.loads(done.stdout.splitlines()[-1]), missing) == ([0, False], [])
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2  # seconds of a core; 0.3 measured


@pytest.mark.parametrize("words, code, out", [("--lr fast", 64, ""), ("--version", 0, f"lockstep {__version__}\n")])
def test_train_py_answers_before_torch_is_imported(words, code, out):
    command = [sys.executable, "-X", "importtime", "train.py", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imports_torch = bool(re.search(r"\| +torch$", done.stderr, re.MULTILINE))
    assert (done.returncode, done.stdout, imports_torch) == (code, out, False)
