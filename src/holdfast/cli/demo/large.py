"""A file that is larger than the memory: loaded whole it ends the cell, chunk by chunk it does not."""

from holdfast.blocking import Session
from holdfast.cli.demo.sandbox import MEMORY_MIB
from holdfast.cli.demo.show import Show

_FILE_MIB = MEMORY_MIB + 64
_ROW = "2026-01-01T06:12,berth 17,3.14," + "calm " * 44
_ROWS = (_FILE_MIB << 20) // (len(_ROW) + 1) // 1000 * 1000
_PATIENCE_S = 120

MAKE = f"""\
row = {_ROW!r} + "\\n"
with open("harbour.csv", "w") as file:
    file.write("at,berth,level,remark\\n")
    for _ in range({_ROWS // 1000}): file.write(row * 1000)
del row, file"""

WHOLE = """\
harbour = pd.read_csv("harbour.csv")      # all of it at once"""

CHUNKED = """\
rows = 0
for part in pd.read_csv("harbour.csv", usecols=["berth", "level"], chunksize=100_000):
    rows += len(part)
rows"""


def csv(show: Show, session: Session) -> None:
    show.chapter("A CSV larger than the cap")
    made = session.run(MAKE, timeout=_PATIENCE_S)
    size = next((change.bytes for change in made.outputs), 0)
    show.say(f"harbour.csv has {size / (1 << 20):.0f} MiB, the session {MEMORY_MIB} MiB")
    show.code(WHOLE)
    whole = session.run(WHOLE, timeout=_PATIENCE_S)
    if whole.recovery is not None:
        show.quote(whole.recovery.text)
    code = whole.error.code if whole.error else "nothing"
    show.promise(
        "a load larger than the cap dies, and says why",
        f"{size / (1 << 20):.0f} MiB into {MEMORY_MIB} MiB: {code}, {whole.status}",
        size > MEMORY_MIB << 20 and (code, whole.status) == ("out_of_memory", "rolled_back"),
    )
    show.code(CHUNKED)
    parts = session.run(CHUNKED, timeout=_PATIENCE_S)
    show.promise("  chunk by chunk it is read", f"{parts.text} rows, {parts.status}", parts.text == str(_ROWS))
    session.remove("harbour.csv")
