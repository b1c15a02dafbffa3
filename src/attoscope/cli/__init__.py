"""The command line: one file per command. What a command does is one Python call, which its
help names."""

from __future__ import annotations

import sys
from typing import Any

from attoscope import __version__


def main() -> None:
    """Run the command line. Bad input: one sentence and exit code 2, never a traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; gives its exit code (0 done, 1 `--fail-on` met, 2 bad input)."""
    if arguments == ["--version"]:
        print(f"attoscope {__version__}")
        return 0
    import typer

    from attoscope.cli.app import app
    from attoscope.errors import AttoscopeError

    # Some versions of typer bring their own click: take its errors from what it exports.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        code = app(arguments or ["--help"], standalone_mode=False, prog_name="attoscope")
    except AttoscopeError as error:
        return _complain(str(error))
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "attoscope"
        return _complain(f"{error.format_message()} (see {command} --help)")
    except typer.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("attoscope: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (as in `| head`): not an error of the user's.
        sys.stderr.close()
        return 0
    return int(code or 0)


def _complain(sentence: str) -> int:
    print(f"attoscope: {' '.join(sentence.split())}", file=sys.stderr)
    return 2
