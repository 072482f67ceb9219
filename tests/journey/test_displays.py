"""Rich output."""

import json

import pytest

from holdfast import Display, Session
from holdfast.jupyter import messages
from holdfast.model import Displayed, Output

PNG = b"\x89PNG\r\n\x1a\n"
SHOW = "from IPython.display import *\n"


@pytest.mark.parametrize(
    ("expression", "kind", "value"),
    [
        ("HTML('<b>bold</b>')", "text/html", "<b>bold</b>"),
        ("Markdown('*it*')", "text/markdown", "*it*"),
        ("Latex('$x^2$')", "text/latex", "$x^2$"),
        ("Image(data=b'\\x89PNG\\r\\n\\x1a\\n-', format='png')", "image/png", PNG + b"-"),
        ("Javascript('1')", "application/javascript", "1"),
    ],
)
def test_a_rich_value_comes_in_its_own_form(session: Session, expression: str, kind: str, value: str | bytes) -> None:
    shown = session.run(f"{SHOW}display({expression})").displays
    last = session.run(expression).displays

    assert [display.data[kind] for display in (*shown, *last)] == [value, value]


def test_svg_is_text(session: Session) -> None:
    (display,) = session.run(f"{SHOW}SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"><g/></svg>')").displays

    assert "<svg" in str(display.data["image/svg+xml"])


def test_json_is_its_text(session: Session) -> None:
    (display,) = session.run(SHOW + "JSON({'a': [1, None, 'é']})").displays

    assert json.loads(str(display.data["application/json"])) == {"a": [1, None, "é"]}


def test_an_object_may_have_forms_of_its_own(session: Session) -> None:
    run = session.run(
        "class Both:\n"
        "    def __repr__(self): return 'plain'\n"
        "    def _repr_html_(self): return '<i>rich</i>'\n"
        "    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n!'\n"
        "Both()"
    )

    assert run.text == "plain"
    assert run.displays == [Display(data={"text/plain": "plain", "text/html": "<i>rich</i>", "image/png": PNG + b"!"})]


def test_a_mime_bundle_passes_as_it_is(session: Session) -> None:
    (display,) = session.run(
        "display({'application/vnd.mine+json': {'x': 1}, 'text/plain': 'p'}, raw=True, metadata={'k': [1]})"
    ).displays

    assert display.data == {"application/vnd.mine+json": '{"x": 1}', "text/plain": "p"}
    assert display.metadata == {"k": [1]}


def test_an_object_is_json_whatever_its_type_is_called(session: Session) -> None:
    bundle = "{'application/x-mine': {'x': [1, None, 'é']}, 'text/x': [True], 'a/b': {(1, 2): 3}, 'c/d': {1, 2}.pop}"
    (display,) = session.run(f"{SHOW}display({bundle}, raw=True)").displays

    assert json.loads(str(display.data["application/x-mine"])) == {"x": [1, None, "é"]}
    assert display.data["text/x"] == "[true]"
    assert display.data["a/b"] == "{(1, 2): 3}", "JSON has no such key"
    shown = messages.bundle(display.data, objects=display.objects)
    assert (shown["application/x-mine"], shown["text/x"]) == ({"x": [1, None, "é"]}, [True])


def test_a_data_frame_is_a_table(session: Session) -> None:
    run = session.run("import pandas as pd\npd.DataFrame({'a': [1, 2]})")

    assert run.text == "   a\n0  1\n1  2"
    assert "<table" in str(run.displays[0].data["text/html"])


@pytest.mark.parametrize("end", ["", "\nplt.show()", "\nNone"])
def test_a_figure_is_shown_as_png(session: Session, end: str) -> None:
    run = session.run(f"import matplotlib.pyplot as plt\nplt.plot([1, 2]);{end}")

    (display,) = run.displays
    assert isinstance(display.data["image/png"], bytes)
    assert display.data["image/png"].startswith(PNG)
    assert session.run("len(plt.get_fignums())").text == "0"


def test_two_figures_are_two_displays(session: Session) -> None:
    run = session.run("import matplotlib.pyplot as plt\nfor i in (1, 2):\n    plt.figure(); plt.plot([i, 2])")

    assert [list(display.data) for display in run.displays] == [["text/plain", "image/png"]] * 2


def test_a_figure_as_last_expression_is_shown(session: Session) -> None:
    session.run("import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); ax.plot([1, 2]);")
    run = session.run("fig")

    assert str(run.text).startswith("<Figure")
    assert isinstance(run.displays[0].data["image/png"], bytes)


def test_figures_of_the_object_interface_are_shown_too(session: Session) -> None:
    run = session.run("import seaborn as sns\nsns.histplot([1, 2, 2]);")

    assert [display.data["image/png"][:8] for display in run.displays] == [PNG]  # type: ignore[index]


def test_a_figure_that_cannot_be_drawn_is_told_and_does_no_harm(session: Session) -> None:
    run = session.run("import matplotlib.pyplot as plt\nplt.title('$\\\\nosuch{$');")

    assert "ParseException" in run.stdout + run.stderr or "ValueError" in run.stdout + run.stderr
    assert session.run("1 + 1").text == "2"


def test_displays_and_the_value_come_in_order(session: Session) -> None:
    run = session.run("display('first')\ndisplay('second')\n'last'")

    assert [display.data["text/plain"] for display in run.displays] == ["'first'", "'second'", "'last'"]
    assert run.text == "'last'"


def test_an_update_replaces_what_it_names(session: Session) -> None:
    run = session.run("h = display('old', display_id=True)\ndisplay('other')\nh.update('new')")

    assert [display.data["text/plain"] for display in run.displays] == ["'new'", "'other'"]
    assert run.displays[0].display_id is not None


def test_a_display_id_may_be_chosen(session: Session) -> None:
    run = session.run(
        "from IPython.display import update_display\n"
        "display(1, display_id='mine')\n"
        "update_display(2, display_id='mine')"
    )

    assert [(display.display_id, display.data["text/plain"]) for display in run.displays] == [("mine", "2")]


def test_an_update_of_an_earlier_run_is_seen_while_it_happens(session: Session) -> None:
    session.run("h = display('old', display_id='x')")
    seen: list[Display] = []
    session.run("h.update('new')", on_display=seen.append)

    assert [(display.display_id, display.data["text/plain"]) for display in seen] == [("x", "'new'")]


def test_clear_output_takes_displays_away(session: Session) -> None:
    run = session.run(SHOW + "display(1)\nclear_output()\ndisplay(2)")

    assert [display.data["text/plain"] for display in run.displays] == ["2"]


def test_clear_output_may_wait_for_the_next(session: Session) -> None:
    waited = session.run(SHOW + "display(1)\nclear_output(wait=True)\ndisplay(2)")
    waiting = session.run("display(1)\nclear_output(wait=True)")

    assert [display.data["text/plain"] for display in waited.displays] == ["2"]
    assert [display.data["text/plain"] for display in waiting.displays] == ["1"]


def test_displays_are_seen_while_the_cell_runs(session: Session) -> None:
    seen: list[Display] = []
    run = session.run("display('a')\ndisplay('b')", on_display=seen.append)

    assert seen == run.displays
    assert len(seen) == 2


def test_a_form_that_fails_is_told_and_the_plain_one_stays(session: Session) -> None:
    run = session.run(
        "class Bad:\n    def _repr_html_(self): raise ValueError('no html')\n    def __repr__(self): return 'ok'\nBad()"
    )

    assert run.text == "ok"
    assert "no html" in run.stdout + run.stderr
    assert session.generation == 1


def test_what_is_no_text_does_no_harm(session: Session) -> None:
    run = session.run(
        "display({'text/plain': 'a\\udc80b', 'x\\udc80/y': 1, 'image/png': '!', 'text/html': 5}, raw=True,"
        " metadata={'s': '\\udc80', 'o': object()})"
    )

    assert run.status == "committed"
    assert run.displays[0].data["text/plain"] == "a?b"
    assert session.generation == 1


def test_ten_megabytes_of_display_arrive_whole(session: Session) -> None:
    (display,) = session.run("display({'image/png': bytes(10_000_000)}, raw=True)").displays

    assert display.data == {"image/png": bytes(10_000_000)}


def test_a_display_that_is_too_large_is_left_out_with_a_note(session: Session) -> None:
    run = session.run("display({'text/plain': 'x' * 40_000_000}, raw=True)\n'after'")

    note = str(run.displays[0].data["text/plain"])
    assert "40,000,000 bytes" in note
    assert "left out" in note
    assert run.text == "'after'"
    assert session.generation == 1


def test_metadata_that_is_too_large_is_left_out(session: Session) -> None:
    (display,) = session.run("display({'text/plain': 'x'}, raw=True, metadata={'k': 'y' * 40_000_000})").displays

    assert (display.data, display.metadata) == ({"text/plain": "x"}, {})
    assert session.generation == 1


def test_displays_past_the_bytes_of_a_run_are_counted_and_left_out(session: Session) -> None:
    run = session.run("for i in range(9): display({'image/png': bytes(10_000_000)}, raw=True)")

    assert (len(run.displays), run.dropped_displays) == (6, 3)


def test_a_hundred_thousand_displays_are_bounded(session: Session) -> None:
    run = session.run("for i in range(100_000): display({'text/plain': str(i)}, raw=True)\n'done'", timeout=600)

    assert run.text == "'done'"
    assert run.displays[0].data == {"text/plain": "0"}
    assert len(run.displays) == 1000
    assert run.dropped_displays == 100_001 - 1000
    assert session.generation == 1


def test_what_is_shown_and_what_is_printed_stay_in_order(session: Session) -> None:
    events: list[object] = []
    session.run("for n in range(100):\n    print(n)\n    display(n)\nprint('end')", on_event=events.append)
    told = "".join(event.text if isinstance(event, Output) else "." for event in events)

    assert told == "".join(f"{n}\n." for n in range(100)) + "end\n"


def test_the_result_is_told_from_what_is_displayed(session: Session) -> None:
    events: list[object] = []
    run = session.run("display(1)\n2", on_event=events.append)

    assert [(event.result, event.run) for event in events if isinstance(event, Displayed)] == [
        (False, run.id),
        (True, run.id),
    ]
