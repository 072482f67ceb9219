"""How libraries find out that what they show is shown by a notebook."""

import pytest

from holdfast import Session

LOOKS = {
    "rich": "get_ipython().__class__.__name__ == 'ZMQInteractiveShell'",
    "pandas": "__import__('pandas.io.formats.console').io.formats.console.in_ipython_frontend()",
    "plotly": "get_ipython().has_trait('kernel')",
    "tqdm": "'IPKernelApp' in get_ipython().config",
    "the shell": "get_ipython().kernel.shell is get_ipython()",
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_libraries_find_a_notebook(session: Session, look: str) -> None:
    assert session.run(look).text == "True"


def test_the_request_under_way_can_be_read(session: Session) -> None:
    code = "parent = get_ipython().get_parent(); parent['content']['code'] == In[-1], parent['header']['msg_type']"
    numbers = [session.run("get_ipython().kernel.get_parent('shell')['header']['msg_id']").text for _ in range(2)]

    assert session.run(code).text == "(True, 'execute_request')"
    assert numbers[0] != numbers[1]
