"""What every file keeps to: layers, sizes, names, docstrings, where ranks meet. Read from the syntax trees.

A rule is one test, whose message lists all that break it.
"""

import ast
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import extras
from benchmarks import size
from data import demo
from models.tasks import TASKS, load_task
from utils.settings.config import CONFIGS, groups
from utils.settings.option import OPERATIONAL
from utils.settings.run_options import DeviceOptions
from utils.strategies import STRATEGIES, load_strategy
from utils.strategies.base import Strategy

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.unit
MAY_IMPORT = {
    "utils": {"utils"}, "data": {"data", "utils"}, "models": {"models", "data", "utils"},
    "engine": {"engine", "models", "data", "utils"}, "extras": {"extras", "engine", "models", "data", "utils"},
    "ask": {"ask", "train", "extras", "engine", "models", "data", "utils"}}
LAYERS = (*MAY_IMPORT, "train")
REFUSED_NAMES = {"misc", "helpers", "helper", "common", "tools", "util", "utils"}
COLLECTIVES = {
    "init_process_group", "new_group", "barrier", "monitored_barrier", "all_reduce", "broadcast", "reduce",
    "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all_single", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send", "recv", "isend", "irecv", "batch_isend_irecv"}
WORLDS_COLLECTIVES = {"on_rank_zero", "gather", "all_reduce_sum", "all_reduce_or", "broadcast", "from_env"}
MAY_MEET = ("utils/distributed/", "utils/strategies/")  # of torch.distributed; the rest goes through World
LOOP = ("train", "train_one_epoch", "train_step")  # of train.py
FORBIDDEN_QUESTIONS = {"is_main", "rank", "local_rank", "world_size", "task", "strategy", "device"}

FILES = [ROOT / "train.py", *sorted(path for layer in MAY_IMPORT for path in (ROOT / layer).rglob("*.py")
                                    if not {"tests", "conftest.py"} & {*path.parts[len(ROOT.parts):]})]
MODULES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
BENCHMARKS = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
              for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def imports_of(tree):
    """Dotted names that a module imports, anywhere in it; `from a.b import c` is a.b and a.b.c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_entry_point(tree):
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def dotted(path):
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def functions_of(tree):
    """(function, the calls made directly in it, without those of functions defined inside; lambdas are its own)."""
    def own_nodes(node):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, FUNCTION):
                yield child
                yield from own_nodes(child)

    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            yield node, [child for child in own_nodes(node) if isinstance(child, ast.Call)]


def distributed_names(tree):
    """What a module calls torch.distributed."""
    names = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname or alias.name for alias in node.names if prefix + alias.name == "torch.distributed"}
    return names


def calls_collective(tree):
    """Whether a call is one of torch.distributed's collectives."""
    names = distributed_names(tree)
    return lambda call: (isinstance(call.func, ast.Attribute) and call.func.attr in COLLECTIVES
                         and ast.unparse(call.func.value) in names)


def calls_worlds_collective(call):
    """Whether a call is one of World's collectives."""
    return (isinstance(call.func, ast.Attribute) and call.func.attr in WORLDS_COLLECTIVES
            and ast.unparse(call.func.value).split(".")[-1].lstrip("_").lower() == "world")


def silent_callers(tree, is_collective):
    """Functions that call a collective one directly and do not say "Collective."; a class says it for its __init__."""
    speaking = {method for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and says_collective(node)
                for method in node.body if isinstance(method, FUNCTION) and method.name == "__init__"}
    return [function.name for function, calls in functions_of(tree)
            if any(map(is_collective, calls)) and not says_collective(function) and function not in speaking]


def says_collective(node):
    return "Collective" in (ast.get_docstring(node) or "")


def function_named(name):
    return next(node for node in MODULES["train.py"].body if isinstance(node, FUNCTION) and node.name == name)


# --- layers and names


def test_imports_go_one_way():
    found = [(path, name) for path, tree in MODULES.items() if path != "train.py" for name in imports_of(tree)
             if name.split(".")[0] in set(LAYERS) - MAY_IMPORT[path.split("/")[0]]]
    assert found == []


def test_an_extra_imports_no_other_one():
    """So that each can be deleted alone."""
    found = [(path, name) for path, tree in MODULES.items() if path.startswith("extras/") for name in imports_of(tree)
             if name.startswith("extras.") and name.split(".")[1] in {*extras.EXTRAS} - {path.split("/")[1]}]
    assert found == []


def test_the_settings_of_extras_are_about_one_launch():
    """They name no run, and no run keeps them."""
    known = [item.metadata["facts"] for page in extras.pages() for item in fields(page)]
    assert known and all(each.kind == OPERATIONAL and not each.kept and not each.fixed for each in known)


def test_a_page_of_an_extra_has_the_heading_of_another_page():
    """Else --help would have a section with one setting."""
    headings = {type(page).__doc__ for page in groups(CONFIGS["image-classification"](extras=()))}
    assert {type(page).__doc__ for page in extras.pages()} <= headings


FLOORS = ({"errors", "files", "output_files", "array_folder"}, {"settings", "hardware", "cpu"}, {"distributed"},
          {"strategies", "numerics"}, {"rundir"})  # rooms of utils, from the ground


def test_a_room_of_utils_imports_from_the_floors_below_it_alone():
    def allowed_for(path):
        room = dotted(path).split(".")[1]
        [floor] = [i for i, rooms in enumerate(FLOORS) if room in rooms]
        return {room}.union(*FLOORS[:floor]) | (FLOORS[0] if floor == 0 else set())

    found = [(path, name) for path, tree in MODULES.items()
             if path.startswith("utils/") and path != "utils/__init__.py" for name in imports_of(tree)
             if name.startswith("utils.") and "__" not in name and name.split(".")[1] not in allowed_for(path)]
    assert found == []


def test_no_file_has_over_300_lines_and_no_function_over_60():
    files = {path: len((ROOT / path).read_text().splitlines()) for path in MODULES | BENCHMARKS}
    functions = {(path, node.name): node.end_lineno - node.lineno + 1 for path, tree in (MODULES | BENCHMARKS).items()
                 for node in ast.walk(tree) if isinstance(node, FUNCTION)}
    assert {path: size for path, size in files.items() if size > 300} == {}
    assert {name: size for name, size in functions.items() if size > 60} == {}


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions count, too: what needs them stands on the wrong floor."""
    names = {dotted(path): path for path in MODULES}
    needed = {name: {names.get(each) and each for each in imports_of(MODULES[path])} - {None, name}
              for name, path in names.items()}
    while free := {name for name, others in needed.items()
                   if not others & set(needed) or not any(name in each for each in needed.values())}:
        needed = {name: others for name, others in needed.items() if name not in free}
    assert sorted(needed) == []


def test_entry_points_are_imported_by_none():
    """But the loop by those who train steps of a run again."""
    entry_points = {dotted(path) for path, tree in MODULES.items() if is_entry_point(tree)}
    found = [(path, name) for path, tree in (MODULES | BENCHMARKS).items()
             for name in imports_of(tree) if name in entry_points and not (name == "train" and path.startswith("ask/"))]
    assert "train" in entry_points and found == []


def test_modules_have_names_of_the_field():
    parts = [part for path in MODULES for part in dotted(path).split(".")[1:]]  # below the layer
    assert [part for part in parts if part in REFUSED_NAMES] == []


def homes_of_tests(path):
    """Where the tests of a module are: its mirror, or the file that the last line of its docstring names."""
    *folders, name = path.split("/")
    home = ROOT.joinpath(*folders[:2], "tests") if folders[0] == "extras" else ROOT.joinpath("tests", "unit", *folders)
    last = (ast.get_docstring(MODULES[path]) or "").splitlines()[-1:]
    named = [ROOT / line.removeprefix("Tests: ") for line in last if line.startswith("Tests: ")]
    return [home / f"test_{name}", *named]


def test_the_tests_of_a_module_are_found_from_it():
    modules = [path for path in MODULES if "/" in path and not path.endswith("__init__.py")]
    assert len(modules) > 100 and [path for path in modules if not any(map(Path.exists, homes_of_tests(path)))] == []


def test_unit_tests_lie_where_make_check_runs_them():
    """`make test` leaves out what has the mark, wherever it lies."""
    places = {path.relative_to(ROOT).parts[:2] for path in (ROOT / "tests").rglob("*.py")
              if "mark.unit" in path.read_text()}
    assert places - {("tests", "unit"), ("tests", "test_architecture.py")} == set()


def test_the_data_layer_is_tracked():
    asked = ["git", "check-ignore", "data/sampler.py", "data/new.py"]
    ignored = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""  # a .gitignore for data sets must not match code


# --- docstrings


def untold_names(tree):
    """Public functions, classes and methods of a module without a docstring."""
    public = [node for node in tree.body if isinstance(node, FUNCTION | ast.ClassDef) and not node.name.startswith("_")]
    methods = [method for node in public if isinstance(node, ast.ClassDef) for method in node.body
               if isinstance(method, FUNCTION) and not method.name.startswith("_")]
    # A silent object's methods are explained by those that it stands in for.
    told = {method.name for method in methods if ast.get_docstring(method)}
    untold = [node.name for node in public if not ast.get_docstring(node)]
    return untold + [method.name for method in methods if method.name not in told]


def test_every_public_name_says_what_it_is():
    assert [(path, name) for path, tree in MODULES.items() for name in untold_names(tree)] == []


def test_every_module_says_what_it_is():
    assert [path for path, tree in MODULES.items() if tree.body and not ast.get_docstring(tree)] == []


# --- where ranks meet


def test_torchs_collectives_are_called_in_few_files():
    callers = {path for path, tree in MODULES.items()
               if any(map(calls_collective(tree), (node for node in ast.walk(tree) if isinstance(node, ast.Call))))}
    assert "utils/distributed/world.py" in callers and [path for path in callers if not path.startswith(MAY_MEET)] == []


def test_torch_distributed_is_called_by_its_name():
    found = [(path, name) for path, tree in MODULES.items() for name in imports_of(tree)
             if name.startswith("torch.distributed") and name.rpartition(".")[2] in COLLECTIVES]
    assert found == []


def test_a_function_that_calls_a_collective_says_so():
    found = [(path, name) for path, tree in MODULES.items() for name in silent_callers(tree, calls_collective(tree))]
    assert found == []


def test_a_function_that_calls_the_worlds_collectives_says_so():
    found = [(path, name) for path, tree in MODULES.items() for name in silent_callers(tree, calls_worlds_collective)]
    assert found == []


def test_a_step_of_the_application_that_takes_a_collective_one_says_so():
    trees = [tree for path, tree in MODULES.items() if path == "train.py" or path.startswith("engine/")]
    collective = {function.name for tree in trees for function, _ in functions_of(tree) if says_collective(function)}
    def is_one(call):
        return isinstance(call.func, ast.Name) and call.func.id in collective

    silent = [name for tree in trees for name in silent_callers(tree, is_one)]
    assert silent == [] and {"train_one_epoch", "evaluate_and_save", "end_if_wrong"} <= collective


# --- the loop


def test_the_loop_asks_for_neither_task_nor_strategy_nor_rank():
    nodes = [node for name in LOOP for node in ast.walk(function_named(name))]
    questions = [node.test for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While)]
    questions += [node for node in nodes if isinstance(node, ast.Compare | ast.Match)]
    asked = [ast.unparse(question) for question in questions for node in ast.walk(question)
             if getattr(node, "attr", getattr(node, "id", None)) in FORBIDDEN_QUESTIONS]
    assert asked == []


def test_no_rank_is_special_in_the_loop():
    special = [ast.unparse(node) for name in LOOP for node in ast.walk(function_named(name))
               if isinstance(node, ast.Attribute) and node.attr in {"is_main", "rank", "local_rank"}]
    assert special == []


# --- devices

ONE_VENDORS = "utils/hardware/vendor.py"
HELP = {"option": 1, "add_argument": None}  # calls with a text of the command line's help: option(default, text), help=


def words_of(tree):
    """Every name and string in a module, docstrings too, but not the command line's help."""
    help_texts = {id(node) for call in ast.walk(tree) if isinstance(call, ast.Call)
                  and (name := getattr(call.func, "id", getattr(call.func, "attr", None))) in HELP
                  for text in [*call.args[1:2 if HELP[name] else 1],
                               *(word.value for word in call.keywords if word.arg == "help")]
                  for node in ast.walk(text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in help_texts:
            yield node.value
        yield from (value for field in ("id", "attr", "name", "asname", "arg", "module")
                    if isinstance(value := getattr(node, field, None), str))


def test_cuda_is_known_to_one_file_and_the_help_alone():
    found = [(path, word) for path, tree in (MODULES | BENCHMARKS).items()
             for word in words_of(tree) if "cuda" in word.lower()]
    assert {path for path, _ in found} == {ONE_VENDORS}, [(path, word) for path, word in found if path != ONE_VENDORS]


# --- registries


def test_every_task_has_a_class_settings_and_a_name_in_all_three_places():
    assert all(isinstance(load_task(name), type) for name in TASKS)
    assert (set(CONFIGS), set(demo.SETTINGS) <= set(TASKS)) == (set(TASKS), True)


def test_every_strategy_is_one_and_can_be_asked_for():
    offered = typing.get_args(typing.get_type_hints(DeviceOptions)["strategy"])
    assert all(issubclass(load_strategy(name), Strategy) for name in STRATEGIES) and set(offered) == set(STRATEGIES)


# --- what an import brings


@pytest.mark.long
def test_an_image_run_never_imports_transformers_or_timm():
    program = ("import sys, train\nfrom models.tasks import load_task\nfrom utils.strategies import load_strategy\n"
               "load_task('image-classification'); load_strategy('ddp'); load_strategy('exact')\n"
               "names = ('transformers', 'tokenizers', 'datasets', 'tensorflow', 'timm')\n"
               "print([name for name in names if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


READ_BEFORE_TORCH = ("ask.command_line", "extras",
    "engine.begin", "utils.settings.config", "utils.settings.command_line", "utils.rundir.identity",
    "utils.rundir.restart", "utils.errors", "utils.distributed.watchdog", "utils.strategies",
    "models.tasks", "data.demo")


def test_what_is_read_before_torch_does_not_import_it():
    program = (f"import importlib, sys\nfor name in {READ_BEFORE_TORCH}:\n    importlib.import_module(name)\n"
               "    if 'torch' in sys.modules: sys.exit(name)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_what_is_read_before_torch_imports_types_for_checkers():
    program = f"import sys, {', '.join(READ_BEFORE_TORCH)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    hiding = {dotted(path) for path, tree in MODULES.items() if "typing.TYPE_CHECKING" in imports_of(tree)}
    assert hiding - set(done.stdout.split()) == set()


# --- sizes

CEILINGS = {"spine": 2_350, "core": 9_185, "core without texts": 7_940, "all": 15_725}  # code lines; make size


def test_the_parts_of_the_program_keep_to_their_sizes():
    """The spine is what docs/reading.md lists: it must be possible to read it in a day."""
    found = size.totals()
    assert {part: found[part] for part, most in CEILINGS.items() if found[part] > most} == {} and found["spine"] > 2_000


def test_a_step_has_at_most_16_statements():
    """Each line of a step is one that everybody must read."""
    statements = [node for node in ast.walk(function_named("train_step"))
                  if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef)]
    assert len(statements) - 1 <= 16  # without its docstring
