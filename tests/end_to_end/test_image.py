"""The Dockerfile: linted; and built and run without a Docker engine, by buildah and namespaces. `make image-test`."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.harness.run_directory import status, trained_steps
from utils.errors import Exit

SUITE = "bookworm"  # Debian's with Python 3.11: a stand-in for python:3.12-slim, which no test can pull
BASE = "docker.io/library/python:3.12-slim"
UID = 12345  # neither root nor the image's own


def test_hadolint_finds_nothing():
    found = subprocess.run([Path(sys.executable).with_name("hadolint"), "--failure-threshold", "style",
                            ROOT / "Dockerfile"],
                           capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_gets_the_whole_program_and_nothing_else():
    """By the rules of .dockerignore that it uses: the last line that matches decides."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = [word for line in re.findall(r"^COPY (.*)", (ROOT / "Dockerfile").read_text(), re.M)
              for word in line.split()[:-1]]
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {name for name in tracked if name.split("/")[0] in copied
              and not (name.startswith("extras/") and {"tests", "conftest.py"} & {*name.split("/")})}
    strange = {"data/imagenet/train/a/b.jpg", "data/huge.csv", ".venv/bin/python", "runs/x/status.json",
               "utils/__pycache__/run.pyc"}

    def goes_along(name):
        matching = [line for line in ignored if _matches(line.removeprefix("!"), name)]
        return matching[-1].startswith("!")

    assert {name for name in wanted | strange if goes_along(name)} == wanted


def test_the_lock_has_an_allowed_version_and_hashes_of_every_package():
    """make lock was run after the last change of requirements.txt."""
    lock = dict(re.findall(r"^([a-z0-9-]+)==(.+(?:\n +.+)+)", (ROOT / "requirements.lock").read_text(), re.M))
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    for requirement in map(Requirement, filter(None, lines)):
        version = lock[requirement.name].split()[0]
        assert requirement.specifier.contains(version), f"{requirement} is {version} in requirements.lock"
    assert [name for name, rest in lock.items() if "--hash=sha256:" not in rest] == []


def _matches(pattern, name):
    """A pattern of .dockerignore also matches what lies under what it matches."""
    expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(f"{expression}(/.*)?", name) is not None


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A folder with the image's file system, and its configuration.

    No package is installed anew: this environment's are lent.
    """
    if missing := [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}, and root")
    folder = tmp_path_factory.mktemp("image")
    environment = os.environ | {"TMPDIR": str(folder)}  # it may need some GB

    def run(*words):
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def buildah(*words):
        return run(
            "buildah", "--root", folder / "store", "--runroot", folder / "run", "--storage-driver", "vfs", *words)

    base = folder / "base"
    run("debootstrap", "--variant=minbase", "--include=python3-minimal,python3-pip,ca-certificates", SUITE, base)
    (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    container = buildah("from", "scratch")
    buildah("add", container, base, "/")
    buildah("commit", "--rm", container, BASE)
    shutil.rmtree(base)
    lent = f"{sysconfig.get_paths()['purelib']}:{LIBRARIES}:ro"
    buildah("bud", "--isolation", "chroot", "--pull-never", "--network", "host", "--volume", lent,
            "--build-arg", f"BASE={BASE}", "--tag", "lockstep", ROOT)
    container = buildah("from", "--pull-never", "lockstep")
    configuration = json.loads(buildah("inspect", "--type", "image", "lockstep"))["OCIv1"]["config"]
    yield Path(buildah("mount", container)), configuration
    subprocess.run(["buildah", "--root", folder / "store", "--runroot", folder / "run", "--storage-driver", "vfs",
                    "rm", "--all"])


LIBRARIES = "/usr/local/lib/python3.11/dist-packages"


@pytest.fixture
def docker_run(image, start_torchrun):
    """docker_run(*words, volumes={}, uid=UID): like `docker run`, the entry point as process 1, as another user."""
    root, configuration = image

    def start(*words, volumes=None, uid=UID):
        bound = {sysconfig.get_paths()["purelib"]: LIBRARIES, "/dev": "/dev"} | (volumes or {})
        mounts = [f"mkdir -p {root}{inside} && mount --rbind {outside} {root}{inside}"
                  for outside, inside in bound.items()]
        entry = shlex.join(map(str, [*configuration["Env"], *configuration["Entrypoint"], *words]))
        inside = ("exec unshare --pid --fork --kill-child --mount-proc=/proc"
                  f" --root={root} --wd={configuration['WorkingDir']}"
                  f' --setuid={uid} --setgid={uid} env -i LOCKSTEP_TEST="$LOCKSTEP_TEST" {entry}')
        return start_torchrun(None, command=["unshare", "--mount", "sh", "-c", " && ".join([*mounts, inside])])
    return start


@pytest.mark.slow
def test_the_configuration_is_that_of_a_batch_job(image):
    _, configuration = image
    assert (configuration["Entrypoint"], configuration["User"], configuration["StopSignal"]) == (
        ["./launch.sh"], "1000:1000", "SIGTERM")
    assert configuration["Labels"]["org.opencontainers.image.title"] == "Lockstep"


@pytest.mark.slow
def test_two_ranks_train_as_any_user_stop_by_docker_stop_and_go_on(image, docker_run, photos, run_dir):
    run_dir.mkdir(parents=True, exist_ok=True)
    os.chown(run_dir, UID, UID)
    volumes = {photos: "/data", run_dir: "/app/runs"}
    words = ["--nproc-per-node", 2, "--data", "/data", "--model", "mobilenet_v3_small", "--image-size", 32,
             "--global-batch-size", 24, "--micro-batch-size", 4, "--epochs", 20, "--log-every", 1,
             "--run-dir", "runs/one"]
    run = run_dir / "one"
    live = docker_run(*words, volumes=volumes)
    live.wait_for(lambda: trained_steps(run) >= 2, "two steps")
    [first] = [pid for pid in live.parents() if re.search(r"NSpid:\t\d+\t1\n", Path(f"/proc/{pid}/status").read_text())]
    os.kill(first, signal.SIGTERM)
    stopped = live.wait()
    assert (stopped.returncode, status(run)["exit_code"]) == (128 + signal.SIGTERM, Exit.STOPPED), stopped.text
    finished = docker_run(*words, volumes=volumes).wait()
    assert (finished.returncode, status(run)["state"], status(run)["start"]) == (0, "finished", 2), finished.text
    assert run.stat().st_uid == UID


@pytest.mark.slow
def test_the_image_alone_trains_the_demo_and_has_compilers(image, docker_run):
    result = docker_run("--max-steps", 2).wait()
    assert (result.returncode, "step 2/2 validation loss" in result.out) == (0, True), result.text
    for compiler, program in (("gcc -x c", "int main(void) { return 42; }"),
                              ("g++ -x c++", "auto main() -> int { return 42; }")):
        line = f"echo '{program}' | {compiler} -o /tmp/a - && /tmp/a"
        compiled = subprocess.run(["chroot", image[0], "sh", "-c", line])
        assert compiled.returncode == 42, compiler
