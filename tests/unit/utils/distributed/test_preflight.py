"""utils/distributed/preflight.py: what would fail later is said at the start, in one line with a way out."""

import socket
import struct
import subprocess
import sys
from collections import namedtuple
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from utils.distributed import preflight
from utils.distributed.preflight import (
    require_loopback,
    require_numbers,
    require_own_name,
    require_packages,
    words_about_tasks,
)
from utils.errors import Exit, UserError

ROOT = Path(__file__).parents[4]
Usage = namedtuple("Usage", "free")


@pytest.mark.parametrize("name", preflight.NUMBERS)
@pytest.mark.parametrize("value", ["abc", "", "1.5", "-1", "99999999999"])
def test_a_variable_that_must_be_a_number_and_is_none_is_64(monkeypatch, capsys, name, value):
    for each in preflight.NUMBERS:
        monkeypatch.delenv(each, raising=False)
    require_numbers()
    monkeypatch.setenv(name, "0")
    require_numbers()
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        require_numbers()
    assert left.value.code == Exit.USAGE
    assert name == "LOCAL_RANK" or f"train.py: {name}={value} in the environment: must be" in capsys.readouterr().err


@pytest.mark.parametrize("environment, says", [
    ({"SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 tasks"), ({"OMPI_COMM_WORLD_SIZE": "3"}, "mpirun started 3 tasks"),
    ({"SLURM_STEP_NUM_TASKS": "1"}, ""), ({"SLURM_STEP_NUM_TASKS": "2", "LOCAL_RANK": "0"}, ""),
    ({"SLURM_STEP_NUM_TASKS": "2", "LOCKSTEP_LAUNCH_ID": "x"}, ""), ({"SLURM_STEP_NUM_TASKS": "many"}, "")])
def test_tasks_of_which_each_would_train_alone_are_counted(monkeypatch, environment, says):
    for name in (*preflight.TASKS.values(), "LOCAL_RANK", "LOCKSTEP_LAUNCH_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert words_about_tasks().startswith(says) and bool(words_about_tasks()) == bool(says)


@pytest.mark.parametrize("flags, is_down", [(0x49, False), (0x8, True)])
def test_a_loopback_that_is_down_is_64_with_the_command(monkeypatch, flags, is_down):
    """It is down in a new network namespace, as sandboxes have it."""
    monkeypatch.setattr(preflight.fcntl, "ioctl", lambda file, request, name: struct.pack("16sH", b"lo", flags))
    with pytest.raises(UserError, match="ip link set lo up") if is_down else nullcontext():
        require_loopback()


# --- packages


@pytest.fixture
def said(monkeypatch, capsys):
    """What require_packages prints, given requirements and {package: (version, requirements)}; "" if all fit."""
    def told(lines, installed, local_rank="0"):
        def version(name):
            if name not in installed:
                raise metadata.PackageNotFoundError(name)
            return installed[name][0]
        monkeypatch.setattr(preflight, "REQUIREMENTS", Path("requirements.txt"))
        Path("requirements.txt").write_text(lines)
        monkeypatch.setattr(preflight.metadata, "version", version)
        monkeypatch.setattr(preflight.metadata, "requires", lambda name: version(name) and installed[name][1])
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        try:
            require_packages()
        except SystemExit as left:
            assert left.code == Exit.USAGE
            return capsys.readouterr().err or "nothing"
        return ""
    return told


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


LINES = "# Why.\ntorch>=2.11,<3   # tensors\n\ntorchvision>=0.26\n"


@pytest.mark.parametrize("installed", [
    {"torch": ("2.15.0+cu132", []), "torchvision": ("0.29.2", ["torch (>=2.14.0)", "numpy"])},
    {"torch": ("2.11.0", []), "torchvision": ("0.26.0", ["torch==2.11.0"])},
    {"torch": ("2.11.0a0+abc.nv26", []), "torchvision": ("0.26.0a0+def", None)},  # a vendor's own builds
    {"torch": ("2.11.0a0+abc", []), "torchvision": ("0.26.0", ["torch==2.11.0a0+abc"])}])
def test_packages_that_fit_pass_without_a_word(said, installed):
    assert said(LINES, installed) == ""


@pytest.mark.parametrize("installed, parts", [
    ({}, ["torch is not installed; torchvision is not installed"]),
    ({"torch": ("2.9.1", []), "torchvision": ("0.26.0", [])},
     ["torch 2.9.1 is installed, but requirements.txt needs torch<3,>=2.11"]),
    ({"torch": ("3.0", []), "torchvision": ("0.26.0", [])}, ["torch 3.0 is installed"]),
    ({"torch": ("2.12.0", []), "torchvision": ("0.26.0", ["torch==2.11.0"])},
     ["torch 2.12.0 is installed, but torchvision needs torch==2.11.0"])])
def test_packages_that_do_not_fit_are_named_with_a_way_out(said, installed, parts):
    text = said(LINES, installed)
    for part in [*parts, "-m pip install -r requirements.txt", socket.gethostname()]:
        assert part in text
    assert text.count("\n") == 1


def test_one_rank_of_a_node_speaks_of_its_packages(said):
    assert said(LINES, {}, local_rank="1") == "nothing"


def test_the_packages_of_this_environment_fit():
    assert require_packages() is None


def test_train_py_says_so_if_nothing_is_installed():
    program = ("import sys; sys.path.insert(0, sys.argv[1]); sys.argv = ['train.py'];"
               "import runpy; runpy.run_path(sys.path[0] + '/train.py', run_name='__main__')")
    bare = subprocess.run([sys.executable, "-S", "-I", "-c", program, ROOT], capture_output=True, text=True, timeout=60)
    assert (bare.returncode, bare.stderr.count("\n")) == (Exit.USAGE, 1), bare.stderr
    assert "is not installed: " in bare.stderr


# --- the name of a machine among several


@pytest.mark.parametrize("address, interface, is_refused", [
    ("127.0.1.1", None, True), ("::1", None, True), (None, None, True), ("127.0.1.1", "lo", False),
    ("10.0.0.7", None, False)])
def test_a_host_name_that_others_cannot_reach_needs_an_interface(monkeypatch, address, interface, is_refused):
    def getaddrinfo(name, port):
        if address is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    if not is_refused:
        return require_own_name()
    with pytest.raises(UserError, match=rf"resolve{f's to {address}' if address else ''}.*\./launch\.sh"):
        require_own_name()


def test_an_interface_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")
    with pytest.raises(UserError, match="has no network interface eth77; it has lo"):
        require_own_name()
