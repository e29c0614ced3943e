"""Named checks that run one after the other: a line each, and an exit code at the end."""

import sys
import time
import traceback
from typing import Callable

_checks: list[tuple[str, Callable]] = []


def check(function: Callable) -> Callable:
    """Registers a function. Its name is the sentence that it checks."""
    _checks.append((function.__name__.replace("_", " "), function))
    return function


def run(*args) -> None:
    """Runs every registered check with `args` and exits: 0 if all held, else 1."""
    failed = []
    for name, function in _checks:
        started = time.monotonic()
        try:
            function(*args)
        except Exception:  # a check may raise any exception; the other checks still run
            traceback.print_exc(file=sys.stdout)
            failed.append(name)
        word = "FAILED" if name in failed else "ok"
        print(f"{word:<6} {time.monotonic() - started:6.2f} s  {name}", flush=True)
    print(f"{len(_checks) - len(failed)} of {len(_checks)} checks passed", flush=True)
    sys.exit(1 if failed else 0)


def raises(kind: type[Exception], function: Callable, *args, **kwargs) -> Exception:
    """Returns the exception of exactly this type that the call raises."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")
