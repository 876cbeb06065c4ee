"""``torchhook``: the commands together, and what is printed when one of them fails."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from torchhook._cli import console, model_commands, store_commands
from torchhook._cli.errors import Trouble, spoken, told
from torchhook._version import __version__

app = typer.Typer(
    name="torchhook",
    help="See, keep and change everything that flows through a PyTorch model.",
    epilog="Exit codes: 0 done, 1 a difference or a broken shard was found, 2 it could not be done.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Not rich's pages of traceback: ``main`` says it in one line.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    model_commands.layers,
    model_commands.run,
    model_commands.report,
    model_commands.diff,
    store_commands.extract,
):
    app.command(command.__name__)(command)
app.add_typer(store_commands.features, name="features")


@app.command()
def demo() -> None:
    """A pretrained network on real photographs, offline."""
    from torchhook import demo as shown  # it needs packages that the other commands do not

    shown.main()


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors are told on stderr without a traceback, and the exit code is 2.

    The environment variable ``TORCHHOOK_TRACEBACK=1`` shows where they come from.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            app(None if arguments is None else list(arguments))
    except KeyboardInterrupt:
        # What shells give for an interrupt: 128 and the number of the signal.
        raise SystemExit(130) from None
    except BrokenPipeError:  # ``| head`` has seen enough
        # Python flushes stdout once more on its way out, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if os.environ.get("TORCHHOOK_TRACEBACK"):
            traceback.print_exc()
        # Our own messages stand by themselves; of others, KeyError: 'x' for one, the class is half of what is said.
        name = "" if isinstance(error, Trouble) or type(error).__module__.startswith("torchhook.") else _kind(error)
        console.say(f"torchhook: {name}{spoken(told(error))}")
        raise SystemExit(2) from None


def _say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # Of ours, the line of Python that they point at is the command's own, and says nothing to its user.
    ours = category.__module__.startswith("torchhook.")
    console.say(
        f"torchhook: {spoken(str(message))}" if ours else f"{filename}:{lineno}: {category.__name__}: {message}"
    )


def _kind(error: Exception) -> str:
    return "" if isinstance(error, (FileNotFoundError, ValueError)) else f"{type(error).__name__}: "
