"""A home of which something is lost is used again: `holdfast accept-loss`, `holdfast keys rotate`."""

import asyncio
import json
from pathlib import Path

from holdfast.config import Settings, home_path
from holdfast.home import acquire
from holdfast.opening import accept_loss
from holdfast.signing import Link, SigningKey, chain_of_home


def accept(home: Path | None, *, as_json: bool) -> int:
    """Accept what is there, and print what that meant."""
    told = asyncio.run(accept_loss(Settings(home=home_path(home))))
    if as_json:
        print(json.dumps({"done": told}))
    else:
        print("\n".join(told) or "nothing is lost: nothing was done")
    return 0


def rotate_key(home: Path | None) -> list[Link]:
    """Make a new key that signs receipts, while nobody owns the home. Returns the chain, oldest key first."""
    owned = acquire(home_path(home))
    try:
        SigningKey.rotate(owned.keys)
        return chain_of_home(owned.path)
    finally:
        owned.release()
