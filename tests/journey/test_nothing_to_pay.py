"""A run that wrote nothing pays nothing: no file is hashed, no layer is laid, nothing is synced but the journal."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.lean import lean_home
from tests.unit.watched import WatchedDisk, watch

HOST = """
import json, os, sys
del os.environ["LD_PRELOAD"]  # this process alone
from pathlib import Path
from holdfast import Session

opened = []
def note(event, told):
    if event == "open" and isinstance(told[0], (str, bytes)):
        opened.append(os.fsdecode(told[0]))
sys.addaudithook(note)
session = Session(memory="256M", timeout=30, home=sys.argv[1])
live = session._session._transport._session

def told(run):
    assert run.status == "committed", run.error
    session.names()  # whatever is done behind the reply is done
    mounts = Path(f"/proc/{live.computer.kernel.pid}/mountinfo").read_text()
    return [live.computer.staging.name, [line for line in mounts.splitlines() if "overlay" in line], session.version]

def watched(code, times):
    before, log = told(session.run("1")), Path(os.environ["SYNCS_LOG"])
    opened.clear(), log.write_text("")
    for _ in range(times):
        after = told(session.run(code))
    synced = {line.partition(" ")[2] for line in log.read_text().splitlines()}
    return {"before": before, "after": after, "opened": sorted(set(opened)), "synced": sorted(synced)}

session.write("committed", "c")
print(json.dumps([watched("1+1", 10), watched("open('committed', 'a').write('c')", 1)]))
session.close()
"""


def test_a_run_that_wrote_nothing_pays_for_its_records_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk: WatchedDisk = watch(tmp_path_factory)
    idle, busy = json.loads(disk.run(HOST, lean_home(tmp_path / "home")))

    (layer, mounts, version), after = idle["before"], idle["after"]
    assert after == [layer, mounts, version + 10]
    assert hashed(idle) == []
    assert [Path(path).name for path in idle["synced"]] == ["journal.sqlite3-wal"]

    # Where there is something to pay for, each of these tells.
    (layer, mounts, _), (next_layer, next_mounts, _) = busy["before"], busy["after"]
    assert (next_layer != layer, next_mounts != mounts) == (True, True)
    assert {layer, "committed"} <= set(hashed(busy))
    assert {Path(path).name for path in busy["synced"]} > {"journal.sqlite3-wal", "committed", "manifests"}


def hashed(watched: dict[str, Any]) -> list[str]:
    """The layers and the files in them that were opened."""
    paths = [Path(path) for path in watched["opened"]]
    return [path.name for path in paths if path.parent.name == "stages" or path.name == "committed"]
