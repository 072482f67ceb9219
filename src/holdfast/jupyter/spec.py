"""The kernelspec: how Jupyter finds the kernel and starts it.

- `-P`: the directory of the notebook is not on the path of the host process. A file `json.py` that lies beside a
  notebook would run outside the sandbox otherwise.
- `interrupt_mode` is `message`: a signal would go to the whole process group, and so to the processes that hold the
  sandbox.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ExtraMissing, InvalidSetting

if TYPE_CHECKING:
    from jupyter_client.kernelspec import KernelSpecManager

NAME = "holdfast"
_LOGO = Path(__file__).with_name("logo")


def spec(display_name: str, arguments: list[str]) -> dict[str, Any]:
    """What stands in kernel.json."""
    return {
        "argv": [sys.executable, "-P", "-m", "holdfast.jupyter", "-f", "{connection_file}", *arguments],
        "display_name": display_name,
        "language": "python",
        "interrupt_mode": "message",
        "metadata": {"debugger": False, "supported_encryption": ["curve"]},
    }


def install(
    *, name: str = NAME, display_name: str = "Holdfast", prefix: str | None = None, arguments: list[str] | None = None
) -> Path:
    """Into a prefix, or else for this user; returns where it is. One of that name is replaced."""
    manager = _manager()
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / NAME
        shutil.copytree(_LOGO, source)
        (source / "kernel.json").write_text(json.dumps(spec(display_name, arguments or []), indent=1) + "\n")
        try:
            installed = manager.install_kernel_spec(str(source), kernel_name=name, user=prefix is None, prefix=prefix)
        except ValueError as error:
            raise InvalidSetting(f"{name!r} is no name of a kernel", hint=_sentence(error)) from error
        except OSError as error:
            raise InvalidSetting(
                f"{error.filename or prefix} cannot be written: {error.strerror}",
                hint="install it for yourself with --user, or into this environment with --sys-prefix",
            ) from error
    return Path(installed)


def uninstall(*, name: str = NAME) -> Path:
    """Take away the kernelspec that Jupyter finds under this name; returns where it was."""
    manager = _manager()
    from jupyter_client.kernelspec import NoSuchKernel

    try:
        found = manager.get_kernel_spec(name)
    except NoSuchKernel:
        raise InvalidSetting(
            f"no kernelspec is named {name!r}", hint="`jupyter kernelspec list` has the names"
        ) from None
    if "holdfast.jupyter" not in found.argv:
        raise InvalidSetting(f"the kernelspec {name!r} is not ours", hint=f"`jupyter kernelspec remove {name}`")
    try:
        return Path(manager.remove_kernel_spec(name))
    except OSError as error:
        raise InvalidSetting(
            f"{found.resource_dir} cannot be removed: {error.strerror}", hint="it was installed by another user"
        ) from error


def _manager() -> "KernelSpecManager":
    try:
        import ipykernel  # noqa: F401 (not needed here; without it the kernel would not start)
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise ExtraMissing(
            f"the Jupyter kernel needs a package that is not installed: {error.name}",
            hint=f"install it: `{sys.executable} -m pip install {error.name}`, or Holdfast with its extra `jupyter`",
        ) from error
    return KernelSpecManager()


def _sentence(error: ValueError) -> str:
    return str(error).partition(". ")[2] or str(error)
