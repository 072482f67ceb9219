"""What a host is busy with when it dies. Each begins on a fresh session with the files of BASE.

Contents are fixed, so that every playing passes the same points in the same order.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast import Session

KEY = "monthly-report"
UPSTREAM = "HOLDFAST_TEST_UPSTREAM"
NOBODY = "127.0.0.1:1"
"""May be reached, and nobody listens there."""
"""Names the address of a server that outlives hosts: see `conftest`."""

BASE = """
import os
os.makedirs("dir/deep")
for path in ("kept.txt", "changed.txt", "removed.txt", "dir/removed.txt", "dir/deep/removed.txt"):
    open(path, "w").write(f"{path}, old\\n")
os.symlink("changed.txt", "turns")
for path in ("/tmp/old", os.path.expanduser("~/notes")):
    open(path, "w").write("old\\n")
base = 1
"""

CHANGES = """
import os, shutil
open("added.txt", "w").write("added\\n")
open("changed.txt", "w").write("new\\n")
os.remove("removed.txt")
shutil.rmtree("dir")
os.makedirs("other/deep")
open("other/deep/added.txt", "w").write("deep\\n")
os.symlink("kept.txt", "link")
os.chmod("kept.txt", 0o755)
os.chmod("other", 0o775)
os.symlink("kept.txt", "turned")
os.rename("turned", "turns")
os.remove("/tmp/old")
open("/tmp/scratch", "w").write("scratch\\n")
open(os.path.expanduser("~/notes"), "a").write("new\\n")
changes = 2
"""

MANY = """
for number in range(20):
    open(f"many-{number}.txt", "w").write(f"{number}\\n")
os.makedirs("wide")
for number in range(18):
    os.makedirs(f"wide/{number}")
    open(f"wide/{number}/file", "w").write("wide\\n")
many = 3
"""

SAVES = """
from holdfast.kit import save
open("first.txt", "w").write("first\\n")
save("first.txt", step="first")
open("second.txt", "w").write("second\\n")
open("changed.txt", "w").write("saved\\n")
save("second.txt", "changed.txt", step="second")
open("never.txt", "w").write("not saved\\n")
"""

DATABASE = """
import sqlite3
db = sqlite3.connect("data.db")
with db:
    db.execute("create table numbers (number integer)")
"""

INSERT = """
with db:
    db.execute("insert into numbers values (1)")
"""

COUNTED = """
open("count.txt", "a").write("executed\\n")
counted = 4
"""


COUNTED_ONCE = b"executed\n"

SENDS = """
import urllib.request
def send(path):
    return urllib.request.urlopen(f"http://{open('upstream').read()}{path}", b"x").read()
send("/first")
open("sent.txt", "w").write("first\\n")
send("/second")
sent = 7
"""
REACHES_NOBODY = f"""
import urllib.request, urllib.error
try:
    urllib.request.urlopen("http://{NOBODY}/", b"x")
except urllib.error.HTTPError:
    alone = 8
"""


class Scenario(NamedTuple):
    play: Callable[[Session], Any]
    prepare: Callable[[Session], object] = lambda session: None
    commits: bool = True
    saves: Sequence[Sequence[str]] = ()
    """Files that are kept from each savepoint on."""
    undo: int = 0
    """What the session keeps to go back to."""
    sends: bool = False
    """It may reach the server that the tests run."""
    at: Sequence[str] = ("",)
    """How the names of the points begin at which its hosts die: any."""
    each: Sequence[str] = ()
    """Of these each is died at, though the disk may be as at another."""

    @property
    def egress(self) -> list[str]:
        return [os.environ[UPSTREAM], NOBODY] if self.sends else []

    def states(self, old: dict[str, str], new: dict[str, str], *, below: str = "") -> list[dict[str, str]]:
        """The files that may be found after a crash, from step to step. `below` is where those lie that it saves."""
        found = [old]
        for paths in self.saves:
            found.append({**found[-1], **{below + path: new[below + path] for path in paths}})
        return [*found, new] if self.commits else found


def name_upstream(session: Session) -> None:
    session.write("upstream", os.environ[UPSTREAM])  # and not in the code: that is the same in every attempt


NOTES = ("journal.Sent.", "journal.Unsent.")
SAVED = [["first.txt"], ["second.txt", "changed.txt"]]
SCENARIOS = {
    "changes": Scenario(lambda s: s.run(CHANGES), each=("",)),
    "many files": Scenario(lambda s: s.run(MANY), each=("durable.sync_filesystem.",)),
    "memory alone": Scenario(lambda s: s.run("memory = 5")),
    "a failure": Scenario(lambda s: s.run(CHANGES + "1 / 0"), commits=False),
    "a database that stays open": Scenario(lambda s: s.run(INSERT), prepare=lambda s: s.run(DATABASE)),
    "savepoints, then death": Scenario(
        lambda s: s.run(SAVES + "os._exit(3)"), commits=False, saves=SAVED, each=("journal.", "save.", "settle.")
    ),
    "savepoints, then success": Scenario(lambda s: s.run(SAVES), saves=SAVED),
    "a write": Scenario(lambda s: s.write("changed.txt", "written\n")),
    "a write into new directories": Scenario(lambda s: s.write("new/deep/written.txt", b"written\n")),
    "a removal": Scenario(lambda s: s.remove("dir")),
    "a restore": Scenario(
        lambda s: s.restore(s.history()[0].ckpt), prepare=lambda s: s.run(CHANGES), each=("durable.symlink.",)
    ),
    "a restore with memory": Scenario(
        lambda s: s.restore(s.history()[0].ckpt),
        prepare=lambda s: s.run(CHANGES),
        undo=2,
        at=("write.", "journal.", "settle.", "restore."),
    ),
    "a key": Scenario(lambda s: s.run(COUNTED, key=KEY)),
    "a key of a run that keeps no file": Scenario(lambda s: s.run("counted = 4", key=KEY)),
    "a run that reaches nobody": Scenario(lambda s: s.run(REACHES_NOBODY), sends=True, at=NOTES, each=NOTES),
    "a key of a run that sends": Scenario(lambda s: s.run(SENDS, key=KEY), prepare=name_upstream, sends=True),
}
