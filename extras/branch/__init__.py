"""--branch RUN@STEP: a new run that begins as another one was after a step, with what this command changes.

The command line reads this before torch is imported: the settings of a branch are RUN's at that step.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extras.branch.parent import find_parent, folder_beside, name_of_run, parts_of
from utils.errors import Exit, UserError
from utils.files import read_json
from utils.rundir.identity import settings_in
from utils.settings.config import CONFIGS, facts
from utils.settings.option import OPERATIONAL, option, options
from utils.settings.spelling import setting_of


@options
class OPTIONS:
    """The run: what, where, how long"""

    branch: str | None = option(None, "begin as another run was after a step, with its settings but those given here;"
                                " RUN = its last step; RUN@best; RUN@epoch:N", OPERATIONAL, kept=False, in_file=False,
                                path="run@step")

    @property
    def beginning(self) -> str:
        """The module whose begin() lays out what the branch begins with."""
        return "extras.branch.begin" if self.branch else ""

    @staticmethod
    def base(flags: Sequence[Sequence[str]]) -> dict[str, Any]:
        """What the settings of this command line begin with: those of RUN, and the run directory; {} without --branch.

        flags: as split() returns them. Raises UserError: 64, 66 where RUN or its checkpoint is missing.
        """
        given = {setting_of(word): behind for word, *behind in flags}
        if not (spec := "".join(given.get("branch", []))):
            return {}
        if wrong := [word for word in ("check", "eval_only", "config") if word in given]:
            raise UserError(f"--branch {spec}: a branch is trained with RUN's settings and those given here; leave"
                            f" --{wrong[0].replace('_', '-')} out")
        run, word = parts_of(spec)
        path = Path("".join(given.get("run_dir", [])) or folder_beside(run) / name_of(run, word, flags))
        begun = {} if "fresh" in given else read_json(path / "auto.json")
        if not begun:
            return find_parent(spec).settings | {"run_dir": str(path)}
        if [begun.get("branch", {}).get(name) for name in ("run", "at")] != [name_of_run(run), word]:
            raise UserError(f"--branch {spec}: {path} is another run; use another --run-dir", Exit.OTHER_RUN)
        return settings_in(path / "config.yaml") | {"run_dir": str(path)}  # RUN may be gone


def name_of(run: Path, word: str, flags: Sequence[Sequence[str]]) -> str:
    """The name of a branch's directory: by the words of its command, so that it is found when RUN is gone."""
    known = {name: fact for config in CONFIGS.values() for name, fact in facts(config()).items()}
    settings = {name: flag for flag in flags for name in (setting_of(flag[0]), setting_of(flag[0]).removeprefix("no_"))}
    naming = [flag for name, flag in settings.items() if name in known and known[name].kind != OPERATIONAL]
    digest = hashlib.sha256(json.dumps(sorted(naming)).encode()).hexdigest()[:8]
    return f"{name_of_run(run)}@{word.replace(':', '-')}-{digest}"
