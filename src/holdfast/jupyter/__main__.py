"""`python -P -m holdfast.jupyter -f CONNECTION_FILE`: what a Jupyter server starts; see `spec.py`."""

import sys

from holdfast.jupyter import settings
from holdfast.jupyter.app import KernelApp


def main() -> None:
    chosen, theirs = settings.chosen(sys.argv[1:])
    KernelApp.launch_instance(argv=theirs, chosen=chosen)


if __name__ == "__main__":
    main()
