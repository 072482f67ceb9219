"""Host ids for sessions, where root gives them away.

Each session gets two uids of its own: the kernel's and pid 1's. A home takes a block of them and keeps it; blocks
are claimed machine-wide by files in a directory, so that two homes never share an id. The ids lie where systemd
says that nobody allocates (above its container range).
"""

import fcntl
from pathlib import Path

from holdfast.errors import SandboxUnavailable

REGISTRY = Path("/var/lib/holdfast/uid-blocks")
FIRST = 1_900_000_000
BLOCK = 8192
BLOCKS = 10_000


class IdBlock:
    """The ids of one home, handed out in pairs."""

    def __init__(self, base: int) -> None:
        self._free = [base + offset for offset in range(BLOCK - 2, -2, -2)]

    def take(self) -> tuple[int, int]:
        """A kernel id and an init id that no living session has."""
        if not self._free:
            raise SandboxUnavailable(
                f"all {BLOCK // 2} pairs of user ids are taken", hint="close sessions that are not needed"
            )
        kernel_id = self._free.pop()
        return kernel_id, kernel_id + 1

    def give_back(self, kernel_id: int) -> None:
        self._free.append(kernel_id)


def claim_block(home: Path, registry: Path = REGISTRY) -> IdBlock:
    """This home's block: the one it has, or the first that no existing home claims."""
    registry.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One at a time: of two that find the claim of a home that is gone, the second would take the first one's.
    with open(registry / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return IdBlock(FIRST + _claim(str(home), registry) * BLOCK)


def _claim(home: str, registry: Path) -> int:
    """The number of the home's block."""
    claims = {int(path.name): path.read_text() for path in registry.iterdir() if path.name.isdigit()}
    mine = next((number for number, owner in claims.items() if owner == home), None)
    if mine is not None:
        return mine
    for number in range(BLOCKS):
        owner = claims.get(number, "")  # empty too if its claimant was killed before he wrote his name
        if not owner or not Path(owner).exists():
            (registry / str(number)).write_text(home)
            return number
    raise SandboxUnavailable(
        "no block of user ids is left", hint=f"remove the claims of homes that are gone from {registry}"
    )
