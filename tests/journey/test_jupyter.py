"""The Jupyter kernel as front ends use it: `jupyter_kernel_test`'s suite, nbclient, papermill, and the client itself.

Every kernel here is a real one, started from the kernelspec that `holdfast jupyter install` wrote. A home has one
owner: kernels that live at the same time have a home each.

Of the suite's attributes one does not apply: `code_page_something`. It asks for a `page` payload in the reply, which
the protocol has deprecated; `zip?` prints what it has to say.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jupyter_kernel_test
import nbclient
import nbformat
import papermill
import pytest
from click.testing import Result
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from tests.journey.kernels import WAIT_S, end_server, jupyter_places, left_behind, make_home, wait_until
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.jupyter import history, messages, settings
from holdfast.jupyter.outputs import MOST_CHARACTERS, MOST_DISPLAYS
from holdfast.model import Display, Displayed, Output, RunError

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main", "jupyter"]
Message = dict[str, Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # papermill and the clients leave sockets to the gc
]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """Homes of their own with the shared environments."""
    made = []

    def make() -> Path:
        made.append(make_home(tmp_path_factory.mktemp("jupyter")))
        return made[-1]

    yield make
    for home in made:
        end_server(home)


def live(home: Path) -> list[str]:
    """The sessions that the home's server has."""
    told = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "ps", "--json", "--home", home], capture_output=True, check=True
    )
    return [session["id"] for session in json.loads(told.stdout)]


@pytest.fixture(scope="module", autouse=True)
def jupyter(tmp_path_factory: pytest.TempPathFactory, homes: Callable[[], Path]) -> Iterator[Path]:
    """Jupyter's own directories, our kernelspec in them, and a home for the tests' one kernel; where the spec is."""
    place = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in jupyter_places(place).items():
            patch.setenv(name, value)
        patch.setenv("HOLDFAST_HOME", str(homes()))
        patch.setattr(KernelManager.shutdown_wait_time, "default_value", float(WAIT_S))  # else it kills, under load
        subprocess.run([*HOLDFAST, "install", "--prefix", place, "--memory", "512M"], check=True)
        yield place / "share" / "jupyter" / "kernels" / "holdfast"


@pytest.fixture
def home(homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """For a kernel that the test starts itself."""
    home = homes()
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    return home


class TestTheSuite(jupyter_kernel_test.KernelTests):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.kc.execute_interactive("1", timeout=WAIT_S)  # the suite waits for less than a zygote under load may need

    kernel_name = "holdfast"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [  # noqa: RUF012
        {"text": "zi", "matches": {"zip"}},
        {"text": "'x'.isident", "matches": {"isidentifier"}},
    ]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x * 2\n\n", "%time 1", "!true"]  # noqa: RUF012
    incomplete_code_samples = ["print('''hello", "def f(x):", "x = (1,"]  # noqa: RUF012
    invalid_code_samples = ["import = 7q", "1 +* 2"]  # noqa: RUF012
    code_generate_error = "raise ValueError('no')"
    code_execute_result = [  # noqa: RUF012
        {"code": "1 + 2 + 3", "result": "6"},
        {"code": "[n * n for n in range(1, 4)]", "result": "[1, 4, 9]"},
        {"code": "import pandas as pd; pd.DataFrame({'a': [1]})", "mime": "text/html"},
    ]
    code_display_data = [  # noqa: RUF012
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('\\\\frac{1}{2}'))", "mime": "text/latex"},
        {"code": "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()", "mime": "image/png"},
    ]
    code_history_pattern = "1?+*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


class TestTheWelcome(jupyter_kernel_test.IopubWelcomeTests):
    kernel_name = "holdfast"
    support_iopub_welcome = True


class Notebook:
    """A front end: it sends cells and gathers what comes back."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def send(self, code: str, **options: Any) -> str:
        return self.client.execute(code, **options)

    def reply(self, asked: str) -> Message:
        while (reply := self.client.get_shell_msg(timeout=WAIT_S))["parent_header"].get("msg_id") != asked:
            pass
        return reply

    def next_output(self, asked: str) -> Message:
        while (message := self.client.get_iopub_msg(timeout=WAIT_S))["parent_header"].get("msg_id") != asked:
            pass
        return message

    def outputs(self, asked: str) -> list[Message]:
        """Until the kernel is idle again."""
        found = []
        while (message := self.next_output(asked))["content"].get("execution_state") != "idle":
            if message["msg_type"] not in ("status", "execute_input"):
                found.append(message)
        return found

    def run(self, code: str, **options: Any) -> tuple[Message, list[Message]]:
        asked = self.send(code, **options)
        return self.reply(asked), self.outputs(asked)

    def value(self, code: str) -> str:
        """text/plain of the last expression."""
        reply, outputs = self.run(code)
        assert reply["content"]["status"] == "ok", reply["content"].get("evalue")
        return next(message for message in outputs if message["msg_type"] == "execute_result")["content"]["data"][
            "text/plain"
        ]  # fmt: skip

    def wait_printed(self, asked: str, text: str) -> None:
        while text not in self.next_output(asked)["content"].get("text", ""):
            pass


@contextmanager
def opened(**options: Any) -> Iterator[Notebook]:
    notebook = Notebook(*start_new_kernel(kernel_name="holdfast", startup_timeout=WAIT_S, **options))
    try:
        yield notebook
    finally:
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebook lies: beside it, modules of the names that a kernel imports, and configuration."""
    directory = tmp_path_factory.mktemp("notebook")
    for name in ("json", "zmq", "msgspec", "holdfast", "ipykernel", "ipython_config", "ipython_kernel_config"):
        (directory / f"{name}.py").write_text(f"open({str(directory / 'ran')!r}, 'a').write(__name__)\n")
    (directory / "data").mkdir()
    (directory / "data" / "tides.csv").write_text("hour,metres\n0,1.2\n")
    (directory / "data" / "stolen.csv").symlink_to("/etc/passwd")
    return directory


@pytest.fixture(scope="module")
def notebook(jupyter: Path, directory: Path) -> Iterator[Notebook]:
    """One kernel for the tests that need nothing special."""
    with opened(cwd=str(directory), env={**os.environ, "HOLDFAST_JUPYTER_UPLOAD": "data/*.csv *.parquet"}) as notebook:
        yield notebook


# -- what a notebook keeps ---------------------------------------------------------------------------------------


def saved(outputs: list[Message]) -> list[Message]:
    """The contents of what a front end has at the end, in order: updated, cleared."""
    kept: list[Message] = []
    clears_next = False
    for output in outputs:
        content = output["content"]
        match output["msg_type"]:
            case "clear_output":
                clears_next = content["wait"]
                kept = kept if clears_next else []
            case "update_display_data":
                for shown in kept:
                    if shown.get("transient") == content["transient"]:
                        shown.update(data=content["data"], metadata=content["metadata"])
            case _:
                kept = [] if clears_next else kept
                kept.append(content)
                clears_next = False
    return kept


def test_the_receipt_stands_in_the_reply_and_in_every_display_and_result(notebook: Notebook) -> None:
    reply, outputs = notebook.run("display('shown')\nprint('text')\n6 * 7")
    ours = reply["metadata"]["holdfast"]

    assert ours["status"] == "committed"
    assert len(ours["receipt"]["sha256"]) == 64
    kinds = [output["msg_type"] for output in outputs]
    assert kinds == ["display_data", "stream", "execute_result", "update_display_data"]
    assert outputs[0]["content"]["metadata"]["holdfast"] == {"session": ours["session"], "run": ours["run"]}
    for output in (outputs[2], outputs[3]):
        assert output["content"]["metadata"]["holdfast"] == {name: ours[name] for name in ("session", "run", "receipt")}
        assert output["metadata"]["holdfast"] == ours
    assert outputs[3]["content"]["data"] == outputs[0]["content"]["data"]


def test_the_receipt_of_a_display_is_of_the_run_that_showed_it_last(notebook: Notebook) -> None:
    first, outputs = notebook.run("handle = display('one', display_id=True)")
    second, updates = notebook.run("handle.update('two')")
    receipts = [output["content"]["metadata"]["holdfast"].get("receipt") for output in (*outputs, *updates)]

    assert receipts == [None, first["metadata"]["holdfast"]["receipt"], None, second["metadata"]["holdfast"]["receipt"]]
    assert updates[-1]["content"]["transient"] == outputs[0]["content"]["transient"]


def test_a_figure_behind_a_result_is_sent_once_and_in_order_with_its_receipt(notebook: Notebook) -> None:
    reply, outputs = notebook.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])")

    assert [output["msg_type"] for output in outputs] == ["execute_result", "display_data"]
    for output in outputs:
        assert output["content"]["metadata"]["holdfast"]["receipt"] == reply["metadata"]["holdfast"]["receipt"]


def test_what_was_cleared_does_not_come_back_with_its_receipt(notebook: Notebook) -> None:
    _, outputs = notebook.run(
        "from IPython.display import clear_output\n"
        "display('gone')\nclear_output()\ndisplay('waits')\nclear_output(wait=True)\ndisplay('stays')\nprint('text')"
    )

    stays, text = saved(outputs)
    assert stays["data"]["text/plain"] == "'stays'"
    assert "receipt" in stays["metadata"]["holdfast"]
    assert text["text"] == "text\n"
    assert [output["msg_type"] for output in outputs].count("update_display_data") == 1


def test_what_a_browser_would_execute_is_shown_once_and_names_its_run(notebook: Notebook) -> None:
    reply, outputs = notebook.run(
        "from IPython.display import HTML, Javascript\n"
        "display(Javascript('1'), HTML('<b>x</b><script>1</script>'))\n"
        "display(HTML('<img src=x onerror=alert()>'), HTML('<input>'))\n"
        "display({'application/vnd.plotly.v1+json': {}, 'text/plain': 'figure'}, raw=True)\n"
        "display(HTML('<style scoped>td { color: red }</style><table><tr><td class=on>=1</td></tr></table>'))"
    )

    shown = saved(outputs)
    assert [output["msg_type"] for output in outputs] == ["display_data"] * 6 + ["update_display_data"]
    assert {output["metadata"]["holdfast"]["run"] for output in shown} == {reply["metadata"]["holdfast"]["run"]}
    assert ["receipt" in output["metadata"]["holdfast"] for output in shown] == [False] * 5 + [True]


def test_two_displays_with_one_id_keep_what_each_shows(notebook: Notebook) -> None:
    notebook.run("display('elsewhere', display_id='same');")
    _, outputs = notebook.run(
        "display('here', display_id='same')\ndisplay('a', display_id='two')\ndisplay('b', display_id='two');"
    )

    assert [output["msg_type"] for output in outputs] == ["display_data"] * 3


@pytest.fixture
def every_value(notebook: Notebook) -> Iterator[None]:
    """A cell shows the value of each of its expressions, as IPython can be told to."""
    notebook.run("get_ipython().ast_node_interactivity = 'all'")
    yield
    notebook.run("get_ipython().ast_node_interactivity = 'last_expr'")


@pytest.mark.usefixtures("every_value")
def test_a_cell_that_goes_on_after_a_result_shows_it_while_it_runs(notebook: Notebook) -> None:
    asked = notebook.send("6 * 7\nprint('on', flush=True)\nwhile True: pass")
    while (result := notebook.next_output(asked))["msg_type"] != "execute_result":
        pass
    notebook.wait_printed(asked, "on")
    notebook.manager.interrupt_kernel()

    assert "receipt" not in result["content"]["metadata"]["holdfast"]
    assert notebook.reply(asked)["content"]["ename"] == "KeyboardInterrupt"


@pytest.mark.usefixtures("every_value")
def test_a_result_is_shown_before_a_question_and_the_others_wait_for_their_receipt(notebook: Notebook) -> None:
    asked = notebook.send("6 * 7\ninput('go on?')\n'last'", allow_stdin=True)
    notebook.client.get_stdin_msg(timeout=WAIT_S)
    while (early := notebook.next_output(asked))["msg_type"] != "execute_result":
        pass
    notebook.client.input("yes")
    late = notebook.outputs(asked)

    assert "receipt" not in early["content"]["metadata"]["holdfast"]
    assert [output["content"]["data"]["text/plain"] for output in late] == ["'yes'", "'last'"]
    assert all("receipt" in output["content"]["metadata"]["holdfast"] for output in late)


def test_more_displays_than_are_kept_name_their_run_alone(notebook: Notebook) -> None:
    _, many = notebook.run(f"for n in range({MOST_DISPLAYS} + 5): display(n)")
    _, large = notebook.run(
        f"for n in range(3): display({{'text/plain': 'x' * ({MOST_CHARACTERS} // 5 * 2)}}, raw=True)"
    )

    have = [["receipt" in output["metadata"]["holdfast"] for output in saved(outputs)] for outputs in (many, large)]
    assert have == [[True] * MOST_DISPLAYS + [False] * 5, [True, True, False]]


def test_a_cell_cannot_forge_its_receipt(notebook: Notebook) -> None:
    forged = (
        "display({'text/plain': 'x'}, raw=True,"
        " metadata={'holdfast': {'run': 'forged', 'receipt': 'forged'}, 'other': 1})"
    )
    reply, (live, sealed) = notebook.run(forged)

    for output in (live, sealed):
        assert output["content"]["metadata"]["holdfast"]["run"] == reply["metadata"]["holdfast"]["run"]
        assert output["content"]["metadata"]["other"] == 1
    assert "receipt" not in live["content"]["metadata"]["holdfast"]
    assert sealed["content"]["metadata"]["holdfast"]["receipt"] == reply["metadata"]["holdfast"]["receipt"]


def test_a_display_is_updated_and_cleared_in_order(notebook: Notebook) -> None:
    _, outputs = notebook.run(
        "from IPython.display import clear_output\n"
        "handle = display('first', display_id='one')\n"
        "print('between', flush=True)\n"
        "handle.update('second')\n"
        "clear_output(wait=True)\n"
        "display({'application/json': {'a': [1, 2]}}, raw=True)"
    )

    assert outputs.pop()["content"]["transient"] == outputs[4]["content"]["transient"], "the last one, with its receipt"
    kinds = [output["msg_type"] for output in outputs]
    assert kinds == ["display_data", "stream", "update_display_data", "clear_output", "display_data"]
    assert outputs[0]["content"]["transient"] == outputs[2]["content"]["transient"] == {"display_id": "one"}
    assert outputs[3]["content"] == {"wait": True}
    assert outputs[4]["content"]["data"] == {"application/json": {"a": [1, 2]}}


def test_lines_that_are_printed_one_by_one_come_in_few_messages(notebook: Notebook) -> None:
    _, outputs = notebook.run("import sys\nfor n in range(3000): print(n, flush=True)\nprint('end', file=sys.stderr)")
    printed = "".join(output["content"]["text"] for output in outputs if output["content"]["name"] == "stdout")

    assert printed == "".join(f"{n}\n" for n in range(3000))
    assert len(outputs) < 300


def test_what_cannot_be_sent_is_named_and_the_notebook_goes_on(notebook: Notebook) -> None:
    _, outputs = notebook.run(
        "display({'application/json': float('nan'), 'text/plain': 'n'}, raw=True)\n"
        "deep = '[' * 900 + ']' * 900\n"
        "display({'text/plain': 'd'}, raw=True, metadata={'deep': __import__('json').loads(deep)})"
    )

    assert outputs
    assert notebook.value("'still here'") == "'still here'"


def test_after_too_much_memory_the_notebook_goes_on_with_its_variables_and_a_note(notebook: Notebook) -> None:
    number = int(notebook.run("kept = list(range(5))")[0]["content"]["execution_count"])
    reply, outputs = notebook.run("kept.append(99)\nopen('<b>.txt', 'w').close()\nhuge = bytearray(2 << 30)")
    note = outputs[0]["content"]

    assert reply["content"]["status"] == "error"
    assert reply["content"]["ename"] in ("OutOfMemory", "MemoryError")
    assert reply["metadata"]["holdfast"]["status"] == "rolled_back"
    assert [output["msg_type"] for output in outputs] == ["display_data", "error"]
    for kind in ("text/plain", "text/html"):
        assert all(word in note["data"][kind] for word in ("Cause: ", "Memory: as it was before the run", "Next: "))
    assert "<b>.txt" in note["data"]["text/plain"]
    assert "&lt;b&gt;.txt" in note["data"]["text/html"], "names are the cell's, and no markup"
    assert note["metadata"]["holdfast"]["receipt"] == reply["metadata"]["holdfast"]["receipt"]
    assert outputs[1]["metadata"]["holdfast"] == reply["metadata"]["holdfast"], "an error's content has no metadata"
    assert notebook.value("kept") == "[0, 1, 2, 3, 4]"
    assert notebook.value("max(Out)") == str(number + 1), "the number of a cell is IPython's own"


# -- input, interrupts, order --------------------------------------------------------------------------------------


def test_input_and_getpass_are_answered_over_the_stdin_channel(notebook: Notebook) -> None:
    asked = notebook.send(
        "import getpass\nprint('before')\nname = input('Name? ')\nsecret = getpass.getpass('Secret? ')\n(name, secret)",
        allow_stdin=True,
    )
    first = notebook.client.get_stdin_msg(timeout=WAIT_S)
    notebook.client.input("Ada")
    second = notebook.client.get_stdin_msg(timeout=WAIT_S)
    notebook.client.input("s3")

    assert notebook.reply(asked)["content"]["status"] == "ok"
    assert first["content"] == {"prompt": "Name? ", "password": False}
    assert second["content"] == {"prompt": "Secret? ", "password": True}
    assert notebook.outputs(asked)[-1]["content"]["data"]["text/plain"] == "('Ada', 's3')"


def test_a_question_can_be_interrupted_and_a_late_answer_answers_nothing(notebook: Notebook) -> None:
    asked = notebook.send("before = 1\ninput('Wait? ')", allow_stdin=True)
    question = notebook.client.get_stdin_msg(timeout=WAIT_S)
    notebook.manager.interrupt_kernel()
    reply = notebook.reply(asked)
    client = notebook.client
    client.stdin_channel.send(client.session.msg("input_reply", {"value": "too late"}, parent=question))
    again = notebook.send("(before, input('Again? '))", allow_stdin=True)
    assert notebook.client.get_stdin_msg(timeout=WAIT_S)["content"]["prompt"] == "Again? "
    notebook.client.input("in time")

    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert notebook.reply(again)["content"]["status"] == "ok"
    assert notebook.outputs(again)[-1]["content"]["data"]["text/plain"] == "(1, 'in time')"


def test_a_traceback_has_an_item_per_block_as_in_ipython(notebook: Notebook) -> None:
    notebook.run("def fail():\n    1 / 0")
    reply, _ = notebook.run("fail()")
    rule, heading, cell, function, error = reply["content"]["traceback"]

    assert set(rule) == {"-"}
    assert heading.startswith("ZeroDivisionError  ")
    assert cell.startswith("Cell In[")
    assert "in fail()" in function
    assert error == "ZeroDivisionError: division by zero"
    assert not any(block.startswith("\n") for block in reply["content"]["traceback"])


def test_an_exit_has_the_blocks_that_clients_look_for(notebook: Notebook) -> None:
    reply, _ = notebook.run("import sys; sys.exit(1)")

    assert reply["content"]["traceback"] == [
        "An exception has occurred, use %tb to see the full traceback.\n",
        "SystemExit: 1\n",
    ]


def test_a_value_that_cannot_be_shown_is_an_error_that_names_it(notebook: Notebook) -> None:
    notebook.run("class Broken:\n    def __repr__(self): raise ValueError('no')\nbroken = Broken()")
    reply, outputs = notebook.run("broken")

    (error,) = [output["content"] for output in outputs if output["msg_type"] == "error"]
    assert (reply["content"]["status"], error["ename"], error["evalue"]) == ("error", "ValueError", "no")
    assert "the variable `broken`, of type Broken" in "\n".join(error["traceback"])


def test_text_for_the_next_cell_is_in_the_payload(notebook: Notebook) -> None:
    reply, _ = notebook.run("get_ipython().set_next_input('x = 1', replace=True)")

    assert reply["content"]["payload"] == [{"source": "set_next_input", "text": "x = 1", "replace": True}]


def test_a_cell_that_does_not_parse_is_counted(notebook: Notebook) -> None:
    counts = [notebook.run(code)[0]["content"]["execution_count"] for code in ("1", "x = =", "1")]

    assert counts == [counts[0], counts[0] + 1, counts[0] + 2]
    assert notebook.value("In[-3:-1]") == "['x = =', '1']"


def test_where_nobody_can_answer_input_says_so(notebook: Notebook) -> None:
    reply, _ = notebook.run("input('Name? ')", allow_stdin=False)

    assert reply["content"]["ename"] == "InputUnavailable"


@pytest.mark.parametrize("by", ["message", "signal"])
def test_an_interrupt_ends_the_cell_and_what_it_did_stays(notebook: Notebook, by: str) -> None:
    asked = notebook.send("import time\ndone = 1\nprint('on', flush=True)\ntime.sleep(600)")
    notebook.wait_printed(asked, "on")
    if by == "message":
        notebook.manager.interrupt_kernel()
    else:
        os.kill(notebook.manager.provisioner.pid, signal.SIGINT)  # type: ignore[union-attr]
    reply = notebook.reply(asked)

    told = [reply["content"][name] for name in ("status", "ename", "evalue")]
    assert told == ["error", "KeyboardInterrupt", ""]
    assert "interrupted" in reply["metadata"]["holdfast"]["error"]["message"]
    assert notebook.value("done") == "1"


def test_cells_that_wait_are_not_run_after_an_error_unless_that_is_wanted(notebook: Notebook) -> None:
    stopping = [notebook.send(code) for code in ("ran = []", "1 / 0", "ran.append('a')", "ran.append('b')")]
    replies = [notebook.reply(asked)["content"]["status"] for asked in stopping]
    after = notebook.value("ran")
    going_on = [notebook.send(code, stop_on_error=False) for code in ("1 / 0", "ran.append('c')")]

    assert replies == ["ok", "error", "aborted", "aborted"]
    assert after == "[]"
    assert [notebook.reply(asked)["content"]["status"] for asked in going_on] == ["error", "ok"]
    assert notebook.value("ran") == "['c']"


def test_a_silent_cell_is_neither_counted_nor_shown(notebook: Notebook) -> None:
    number = notebook.run("0")[0]["content"]["execution_count"]
    reply, outputs = notebook.run("quiet = 1\nprint('x')\n5", silent=True)

    assert (reply["content"]["status"], outputs) == ("ok", [])
    assert notebook.value("quiet, _") == "(1, 0)"
    assert notebook.run("0")[0]["content"]["execution_count"] == number + 2


def test_user_expressions_are_evaluated_after_the_cell(notebook: Notebook) -> None:
    reply, _ = notebook.run("base = 20", user_expressions={"sum": "base + 1", "wrong": "nowhere"})
    values = reply["content"]["user_expressions"]

    assert values["sum"]["status"] == "ok"
    assert values["sum"]["data"]["text/plain"] == "21"
    assert (values["wrong"]["status"], values["wrong"]["ename"]) == ("error", "NameError")


def test_a_comm_is_closed_at_once(notebook: Notebook) -> None:
    client = notebook.client
    message = client.session.msg("comm_open", {"comm_id": "c1", "target_name": "jupyter.widget", "data": {}})
    client.shell_channel.send(message)

    while (answer := client.get_iopub_msg(timeout=WAIT_S))["msg_type"] != "comm_close":
        pass
    assert answer["content"]["comm_id"] == "c1"


# -- whole notebooks ---------------------------------------------------------------------------------------------


def a_notebook(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def test_nbclient_runs_a_notebook_with_plots(home: Path) -> None:
    cells = a_notebook(
        "import numpy as np, pandas as pd, matplotlib.pyplot as plt\n"
        "tides = pd.DataFrame({'hour': np.arange(24), 'metres': 3 + 2 * np.sin(np.arange(24) / 2)})\n"
        "tides.to_csv('tides.csv', index=False)\n"
        "tides.describe()",
        "fig, ax = plt.subplots()\nax.plot(tides.hour, tides.metres)\nplt.show()\nprint(len(tides), 'rows')",
        "tides.metres.hist()",
        "everything = np.ones(1 << 30)",
        "round(float(tides.metres.max()), 2), len(pd.read_csv('tides.csv'))",
    )
    nbclient.NotebookClient(cells, kernel_name="holdfast", timeout=WAIT_S, allow_errors=True).execute()
    outputs = [cell.outputs for cell in cells.cells]
    shown = [output for cell in outputs for output in cell if "metadata" in output]

    nbformat.validate(cells)
    assert "text/html" in outputs[0][0].data
    figures = [output.data["image/png"] for output in shown if "image/png" in output.data]
    assert len(figures) == 2
    assert all(base64.b64decode(figure).startswith(b"\x89PNG") for figure in figures)
    assert len({output.metadata.holdfast.run for output in shown}) == 5, "each cell that shows something is a run"
    assert len({output.metadata.holdfast.receipt.sha256 for output in shown}) == 5, "and has a receipt"
    assert [output.output_type for output in outputs[3]] == ["display_data", "error"]
    assert outputs[4][0].data["text/plain"] == "(4.99, 24)"
    end_server(home)
    assert left_behind(home) == []


def test_papermill_runs_one_with_parameters(home: Path, tmp_path: Path) -> None:
    cells = a_notebook("factor = 1", "display('shown')\nprint(factor * 21)\nfactor * 21")
    cells.cells[0].metadata.tags = ["parameters"]
    cells.metadata.kernelspec = {"name": "holdfast", "display_name": "Holdfast", "language": "python"}
    nbformat.write(cells, tmp_path / "in.ipynb")

    done = papermill.execute_notebook(
        str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), {"factor": 2}, progress_bar=False
    )

    assert done.metadata.papermill.exception is None
    shown, printed, result = done.cells[-1].outputs
    assert (shown.data["text/plain"], printed.text, result.data["text/plain"]) == ("'shown'", "42\n", "42")
    assert shown.metadata.holdfast == result.metadata.holdfast
    assert len(result.metadata.holdfast.receipt.sha256) == 64
    end_server(home)
    assert left_behind(home) == []


def test_papermill_stops_at_an_exit_with_success(home: Path, tmp_path: Path) -> None:
    cells = a_notebook("import sys; sys.exit(0)", "print('not reached')")
    cells.metadata.kernelspec = {"name": "holdfast", "display_name": "Holdfast", "language": "python"}
    nbformat.write(cells, tmp_path / "in.ipynb")

    done = papermill.execute_notebook(str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), progress_bar=False)

    (error,) = done.cells[0].outputs
    assert (error.output_type, error.ename, error.evalue) == ("error", "SystemExit", "0")
    assert done.cells[1].outputs == []
    end_server(home)


# -- how it begins and ends --------------------------------------------------------------------------------------


def test_the_log_has_the_prefix_that_clients_leave_out(home: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, opened(stderr=log, extra_arguments=["--debug"]) as notebook:
        assert notebook.value("1") == "1"
    lines = (tmp_path / "log").read_text().splitlines()

    assert any(line.startswith("[IPKernelApp] ") for line in lines)
    assert [line for line in lines if line.startswith("[") and not line.startswith("[IPKernelApp] ")] == []
    end_server(home)


def test_a_restart_begins_anew_and_leaves_nothing_of_the_old(home: Path) -> None:
    with opened() as notebook:
        notebook.run("x = 1\nopen('old.txt', 'w').write('x')")
        (first,) = live(home)
        notebook.manager.restart_kernel()
        notebook.client.wait_for_ready(timeout=WAIT_S)
        reply, _ = notebook.run("x")

        assert reply["content"]["ename"] == "NameError"
        assert reply["content"]["execution_count"] == 1
        assert notebook.value("__import__('os').listdir()") == "[]"
        (second,) = live(home)
        assert second != first
        notebook.manager.restart_kernel(now=True)  # by SIGKILL: the server notices that nobody holds the session
        notebook.client.wait_for_ready(timeout=WAIT_S)
        assert notebook.value("__import__('os').listdir()") == "[]"
        assert wait_until(lambda: second not in live(home) and len(live(home)) == 1)
    end_server(home)
    assert left_behind(home) == []


MANAGER = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="holdfast", startup_timeout=60)
asked = client.execute("print('on', flush=True)\\nwhile True: pass")
while "on" not in client.get_iopub_msg(timeout=60)["content"].get("text", ""): pass
print(manager.provisioner.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ended_by", ["SIGTERM", "death of its parent"])
def test_however_it_ends_nothing_is_left(home: Path, ended_by: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MANAGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as manager:
        assert manager.stdout is not None
        kernel = int(manager.stdout.readline())
        assert len(live(home)) == 1
        if ended_by == "SIGTERM":
            os.kill(kernel, signal.SIGTERM)
            assert wait_until(lambda: live(home) == [])
        manager.kill()

    assert wait_until(lambda: live(home) == [])
    end_server(home)
    assert wait_until(lambda: left_behind(home) == []), left_behind(home)


def test_what_lies_beside_a_notebook_is_not_run_outside_the_sandbox(notebook: Notebook, directory: Path) -> None:
    assert notebook.value("__import__('os').getcwd()") == "'/mnt/data'"
    assert not (directory / "ran").exists()


def test_files_beside_the_notebook_are_taken_along_if_that_is_wanted_but_no_links_out_of_it(notebook: Notebook) -> None:
    assert notebook.value("__import__('glob').glob('data/*')") == "['data/tides.csv']"
    assert notebook.value("open('data/tides.csv').read()") == "'hour,metres\\n0,1.2\\n'"


def test_two_notebooks_share_a_home_and_nothing_else(notebook: Notebook) -> None:
    notebook.run("mine = 1\nopen('mine.txt', 'w').write('1')")
    with opened() as second:
        assert second.value("'mine' in globals(), __import__('os').path.exists('mine.txt')") == "(False, False)"

    assert notebook.value("mine") == "1"


# -- the kernelspec ------------------------------------------------------------------------------------------------


def test_the_kernelspec_has_a_logo_and_keeps_the_notebooks_directory_off_the_path(jupyter: Path) -> None:
    spec = json.loads((jupyter / "kernel.json").read_text())

    assert spec["display_name"] == "Holdfast"
    assert spec["interrupt_mode"] == "message"
    assert spec["argv"][1:4] == ["-P", "-m", "holdfast.jupyter"]
    assert spec["argv"][-2:] == ["--memory", "512M"]
    assert {path.name for path in jupyter.iterdir()} == {
        "kernel.json", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg",
    }  # fmt: skip


def test_a_kernelspec_is_removed_by_name_and_only_if_it_is_ours(jupyter: Path) -> None:
    def holdfast(*words: str) -> Result:
        return CliRunner().invoke(app, ["jupyter", *words])

    installed = holdfast("install", "--user", "--name", "other", "--keep", "--upload", "*.csv", "--json")
    directory = Path(json.loads(installed.stdout)["directory"])
    argv = json.loads((directory / "kernel.json").read_text())["argv"]
    removed, again, theirs = (holdfast("uninstall", "--name", name) for name in ("other", "other", "python3"))

    assert argv[-3:] == ["--upload", "*.csv", "--keep"]
    assert (removed.exit_code, again.exit_code, theirs.exit_code) == (0, 3, 3)
    assert not directory.exists()
    assert "no kernelspec is named 'other'" in again.stderr
    assert "not ours" in theirs.stderr
    assert jupyter.exists()


def test_without_the_extra_it_says_what_to_install() -> None:
    without = (
        "import sys; sys.modules['ipykernel'] = None\nfrom holdfast.cli.main import app; app(['jupyter', 'install'])"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)

    assert done.returncode == 3
    assert "[extra_missing]" in done.stderr
    assert "pip install ipykernel" in done.stderr


def test_an_argument_counts_more_than_a_variable_and_a_cell_has_no_deadline_by_default() -> None:
    variables = {"HOLDFAST_JUPYTER_MEMORY": "2G", "HOLDFAST_JUPYTER_CPUS": "1.5", "HOLDFAST_JUPYTER_KEEP": "1"}
    ours, theirs = settings.chosen(["-f", "file.json", "--memory", "4G"], variables)

    assert ours.options == {"memory": "4G", "cpus": 1.5, "timeout": settings.NO_DEADLINE, "mode": "notebook"}
    assert (ours.keep, ours.inert, ours.upload) == (True, False, [])
    assert theirs == ["-f", "file.json"]
    given = {"timeout": "5m", "env": None, "upload": ["*.csv", "data/**/*"], "inert": True, "keep": False}
    again, _ = settings.chosen(settings.arguments(given | {"egress": ["a.example", "b.example"]}), {})
    assert again.options == {"timeout": "5m", "mode": "notebook", "egress": ["a.example", "b.example"]}
    assert (again.keep, again.inert, again.upload) == (False, True, ["*.csv", "data/**/*"])


def test_events_become_messages_in_order_and_text_is_put_together() -> None:
    display = Display(data={"image/png": b"\x89PNG", "application/json": "{not json"})
    events = [Output(stream="stdout", text="a"), Output(stream="stdout", text="b"), Output(stream="stderr", text="c")]
    found = list(
        messages.of_events([*events, Displayed(display=display, result=True, run="run_1")], session="s", count=3)
    )

    assert found[:2] == [("stream", {"name": "stdout", "text": "ab"}), ("stream", {"name": "stderr", "text": "c"})]
    assert found[2][0] == "execute_result"
    assert found[2][1]["data"] == {"image/png": "iVBORw==", "application/json": "{not json"}
    assert found[2][1]["execution_count"] == 3


@pytest.mark.parametrize("blocks", [[], [0, 5], [-(2**60), 5, 5, 2**60]])
def test_wherever_a_guest_says_that_blocks_begin_nothing_is_lost(blocks: list[int]) -> None:
    error = RunError(code="exception", name="E", message="no", traceback="head\nbody\n", blocks=blocks)

    assert messages.of_error(error)["traceback"] == (["head", "body\n"] if blocks else ["head\nbody\n"])


def test_an_inert_notebook_gets_nothing_that_a_browser_would_execute() -> None:
    shown = [Display(data={"text/html": "<script>", "text/plain": "table"}), Display(data={"image/svg+xml": "<svg/>"})]
    found = messages.of_events([Displayed(display=display) for display in shown], session="s", count=1, inert=True)

    assert [content["data"] for _, content in found] == [
        {"text/plain": "table"},
        {"text/plain": "<left out, for a browser would execute it: image/svg+xml>"},
    ]


def test_a_unique_search_finds_the_latest_of_equal_lines() -> None:
    lines = history.History()
    for number, code in enumerate(("a = 1", "b = 2", "a = 1"), start=1):
        lines.add(number, code, None)

    assert [line.number for line in lines.search("a*", None, unique=True)] == [3]
    assert [line.number for line in lines.search("*", 2, unique=False)] == [2, 3]
    assert [line.number for line in lines.range(2, 3)] == [2]
