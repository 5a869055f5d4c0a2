"""A stage's command line: how it fails, which is with one line on stderr and exit status 2."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, `error: <argument>: <value>: <reason>`."""

    def error(self, message: str) -> NoReturn:
        needed = "the following arguments are required: "
        if message.startswith(needed):
            message = f"{message.removeprefix(needed)}: missing: needed"
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def json_object(text: str) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object")
    return value


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except MemoryError as error:
        _fail(f"memory: out of memory: {error}")
    except OSError as error:
        _fail(f"{error.filename or 'file'}: {error.strerror}: cannot be read or written")
    except (ArithmeticError, ValueError) as error:
        _fail(error)


def _fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
