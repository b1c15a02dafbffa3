"""The command line: one file per command. What a command does is one Python call, which its
help names."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Any

from attoscope import __version__

_INTERRUPTED = 130
# A command's own word for: interrupted, and what was finished by then is written.
PARTIAL = 131


def main() -> None:
    """Run the command line. Bad input: one sentence and exit code 2, never a traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; gives its exit code.

    0 done; 1 `--fail-on` met, or a promise of `check` broken; 2 bad input; 3 a fault of ours, with
    a traceback to report; 130 interrupted.
    """
    if arguments == ["--version"]:
        print(f"attoscope {__version__}")
        return 0
    try:
        code = _run(arguments or ["--help"])
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        print("attoscope: interrupted; nothing was written", file=sys.stderr)
    return _INTERRUPTED if code == PARTIAL else code


def _run(arguments: list[str]) -> int:
    import typer

    from attoscope.cli.app import app
    from attoscope.errors import AttoscopeError

    # Some versions of typer bring their own click: take its errors from what it exports.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        # typer gives 130 for an interrupt that nobody caught.
        return int(app(arguments, standalone_mode=False, prog_name="attoscope") or 0)
    except AttoscopeError as error:
        return _complain(str(error))
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "attoscope"
        return _complain(f"{error.format_message()} (see {command} --help)")
    except typer.Exit as error:
        return int(error.exit_code)
    except typer.Abort:
        return _INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader went away (as in `| head`), which typer turns into an exit: no fault of ours.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return _fault()
        return _complain(f"what is to be printed cannot be written ({error.strerror})")
    except Exception:
        return _fault()


def _fault() -> int:
    traceback.print_exc()
    print(
        "attoscope: this is a fault of attoscope; please report it with the lines above",
        file=sys.stderr,
    )
    return 3


def _complain(sentence: str) -> int:
    print(f"attoscope: {' '.join(sentence.split())}", file=sys.stderr)
    return 2
