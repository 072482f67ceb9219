"""A session's books are the host's: no guest sees the key, the journal, receipts, manifests or old versions."""

import hashlib

import pytest

BOOKS = ("keys/ed25519.pem", "keys/ed25519.pub.pem", "journal.sqlite3", "journal.sqlite3-wal")
OWN = ("blobs", "manifests", "log", "files", "stages")


@pytest.mark.parametrize("root", ["", "/proc/1/root", "/proc/self/root", "/mnt/data/../../.."])
def test_the_key_and_the_journal_are_not_there(session, attack, tools, root):
    session.run("open('kept.txt', 'w').write('by a run')")  # so that there is something to steal
    home = tools.home()
    places = [home / name for name in BOOKS] + [home / "sessions" / session.id / name for name in OWN]

    printed = attack(f"print(*[tries(os.stat, {root!r} + place) for place in {[str(place) for place in places]}])")

    assert all(place.exists() for place in places if place.suffix == ".pem" or place.parent.name == session.id)
    assert set(printed.split()) <= {"ENOENT", "EACCES"}


def test_nobody_inside_remembers_the_signing_key(attack, tools):
    """The zygote's memory is every guest's memory. The attack knows how the key begins and the digest of the rest."""
    line = (tools.home() / "keys/ed25519.pem").read_bytes().splitlines()[1]
    begin, rest = line[:24], line[24:]

    printed = attack(f"""
        import hashlib
        begin, hits = bytes.fromhex("{begin.hex()}"), 0
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps.read().splitlines():
                span, mode = line.split()[:2]
                low, high = (int(x, 16) for x in span.split("-"))
                if mode.startswith("rw") and "[v" not in line and high - low < 64 << 20:
                    memory.seek(low)
                    for after in (memory.read(high - low) or b"").split(begin)[1:]:
                        hits += hashlib.sha256(after[:{len(rest)}]).hexdigest() == "{hashlib.sha256(rest).hexdigest()}"
        print(hits)
    """)

    assert printed == "0"
