"""`holdfast keys`: who else may use this home's server, and the key that signs receipts.

API keys are made and revoked beside a running server, and without one. The signing key changes only while nobody owns
the home: its owner would go on with the old one.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import Home, Json
from holdfast.cli.telling import told

if TYPE_CHECKING:  # the command line starts quickly: what a command needs is imported when it runs
    from rich.table import Table

    from holdfast.access import ApiKey, KeyRing

app = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="API keys of a server: make, list and revoke them. Also a new key to sign receipts.",
)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose it is, or what for: shown in the list.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it, this once. Only its hash is kept.

    \b
      curl -H "Authorization: Bearer $(holdfast keys add laptop)" http://127.0.0.1:8765/v1/sessions
    """
    with told(home, as_json=as_json):
        import msgspec

        made, key = _ring(home).add(name)
        if as_json:
            print(msgspec.json.encode({**msgspec.to_builtins(made), "key": key}).decode())
            return
        print(key, flush=True)
        typer.echo(f"It is shown this once. To end it: holdfast keys revoke {made.id}", err=True)


@app.command("list")
def list_keys(home: Home = None, as_json: Json = False) -> None:
    """List all keys, oldest first: id, name, when it was made, last used (to the hour), and revoked."""
    with told(home, as_json=as_json):
        import msgspec

        from holdfast.cli.terminal import console

        keys = _ring(home).keys()
        if as_json:
            print(msgspec.json.encode(keys).decode())
        elif not keys:
            print("there are no API keys; holdfast keys add NAME makes one")
        else:
            console().print(_table(keys))


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id of a key: the part between hf_ and the next _.", metavar="ID")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Revoke a key: a running server refuses it from the next request on. Its sessions stay."""
    with told(home, as_json=as_json):
        import msgspec

        revoked = _ring(home).revoke(key_id)
        print(msgspec.json.encode(revoked).decode() if as_json else f"{revoked.id} ({revoked.name}) is revoked")


@app.command()
def rotate(home: Home = None, as_json: Json = False) -> None:
    """Make a new key that signs receipts, also where the old one is lost. Receipts of the old one stay valid.

    The old public key stays in the chain of this home, and goes with its exports. If the old private key is still
    there, it signs the new one: who trusts the old one by [b]--public-key[/b] accepts the new one.
    """
    with told(home, as_json=as_json):
        import msgspec

        from holdfast.cli.accidents import rotate_key

        links = rotate_key(home)
        if as_json:
            print(msgspec.json.encode([link.public.key_id for link in links]).decode())
            return
        print(f"receipts are signed by key {links[-1].public.key_id} from now on")
        for link in links[:-1]:
            print(f"  still accepted: {link.public.key_id}")
        if len(links) == 1:
            typer.echo("No earlier key is known: receipts before this need --public-key, as from an export.", err=True)


def _ring(home: Path | None) -> "KeyRing":
    from holdfast.access import KeyRing
    from holdfast.config import home_path

    return KeyRing(home_path(home) / "keys")


def _table(keys: list["ApiKey"]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("key", "name", "made (UTC)", "last used", "revoked"):
        table.add_column(name, no_wrap=name != "name", overflow="fold")
    for key in keys:
        # As text, not as markup: a name is what somebody typed. It is printable, or it was not taken.
        table.add_row(key.id, Text(key.name), _when(key.created_at), _when(key.last_used_at), _when(key.revoked_at))
    return table


def _when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))
