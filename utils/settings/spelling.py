"""Words become settings; if nothing can be made of one, one line says what is wrong, and what was meant.

    read_settings(split(["--lr", "0.1", "--fresh"]), "masked-lm")             # {"lr": 0.1, "fresh": True}
    read_settings(split(["--learning-rate", "0.1"]), "masked-lm")             # UserError: --learning-rate: use --lr

Nothing here imports torch.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

from utils.errors import UserError
from utils.settings.config import CONFIGS, flag, types
from utils.settings.habits import answer
from utils.settings.option import UNIONS, parse, rule_of

_FLAG = re.compile("--|-[a-zA-Z]")  # not -1


def split(words: Iterable[str]) -> list[list[str]]:
    """Each flag with the words behind it: [["--lr", "0.1"], ["--fresh"]]. Words before the first flag stand alone."""
    found: list[list[str]] = []
    for word in words:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            found.append([name, value] if equals else [name])
        elif found:
            found[-1].append(word)
        else:
            found = [[word]]
    return found


def setting_of(word: str) -> str:
    """The name of the setting that a flag spells: --global-batch-size and --global_batch_size are global_batch_size."""
    return word[2:].replace("-", "_") if word.startswith("--") else ""


def read_settings(flags: Sequence[Sequence[str]], task: str, where: str = "") -> dict[str, Any]:
    """The settings of a command line as {name: value}, from split(). A later flag counts.

    Raises UserError: one message for all unknown flags, or one for the first wrong value, which begins with `where`.
    """
    kinds = types(CONFIGS[task]())
    meanings = {name: (name, True) for name in kinds}
    meanings |= {f"no_{name}": (name, False) for name, kind in kinds.items() if kind is bool}
    if unknown := dict.fromkeys(word for word, *_ in flags if setting_of(word) not in meanings):
        raise UserError("; ".join(_unknown(word, task) for word in unknown))
    values = {}
    for word, *behind in flags:
        name, is_on = meanings[setting_of(word)]
        try:
            value = parse(kinds[name], behind)
        except ValueError:
            raise UserError(where + _wrong(word, behind, name, task)) from None
        values[name] = value if is_on else not value
    return values


def what_to_say(name: str, task: str) -> str:
    """Of an unknown setting, in any spelling."""
    said = answer(name.lstrip("-").replace("_", "-"), task)
    return said or f"unknown; `train.py --task {task} --help-all` lists the settings"


def _unknown(word: str, task: str) -> str:
    if _FLAG.match(word):
        return f"{word}: {what_to_say(word, task)}"
    key, equals, _ = word.partition("=")
    way_out = "a setting is --name value"
    if equals:
        is_setting = setting_of(f"--{key}") in types(CONFIGS[task]())
        way_out = f"write --{word}" if is_setting else what_to_say(key, task)
    return f"{word}: this belongs to no setting; {way_out}"


def _wrong(word: str, behind: Sequence[str], name: str, task: str) -> str:
    """The message about a flag with a wrong value, or with more words behind it than its values."""
    kind = types(CONFIGS[task]())[name]
    given = " ".join([word, *(each or "''" for each in behind)])
    if kind is bool:
        return f"{given}: a switch is {flag(name)} or {flag(f'no_{name}')}; in a file true or false"
    choices = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
    num_values = max(len(get_args(each)) if get_origin(each) is tuple else 1 for each in choices)
    if len(behind) > num_values:
        return _unknown(behind[num_values], task)
    return f"{given}: give a value" if str in choices else f"{given}: must be {rule_of(kind)}"


def suggestion(word: str, known: Iterable[str], about: str = "") -> str:
    """" (did you mean ...?)", or nothing. about: more words, about what may be meant."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]}?{about})" if match else ""
