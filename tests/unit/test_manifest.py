"""Manifests, against GNU sha256sum itself."""

import hashlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from holdfast import manifest, paths
from holdfast.records import FileEntry

ODD_NAMES = [
    b"-", b"--help", b"-c", b" leading", b"trailing ", b"*star", b"two  spaces", b"a\\b", b"line\nbreak", b"cr\r",
    b"\r", b"\\", b"\n", b"\\n", b"caf\xc3\xa9", b"\xff\xfe", b"\xff\n\\", b"dir/-", b"dir/\xf0\x9f\x8c\x8a",
    b"#comment", b"SHA256 (x) = y", b"\x1b[31m", b"tab\t", b"'quote\"", b"\xed\xa0\x80",
]  # fmt: skip


def _entry(name: bytes, content: bytes) -> FileEntry:
    path = paths.to_text(name)
    return FileEntry(path=path, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def _files(*names: bytes) -> dict[str, FileEntry]:
    return {paths.to_text(name): _entry(name, name) for name in names}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "files"
    (root / "dir").mkdir(parents=True)
    for name in ODD_NAMES:
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(name)
    return root


def _check(tree: Path, text: bytes) -> subprocess.CompletedProcess[bytes]:
    (tree.parent / "manifest-sha256.txt").write_bytes(text)
    return subprocess.run(
        ["sha256sum", "--strict", "-c", "../manifest-sha256.txt"],
        cwd=tree,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )


def test_sha256sum_accepts_every_name_that_linux_does(tree: Path) -> None:
    checked = _check(tree, manifest.render(_files(*ODD_NAMES)))

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count(b": OK\n") == len(ODD_NAMES)


def test_sha256sum_sees_a_file_that_changed(tree: Path) -> None:
    (tree / "a\\b").write_bytes(b"other")

    assert b"FAILED" in _check(tree, manifest.render(_files(*ODD_NAMES))).stdout


@pytest.mark.parametrize("name", [name for name in ODD_NAMES if name != b"-"])
def test_a_line_is_what_sha256sum_writes(tree: Path, name: bytes) -> None:
    written = subprocess.run([b"sha256sum", b"--", name], cwd=tree, capture_output=True, check=True).stdout

    assert manifest.render(_files(name)) == written


def test_what_is_rendered_can_be_parsed() -> None:
    files = _files(*ODD_NAMES)

    assert manifest.parse(manifest.render(files)) == {path: entry.sha256 for path, entry in files.items()}


@pytest.mark.parametrize("steps", [1, 7, 3_000])
def test_lines_after_changes_are_those_of_all_files(steps: int) -> None:
    """One by one, or so many that they are sorted in together."""
    chance = random.Random(steps)
    files = _files(*ODD_NAMES)
    lines = manifest.Lines.of(files)
    for _ in range(3):
        put = [_entry(b"%d" % chance.randrange(2 * steps), b"%d" % chance.randrange(9)) for _ in range(steps)]
        gone = [path for path in chance.sample(sorted(files), len(files) // 3)]
        for path in gone:
            del files[path]
        files |= {entry.path: entry for entry in put}
        lines = lines.after(put, gone)

        assert lines.text() == manifest.render(files)
        assert lines.sha256() == manifest.digest(files) == hashlib.sha256(lines.text()).hexdigest()


def test_lines_are_sorted_by_the_bytes_of_the_path() -> None:
    names = [b"b", b"a/z", b"a-b", b"B", b"\xff", b"\xc3\xa9"]

    lines = manifest.render(_files(*names)).split(b"\n")[:-1]

    assert [each[66:] for each in lines] == sorted(names)


def test_the_order_of_insertion_does_not_matter() -> None:
    assert manifest.digest(_files(b"a", b"b")) == manifest.digest(_files(b"b", b"a"))


def test_no_files_have_an_empty_manifest() -> None:
    assert manifest.render({}) == b""
    assert manifest.parse(b"") == {}
    assert manifest.digest({}) == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"ab" * 32 + b"  cut", "cut short"),
        (b"ab" * 31 + b"  short\n", "line 1"),
        (b"AB" * 32 + b"  upper\n", "line 1"),
        (b"ab" * 32 + b"  a\n" + b"ab" * 32 + b" b\n", "line 2"),
        (b"ab" * 32 + b"  a\n\n", "line 2"),
        (b"\\" + b"ab" * 32 + b"  a\\t\n", "line 1"),
        (b"\\" + b"ab" * 32 + b"  a\\\n", "line 1"),
        (b"ab" * 32 + b"  a\n" + b"cd" * 32 + b"  a\n", "twice"),
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        manifest.parse(text)
