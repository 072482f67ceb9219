"""What a session sees of the machine is what it has: its memory cap and its processors."""

import os

import pytest

from holdfast import Session

MIB = 1 << 20


def shown(session: Session, code: str) -> str:
    run = session.run(code)
    assert run.error is None, run.error
    return run.stdout.strip()


@pytest.mark.parametrize("memory", ["256M", "1536M"])
def test_the_machine_has_as_much_memory_as_the_session(memory: str) -> None:
    with Session(memory=memory) as session:
        cap = int(memory[:-1]) * MIB
        assert shown(session, "import psutil; print(psutil.virtual_memory().total)") == str(cap)
        assert shown(session, "print(psutil.swap_memory().total)") == "0"
        assert shown(session, "!free -b | awk '/Mem:/ {print $2}'") == str(cap)
        assert f"MemTotal: {cap >> 10} kB" in " ".join(shown(session, "print(open('/proc/meminfo').read())").split())


def test_what_is_free_follows_what_the_session_holds() -> None:
    with Session(memory="512M") as session:
        before = int(shown(session, "import psutil; print(psutil.virtual_memory().available)"))
        session.run("block = bytearray(200 << 20)")
        after = int(shown(session, "print(psutil.virtual_memory().available)"))
        session.run("del block")

        assert 190 * MIB < before - after < 300 * MIB
        assert int(shown(session, "print(psutil.virtual_memory().available)")) > after + 150 * MIB
        session.reset()
        assert int(shown(session, "import psutil; print(psutil.virtual_memory().available)")) > 450 * MIB


@pytest.mark.parametrize(("cpus", "seen"), [(0.5, 1), (1, 1), (1.5, 2), (1000, 1000)])
def test_the_machine_has_as_many_processors_as_the_session(cpus: float, seen: int) -> None:
    here = len(os.sched_getaffinity(0))
    with Session(memory="256M", cpus=cpus) as session:
        expected = str(min(seen, here))
        assert shown(session, "import os, psutil; print(os.cpu_count())") == expected
        assert shown(session, "print(os.sysconf('SC_NPROCESSORS_CONF'))") == expected
        assert shown(session, "print(psutil.cpu_count(logical=False))") == expected
        assert shown(session, "!nproc") == expected
        assert shown(session, "print(os.environ['OMP_NUM_THREADS'])") == expected
        # Not by an affinity: what others leave unused it may use.
        assert shown(session, "print(len(os.sched_getaffinity(0)))") == str(here)


def test_sessions_side_by_side_see_their_own() -> None:
    code = "import os, psutil; print(os.cpu_count(), psutil.virtual_memory().total >> 20)"
    with Session(memory="256M", cpus=1) as small, Session(memory="512M", cpus=2) as large:
        assert shown(small, code) == "1 256"
        assert shown(large, code) == f"{min(2, len(os.sched_getaffinity(0)))} 512"
        small.run("import os; os._exit(1)")
        assert shown(small, code) == "1 256"
        small.reset()
        assert shown(small, code) == "1 256"
