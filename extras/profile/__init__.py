"""--profile N: the first steps of a start, as torch.profiler sees them."""

from utils.settings.option import OPERATIONAL, option, options


@options
class OPTIONS:
    """Records and checkpoints"""

    profile: int = option(0, "record this many optimizer steps of this start with torch.profiler, in RUN/profile; 0 ="
                          " off", OPERATIONAL, at_least=0, kept=False, rare=True)
