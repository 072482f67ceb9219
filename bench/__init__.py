"""What Holdfast costs, measured side by side with ipykernel in one run: `make bench`."""

import os
from pathlib import Path

# The clone's own home, as for the tests: never the user's.
os.environ.setdefault("HOLDFAST_HOME", str(Path(__file__).parents[1] / ".home"))
