"""API keys and the server's token, and `holdfast keys`."""

import hashlib
import json
import multiprocessing
import os
import stat
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast import access
from holdfast.access import OWNER, Access, KeyRing, Principal
from holdfast.cli.main import app
from holdfast.errors import ApiKeyUnknown, InvalidSetting


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


def test_a_key_opens_and_only_its_hash_is_kept(ring: KeyRing, tmp_path: Path) -> None:
    made, key = ring.add("laptop")
    _, key_id, secret = key.split("_")
    kept = (tmp_path / "keys/access.json").read_text()

    assert (made.id, made.name) == (key_id, "laptop")
    assert ring.find(key) == made
    assert secret not in kept
    assert hashlib.sha256(secret.encode()).hexdigest() in kept
    assert len(bytes.fromhex(secret)) == 32


def test_files_of_keys_are_their_owners_alone(ring: KeyRing, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ring.add("laptop")
    finally:
        os.umask(before)

    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("keys", "keys/access.json", "keys/access.lock")
    ]
    assert modes == [0o700, 0o600, 0o600]


def test_what_is_not_quite_a_key_opens_nothing(ring: KeyRing) -> None:
    made, key = ring.add("laptop")
    _, other = ring.add("desktop")
    wrong = [
        "", "hf__", key[:-1], key + "0", key.upper(), key + "\n", " " + key,
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        f"hf_{made.id}_{other.split('_')[2]}", f"hf_0000000000_{'0' * 64}", f"hf_{made.id}_", "hf_é_\udcff",
    ]  # fmt: skip

    assert [ring.find(one) for one in wrong] == [None] * len(wrong)


def test_a_revoked_key_is_refused_at_once_by_a_ring_that_knew_it(ring: KeyRing, tmp_path: Path) -> None:
    made, key = ring.add("laptop")
    _, other = ring.add("desktop")
    assert ring.find(key) is not None

    revoked = KeyRing(tmp_path / "keys").revoke(made.id)

    assert ring.find(key) is None
    assert ring.find(other) is not None
    assert revoked.revoked_at is not None
    assert ring.revoke(made.id).revoked_at == revoked.revoked_at
    assert ring.keys()[0].id == made.id


def test_who_revokes_what_is_not_there_is_told(ring: KeyRing) -> None:
    with pytest.raises(ApiKeyUnknown, match="holdfast keys list"):
        ring.revoke("0000000000")


def _add_some(directory: Path, together: Barrier) -> None:
    together.wait(60)
    for _ in range(10):
        KeyRing(directory).add("one of many")


def test_processes_that_add_at_once_lose_none(ring: KeyRing, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(4)
    many = [spawn.Process(target=_add_some, args=(tmp_path / "keys", together)) for _ in range(3)]
    for one in many:
        one.start()
    _add_some(tmp_path / "keys", together)
    for one in many:
        one.join(60)

    assert [one.exitcode for one in many] == [0, 0, 0]
    assert len(ring.keys()) == 40


def test_use_is_noted_to_the_hour(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = ring.add("laptop")
    assert ring.use_is_due(made.id)

    ring.note_use(made.id)

    assert not ring.use_is_due(made.id)
    noted = ring.keys()[0].last_used_at
    assert noted is not None
    monkeypatch.setattr(access.time, "time", lambda: noted + 3601)
    assert ring.use_is_due(made.id)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b]0;title\x07", "x" * 101])
def test_a_name_that_cannot_be_shown_is_refused(ring: KeyRing, name: str) -> None:
    with pytest.raises(InvalidSetting):
        ring.add(name)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"keys": [{"id": 1}]}', b"\xff"])
def test_a_broken_file_opens_nothing_and_is_not_written_over(ring: KeyRing, tmp_path: Path, content: bytes) -> None:
    _, key = ring.add("laptop")
    path = tmp_path / "keys/access.json"
    path.write_bytes(content)

    with pytest.raises(InvalidSetting, match="restore it"):
        ring.find(key)
    with pytest.raises(InvalidSetting, match="restore it"):
        ring.add("another")
    assert path.read_bytes() == content


def test_a_file_that_others_may_write_is_not_trusted(ring: KeyRing, tmp_path: Path) -> None:
    _, key = ring.add("laptop")
    (tmp_path / "keys/access.json").chmod(0o666)

    with pytest.raises(InvalidSetting, match="others may have written"):
        KeyRing(tmp_path / "keys").find(key)


def test_the_token_is_the_owner_and_a_key_is_itself(ring: KeyRing) -> None:
    made, key = ring.add("laptop")
    entrance = Access(ring)

    assert entrance.principal_of(entrance.token) == OWNER
    assert entrance.principal_of(key) == Principal(made.id, "laptop")
    assert entrance.principal_of(entrance.token + "x") is None
    assert len(entrance.token) == 64


def test_a_key_sees_its_own_sessions_and_the_owner_all() -> None:
    one = Principal("aaaaaaaaaa", "one")

    assert (one.may_use("aaaaaaaaaa"), one.may_use("bbbbbbbbbb"), one.may_use("owner")) == (True, False, False)
    assert OWNER.may_use("aaaaaaaaaa")
    assert not Principal("", "nobody").may_use("")


def test_a_chosen_token_is_not_compared_while_somebody_guesses(ring: KeyRing) -> None:
    _, key = ring.add("laptop")
    chosen, random = Access(ring, token="correct horse battery".replace(" ", "-")), Access(ring)

    assert chosen.principal_of(chosen.token) == OWNER
    assert chosen.principal_of(chosen.token, slowed=True) is None
    assert chosen.principal_of(key, slowed=True) is not None
    assert random.principal_of(random.token, slowed=True) == OWNER


@pytest.mark.parametrize("token", ["short", "with spaces in between", "ümlaut-ümlaut-ümlaut", "line\nbreak-line-break"])
def test_a_token_that_cannot_be_one_is_refused(ring: KeyRing, token: str) -> None:
    with pytest.raises(InvalidSetting, match="at least 16"):
        Access(ring, token=token)


def test_keys_on_the_command_line(tmp_path: Path) -> None:
    def keys(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["keys", *arguments, "--home", str(tmp_path)], env={"COLUMNS": "200"})
        return done.exit_code, done.stdout

    assert "there are no API keys" in keys("list")[1]
    key = keys("add", "laptop")[1].strip()
    made = json.loads(keys("add", "[red]two[/red]", "--json")[1])

    ring = KeyRing(tmp_path / "keys")
    assert ring.find(key) is not None
    assert ring.find(made["key"]) is not None
    assert "[red]two[/red]" in keys("list")[1]
    assert keys("revoke", made["id"])[0] == 0
    assert ring.find(made["key"]) is None
    listed = json.loads(keys("list", "--json")[1])
    assert [(one["name"], one["revoked_at"] is None) for one in listed] == [("laptop", True), ("[red]two[/red]", False)]
    assert "sha256" not in listed[0]
    assert keys("revoke", "nobody") == (3, "")
