"""JupyterLab itself, in a browser: a notebook that outlives a cell that runs out of memory, and saves its receipts."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import nbformat.reader
import pytest
from tests.journey.kernels import WAIT_S, end_server, jupyter_places, left_behind, make_home, wait_until

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (Debian's package `chromium`)"),
    pytest.mark.timeout(300),
]
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
LAB = [
    "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root", "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.extension_manager=readonly",
]  # fmt: skip
NEWS = "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
CELLS = [
    "import matplotlib.pyplot as plt\nx = list(range(20))\nfig, ax = plt.subplots()\nax.plot(x)\nplt.show()\nlen(x)",
    "x.append(99)\nhog = bytearray(2 << 30)",
    "sum(x), 'hog' in globals()",
    "from IPython.display import HTML\ndisplay(HTML('<b>once</b><script>window.ran = (window.ran || 0) + 1</script>'))",
]


@contextmanager
def served(place: Path, home: Path) -> Iterator[str]:
    """`jupyter lab` on loopback, the notebook in it; its address. Nothing of it is left afterwards."""
    token, notebooks = secrets.token_hex(16), place / "notebooks"
    notebooks.mkdir()
    spec = {"name": "holdfast", "display_name": "Holdfast", "language": "python"}
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec}), notebooks / "tides.ipynb")
    environment = {**os.environ, **jupyter_places(place), "HOLDFAST_HOME": str(home), "HOME": str(place)}
    (place / "config" / NEWS).parent.mkdir(parents=True)
    (place / "config" / NEWS).write_text('{"fetchNews": "false", "checkForUpdates": false}')
    install = [sys.executable, "-m", "holdfast.cli.main", "jupyter", "install", "--prefix", place, "--memory", "512M"]
    subprocess.run(install, check=True, env=environment)
    with (place / "lab.log").open("wb") as log:
        lab = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *LAB, f"--ServerApp.root_dir={notebooks}"],
            env={**environment, "JUPYTER_TOKEN": token}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        told = place / "runtime" / f"jpserver-{lab.pid}.json"
        assert wait_until(lambda: told.exists() and told.read_text().endswith("}")), (place / "lab.log").read_text()
        yield f"http://127.0.0.1:{json.loads(told.read_text())['port']}/lab/tree/tides.ipynb?token={token}"
    finally:
        lab.terminate()  # it ends its kernels first
        try:
            lab.wait(WAIT_S)
        finally:
            if lab.poll() is None:
                os.killpg(lab.pid, signal.SIGKILL)
                lab.wait()
            end_server(home)


@contextmanager
def browser(place: Path, home: Path) -> Iterator[Any]:
    """A page of Debian's own Chromium, whose processes have the home in their environment to be found by."""
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            place / "browser",
            executable_path=CHROMIUM,
            headless=True,
            args=QUIET,
            env={**os.environ, "HOLDFAST_HOME": str(home)},
            viewport={"width": 1300, "height": 1000},
        )
        context.set_default_timeout(WAIT_S * 1000)
        sync_api.expect.set_options(timeout=WAIT_S * 1000)
        try:
            yield context.pages[0]
        finally:
            context.close()


def run_cell(page: Any, number: int) -> Any:
    """Run it as a user does, and wait until it is done; where its outputs are."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    sync_api.expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))
    sync_api.expect(page.get_by_text("Holdfast | Idle")).to_be_visible()
    return cell.locator(".jp-OutputArea")


def test_a_notebook_in_jupyterlab_outlives_a_cell_that_runs_out_of_memory(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    with served(tmp_path, home) as address, browser(tmp_path, home) as page:
        page.goto(address)
        sync_api.expect(page.get_by_text("Holdfast | Idle")).to_be_visible()
        plot = run_cell(page, 0)
        sync_api.expect(plot.locator("img")).to_have_js_property("complete", True)
        sync_api.expect(plot.locator(".jp-OutputArea-executeResult")).to_contain_text("20")
        killed = run_cell(page, 1)
        sync_api.expect(killed).to_contain_text("Holdfast took this cell back; the notebook goes on.")
        sync_api.expect(killed).to_contain_text("Memory: as it was before the run")
        sync_api.expect(run_cell(page, 2)).to_contain_text("(190, False)")
        sync_api.expect(run_cell(page, 3)).to_contain_text("once")
        assert page.evaluate("window.ran") == 1, "the receipt comes by an update, which would run it again"
        page.keyboard.press("Control+s")
        file = tmp_path / "notebooks" / "tides.ipynb"
        assert wait_until(lambda: is_saved(file))
    assert wait_until(lambda: left_behind(home) == []), left_behind(home)

    plotted, taken_back, after, scripted = outputs_of(file)
    assert [output.output_type for output in plotted] == ["display_data", "execute_result"]
    assert [output.output_type for output in taken_back] == ["display_data", "error"]
    receipts = [output.metadata.holdfast.receipt for output in (*plotted, taken_back[0], *after)]
    assert [receipt.number for receipt in receipts] == [1, 1, 2, 3]
    assert len({receipt.sha256 for receipt in receipts}) == 3
    assert "receipt" not in scripted[0].metadata.holdfast


def is_saved(notebook: Path) -> bool:
    """With what the last cell gave; JupyterLab writes it in place, so that it is empty for a moment."""
    with suppress(nbformat.reader.NotJSONError):
        return len(outputs_of(notebook)[-1]) == 1
    return False


def outputs_of(notebook: Path) -> list[list[Any]]:
    return [cell.outputs for cell in nbformat.read(notebook, as_version=4).cells]
