"""Packing and unpacking workspaces: the same bytes for the same content, and nothing hostile gets through."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from services.mesh.workspace import MAX_DEPTH, WorkspaceError, pack, remove, unpack

_names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
_tree = st.recursive(
    st.tuples(st.binary(max_size=1500), st.booleans()),
    lambda inner: st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)


def write(folder: Path, tree: dict) -> None:
    folder.mkdir()
    for name, part in tree.items():
        if isinstance(part, dict):
            write(folder / name, part)
        else:
            (folder / name).write_bytes(part[0])
            (folder / name).chmod(0o755 if part[1] else 0o644)


def read(folder: Path) -> dict:
    return {
        path.name: read(path) if path.is_dir() else (path.read_bytes(), os.access(path, os.X_OK))
        for path in folder.iterdir()
    }


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(_names, _tree, max_size=4))
def test_what_is_packed_comes_out(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    folder = tmp_path_factory.mktemp("w")
    write(folder / "in", tree)
    data = pack(folder / "in")
    unpack(data, folder / "out")
    assert read(folder / "out") == tree
    assert pack(folder / "out") == data


def test_bytes_do_not_depend_on_owner_time_or_order(tmp_path: Path) -> None:
    for name, order in (("a", ["x", "y"]), ("b", ["y", "x"])):
        (tmp_path / name).mkdir()
        for file in order:
            (tmp_path / name / file).write_text(file)
    os.utime(tmp_path / "a" / "x", (1, 1))
    assert pack(tmp_path / "a") == pack(tmp_path / "b")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / os.fsdecode(b"\xff\xfe")).write_text("x")
    unpack(pack(tmp_path / "in"), tmp_path / "out")
    assert os.listdir(os.fsencode(tmp_path / "out")) == [b"\xff\xfe"]


def test_links_inside_stay_and_links_outside_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("x")
    (tmp_path / "secret").write_text("no")
    (folder / "relative").symlink_to("file")
    (folder / "sub" / "up").symlink_to("../file")
    (folder / "absolute").symlink_to(folder / "file")
    (folder / "folder").symlink_to("sub")
    for name, target in (
        ("o1", "../secret"),
        ("o2", "/etc/passwd"),
        ("gone", "nothing"),
        ("loop", "loop"),
        ("o3", "o2"),
    ):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(folder / "socket"))
        (folder / "to-socket").symlink_to("socket")
        data = pack(folder)
    unpack(data, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["absolute", "file", "folder", "relative", "sub"]
    assert os.readlink(tmp_path / "out" / "absolute") == "file"
    assert (tmp_path / "out" / "sub" / "up").read_text() == "x"


def test_limits_name_the_totals(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big").write_bytes(b"x" * 5000)
    with pytest.raises(WorkspaceError, match=r"5632 bytes in 1 files, above 4096 bytes"):
        pack(tmp_path / "in", max_bytes=4096)
    with pytest.raises(WorkspaceError, match=r"in 1 files, above .* or 0 files"):
        pack(tmp_path / "in", max_files=0)


def test_too_deep_or_not_there(tmp_path: Path) -> None:
    deep = tmp_path / "in"
    for _ in range(MAX_DEPTH + 1):
        deep = deep / "d"
    deep.mkdir(parents=True)
    for folder in (tmp_path / "in", tmp_path / "nowhere"):
        with pytest.raises(WorkspaceError, match="cannot be read"):
            pack(folder)


def archive(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return zstandard.ZstdCompressor().compress(buffer.getvalue())


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "members",
    [
        [member("../evil")],
        [member("a/../../evil")],
        [member("/evil")],
        [member("./a")],
        [member("missing/a")],
        [member("a"), member("a")],
        [member("b"), member("a")],
        [member("link", tarfile.SYMTYPE, ".."), member("link/evil")],
        [member("link", tarfile.SYMTYPE, "../evil")],
        [member("link", tarfile.SYMTYPE, "/etc/passwd")],
        [member("a", tarfile.SYMTYPE, "b"), member("b", tarfile.SYMTYPE, "../evil")],
        [
            member("d", tarfile.DIRTYPE),
            member("d/up", tarfile.SYMTYPE, ".."),
            member("x", tarfile.SYMTYPE, "d/up/../evil"),
        ],
        [member("a"), member("hard", tarfile.LNKTYPE, "a")],
        [member("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("disk", tarfile.BLKTYPE)],
        [member("tty", tarfile.CHRTYPE)],
        [member("sparse", tarfile.GNUTYPE_SPARSE)],
    ],
)
def test_hostile_members_are_refused(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    (tmp_path / "evil").write_text("mine")
    with pytest.raises(WorkspaceError, match="not the bytes of a preserved workspace"):
        unpack(archive(*members), tmp_path / "out")
    assert (tmp_path / "evil").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["evil", "out"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        zstandard.ZstdCompressor().compress(b"no tar at all"),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 1024),
        zstandard.ZstdCompressor().compress(b"\0" * (1 << 20)),
    ],
    ids=["empty", "no zstd", "no tar", "size unknown", "too large"],
)
def test_other_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(WorkspaceError):
        unpack(data, tmp_path / "out", max_bytes=100_000)


def test_a_member_longer_than_the_archive_is_refused(tmp_path: Path) -> None:
    info = member("a")
    info.size = 1 << 40
    with pytest.raises(WorkspaceError):
        unpack(zstandard.ZstdCompressor().compress(info.tobuf()), tmp_path / "out")


def test_remove_takes_any_folder_away(tmp_path: Path) -> None:
    (tmp_path / "x" / "y" / "z").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "x" / "link").symlink_to("../kept")
    (tmp_path / "x" / "y").chmod(0)
    (tmp_path / "x").chmod(0)
    remove(tmp_path / "x")
    remove(tmp_path / "nothing")
    assert os.listdir(tmp_path) == ["kept"]
