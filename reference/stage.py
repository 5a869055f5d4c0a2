"""How a stage's command line fails: one line on stderr, exit status 2."""

import sys
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except (ArithmeticError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
