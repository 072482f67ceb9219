"""python -m holdfast.environments --home DIR: prepare the environment ahead of the first session."""

import argparse
import sys
from pathlib import Path

import anyio

from holdfast.environments import Progress, Report, ensure
from holdfast.errors import HoldfastError
from holdfast.visible import visible


def main(report: Report, prog: str | None = None) -> int:
    """Build the managed environment and print its path."""
    parser = argparse.ArgumentParser(prog, description=main.__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--python", help="base interpreter (default: the one that runs holdfast)")
    chosen = parser.parse_args()
    try:
        print(anyio.run(lambda: ensure(chosen.home, python=chosen.python, report=report)).prefix)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print_phases() -> Report:
    shown: list[str] = []

    def report(progress: Progress) -> None:
        if progress.phase not in shown:
            shown.append(progress.phase)
            print(visible(f"environment: {progress.phase} {progress.text}").rstrip(), file=sys.stderr)

    return report


if __name__ == "__main__":
    sys.exit(main(_print_phases(), "python -m holdfast.environments"))
