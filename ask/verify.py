"""Verify a run: train its steps again in a temporary directory, and compare what each of its checkpoints meant.

    python -m ask.verify RUN                            # from the beginning to the last checkpoint
    python -m ask.verify RUN --from 4000 --to 5000      # from a checkpoint that was kept (--keep-every)
    python -m ask.verify RUN --keep 4100                # and keep the checkpoint of a step, to branch from it
    python -m ask.verify RUN --chain-only               # compute nothing: do the files belong together?
    torchrun --nproc-per-node=2 -m ask.verify RUN       # with --strategy exact on any number of processes

The run stays as it is, but for --keep. Exit code 0: verified. 83: the run is not what its directory says. 78: it cannot
be compared here, because bits differ and so does what computed them. 75: stopped. The training itself prints to
standard error.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ask.command_line import answer, begin, parser_of

PARSER = parser_of("verify", __doc__, "RUN")
PARSER.add_argument("--from", dest="first", type=int, metavar="STEP",
                    help="begin with the newest checkpoint up to this step; by default with the run")
PARSER.add_argument("--to", dest="last", type=int, metavar="STEP",
                    help="end with the first checkpoint that the run saved from this step on; by default with the last")
PARSER.add_argument("--keep", type=int, metavar="STEP", help="verify from the newest checkpoint before this step to the"
                    " first saved step after it, and put the step's checkpoint into RUN")
PARSER.add_argument("--output", metavar="FILE", help="write a receipt: an in-toto Statement about RUN/model, as JSON")
PARSER.add_argument("--with-places", action="store_true", help="with the paths of data and weights in the receipt")
PARSER.add_argument("--chain-only", action="store_true", help="compute nothing: do the files belong together?")

if __name__ == "__main__":  # before torch is imported
    GIVEN, WATCHDOG = begin(PARSER)

from ask.again import SAMPLES, Again, key_of
from ask.integrity import findings, model_of, not_covered
from ask.keep import cut_at, keep
from ask.record import Part, Record, parts_of, read_run, require_begun, starts_of
from ask.repeat import computing, differences
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, say
from utils.files import file_sha256
from utils.output_files import open_output, require_output, without_places
from utils.rundir.chain import FILE, files_in
from utils.rundir.starts import describe

PREDICATE = "urn:lockstep:verification:1"  # what the rest of a receipt means: docs/asking.md


def main(given: argparse.Namespace, watchdog: Watchdog) -> Exit:
    """Answer on standard output. Collective. Raises UserError."""
    write = partial(write_receipt, given.output, Path(given.run), given.with_places)
    if given.keep and (given.chain_only or given.first or given.last):
        raise UserError("--keep: it says which steps are verified; leave --from, --to and --chain-only out")
    if given.chain_only and given.output:
        raise UserError("--output: a receipt is about steps that are computed again; leave --chain-only out")
    run, is_main = Path(given.run), os.environ.get("RANK", "0") == "0"
    if given.chain_only:  # no group of processes, and no start that could be opened, is needed
        found = []
        if is_main:
            require_begun(given.run)
            found = findings(run)
            rest = "" if found else not_covered(run)
            result = f"differs: {run}" if found else f"the files of {run} belong together" + (
                f"; no link covers {rest}" if rest else "")
            say("\n".join([*found, result]), sys.stdout)
        return Exit.DIFFERS if found else Exit.DONE

    with computing([given.run], given.device, watchdog) as place:  # Collective.
        # the files
        world, here = place.world, describe(place.world)  # Collective.
        note = partial(say, stream=sys.stdout) if world.is_main else lambda text: None
        if given.output:
            world.on_rank_zero(partial(require_output, given.output))  # Collective.
        if found := world.on_rank_zero(partial(findings, run), takes_long=True):  # Collective.
            note("\n".join([*found, f"differs: {run}"]))
            world.on_rank_zero(lambda: write("differs", found, here))  # Collective.
            return Exit.DIFFERS

        # the steps
        record = read_run(given.run, world, *given.data)  # Collective.
        ends = (given.keep - 1, given.keep) if given.keep else (given.first, given.last)
        parts, words = cut_at(parts_to_verify(record, *ends, world), given.keep), ""  # Collective.
        apart = [(start, differences(start, world) | not_promised(start))  # Collective.
                 for start in starts_of(record, parts)]
        again = Again(place, record, parts, apart, note, given.keep)
        again.announce()
        try:
            for part in parts:
                again.train(part)  # Collective.
            world.on_rank_zero(again.require_all)  # Collective.
        except UserError as error:
            if error.code != Exit.DIFFERS:
                raise
            words = str(error)
        code = Exit(world.on_rank_zero(lambda: conclude(again, words, write, here)))  # Collective.
        if given.keep and code == Exit.DONE:
            note(f"kept: {world.on_rank_zero(lambda: str(keep(again, given.keep)))}")  # Collective.
        return code


def conclude(again: Again, words: str, write: Callable[..., None], here: dict[str, Any]) -> int:
    """Say the result, and write the receipt; on rank 0. Returns the exit code.

    words: what differs, or "". write: write_receipt, of this run. here: what computed it, see describe.
    """
    # RUN/model; files_in differs while the run is replacing it
    record, run = again.record, again.record.path
    links = {step: link for step, link in record.links.items() if key_of(link) in again.seen}
    model = model_of(record.links.values())
    is_known = model["step"] in {0, *links} and files_in(run / "model") == model["model"]

    # the result
    if words:
        by = max(link["start"] for step, link in record.links.items() if step <= [*again.seen][-1][0])
        reasons = [each for start, differ in again.apart if start["start"] <= by for each in differ.values()]
        found = [*dict.fromkeys(filter(None, [words, again.differing_record(), *reasons]))]
        result, code = ("cannot be compared here", Exit.OTHER_RUN) if reasons else ("differs", Exit.DIFFERS)
        what = ""
    else:
        behind = not_covered(run) if max(links) == max(record.links) else ""
        of_model = "" if is_known or "RUN/model" in behind else "RUN/model, which is not of these steps"
        left_out = [of_model, behind, *sorted(again.unsaid - {SAMPLES})]
        found = [f"not verified: {text}" for text in left_out if text]
        result, code = "verified in part" if found else "verified", Exit.DONE
        what = (f", {again.steps}: {counted(len(links), 'link')} and all records are the same"
                + f"; RUN/model is that of step {model['step']}" * bool(is_known and model["step"])
                + f"; {SAMPLES} is not compared, as it was not noted from the beginning" * (SAMPLES in again.unsaid))
    again.note("\n".join([*found, f"{result}: {run}{what}"]))

    # the receipt
    write(result, found, here, steps=[again.parts[0].first + 1, again.parts[-1].last],
          model_step=model["step"] if is_known and not words else None,
          links=links, head=[*record.links.values()][-1]["link"],
          computed={step: again.seen[key_of(link)].get("content") for step, link in links.items()},
          starts=[start for start, _ in again.apart],
          parents=[start["resolved"]["branch"] for start in record.starts if "branch" in start["resolved"]][:1])
    return int(code)


def write_receipt(output: str | None, run: Path, has_places: bool, result: str, found: list[str],
                  here: dict[str, Any], **steps: Any) -> None:
    """What was found of the files of RUN/model, as JSON: an in-toto Statement, which names no place, host or user.

    output: None = nowhere. steps: what was computed again, if anything was.
    Source: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
    """
    if not output:
        return
    subject = {f"model/{name}": digest for name, digest in files_in(run / "model").items()}
    subject = subject or {FILE: file_sha256(run / FILE)}  # nothing was evaluated
    about = {"result": result, "found": [text.replace(f"{run}/", "") for text in found], "run": run.absolute().name,
             **steps, "computed_on": here, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    with open_output(output) as file:
        json.dump({"_type": "https://in-toto.io/Statement/v1",
                   "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subject.items()],
                   "predicateType": PREDICATE, "predicate": about if has_places else without_places(about)},
                  file, indent=1)


def not_promised(start: Mapping[str, Any]) -> dict[str, str]:
    """Why the bits of this start need not repeat on the same machine: docs/reliability.md."""
    settings = start["settings"]
    is_deterministic = settings["deterministic"] or start["resolved"]["device"] == "cpu"
    kinds = {"with --compile": settings["compile"], "without --deterministic": not is_deterministic}
    return {kind: f"trained {kind}" for kind, is_so in kinds.items() if is_so}


def parts_to_verify(record: Record, first: int | None, last: int | None, world: World) -> list[Part]:
    """What is computed again. first, last: as the user gave them. Collective. Raises UserError (64)."""
    links = record.links
    ends = sorted(step for step in links if step > (first or 0) and step >= (last or 1))
    if not ends or (last and last < (first or 0)):
        raise UserError(f"{record.path} has saved steps up to {max(links, default=0)}; what is verified ends with one"
                        " of them, and begins before it: --from A --to B with A before B")
    return parts_of(record, first or 0, ends[0] if last else ends[-1], world)  # Collective.


if __name__ == "__main__":
    answer(main, GIVEN, WATCHDOG, PARSER)
