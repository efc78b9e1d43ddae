"""--audit-every N: a device that computes wrongly, without an error, is found and named."""

from utils.settings.option import OPERATIONAL, option, options


@options
class OPTIONS:
    """Fault tolerance: a time limit (exit code 76), wrong computation (71), non-finite gradients (80)"""

    audit_every: int = option(0, "every N optimizer steps each process computes a micro-batch of another one again; if"
                              " the bits differ, the run ends with 71 and names the device; 0 = off", OPERATIONAL,
                              at_least=0, kept=False, rare=True)
