"""What a cell means: IPython's semantics, errors included."""

import os
from collections.abc import Iterator

import pytest

from holdfast import Run, Session


@pytest.fixture
def notebook() -> Iterator[Session]:
    """Where a failed cell keeps what it did, as it does in IPython."""
    with Session(memory="512M", timeout=30, mode="notebook") as session:
        yield session


def frames(run: Run) -> list[str]:
    """The places a traceback names, in order."""
    assert run.error is not None
    lines = [line.lstrip(" |") for line in run.error.traceback.splitlines()]
    return [line for line in lines if line.startswith(("Cell In", "File "))]


def assert_begins_at_the_cell(run: Run) -> None:
    assert frames(run)[0].startswith(("Cell In", 'File "<ipython-input-'))
    assert run.error is not None
    assert "interactiveshell.py" not in run.error.traceback
    assert "/holdfast/" not in run.error.traceback


# -- values ------------------------------------------------------------------------------------------------------


def test_the_value_of_the_last_expression_is_the_text(session: Session) -> None:
    run = session.run("x = 21 * 2\nx")

    assert (run.status, run.text, run.stdout, run.error) == ("committed", "42", "", None)


def test_a_semicolon_hides_the_value(session: Session) -> None:
    assert session.run("21 * 2;").text is None
    assert session.run("_").text is None


def test_a_cell_without_a_last_expression_has_no_text(session: Session) -> None:
    assert session.run("x = 1").text is None
    assert session.run("").status == "committed"


def test_earlier_values_are_in_underscore_and_out(session: Session) -> None:
    session.run("'first'")
    session.run("'second'")

    assert session.run("_, __, _1, _2, Out[1], Out[2]").text == (
        "('second', 'first', 'first', 'second', 'first', 'second')"
    )


def test_earlier_code_is_in_in(session: Session) -> None:
    session.run("a = 1")

    assert session.run("In[1], _i, _i1").text == "('a = 1', 'a = 1', 'a = 1')"


def test_runs_are_counted_and_a_failure_counts_too(notebook: Session) -> None:
    assert [notebook.run(code).count for code in ("1", "1/0", "x = =", "2")] == [1, 2, 3, 4]
    assert notebook.run("Out").text == "{1: 1, 4: 2}"


def test_a_failure_that_is_taken_back_leaves_the_count_as_well(session: Session) -> None:
    assert [session.run(code).count for code in ("1", "1/0", "raise KeyError", "2")] == [1, 2, 2, 2]
    assert session.run("Out, In").text == "({1: 1, 2: 2}, ['', '1', '2', 'Out, In'])"


def test_a_huge_value_is_shortened_as_ipython_shortens_it(session: Session) -> None:
    run = session.run("list(range(100_000))")

    assert run.text is not None
    assert run.text.endswith(" ...]")
    assert len(run.text) < 20_000


def test_main_is_the_namespace_of_the_cells(session: Session) -> None:
    session.run("x = 5")

    assert session.run("import __main__; __name__, __main__.x").text == "('__main__', 5)"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("before", ["", "%reset -f\n"])
def test_processes_start_by_every_method_in_a_cell(session: Session, method: str, before: str) -> None:
    session.run(before)
    code = (
        f"import math, multiprocessing\nwith multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "    print(pool.map(math.sqrt, [4]), __spec__, __loader__, __package__)\ndel pool"
    )

    for run in (session.run(code), session.run(code)):  # the second finds the helpers of the first ended
        assert (run.error, run.stdout) == (None, "[2.0] None None None\n")
        assert "died unexpectedly" not in run.stderr


def test_what_a_cell_defines_can_be_pickled_by_the_next(session: Session) -> None:
    session.run("import dataclasses\n@dataclasses.dataclass\nclass P:\n    a: int")

    assert session.run("import pickle; pickle.loads(pickle.dumps(P(3)))").text == "P(a=3)"


def test_the_source_of_a_function_can_be_read_back(session: Session) -> None:
    session.run("def f():\n    return 'here'")

    assert session.run("import inspect; print(inspect.getsource(f))").stdout == "def f():\n    return 'here'\n\n"


# -- magics and commands -------------------------------------------------------------------------------------------


def test_timeit_measures(session: Session) -> None:
    assert "2 runs, 3 loops each" in session.run("%timeit -n 3 -r 2 1 + 1").stdout


def test_a_timed_cell_keeps_its_value(session: Session) -> None:
    run = session.run("%%time\ny = 5\ny")

    assert run.text == "5"
    assert "Wall time" in run.stdout
    assert session.run("y").text == "5"


def test_bash_cells_run_in_bash(session: Session) -> None:
    run = session.run("%%bash\na=(1 2 3)\necho ${a[2]}\necho bad >&2")

    assert (run.stdout, run.stderr, run.strays) == ("3\n", "bad\n", [])


def test_a_bash_cell_that_fails_is_an_error(session: Session) -> None:
    run = session.run("%%bash\necho out\nexit 3")

    assert run.stdout == "out\n"
    assert run.error is not None
    assert run.error.name == "CalledProcessError"
    assert "exit status 3" in run.error.message


def test_writefile_writes_a_module_that_can_be_imported(session: Session) -> None:
    session.run("%%writefile mymodule.py\nvalue = 7")

    assert session.run("import mymodule; mymodule.value, mymodule.__file__").text == "(7, '/mnt/data/mymodule.py')"


def test_who_lists_only_the_users_names(session: Session) -> None:
    session.run("alpha = 1; beta = 2")

    assert session.run("%who").stdout.split() == ["alpha", "beta"]


def test_env_reaches_later_commands(session: Session) -> None:
    session.run("%env COLOUR=blue")

    assert session.run("!echo $COLOUR").stdout == "blue\n"
    assert session.shell("echo $COLOUR").stdout == "blue\n"


@pytest.mark.parametrize("code", ["%cd /tmp", "import os; os.chdir('/tmp')"])
def test_a_change_of_directory_lasts(session: Session, code: str) -> None:
    session.run(code)

    assert session.run("import os; os.getcwd()").text == "'/tmp'"
    assert session.run("!pwd").stdout == "/tmp\n"
    assert session.shell("pwd").stdout == "/tmp\n"


def test_the_workspace_is_the_first_directory(session: Session) -> None:
    assert session.run("%pwd").text == "'/mnt/data'"


def test_a_command_shows_its_output_and_leaves_its_exit_code(session: Session) -> None:
    run = session.run("!echo out; echo err >&2; exit 4")

    assert (run.status, run.stdout, run.stderr) == ("committed", "out\n", "err\n")
    assert session.run("_exit_code").text == "4"


def test_a_command_may_use_python_variables(session: Session) -> None:
    assert session.run("name = 'world'\n!echo hello {name} $name").stdout == "hello world world\n"


def test_a_command_in_a_function_sees_the_functions_variables(session: Session) -> None:
    run = session.run("def f():\n    inner = 5\n    found = !echo {inner}\n    return found\nf()")

    assert run.text == "['5']"


def test_the_output_of_a_command_can_be_assigned(session: Session) -> None:
    run = session.run("x = !printf 'a\\nb\\n'; exit 2\nx, x.s, _exit_code")

    assert run.text == "(['a', 'b'], 'a b', 2)"
    assert run.stdout == ""


def test_an_unknown_magic_is_an_error(session: Session) -> None:
    for code in ("%nosuch", "%%nosuch\nx"):
        run = session.run(code)
        assert run.error is not None
        assert (run.error.code, run.error.name) == ("exception", "UsageError")
        assert "nosuch" in run.error.message


def test_a_question_mark_explains(session: Session) -> None:
    assert "Return the number of items in a container" in session.run("len?").stdout


def test_tb_shows_the_last_traceback_again(notebook: Session) -> None:
    notebook.run("1 / 0")
    run = notebook.run("%tb")

    assert run.status == "committed"
    assert "ZeroDivisionError: division by zero" in run.stderr


def test_cd_leads_back_to_where_the_session_began(session: Session) -> None:
    moved = session.run("%cd /tmp\n%cd -")

    assert (moved.stdout, session.run("import os; os.getcwd()").text) == ("/tmp\n/mnt/data\n", "'/mnt/data'")


def test_history_prints_what_this_session_ran(session: Session) -> None:
    for code in ("x = 1", "y = 22", "y"):
        session.run(code)

    assert session.run("%history").stdout == "x = 1\ny = 22\ny\n%history\n"
    assert session.run("%history -g y =").stdout == "   2: y = 22\n   5: %history -g y =\n"
    assert session.run("%history -l 2").stdout == "%history\n%history -g y =\n"
    assert session.run("%history -o 1-3").stdout == "x = 1\ny = 22\ny\n22\n"
    assert session.run("%recall y = 2").next_input is not None


# -- await ---------------------------------------------------------------------------------------------------------


def test_await_works_at_the_top_level(session: Session) -> None:
    assert session.run("import asyncio\nawait asyncio.sleep(0.001, result=5)").text == "5"


def test_gather_and_async_for_work_at_the_top_level(session: Session) -> None:
    run = session.run(
        "import asyncio\n"
        "async def count():\n"
        "    for i in range(3):\n"
        "        await asyncio.sleep(0)\n"
        "        yield i\n"
        "async for i in count():\n"
        "    print(i)\n"
        "await asyncio.gather(asyncio.sleep(0.001, 1), asyncio.sleep(0.001, 2))"
    )

    assert (run.stdout, run.text) == ("0\n1\n2\n", "[1, 2]")


def test_cells_share_one_event_loop(session: Session) -> None:
    session.run("import asyncio\nq = asyncio.Queue()\nawait asyncio.sleep(0)\nloop = asyncio.get_running_loop()")
    session.run("task = loop.create_task(q.put('from before'))")

    assert session.run("await q.get(), asyncio.get_running_loop() is loop").text == "('from before', True)"


def test_an_interrupted_await_does_not_go_on_in_the_next_cell(notebook: Session) -> None:
    run = notebook.run(
        "import asyncio\nticks = 0\nwhile True:\n    await asyncio.sleep(0.01)\n    ticks += 1\n"
        "    if ticks == 5: print('well under way')",
        on_stdout=lambda _: notebook.interrupt(),
    )
    assert run.error is not None
    assert (run.error.code, run.memory) == ("interrupted", "kept")
    assert run.error.line in (4, 5, 6)
    notebook.run("before = ticks\nawait asyncio.sleep(0.1)")

    assert notebook.run("before >= 5, before == ticks").text == "(True, True)"
    assert notebook.generation == 1


def test_an_await_that_is_taken_back_leaves_a_loop_that_works(session: Session) -> None:
    session.run("import asyncio\nticks = 0\nloop = asyncio.get_event_loop_policy().get_event_loop()")
    run = session.run("while True:\n    await asyncio.sleep(0.01)\n    ticks += 1", timeout=1)
    assert run.error is not None
    assert (run.error.code, run.memory) == ("timeout", "restored")
    if "HOLDFAST_EMULATED" not in os.environ:  # where a traceback through asyncio takes longer than a deadline waits
        assert run.error.line in (2, 3)

    assert session.run("await asyncio.sleep(0.1, 'slept'), ticks").text == "('slept', 0)"
    assert session.generation == 1


def test_asyncio_run_works_in_a_cell(session: Session) -> None:
    assert session.run("import asyncio\nasync def f():\n    return 3\nasyncio.run(f())").text == "3"


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_traceback_begins_at_the_users_code(session: Session) -> None:
    run = session.run("def f():\n    return 1 / 0\n\nf()")

    assert run.error is not None
    assert (run.status, run.error.code, run.error.name) == ("rolled_back", "exception", "ZeroDivisionError")
    assert run.error.message == "division by zero"
    assert run.error.line == 2
    assert frames(run) == ["Cell In[1], line 4", "Cell In[1], line 2, in f()"]
    assert_begins_at_the_cell(run)


def test_a_traceback_into_a_library_begins_at_the_users_code(session: Session) -> None:
    run = session.run("import json\n\njson.loads('{')")

    assert run.error is not None
    assert (run.error.name, run.error.line) == ("JSONDecodeError", 3)
    assert "json/decoder.py" in run.error.traceback
    assert_begins_at_the_cell(run)


def test_a_traceback_names_the_cell_that_defined_the_function(session: Session) -> None:
    session.run("\n\ndef f(): raise KeyError('k')")
    run = session.run("f()")

    assert frames(run) == ["Cell In[2], line 1", "Cell In[1], line 3, in f()"]


def test_the_traceback_of_an_async_cell_begins_at_the_users_code(session: Session) -> None:
    run = session.run("import asyncio\nawait asyncio.sleep(0)\n1 / 0")

    assert run.error is not None
    assert run.error.line == 3
    assert_begins_at_the_cell(run)


def test_chained_exceptions_are_both_shown(session: Session) -> None:
    run = session.run("try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError('second') from e")

    assert run.error is not None
    assert (run.error.name, run.error.message, run.error.line) == ("ValueError", "second", 4)
    assert "ZeroDivisionError: division by zero" in run.error.traceback
    assert "direct cause" in run.error.traceback
    assert_begins_at_the_cell(run)


def test_an_exception_group_shows_its_members(session: Session) -> None:
    run = session.run("raise ExceptionGroup('both', [ValueError('one'), TypeError('two')])")

    assert run.error is not None
    assert run.error.name == "ExceptionGroup"
    assert "ValueError: one" in run.error.traceback
    assert "TypeError: two" in run.error.traceback
    assert run.stderr == ""
    assert_begins_at_the_cell(run)


def test_an_exception_that_cannot_be_printed_is_still_named(session: Session) -> None:
    run = session.run("class Bad(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Bad()")

    assert run.error is not None
    assert (run.error.code, run.error.name, run.error.line) == ("exception", "Bad", 3)
    assert run.stdout == run.stderr == ""


def test_lone_surrogates_in_an_exception_do_no_harm(session: Session) -> None:
    run = session.run("raise ValueError('a\\udc80b')")

    assert run.error is not None
    assert (run.error.name, run.error.message) == ("ValueError", "a?b")
    assert session.generation == 1


def test_endless_recursion_is_an_ordinary_error(session: Session) -> None:
    run = session.run("def f(): return f()\nf()")

    assert run.error is not None
    assert run.error.name == "RecursionError"
    assert len(run.error.traceback) < 10_000
    assert_begins_at_the_cell(run)


def test_a_long_message_is_cut(session: Session) -> None:
    run = session.run("raise ValueError('x' * 5_000_000)")

    assert run.error is not None
    assert len(run.error.message) <= 1_000_000
    assert len(run.error.traceback) <= 1_000_000
    assert "5,000,000 characters in all" in run.error.message
    assert session.generation == 1


@pytest.mark.parametrize(
    ("code", "name", "line"),
    [
        ("a = 1\nx = = 1", "SyntaxError", 2),
        ("def f():\nreturn 1", "IndentationError", 2),
        ("if True:\n        a = 1\n    b = 2", "IndentationError", 3),
        ("print('unclosed", "SyntaxError", 1),
        ("return 5", "SyntaxError", 1),
    ],
)
def test_code_that_does_not_parse_is_a_syntax_error(session: Session, code: str, name: str, line: int) -> None:
    run = session.run(f"{code}")

    assert run.error is not None
    assert (run.error.code, run.error.name, run.error.line) == ("syntax", name, line)
    assert "ipython-input" not in run.error.message
    assert session.run("'a' in globals()").text == "False"


def test_a_syntax_error_at_run_time_is_an_exception(session: Session) -> None:
    run = session.run("ok = 1\neval('1 +')")

    assert run.error is not None
    assert (run.error.code, run.error.name, run.error.line) == ("exception", "SyntaxError", 2)
    assert_begins_at_the_cell(run)


def test_a_nul_in_the_code_is_a_syntax_error(session: Session) -> None:
    run = session.run("x = 1\0")

    assert run.error is not None
    assert run.error.code == "syntax"


def test_what_a_failed_cell_did_before_it_failed_is_kept_in_a_notebook(notebook: Session) -> None:
    run = notebook.run("kept = 1\n1 / 0")

    assert (run.memory, run.discarded) == ("kept", [])
    assert notebook.run("kept").text == "1"


def test_what_a_failed_cell_did_before_it_failed_is_taken_back_elsewhere(session: Session) -> None:
    session.run("kept = 1")
    run = session.run("kept = 2\n1 / 0")

    assert (run.memory, run.discarded, run.generation) == ("restored", ["kept"], 1)
    assert session.run("kept").text == "1"


def test_blank_lines_before_the_code_count(session: Session) -> None:
    run = session.run("\n\n  x = 1\n  1 / 0")

    assert run.error is not None
    assert run.error.line == 4
    assert "line 4" in run.error.traceback


def test_an_indented_cell_is_dedented(session: Session) -> None:
    run = session.run("""
        if True:
            x = 3

        x
    """)

    assert run.text == "3"
    assert session.run("\n\n  %%bash\n  echo hi").stdout == "hi\n"


# -- things that need a terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["input('name? ')", "import getpass; getpass.getpass('name? ')"])
def test_asking_for_input_fails_with_a_clear_word(session: Session, code: str) -> None:
    run = session.run(code)

    assert run.error is not None
    assert run.error.name == "InputUnavailable"
    assert "name? " in run.error.message
    assert "no stdin" in run.error.message


def test_reading_stdin_finds_its_end(session: Session) -> None:
    assert session.run("import sys; sys.stdin.read()").text == "''"
    assert session.shell("cat; echo done").stdout == "done\n"


@pytest.mark.parametrize(
    "code", ["exit()", "quit()", "exit", "import sys; sys.exit(0)", "raise SystemExit", "import sys; sys.exit()"]
)
def test_exit_ends_nothing_but_the_cell(session: Session, code: str) -> None:
    session.run("x = 5")
    run = session.run(f"{code}\nx = 6" if code != "exit" else "exit")

    assert (run.status, run.error, run.memory, run.exit_code) == ("committed", None, "kept", 0)
    assert session.run("x").text == "5"
    assert session.run("x").exit_code is None
    assert session.generation == 1


@pytest.mark.parametrize("code", ["exit()", "import sys; sys.exit(0)", "raise SystemExit"])
def test_exit_is_an_error_in_a_notebook_and_keeps_what_the_cell_did(notebook: Session, code: str) -> None:
    run = notebook.run(f"x = 5\n{code}\nx = 6")

    assert run.error is not None
    assert (run.status, run.error.code, run.error.name, run.exit_code) == ("kept", "exception", "SystemExit", 0)
    assert run.error.message in ("", "0")
    assert notebook.run("x").text == "5"


@pytest.mark.parametrize(("code", "message"), [("import sys; sys.exit(3)", "3"), ("raise SystemExit('why')", "why")])
def test_exit_with_a_code_is_an_error_of_the_cell_alone(session: Session, code: str, message: str) -> None:
    run = session.run(code)

    assert run.error is not None
    assert (run.error.code, run.error.name, run.error.message) == ("exception", "SystemExit", message)
    assert run.exit_code == (3 if message == "3" else 1)
    assert (run.memory, session.generation) == ("restored", 1)


# -- completion and inspection -----------------------------------------------------------------------------------


def test_names_are_completed(session: Session) -> None:
    session.run("my_long_variable = 1")
    found = session.complete("my_lo")

    assert (found.matches, found.start, found.end) == (["my_long_variable"], 0, 5)


def test_attributes_are_completed(session: Session) -> None:
    session.run("import os")
    found = session.complete("x = os.getcw")

    assert (found.matches, found.start, found.end) == (["getcwd", "getcwdb"], 7, 12)


def test_paths_are_completed(session: Session) -> None:
    session.run("open('/mnt/data/report-2024.csv', 'w').close()")

    assert "/mnt/data/report-2024.csv" in session.complete("open('/mnt/data/rep").matches


def test_completion_looks_at_the_cursor_and_not_at_the_end(session: Session) -> None:
    assert "print" in session.complete("prin + 1", 4).matches


def test_nothing_to_complete_is_an_empty_answer(session: Session) -> None:
    assert session.complete("no_such_name_at_all").matches == []
    assert session.complete("abc", 1000).matches == []


def test_inspection_tells_what_a_name_is(session: Session) -> None:
    found = session.inspect("len")

    assert "Return the number of items in a container" in str(found["text/plain"])
    assert session.inspect("no_such_name") == {}
    assert session.inspect("") == {}


def test_inspection_in_detail_shows_the_source(session: Session) -> None:
    session.run("def f():\n    return 'the body'")

    assert "the body" in str(session.inspect("f", detail=1)["text/plain"])
    assert "the body" not in str(session.inspect("f")["text/plain"])


def test_objects_that_break_when_looked_at_do_not_break_the_kernel(session: Session) -> None:
    session.run(
        "class Bad:\n"
        "    nbytes = 10 ** 40\n"
        "    def __dir__(self): raise SystemExit\n"
        "    def __repr__(self): raise KeyboardInterrupt\n"
        "    def __sizeof__(self): raise RuntimeError\n"
        "bad = Bad()\n"
        "globals()['n' * 10_000_000] = 1"
    )
    session.complete("bad.x")
    session.inspect("bad")

    assert "bad" in session.names()
    assert session.generation == 1
