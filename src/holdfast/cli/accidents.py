"""`holdfast accept-loss`: a home whose journal is lost is used again."""

import asyncio
import json
from pathlib import Path

from holdfast.config import Settings, home_path
from holdfast.opening import accept_loss


def accept(home: Path | None, *, as_json: bool) -> int:
    """Accept what is there, and print what that meant."""
    told = asyncio.run(accept_loss(Settings(home=home_path(home))))
    if as_json:
        print(json.dumps({"done": told}))
    else:
        print("\n".join(told) or "nothing is lost: nothing was done")
    return 0
