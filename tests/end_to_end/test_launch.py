"""launch.sh: the command for options and platforms, by --dry-run; what it refuses.

On several hosts: tests/faults/test_cluster.py.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from utils.errors import Exit
from utils.hardware.cores import available_cores

PLATFORM = ("NNODES", "NODE_RANK", "MASTER_", "NPROC", "PET_", "SLURM", "WORLD_SIZE", "RANK", "LOCAL_RANK",
            "JOB_COMPLETION", "OMP", "GLOO", "LOCKSTEP")


def launch(*words, inside=(), **environment):
    """launch.sh with no variable of a platform but those given. inside: a command that starts it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PLATFORM)}
    inherited |= {"LOCKSTEP_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [*inside, ROOT / "launch.sh", *map(str, words)]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True)


def dry(*words, **environment):
    """(environment, words of the command) of what it would start."""
    result = launch("--dry-run", *words, **environment)
    assert result.returncode == 0, result.stderr
    *variables, command = result.stdout.splitlines()
    return dict(line.split("=", 1) for line in variables), shlex.split(command)


def option(command, name):
    """The value of --name=value."""
    [value] = [word.split("=", 1)[1] for word in command if word.startswith(f"--{name}=")]
    return value


def test_shellcheck_finds_nothing():
    command = [Path(sys.executable).with_name("shellcheck"), "launch.sh", "launch/slurm.sh"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_one_process_needs_no_torchrun_and_settings_are_passed_on():
    _, command = dry("--data", "a b", "--lr=1e-3", "--", "--nnodes", "7")
    assert command[1:] == [str(ROOT / "train.py"), "--data", "a b", "--lr=1e-3", "--nnodes", "7"]


@pytest.mark.parametrize("words", [["--nproc-per-node", "3"], ["--nproc_per_node=3"]])
def test_cores_are_shared_by_the_processes_of_a_machine(words):
    environment, command = dry(*words)
    assert option(command, "nproc-per-node") == "3"
    assert int(environment["OMP_NUM_THREADS"]) == max(1, available_cores() // 3)
    assert option(command, "rdzv-conf") == "store_type=file"


def test_a_cpu_quota_counts_as_that_many_cores(in_control_group):
    shown = launch("--dry-run", "--nproc-per-node", "cpu", inside=in_control_group(1)).stdout
    assert shown.splitlines()[-1].strip() == f"{sys.executable} {ROOT / 'train.py'}"  # one process


STATIC = {"nnodes": "2", "node-rank": "1", "master-addr": "10.0.0.1", "master-port": "29500", "nproc-per-node": "1"}


@pytest.mark.parametrize(("words", "environment", "expected"), [
    (["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"], {}, STATIC),
    ([], {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "NPROC_PER_NODE": "4"},
     STATIC | {"master-port": "1234", "nproc-per-node": "4"}),
    (["--node-rank", "0", "--nproc-per-node", "2"], {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"},
     STATIC | {"node-rank": "0", "nproc-per-node": "2"}),
    ([], {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "2345",
          "PET_NPROC_PER_NODE": "auto"}, STATIC | {"master-port": "2345"}),
    ([], {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"},
     STATIC | {"master-port": "23456"}),
    (["--nnodes", "2", "--master-addr", "10.0.0.1"], {"JOB_COMPLETION_INDEX": "1"}, STATIC),
    (["--nnodes", "10", "--node-rank", "08", "--master-addr", "10.0.0.1"], {},
     STATIC | {"nnodes": "10", "node-rank": "8"}),
    ([], {"SLURM_JOB_ID": "40007", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
          "SLURM_STEP_NODELIST": "localhost,b[1-3]", "SLURM_NODEID": "0"},
     STATIC | {"node-rank": "0", "master-addr": "localhost", "master-port": "10007"}),
    (["--nnodes", "2"], {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1"}, STATIC),
    ([], {"SLURM_JOB_ID": "40007", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1",
          "NNODES": "2", "MASTER_ADDR": "10.0.0.1"}, STATIC | {"master-port": "10007"}),
], ids=["flags", "variables", "flags before variables", "Kubeflow Trainer v2", "PyTorchJob", "an indexed Job",
        "leading zeros", "Slurm", "some by a flag, the rest by PyTorchJob", "some by variables, the rest by Slurm"])
def test_each_of_several_machines_learns_its_place(words, environment, expected):
    variables, command = dry(*words, **environment)
    assert {name: option(command, name) for name in expected} == expected
    assert variables["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize("environment", [
    {"JOB_COMPLETION_INDEX": "3"}, {"NODE_RANK": "3", "MASTER_ADDR": "10.0.0.1"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}])
def test_with_nnodes_1_the_numbers_of_a_platform_are_ignored(environment):
    _, command = dry("--nnodes", 1, **environment)
    assert command[-1] == str(ROOT / "train.py") and not any("torchrun" in word for word in command)
    assert [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environment and name not in command] == []


@pytest.mark.parametrize(("host", "is_host"), [("localhost", "1"), ("10.0.0.1", "0")])
def test_an_elastic_run_says_who_hosts_the_store(host, is_host):
    variables, command = dry("--nnodes", "1:3", "--master-addr", host)
    assert (option(command, "rdzv-conf"), option(command, "max-restarts")) == (f"is_host={is_host}", "3")
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_an_elastic_job_of_kubernetes_is_known_by_its_endpoint():
    _, command = dry(PET_NNODES="2:4", PET_RDZV_ENDPOINT="10.0.0.1:2345", PET_MAX_RESTARTS="7", PET_RDZV_ID="job")
    assert {name: option(command, name) for name in ("nnodes", "rdzv-endpoint", "max-restarts", "rdzv-id")} == {
        "nnodes": "2:4", "rdzv-endpoint": "10.0.0.1:2345", "max-restarts": "7", "rdzv-id": "job"}


@pytest.mark.parametrize(("nodes", "first"), [
    ("localhost", "localhost"), ("127.0.0.[1-3]", "127.0.0.1"), ("127.0.0.[1,3],b", "127.0.0.1"),
    ("127.0.[0-1].[1-2]", "127.0.0.1")])
def test_the_first_of_slurms_nodes_is_machine_0(nodes, first):
    _, command = dry(SLURM_JOB_ID="40007", SLURM_STEP_NUM_NODES="2", SLURM_STEP_NUM_TASKS="2",
                     SLURM_STEP_NODELIST=nodes, SLURM_NODEID="0")
    assert option(command, "master-addr") == first


def test_a_user_may_have_folders_named_like_ours(tmp_path):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").touch()
    words = ["--dry-run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    done = subprocess.run([ROOT / "launch.sh", *words], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"LOCKSTEP_PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr


def test_visible_gpus_are_counted(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: one\\n  MIG 1g\\nGPU 1: two\\nGPU 2: three\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {"PATH": path}
    shown = subprocess.run([ROOT / "launch.sh", "--dry-run"], env=environment, capture_output=True, text=True)
    assert "--nproc-per-node=3" in shown.stdout, shown.stderr
    assert option(dry(PATH=path, CUDA_VISIBLE_DEVICES="0,2")[1], "nproc-per-node") == "2"
    assert dry(PATH=path, CUDA_VISIBLE_DEVICES="-1")[1][1:] == [str(ROOT / "train.py")]


@pytest.mark.parametrize(("nodes", "words", "answer", "processes", "is_asked"), [
    ("kfd", [], "echo 3", 3, True), ("dri/renderD128", [], "echo 3", 3, True), ("kfd", [], "echo 0", 1, True),
    ("kfd", [], "exit 1", 1, True), ("kfd", [], "echo hello", 1, True),
    ("kfd", ["--device", "cpu"], "echo 3", 1, False), ("kfd", ["--nproc-per-node", 2], "echo 3", 2, False),
    ("nvidia0 dri/renderD128", [], "echo 3", 1, False), ("tty", [], "echo 3", 1, False),
], ids=["AMD", "Intel", "torch sees none", "torch fails", "not a number", "on the CPU", "their number is given",
        "NVIDIA, all hidden", "no GPU"])
def test_gpus_of_other_vendors_are_counted_by_torch(tmp_path, nodes, words, answer, processes, is_asked):
    """launch.sh sees a /dev with these nodes, and a Python whose torch answers."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs to be permitted namespaces")
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    (tmp_path / "dev" / "fd").symlink_to("/proc/self/fd")
    for name in ("null", *nodes.split()):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    python = tmp_path / "python"
    asked = f'case "$*" in *device_count*) echo >>{tmp_path}/asked; {answer}; exit;; esac'
    python.write_text(f'#!/bin/sh\n{asked}\nexec {sys.executable} "$@"\n')
    for program in (python, tmp_path / "nvidia-smi"):
        program.chmod(0o755)
    show = 'mount --bind /dev/null "$0/null" && mount --rbind "$0" /dev && exec "$@"'
    shown = launch("--dry-run", *words, inside=["unshare", "--mount", "sh", "-c", show, tmp_path / "dev"],
                   PATH=f"{tmp_path}:{os.environ['PATH']}", LOCKSTEP_PYTHON=str(python))
    assert shown.returncode == 0, shown.stderr
    command = shlex.split(shown.stdout.splitlines()[-1])
    found = int(option(command, "nproc-per-node")) if any("torchrun" in word for word in command) else 1
    times_asked = (tmp_path / "asked").read_text().count("\n") if (tmp_path / "asked").exists() else 0
    assert (found, times_asked) == (processes, int(is_asked))


NODES = "cd /sys/devices/system && mount -t tmpfs none node && mkdir node/node0 node/node1"
HAS_ALL_CORES = len(os.sched_getaffinity(0)) == os.cpu_count()
ONE_CORE = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]


@pytest.mark.parametrize(("numactl", "words", "within", "sees_gpus", "is_bound"), [
    ("exit 0", [], [], True, HAS_ALL_CORES), ("exit 1", [], [], True, False), ("exit 127", [], [], True, False),
    ("exit 0", ["--device", "cpu"], [], True, False), ("exit 0", ["--device=cpu"], [], True, False),
    ("exit 0", ["--nproc-per-node", 3], [], True, False), ("exit 0", [], ONE_CORE, True, False),
    ("exit 0", [], [], False, False),
], ids=["all conditions hold", "not permitted", "no numactl", "on the CPU", "on the CPU, with =",
        "more processes than GPUs", "a part of the cores", "torch sees no GPU"])
def test_processes_are_bound_to_numa_nodes_where_they_can_be(tmp_path, numactl, words, within, sees_gpus, is_bound):
    """Elsewhere torchrun would end with a traceback. launch.sh sees two GPUs and two NUMA nodes."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs to be permitted namespaces")
    for name, does in (("nvidia-smi", "printf 'GPU 0: one\\nGPU 1: two\\n'"), ("numactl", numactl)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    inside = ["unshare", "--mount", "sh", "-c", f'{NODES} && exec "$@"', "sh", *within]
    path, python = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "python"
    answer = f'case "$*" in *accelerator*) exit {int(not sees_gpus)};; esac'  # instead of torch, which sees no GPU here
    python.write_text(f'#!/bin/sh\n{answer}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shown = launch("--dry-run", *words, inside=inside, PATH=path, CUDA_VISIBLE_DEVICES="0,1",
                   LOCKSTEP_PYTHON=str(python))
    assert (shown.returncode, "--numa-binding=node" in shown.stdout) == (0, is_bound), shown.stderr


@pytest.mark.parametrize(("host", "code", "said"), [
    ("localhost", Exit.USAGE, "resolves to 127.0.0.1, which other hosts cannot reach: give this host's address"),
    ("10.0.0.1", Exit.LOST_PEERS, "no route to host 10.0.0.1")])
def test_a_machine_without_a_network_gets_a_message(host, code, said):
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("needs to be permitted namespaces")
    words = ["--dry-run", "--nnodes", "2", "--node-rank", "0", "--master-addr", host]
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    refused = launch(*words, inside=inside)
    assert (refused.returncode, said in refused.stderr) == (code, True), refused.stderr


@pytest.fixture
def retried(tmp_path):
    """The exit code of a launch with two retries, and LOCKSTEP_LAUNCH_ID of each start. Without the pauses."""
    ids, script = tmp_path / "ids", tmp_path / "script.py"
    (tmp_path / "sleep").symlink_to("/bin/true")

    def start(code):
        ids.write_text("")
        script.write_text(f"import os\nprint(os.environ['LOCKSTEP_LAUNCH_ID'], file=open({str(ids)!r}, 'a'))\n"
                          f"raise SystemExit({code})")
        ended = launch("--retries", 2, LOCKSTEP_SCRIPT=str(script), PATH=f"{tmp_path}:{os.environ['PATH']}")
        return ended.returncode, ids.read_text().split()
    return start


@pytest.mark.parametrize(("code", "starts"), [
    (71, 3), (76, 3), (1, 3), (128, 3), (137, 3), (64, 1), (65, 1), (70, 1), (74, 1), (75, 1), (80, 1), (127, 1)])
def test_retries_are_for_failed_hardware_lost_peers_and_kills(retried, code, starts):
    returned, ids = retried(code)
    assert (returned, len(ids)) == (code, starts)


def test_the_retries_of_a_launch_share_its_id(retried):
    one, two = (set(retried(76)[1]) for _ in range(2))
    assert (len(one), len(two), one & two) == (1, 1, set())


def test_every_launch_ends_at_ctrl_c(tmp_path):
    """Freed memory is overwritten here: bash's `wait -f` reads it, and one launch in 256 never ended."""
    script = tmp_path / "script.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
                      "print('up', flush=True)\nsignal.pause()")
    here = {"LOCKSTEP_PYTHON": sys.executable, "LOCKSTEP_SCRIPT": str(script)}
    freed = {"MALLOC_PERTURB_": "127", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    process = subprocess.Popen([ROOT / "launch.sh"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | freed | here)
    try:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
    finally:
        process.kill()


def test_a_stop_before_anything_is_started_ends_it(tmp_path):
    python = tmp_path / "python"
    of_launcher = "awk '/PPid/ {print $2}' /proc/$PPID/status"  # a subshell of launch.sh starts python
    python.write_text(f'#!/bin/sh\nkill -TERM $({of_launcher})\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert launch("--nproc-per-node", 2, LOCKSTEP_PYTHON=str(python)).returncode == 128 + signal.SIGTERM


def test_as_process_1_it_stops_while_it_waits_for_a_name(tmp_path):
    """unshare --fork --pid makes it process 1."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("needs to be permitted namespaces")
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "no.such.host"]
    process = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", ROOT / "launch.sh", *words],
                               env=os.environ | {"LOCKSTEP_PYTHON": sys.executable}, stderr=subprocess.PIPE, text=True)
    assert "cannot resolve this host name yet; trying for 300 s" in process.stderr.readline()
    [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM


def test_another_system_than_linux_is_refused_by_name(tmp_path):
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    refused = launch(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (refused.returncode, refused.stdout) == (Exit.USAGE, "")
    assert refused.stderr.startswith("launch.sh: this system is Darwin, and train.py needs Linux")


def test_a_port_in_use_is_refused_on_the_machine_of_the_store():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        refused = launch("--dry-run", "--nnodes", 2, "--node-rank", 0, "--master-addr", "localhost",
                         "--master-port", port)
        assert refused.returncode == Exit.USAGE
        assert f"port {port} on this host: Address already in use" in refused.stderr
        _, command = dry("--nnodes", 2, "--node-rank", 1, "--master-addr", "10.0.0.1", "--master-port", port)
        assert option(command, "master-port") == str(port)


@pytest.mark.parametrize(("words", "environment", "code", "said"), [
    (["--nnodes", "2"], {}, Exit.USAGE, "--master-addr HOST"),
    (["--nnodes", "2", "--master-addr", "10.0.0.1"], {}, Exit.USAGE, "--node-rank N"),
    (["--nnodes", "2", "--master-addr", "10.0.0.1", "--node-rank", "2"], {}, Exit.USAGE, "must be below --nnodes 2"),
    (["--nnodes", "2", "--master-addr", "localhost", "--node-rank", "1"], {}, Exit.USAGE,
     "is this machine itself, and --node-rank 1"),
    (["--nnodes", "2", "--master-addr", "no.such.host", "--node-rank", "1"], {}, Exit.LOST_PEERS,
     "cannot resolve host name no.such.host"),
    (["--nnodes", "two"], {}, Exit.USAGE, "--nnodes two: must be a number, or MIN:MAX"),
    (["--nnodes", "3:2"], {}, Exit.USAGE, "MIN is above MAX"),
    (["--nnodes"], {}, Exit.USAGE, "--nnodes needs a value"),
    (["--nproc-per-node", "0"], {}, Exit.USAGE, "--nproc-per-node 0: must be a number"),
    (["--print", "slurm"], {}, Exit.USAGE, "launch/slurm.sh and launch/trainjob.yaml are jobs to copy"),
    (["--nnodes="], {}, Exit.USAGE, "--nnodes needs a value"),
    (["--nnodes", ""], {}, Exit.USAGE, "--nnodes needs a value"),
    (["--nnodes", "1", "--node-rank", "3"], {}, Exit.USAGE, "--node-rank 3: must be below --nnodes 1"),
    (["--master-port", "99999"], {}, Exit.USAGE, "must be between 1 and 65535"),
    (["--nnodes", "2", "--master-addr", "a..b", "--node-rank", "1"], {}, Exit.LOST_PEERS,
     "cannot resolve host name a..b"),
    ([], {"WORLD_SIZE": "2"}, Exit.USAGE, "which machine is number 0?"),
    ([], {"RANK": "0"}, Exit.USAGE, "but not the number of machines: --nnodes N"),
    ([], {"PET_NNODES": "2"}, Exit.USAGE, "which machine is number 0?"),
    ([], {"LOCKSTEP_PYTHON": "/usr/bin/false"}, Exit.USAGE,
     "/usr/bin/false has no torch: /usr/bin/false -m pip install -r"),
    (["--nnodes", "2", "--master-addr", "10.0.0.1", "--node-rank", "1"], {"GLOO_SOCKET_IFNAME": "eth77"}, Exit.USAGE,
     "has no network interface eth77"),
    ([], {"MASTER_ADDR": "10.0.0.1"}, Exit.USAGE, "but not the number of machines: --nnodes N"),
    ([], {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1"}, Exit.USAGE,
     "but not the number of machines: --nnodes N"),
    ([], {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, Exit.USAGE,
     "LOCAL_RANK=0 and WORLD_SIZE=2: this is one of several"),
    (["--nproc-per-node", "9999999"], {}, Exit.USAGE, "--nproc-per-node 9999999: must be a number"),
    ([], {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, Exit.USAGE, "srun --ntasks-per-node=1 ./launch.sh"),
    ([], {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8"}, Exit.USAGE,
     "use one per node"),
])
def test_what_is_not_known_is_asked_for_and_never_guessed(words, environment, code, said):
    result = launch("--dry-run", *words, **environment)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith("launch.sh: ") and said in line


def test_a_temporary_folder_that_is_not_there_is_64_and_named():
    """mkdir's own code, 1, would be taken for a failure of torchrun, and tried again."""
    done = launch("--device", "cpu", "--retries", 3, TMPDIR="/none")
    assert (done.returncode, done.stderr) == (Exit.USAGE, "launch.sh: cannot make a folder in /none: set TMPDIR to one"
                                              " that is there and that you may write to\n")


def test_a_typing_error_under_torchrun_is_not_buried_in_its_table():
    done = launch("--nproc-per-node", 2, "--modle", "x")
    assert (done.returncode, "train.py: --modle: did you mean --model?\n" in done.stderr) == (Exit.USAGE, True)
    assert "torchrun: not all processes ended well: rank " in done.stderr and "(exit code 64)" in done.stderr
    assert "FAILED" not in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 8


@pytest.mark.long
def test_a_machine_that_waits_for_the_others_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    with subprocess.Popen([ROOT / "launch.sh", *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                          env=os.environ | {"LOCKSTEP_PYTHON": sys.executable}) as waiting:
        line = next(line for line in waiting.stderr if "waits for" in line)
        waiting.terminate()
    assert line.startswith("launch.sh: no process has begun after 10 s: machine 0 waits for the others of 2 (the same")
