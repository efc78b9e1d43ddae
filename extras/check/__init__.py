"""--check: look at the data and the machine before a training, in place of it."""

from utils.settings.option import OPERATIONAL, option, options


@options
class OPTIONS:
    """The run: what, where, how long"""

    check: bool = option(False, "look at data and machine, say what stands in the way, and end", OPERATIONAL,
                         kept=False, in_file=False)

    @property
    def mode(self) -> str:
        """The module whose run() takes the place of a training; "" = none."""
        return "extras.check.mode" if self.check else ""
