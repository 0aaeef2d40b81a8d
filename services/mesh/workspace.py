"""Workspaces as bytes: one zstd-compressed tar, the same bytes for the same content, and its careful unpacking.

`pack` writes members in order of their paths, every folder before what is in it, without owners and times. Left out is
what cannot mean the same elsewhere: sockets, pipes, devices, and links that don't lead to a file or folder inside.
`unpack` takes what `pack` writes and refuses everything else, because the bytes may have been made by somebody hostile:

- members rise strictly and lie in a folder that is itself a member, so nothing is written twice or through a link;
- files, folders and links only, and once all is written every link leads to something inside.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import zstandard

from schemas.errors import GyreError

MAX_BYTES = 256 << 20
"""Most bytes of a workspace's tar."""
MAX_FILES = 50_000
MAX_DEPTH = 128
"""Most folders inside one another."""
_BLOCK = 512
_LEVEL = 3


class WorkspaceError(GyreError):
    """A workspace cannot be preserved, or what was preserved cannot be used."""


def pack(folder: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> bytes:
    """The content of `folder` as `unpack` takes it. Nothing may write there meanwhile.

    Raises WorkspaceError with the totals when its tar is more than `max_bytes` or holds more than `max_files`, and when
    something cannot be read.
    """
    buffer = io.BytesIO()
    try:
        members = list(_members(folder.resolve()))
        total = sum(_BLOCK + -(-info.size // _BLOCK) * _BLOCK for info, _ in members)
        if total <= max_bytes and len(members) <= max_files:
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
                for info, path in members:
                    if info.isreg():
                        with open(path, "rb") as file:
                            tar.addfile(info, file)
                    else:
                        tar.addfile(info)
            total = buffer.tell() - tarfile.RECORDSIZE
    except OSError as error:
        raise WorkspaceError(
            f"the workspace cannot be read: {error.strerror or error}",
            where=str(error.filename or folder),
            remedy="see that nothing else writes there and that the disk is sound",
        ) from error
    if total > max_bytes or len(members) > max_files:
        raise WorkspaceError(
            f"the workspace is {total} bytes in {len(members)} files, above {max_bytes} bytes or {max_files} files",
            where=str(folder),
            remedy="let the task write less into its workspace",
        )
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(buffer.getbuffer())


def unpack(data: bytes, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Write what `pack` packed into `folder`, which is made. Raises WorkspaceError at anything that `pack` never writes."""
    folder.mkdir(parents=True)
    root = folder.resolve()
    links: list[Path] = []
    known: set[str] = {""}
    last: tuple[str, ...] = ()
    try:
        # A tar ends with up to a whole record of padding.
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes + tarfile.RECORDSIZE:
            raise _hostile(f"a frame of {size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes + tarfile.RECORDSIZE)
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:", errors="surrogateescape") as tar:
            for info in tar:
                parts = tuple(info.name.split("/"))
                if any(part in ("", ".", "..") for part in parts) or len(parts) > MAX_DEPTH + 1:
                    raise _hostile(f"the path {info.name!r}")
                if parts <= last or "/".join(parts[:-1]) not in known:
                    raise _hostile(f"{info.name!r} out of order")
                last = parts
                path = root.joinpath(*parts)
                if info.isdir():
                    path.mkdir()
                    known.add(info.name)
                elif info.issym():
                    path.symlink_to(info.linkname)
                    links.append(path)
                elif (
                    info.type == tarfile.REGTYPE
                    and not info.issparse()
                    and (source := tar.extractfile(info)) is not None
                ):
                    with source, open(path, "xb") as file:
                        shutil.copyfileobj(source, file)
                    path.chmod(0o600 | info.mode & 0o777)
                else:
                    raise _hostile(f"{info.name!r} is of type {info.type!r}")
    except (zstandard.ZstdError, tarfile.TarError, OSError, ValueError) as error:
        raise _hostile(str(error)) from error
    for path in links:
        if _target(path, root) is None:
            raise _hostile(f"the link {path.relative_to(root)} leads outside")


def read_plain(path: Path, limit: int) -> bytes | None:
    """The content of a file of at most `limit` bytes that somebody else wrote; None where there is nothing.

    Raises WorkspaceError when it is no plain file (a link is not followed, a pipe not waited for) or too long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkspaceError(f"{path.name} cannot be read: {error.strerror}", where=str(path.parent)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WorkspaceError(f"{path.name} is no plain file", where=str(path.parent))
        content = os.read(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise WorkspaceError(f"{path.name} is longer than {limit} bytes", where=str(path.parent))
    return content


def remove(folder: Path) -> None:
    """Remove a folder that somebody else filled, whatever modes it has; nothing happens where there is none.

    Raises WorkspaceError when it cannot be removed."""
    if not folder.is_dir() or folder.is_symlink():
        return
    try:
        _open_up(folder)
        shutil.rmtree(folder)
    except (OSError, RecursionError) as error:
        raise WorkspaceError(f"cannot be removed: {error}", where=str(folder), remedy="remove it by hand") from error


def _open_up(folder: Path) -> None:
    os.chmod(folder, 0o700)
    for at, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(path := os.path.join(at, name)):
                os.chmod(path, 0o700)


def _members(root: Path) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Every member with the path to read it from, in the order of the archive.

    A folder's content follows it at once, so paths rise as tuples of their parts.
    """
    os.chmod(root, 0o700)
    stack = [iter(_entries(str(root)))]
    prefixes = [""]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            prefixes.pop()
            continue
        info = tarfile.TarInfo(prefixes[-1] + entry.name)
        found = entry.stat(follow_symlinks=False)
        info.mode = stat.S_IMODE(found.st_mode) & 0o777
        if entry.is_symlink():
            target = _target(Path(entry.path), root)
            if target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, target
                yield info, entry.path
        elif entry.is_dir(follow_symlinks=False):
            if len(stack) >= MAX_DEPTH:
                raise OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} folders deep", entry.path)
            info.type = tarfile.DIRTYPE
            yield info, entry.path
            if not found.st_mode & stat.S_IRUSR or not found.st_mode & stat.S_IXUSR:
                os.chmod(entry.path, 0o700)
            stack.append(iter(_entries(entry.path)))
            prefixes.append(info.name + "/")
        elif entry.is_file(follow_symlinks=False):
            info.size = found.st_size
            if not found.st_mode & stat.S_IRUSR:
                os.chmod(entry.path, 0o600)
            yield info, entry.path


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return sorted(found, key=lambda entry: entry.name)


def _target(link: Path, root: Path) -> str | None:
    """Where a link below `root` points, relative; None unless that is a file or folder inside."""
    try:
        real = Path(os.path.realpath(link, strict=True))
        usable = real.is_relative_to(root) and (real.is_file() or real.is_dir())
    except OSError:
        return None
    if not usable:
        return None
    target = os.readlink(link)
    return os.path.relpath(real, link.parent) if os.path.isabs(target) else target


def _hostile(what: str) -> WorkspaceError:
    return WorkspaceError(
        f"these are not the bytes of a preserved workspace: {what}",
        remedy="nothing of it is used; look at who wrote it",
    )
