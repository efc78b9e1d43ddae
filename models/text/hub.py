"""What --model and --tokenizer name: local folders, or copies from the Hugging Face hub; what a run keeps of them.

A name on the hub is fetched once per node, at one commit for the whole run; then only local folders are read.
"""

import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import huggingface_hub
from transformers import PreTrainedTokenizerBase

from data.texts.tokenizer import load_tokenizer, train_tokenizer
from models.text.bert import BUILT, config_of, read_config, takes_types
from utils.distributed.world import World, is_folder
from utils.errors import Exit, UserError, first_line
from utils.files import folder_digest
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run, require_shared
from utils.settings.config import MaskedLMConfig, TextClassificationConfig
from utils.settings.option import is_model_folder
from utils.settings.spelling import suggestion

# who owns the models that are also known without an owner; bert-base, a size, is none of them
OWNERS = {"google-bert": r"bert-(base|large)-", "distilbert": "distilbert-base-", "albert": "albert-",
          "FacebookAI": "(xlm-)?roberta-(base|large)"}
FILES = ("*.json", "*.txt", "*.model", "model*.safetensors")  # weights, tokenizer, their settings


def find_folder(name: str, run: Run, world: World) -> str | None:
    """The local folder of a model or tokenizer: `name` itself, or its copy from the hub; None if BUILT. Collective.

    A name of the hub is one commit for the whole run and on every node: the one that rank 0 fetched first, kept in
    auto.json. Raises UserError (66) if there is no such folder and it cannot be fetched.
    """
    # what the name means
    is_local = is_folder(name, world)  # Collective: on all nodes or on none.
    world.everywhere(lambda: _check(name))  # Collective.
    if is_local or name in BUILT:
        return name if is_local else None

    # the commit, then the files on every node
    commits = run.resolve("hub", "auto", dict)
    kept = commits.get(name)
    commit = world.on_rank_zero(lambda: Path(_fetch(name, kept, kept)).name, takes_long=True)  # Collective.
    run.keep(hub=commits | {name: commit})
    world.on_rank_zero(lambda: _fetch(name, commit, kept), per_node=True)  # Collective.
    return world.everywhere(lambda: _fetch(name, commit, kept, local_files_only=True))  # Collective.


def resolve_encoder(name: str, run: Run, world: World) -> str | None:
    """RUN/encoder, which has the config of the encoder that --model names; None for one of BUILT. Collective.

    Kept from the run's first start on, so that a later start does not need the hub.
    Raises UserError: 66 if --model has no config, 78 if the kept one changed.
    """
    folder, is_kept = run.path / "encoder", run.resolved.encoder is not UNSET
    source = None if is_kept else find_folder(name, run, world)  # Collective.
    if not is_kept and (source is None or run.is_read_only):
        return source

    def keep() -> None:
        if not is_kept:
            read_config(source)
            run.replace_folder("encoder", lambda unnamed: shutil.copy(Path(source, "config.json"), unnamed))

    world.on_rank_zero(keep)  # Collective.
    digest = require_shared(folder, partial(folder_digest, folder), world)  # Collective.
    run.require_same("encoder", digest, f"the encoder's config in {folder}")
    return str(folder)


def resolve_tokenizer(
    config: TextClassificationConfig | MaskedLMConfig, encoder: str | None, texts: Callable[[], Iterable[str]],
    run: Run, world: World
) -> tuple[PreTrainedTokenizerBase, str]:
    """RUN/tokenizer and its sha256: that of --tokenizer or --model, or trained on texts(). Collective.

    Made at the run's first start, kept from then on. encoder: of resolve_encoder.
    Raises UserError: 64 or 66 if there is none, what texts() raises, 78 if the kept one changed.
    """
    # where it comes from
    folder, is_kept, source = run.path / "tokenizer", run.resolved.tokenizer is not UNSET, None
    if not is_kept:
        given = config.text.tokenizer
        source = find_folder(config.model.model if given == "auto" else given, run, world)  # Collective.
        if given != "auto" and source is None:
            raise UserError(f"--tokenizer {given}: a --model that is built from scratch has no tokenizer; leave it out,"
                            " and one is trained")
    has_types = world.everywhere(lambda: takes_types(config_of(config.model.model, encoder)))  # Collective.

    def write(folder: Path) -> None:
        tokenizer = load_tokenizer(source) if source else train_tokenizer(texts(), config.text.vocab_size)
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids" or has_types]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # init_kwargs are saved
        tokenizer.save_pretrained(folder)

    # weights as they are: there is no run to keep it
    if not run.is_there:
        if source is None:
            raise UserError(f"--eval-only: --model {config.model.model} is built from scratch and has no weights; name"
                            " a model folder, or a transformers name")
        with TemporaryDirectory() as own:
            world.everywhere(lambda: write(Path(own)))  # Collective.
            digest = world.on_rank_zero(lambda: folder_digest(Path(own)))  # Collective.
            return world.everywhere(lambda: load_tokenizer(own)), digest  # Collective.

    # keep it
    world.on_rank_zero(lambda: is_kept or run.replace_folder("tokenizer", write), takes_long=True)  # Collective.
    digest = require_shared(folder, partial(folder_digest, folder), world)  # Collective.
    run.require_same("tokenizer", digest, f"the tokenizer in {folder}")
    return world.everywhere(lambda: load_tokenizer(str(folder))), digest  # Collective.


def _check(name: str) -> None:
    """Raise UserError (66) if `name` is a folder of something else, or can be neither built nor a name of the hub."""
    path, files = Path(name), {"config.json", "tokenizer_config.json", "tokenizer.json"}
    if is_model_folder(name):
        if not files & {file.name for file in path.iterdir()}:
            raise UserError(f"{name} is not a model folder: it needs a config.json with a model_type,"
                            " as RUN/model of a text run has", Exit.NO_INPUT)
    elif name not in BUILT and (path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise UserError(f"{name}: there is no such model folder; give a folder, one of {', '.join(BUILT)}, or a name on"
                        " the hub", Exit.NO_INPUT)


def _fetch(name: str, commit: str | None, kept: str | None, local_files_only: bool = False) -> str:
    """The folder of `commit` (None: the newest) in the hub's cache, fetched if need be. Raises UserError (66).

    The cache alone counts where the hub cannot be reached: huggingface_hub 1 asks it for a commit that is there, too.

    kept: the commit of an earlier start of this run, if any.
    """
    # fetch
    reason = ""
    for is_local in sorted({local_files_only, True}):
        try:
            return huggingface_hub.snapshot_download(
                name, revision=commit, allow_patterns=list(FILES), local_files_only=is_local)
        except Exception as error:  # without a network: of an HTTP client that depends on the version
            reason = reason or first_line(error)

    # the ways out
    cache = huggingface_hub.constants.HF_HUB_CACHE
    if kept:
        raise UserError(f"{name} at commit {kept}, which this run uses, cannot be fetched from the hub ({reason}). Ways"
                        f" out: copy a hub cache that has this commit to {cache}; or start over with --fresh",
                        Exit.NO_INPUT)
    owner = next((owner for owner, begin in OWNERS.items() if re.match(begin, name)), None)
    meant = "" if owner else suggestion(name, BUILT, " It is trained from scratch")
    full = f"{owner}/{name}" if owner else name
    raise UserError(
        f"{name} is not a folder, not one of {', '.join(BUILT)}{meant}, and"
        f"{f' {full}, its full name,' if owner else ''} cannot be fetched from the hub ({reason})."
        f" Ways out: fetch it elsewhere (hf download {full} --local-dir DIR) and pass DIR; or copy the hub's cache to"
        f" {cache}; or give --model one of these names, to train from scratch"
        f"{' (another model, with random weights)' if owner else ''}", Exit.NO_INPUT)
