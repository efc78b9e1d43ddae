"""models.predict in this process, for tests that look at what it prints and at its exit code."""

import sys
import traceback

from models import predict
from utils.errors import Exit, explain


def ended(words: list[str]) -> int:
    """The exit code of models.predict; an error is printed as exit_after does it."""
    try:
        return predict.main(words)
    except Exception as error:
        message, code = explain(error, **predict.WAYS_OUT)
        if code == Exit.INTERNAL:
            traceback.print_exc()
        print(f"predict: {message}", file=sys.stderr)
        return code
