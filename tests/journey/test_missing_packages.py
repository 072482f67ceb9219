"""What a session says to who misses a package: nothing can be installed inside."""

import pytest

from holdfast import Session

WHAT_TO_DO = "open the session with env=DIRECTORY"


@pytest.mark.parametrize(
    "code",
    [
        "!pip install plotly", "%pip install plotly", "!pip3 install plotly", "%uv pip install plotly", "!conda list",
        "%%bash\npip install plotly || true", "import subprocess; subprocess.run(['pip', 'install', 'plotly']);",
    ],
)  # fmt: skip
def test_an_installer_says_what_to_do_instead(session: Session, code: str) -> None:
    run = session.run(code)

    assert WHAT_TO_DO in run.stderr
    assert "restart the kernel" not in run.stdout


HAS_INSTALLERS = """
import os, sys
for name in ("pip", "uv"):
    os.makedirs(f"lib/{name}")
    with open(f"lib/{name}/__main__.py", "w") as main:
        main.write("import sys; print('its own', *sys.argv[1:])")
os.environ["PYTHONPATH"] = "/mnt/data/lib"
sys.path.insert(0, "/mnt/data/lib")
"""


@pytest.mark.parametrize("name", ["pip", "uv"])
def test_an_installer_that_the_environment_has_is_run(session: Session, name: str) -> None:
    made = session.run(HAS_INSTALLERS)
    run = session.run(f"%{name} list")

    assert (made.error, run.error) == (None, None)
    assert "its own" in run.stdout


def test_a_command_that_installs_says_it_too(session: Session) -> None:
    ran = session.shell("pip install plotly")

    assert (ran.exit_code, WHAT_TO_DO in ran.stderr) == (1, True)


@pytest.mark.parametrize(
    "code",
    [
        "import nosuchpackage",
        # As plotly's `fig.show()` says it.
        "raise ValueError('Mime type rendering requires nbformat>=4.2.0 but it is not installed')",
        "raise ImportError('Missing optional dependency. Use pip or conda: pip install x')",
    ],
)
def test_an_error_about_a_missing_package_says_what_to_do(session: Session, code: str) -> None:
    run = session.run(code)

    assert run.error is not None
    assert WHAT_TO_DO in run.error.hint
    assert WHAT_TO_DO in run.error.traceback
    assert WHAT_TO_DO not in run.error.message


def test_other_errors_have_no_such_hint(session: Session) -> None:
    run = session.run("int('x')")

    assert run.error is not None
    assert run.error.hint == ""


def test_scripts_of_the_environment_run(session: Session) -> None:
    ran = session.shell("ipython --version")

    assert (ran.exit_code, ran.stderr) == (0, "")
