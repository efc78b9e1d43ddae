"""Words of a command line that nothing can be made of: one line that says what is wrong, and what was meant.

    check_flags(["--learning-rate", "0.1"], "masked-lm")       # UserError: --learning-rate: use --lr

Nothing here imports torch.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args, get_origin

from utils.errors import UserError
from utils.settings.config import CONFIGS, facts, flag, types
from utils.settings.habits import answer
from utils.settings.option import UNIONS, rule_of

_FLAG = re.compile("--?[a-zA-Z]")  # not -1


def check_flags(argv: Iterable[str], task: str) -> None:
    """Raise UserError if there are unknown flags: one message for all of them."""
    known = {flag(name) for name in facts(CONFIGS[task]())}
    known |= {flag(f"no_{name}") for name, kind in types(CONFIGS[task]()).items() if kind is bool}
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if _FLAG.match(word))
    if unknown := [word for word in flags if _spelled(word) not in known]:
        raise UserError("; ".join(f"{word}: {what_to_say(word, task)}" for word in unknown))


def what_to_say(name: str, task: str) -> str:
    """Of an unknown setting, in any spelling."""
    said = answer(name.lstrip("-").replace("_", "-"), task)
    return said or f"unknown; `train.py --task {task} --help-all` lists the settings"


def one_by_one(words: Iterable[str]) -> Iterator[list[str]]:
    """Each flag with the words behind it."""
    each: list[str] = []
    for word in words:
        if each and _FLAG.match(word):
            yield each
            each = []
        each.append(word)
    yield each


def what_is_wrong(words: Sequence[str], task: str) -> str:
    """The message about a flag with a wrong value, or with more words behind it than its values."""
    kinds = {flag(name): kind for name, kind in types(CONFIGS[task]()).items()}
    name, stray = _spelled(words[0]), words[0]
    if name.replace("--no-", "--") in kinds:
        # a flag
        name = name.replace("--no-", "--")
        kind = kinds[name]
        if kind is bool:
            return f"{' '.join(words)}: a switch is {name} or {name.replace('--', '--no-')}; in a file true or false"
        choices = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
        num_values = max(len(get_args(each)) if get_origin(each) is tuple else 1 for each in choices)
        end = num_values + ("=" not in words[0])
        if len(words) <= end:
            return f"{' '.join(words)}: must be {rule_of(kind)}"
        stray = words[end]

    # a word that is no value of it
    key, equals, _ = stray.partition("=")
    way_out = "a setting is --name value"
    if equals:
        way_out = f"write --{stray}" if flag(key) in kinds else what_to_say(key, task)
    return f"{stray}: this belongs to no setting; {way_out}"


def suggestion(word: str, known: Iterable[str], about: str = "") -> str:
    """" (did you mean ...?)", or nothing. about: more words, about what may be meant."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]}?{about})" if match else ""


def _spelled(word: str) -> str:
    """--global_batch_size=8 is --global-batch-size; a word that is no flag stays as it is."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
