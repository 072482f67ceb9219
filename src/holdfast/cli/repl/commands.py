"""What is asked of us and not of Python: a line that begins with a colon."""

import difflib
import time
from collections.abc import Callable, Iterator

from holdfast.blocking import Session
from holdfast.cli.sizes import short
from holdfast.errors import HoldfastError, InvalidSetting
from holdfast.visible import visible

Lines = Iterator[str]


def status(session: Session, argument: str) -> Lines:
    """where the session stands"""
    info = session.info()
    cap, used = info.limits.get("memory_bytes"), info.memory_bytes
    yield f"session     {info.id} · {info.mode} · {info.state}"
    yield f"state       {info.ckpt}"
    yield f"version     {info.version} (of memory and files), generation {info.generation} (memories)"
    yield f"memory      {short(used)} of {short(cap)}"
    names = session.names()
    yield f"names       {', '.join(visible(f'{name}: {it.type}') for name, it in sorted(names.items())) or 'none'}"
    if (told := session.recover()).memory != "kept":
        yield told.text


def history(session: Session, argument: str) -> Lines:
    """the latest runs, oldest first"""
    for entry in session.history(limit=20):
        when = time.strftime("%H:%M:%S", time.localtime(entry.at))
        yield f"{when}  {entry.status:<11} v{entry.version:<4} {entry.ckpt}  {visible(entry.goal)}"


def restore(session: Session, argument: str) -> Lines:
    """CKPT: bring the files of an earlier state back, as a new version; and memory, as far as --undo keeps it"""
    if not argument:
        raise InvalidSetting(":restore needs a CKPT", hint=":history shows them; Tab completes them")
    written = session.restore(argument)
    yield f"files are those of {argument}: version {written.version}, {written.ckpt}"
    if written.files_not_restored:
        yield f"files not brought back: {_several(written.files_not_restored)}"
    if written.memory == "restored":
        yield "memory is as it was then" + "".join(f"; not {visible(what)}" for what in written.not_restored)
    elif written.memory == "lost":
        yield f"memory is lost: {written.without_memory}; gone: {_several(written.names_not_restored)}"
    elif written.names_not_restored:
        yield f"memory stays as it is; not of that state: {_several(written.names_not_restored)}"


def files(session: Session, argument: str) -> Lines:
    """what is committed in /mnt/data"""
    for entry in session.files():
        yield f"{entry.sha256[:12]}  {entry.bytes:>14,}  {entry.path}"


def reset(session: Session, argument: str) -> Lines:
    """purge memory and end its processes; files stay"""
    session.reset()
    yield session.recover().text


def _several(names: list[str]) -> str:
    return ", ".join(visible(name) for name in names)


def explain(session: Session, argument: str) -> Lines:
    """this list"""
    for name, command in COMMANDS.items():
        yield f":{name:<9} {command.__doc__}"
    yield "Enter runs a complete cell, Esc Enter any, Alt-Enter too; Tab completes; Ctrl-C interrupts."
    yield "exit, quit or Ctrl-D ends it."
    yield "It is IPython inside: !command, %magic, name? work."


COMMANDS: dict[str, Callable[[Session, str], Lines]] = {
    "status": status, "history": history, "files": files, "restore": restore, "reset": reset, "help": explain,
}  # fmt: skip


def carry_out(session: Session, line: str) -> Lines:
    """What a command has to say; HoldfastError if it cannot be done."""
    name, _, argument = line.strip().removeprefix(":").strip().partition(" ")
    if name not in COMMANDS:
        alike = difflib.get_close_matches(name, COMMANDS, n=1)
        raise InvalidSetting(f":{name} is no command", hint=f"did you mean :{alike[0]}?" if alike else "see :help")
    return COMMANDS[name](session, argument.strip())


def candidates(session: Session, line: str) -> list[str]:
    """What the line could become: commands, and behind `:restore` the CKPTs that there are."""
    name, space, _ = line.lstrip().partition(" ")
    if not space:
        return [f":{each}" for each in COMMANDS]
    if name != ":restore":
        return []
    try:
        return [f":restore {ckpt}" for ckpt in dict.fromkeys(entry.ckpt for entry in session.history(limit=100))]
    except HoldfastError:  # a menu is no place for it; the next run says what is wrong
        return []
