"""A disk that does not keep what it is given: the session stops, says so, and is whole when it is opened again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = Path(__file__).parents[1] / "unit" / "syncs.c"
WORK = """
import os, sys
from holdfast import HoldfastError, Session

def tried(code):
    try:
        return session.run(code).status
    except HoldfastError as error:
        return error.code

session = Session(memory="256M")
print(session.id)
print(tried("x = 1; open('a', 'w').write('old')"))
open(os.environ["SYNCS_FAIL"], "w").close()
print(tried("x = 2; open('a', 'w').write('new')"))
os.unlink(os.environ["SYNCS_FAIL"])
print(tried("x"))
try:
    session.close(keep=True)
except HoldfastError as error:
    print(error.code)
"""
AGAIN = """
import sys
from holdfast import Session

with Session(resume=sys.argv[1]) as session:
    run = session.run("open('a').read()", preflight="off")
    print(run.status, run.text, *sorted(entry.status for entry in session.history()))
"""


def test_a_failed_sync_stops_the_session_until_it_is_opened_again(tmp_path: Path, guest_environment: Path) -> None:
    library = tmp_path / "syncs.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    home = tmp_path / "home"
    (home / "envs").mkdir(parents=True)
    (home / "envs" / guest_environment.name).symlink_to(guest_environment)
    watched = {"LD_PRELOAD": str(library), "SYNCS_FAIL": str(tmp_path / "fail"), "HOLDFAST_HOME": str(home)}

    session, *outcomes = _run(WORK, env=watched).split()
    # Closing it fails only where something is left that nobody was told of.
    assert outcomes == ["committed", *["disk_failed"] * 2], "the disk works again, and nobody trusts it"

    assert _run(AGAIN, session, env={"HOLDFAST_HOME": str(home)}) == "committed 'old' committed committed\n"


def _run(code: str, *arguments: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **env}, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


pytestmark = pytest.mark.timeout(180)
