"""A job in a repository of the user's: it tries to leave behind what `git`, a shell or an editor runs by itself."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from holdfast import engine, expectations, jobs, verbs
from holdfast.config import Limits, Settings
from holdfast.jobs import OpenJob
from holdfast.kernel.wire import Script
from holdfast.model import Run
from holdfast.protected import PROTECTED, is_protected
from holdfast.requests import RunRequest

RunIn = Callable[..., Run]
PRELUDE = """
import os, shutil
HOOK = "#!/bin/sh\\ntouch OWNED\\n"
def put(path, text=HOOK, mode=0o755):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    open(path, "w").write(text)
    os.chmod(path, mode)
"""
ROUTES = {
    "a hook": 'put(".git/hooks/pre-commit")',
    "through a link": 'put("to-git/hooks/pre-commit")',
    "through a link to hooks": 'put("to-hooks/pre-commit")',
    "by rename of a file": 'put("x"); os.rename("x", ".git/hooks/pre-commit")',
    "by rename of a directory": 'shutil.rmtree(".git/hooks"); put("h/pre-commit"); os.rename("h", ".git/hooks")',
    "a directory for .git": 'shutil.move(".git", "was"); shutil.copytree("was", ".git"); put(".git/hooks/pre-commit")',
    "by hard link": 'put("x"); os.link("x", ".git/hooks/pre-commit")',
    "by a second name of one that is there": 'os.link(".git/hooks/sleeping", "x"); open("x", "a").write("touch OWNED")',
    "by the mode of a second name": 'os.link(".git/hooks/sleeping", "x"); os.chmod("x", 0o755)',
    "by the mode of one that is there": 'os.chmod(".git/hooks/sleeping", 0o755)',
    "in place of one that is there": 'put(".git/hooks/sleeping")',
    "by setting": 'open(".git/config", "a").write("[core]\\n\\thooksPath = data\\n"); put("data/pre-commit")',
    "by removal": 'os.remove(".git/config")',
    "all of it removed": 'shutil.rmtree(".git")',
    "a link in its place": 'shutil.rmtree(".git/hooks"); put("h/pre-commit"); os.symlink("../h", ".git/hooks")',
    "a link to it": 'os.symlink(".git/hooks/pre-commit", "report.parquet")',
    "below": 'put("sub/.git/hooks/pre-commit")',
    "a file for .git": 'put("sub/.git", "gitdir: ../bare")',
    "a bare repository": 'put("sub/HEAD", "ref: refs/heads/main"); put("sub/config"); os.makedirs("sub/refs")',
    "in other letters": 'put("sub/.GIT/hooks/pre-commit")',
    "in letters that fold": 'put("sub/.g\\u200cit/config")',
    "short as on FAT": 'put("GIT~1/config")',
    "attributes": 'put(".gitattributes", "* filter=x")',
    "an editor": 'put(".vscode/tasks.json")',
    "a shell": 'put("deep/er/.envrc")',
    "Python": 'put("evil.pth", "import os")',
    "Python's start": 'put("sitecustomize.py")',
    "an agent": 'put(".mcp.json")',
    "a service": 'put(".github/workflows/x.yml")',
    "the start of pytest": 'put("tests/conftest.py")',
    "pytest's options": 'put("pyproject.toml", "[tool.pytest.ini_options]\\naddopts = \'-p evil\'")',
    "an install": 'put("web/package.json", "{}")',
    "a build tool's options": 'put("web/vite.config.ts")',
    "a hook where core.hooksPath may point": 'put("tools/pre-commit")',
    "a bare repository that is there": 'put("mirror/hooks/post-update-x")',
    "the settings of a bare repository": 'open("mirror/config", "a").write("[core]\\n\\tfsmonitor = ./x\\n")',
    "a place of .git files": 'put("odd/hooks/x", mode=0o644)',
    "a name that makes it a repository": 'os.makedirs("nearly/objects"); put("nearly/config")',
    "a nested repository, with its parent": 'shutil.rmtree("lib")',
    "a nested repository, moved": 'shutil.move("lib", "lib2")',
    "a nested repository, hidden": 'shutil.rmtree("lib"); put("lib/x.py")',
    "a nested repository, by a link to its parent": 'shutil.rmtree("lib"); os.symlink("mirror", "lib")',
    "a link over a link of the user's": 'os.symlink("../to-git/hooks", "data/report.csv")',
    "links one after the other": 'os.symlink("data/b", "a"); os.symlink("../to-hooks", "data/b")',
    "a link by way of above": 'os.symlink("../project/to-hooks/x", "report.csv")',
    "a link to a bare repository": 'os.symlink("mirror/config", "report.csv")',
    "a link of a link's directory": 'os.symlink("data/to-above/to-git", "report.csv")',
    "a link to a file of the user's home": 'os.symlink("/root/.bashrc", "report.csv")',
    "a link to the user's keys": 'os.symlink("../../.ssh/authorized_keys", "report.csv")',
    "an environment": 'put("venv/bin/activate")',
    "an environment's modules": 'put("venv/lib/python3/x.py")',
    "an environment's programs, by a link": 'shutil.rmtree("venv/bin"); os.symlink("../data", "venv/bin")',
    "an editor's session": 'put("Session.vim")',
    "a pipe in its place": 'os.mkfifo(".envrc")',
    "only its mode": 'os.chmod(".git", 0o777)',
}  # fmt: skip

TERMS = [((), "refuse"), (("**",), "keep"), (("*.parquet",), "drop"), (("**/*", "*.parquet"), "refuse")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("repository") / "project"
    directory.mkdir()
    git(directory, "init", "-q")
    (directory / ".git/hooks").mkdir(exist_ok=True)
    (directory / ".git/hooks/sleeping").write_text("#!/bin/sh\ntouch OWNED\n")
    (directory / "to-git").symlink_to(".git")
    (directory / "to-hooks").symlink_to(".git/hooks")
    for bare in ("mirror", "odd"):
        git(directory, "init", "-q", "--bare", bare)
    (directory / "nearly").mkdir()
    (directory / "nearly/HEAD").write_text("ref: refs/heads/main\n")
    (directory / "lib").mkdir()
    git(directory / "lib", "init", "-q")
    (directory / "venv/bin").mkdir(parents=True)
    (directory / "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    (directory / "data").mkdir()
    (directory / "data/to-above").symlink_to("..")
    (directory / "tool").write_text("#!/bin/sh\n")
    (directory / "tool").chmod(0o744)
    (directory / "plain").write_text("plain\n")
    (directory / "plain").chmod(0o644)
    return directory


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, directory: Path, lean: Path) -> Iterator[OpenJob]:
    job = jobs.Job(
        code="", script=Script(file="/mnt/data/job.py"), env=lean,
        limits=Limits(memory_bytes=512 << 20, timeout_s=60),
    )  # fmt: skip
    settings = Settings(home=tmp_path_factory.mktemp("home") / "home")
    opened = engine.wait(lambda: jobs.open_job(directory, job, settings=settings))
    try:
        engine.wait(opened.look)
        engine.wait(opened.plan)
        yield opened
    finally:
        engine.wait(opened.close)


@pytest.fixture
def run(opened: OpenJob) -> RunIn:
    session = opened._session
    assert session is not None
    session.single_use = False

    def run(code: str, out: tuple[str, ...] = (), **more: Any) -> Run:
        request = RunRequest(code=PRELUDE + dedent(code), outputs=expectations.outputs(out), **more)
        return engine.wait(lambda: verbs.run(session, request))

    return run


def git(directory: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(
        ["git", *who, *arguments], cwd=directory, check=True, capture_output=True, timeout=30,
        env=os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"},
    )  # fmt: skip


def below(directory: Path) -> dict[str, tuple[int, bytes]]:
    """All but what Holdfast keeps, with modes."""
    found: dict[str, tuple[int, bytes]] = {}
    for place, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name != ".holdfast"]
        for path in (Path(place, name) for name in names):
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            found[str(path.relative_to(directory))] = path.lstat().st_mode, content
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_what_tools_run_by_themselves_is_not_published_by_any_route(run: RunIn, directory: Path, route: str) -> None:
    before = below(directory)
    out, undeclared = TERMS[[*ROUTES].index(route) % len(TERMS)]

    done = run(f'{ROUTES[route]}\nput("made.parquet")', out, undeclared=undeclared)

    assert done.error is not None, out
    assert (done.status, done.error.code) == ("rolled_back", "protected_path"), done.error
    assert "--out" in done.error.hint
    assert below(directory) == before


def test_a_commit_after_the_attacks_runs_nothing_of_theirs(run: RunIn, directory: Path) -> None:
    for attack in ROUTES.values():
        run(attack, ("**",), undeclared="keep")

    git(directory, "add", "plain")
    git(directory, "commit", "-q", "--allow-empty", "-m", "quiet")

    assert not (directory / "OWNED").exists()
    assert not (directory / ".git/hooks/pre-commit").exists()


def test_a_protected_file_that_is_named_exactly_is_published_and_no_other(run: RunIn, directory: Path) -> None:
    other = run('put(".vscode/tasks.json"); put(".vscode/settings.json")', (".vscode/settings.json",))
    named = run('put(".vscode/settings.json")', (".vscode/settings.json",))
    pattern = run('put("*.pth")', ("*.pth",))

    assert [each.error and each.error.code for each in (other, named, pattern)] == [
        "protected_path", None, "protected_path",
    ]  # fmt: skip
    assert "tasks.json" in (other.error.message if other.error else "")
    assert sorted(path.name for path in (directory / ".vscode").iterdir()) == ["settings.json"]


def test_executable_bits_come_to_new_files_only_where_they_are_declared(run: RunIn, directory: Path) -> None:
    done = run("""
        for name in ("one", "two", "plain", "tool"):
            put(name, mode=0o7755)
        os.link("one", "three")
    """)
    declared = run('put("bin/start"); put("bin/not")', executable=["bin/s*"])

    modes = {name: (directory / name).stat().st_mode & 0o7777 for name in ("one", "two", "three", "plain", "tool")}
    assert modes == {"one": 0o644, "two": 0o644, "three": 0o644, "plain": 0o644, "tool": 0o744}
    assert [check.detail for check in done.checks if check.name == "not executable"] == [
        "published without the executable bit: one, plain, three, tool, two. --executable names what may have it"
    ]
    assert {change.path: change.mode for change in done.outputs}.items() >= modes.items()
    assert declared.status == "committed"
    assert ((directory / "bin/start").stat().st_mode & 0o7777, (directory / "bin/not").stat().st_mode & 0o7777) == (
        0o755, 0o644,
    )  # fmt: skip


def test_undeclared_writes_are_refused_dropped_or_kept(run: RunIn, directory: Path) -> None:
    code = """
        put("out/a.csv", "a"); put("late.txt", "late"); os.remove("plain")
        os.makedirs("empty"); put("pkg/__pycache__/m.pyc", "code"); put("pkg/.pytest_cache/x", "x")
    """
    before = below(directory)
    refused = run(code, ("out/*.csv",))
    assert below(directory) == before
    dropped = run(code, ("out/*.csv",), undeclared="drop")
    kept = run(code.replace('"a")', '"b")'), ("out/*.csv",), undeclared="keep")

    assert refused.error is not None
    assert (refused.error.code, refused.status) == ("undeclared_write", "rolled_back")
    assert refused.error.message.startswith("no --out covers empty, late.txt, plain. ")
    assert dropped.status == "committed"
    assert [change.path for change in dropped.outputs] == ["out/a.csv"]
    (note,) = [check for check in dropped.checks if check.name == "unpublished"]
    assert (note.ok, note.detail) == (True, "left unpublished, as no --out covers it: empty, late.txt, plain")
    assert {change.path for change in kept.outputs} == {"out/a.csv", "late.txt", "plain", "pkg/.pytest_cache/x"}
    assert not list(directory.rglob("*.pyc")), "bytecode runs in place of a source that looks untouched"


def test_caches_of_tools_fail_no_run_that_declares_its_outputs(run: RunIn, directory: Path) -> None:
    done = run('put("n.csv", "1"); put("__pycache__/job.pyc"); put(".ipynb_checkpoints/n.ipynb")', ("n.csv",))

    assert (done.status, [change.path for change in done.outputs]) == ("committed", ["n.csv"])


def test_a_file_in_place_of_a_directory_of_which_something_stays_is_refused(run: RunIn, directory: Path) -> None:
    assert run('put("d/x", "x"); put("f", "f")').status == "committed"

    as_file = run('shutil.rmtree("d"); put("d", "now a file")', ("d",), undeclared="drop")
    as_directory = run('os.remove("f"); put("f/x.csv", "x")', ("f/*.csv",), undeclared="drop")

    assert [each.error and each.error.code for each in (as_file, as_directory)] == ["undeclared_write"] * 2
    assert ((directory / "d/x").read_text(), (directory / "f").read_text()) == ("x", "f")


def test_a_savepoint_publishes_nothing_that_the_run_may_not(run: RunIn, directory: Path) -> None:
    code = """
        from holdfast.kit import save
        def tries(path):
            put(path)
            try:
                save(path)
            except Exception as error:
                return str(error)
            return "saved"
        print(tries(".git/hooks/pre-commit")); print(tries("other.txt")); print(tries("part.csv"))
        print(tries("mirror/config"))
        raise SystemExit(1 / 0)
    """
    done = run(code, ("part.csv",))

    first, hint, second, _, third, fourth, _ = done.stdout.splitlines()
    assert first.startswith("not saved: it may not write .git/hooks/pre-commit [protected_path]"), hint
    assert second.startswith("not saved: no --out covers other.txt [undeclared_write]")
    assert fourth.startswith("not saved: it may not write mirror/config [protected_path]")
    assert (third, done.saved) == ("saved", ["part.csv"])
    assert (directory / "part.csv").stat().st_mode & 0o7777 == 0o644
    assert not (directory / ".git/hooks/pre-commit").exists()


def test_what_is_there_and_unchanged_does_not_matter(run: RunIn, directory: Path) -> None:
    done = run("""
        import time
        hook = ".git/hooks/sleeping"
        text, status = open(hook).read(), os.stat(hook)
        open(hook, "w").write(text); os.utime(hook, ns=(status.st_atime_ns, status.st_mtime_ns))
        put("fine.csv", "1")
    """)

    assert (done.status, [change.path for change in done.outputs]) == ("committed", ["fine.csv"])


def test_the_documentation_names_each_kind_of_protected_name_and_only_protected_names() -> None:
    page = (Path(__file__).parents[2] / "docs/run.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (`.+`) \|$", page, re.M)

    assert [kind for kind, _ in rows] == [*PROTECTED]
    for _, names in rows:
        assert [name for name in re.findall(r"`(.+?)`", names) if not is_protected(name)] == []


def test_what_cannot_run_anything_and_what_is_started_by_a_command_is_free() -> None:
    free = "Makefile Dockerfile setup.py app.py requirements.txt .gitignore .editorconfig update heads.csv my.git.csv"

    assert [name for name in free.split() if is_protected(name)] == []


def test_a_job_beside_an_environment_and_a_file_of_the_name_head_is_free(run: RunIn, directory: Path) -> None:
    done = run('put("venv/notes.txt", "x", 0o644); put("nearly/x.csv", "x", 0o644); os.symlink("../plain", "data/l")')

    assert done.status == "committed", done.error
    assert [change.path for change in done.outputs] == ["data/l", "nearly/x.csv", "venv/notes.txt"]
