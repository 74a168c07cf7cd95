"""Simulate a power cut: record the operations on a folder, and draw a state of the disk that a cut may leave.

The disk guarantees as little as POSIX allows. Of bytes that were not synced, all, a part or zeros are on disk. Each
name that was created, moved or deleted since the last sync of its folder may or may not have changed on disk,
independently of the others. Syncing a file does not save its name; syncing a folder does not save the content of its
files.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Object = int  # an inode: a file or folder, independent of its names
ROOT: Object = 0
Tree = dict[str, bytes | None]  # path → content; a folder has none


@dataclass(frozen=True)
class Names:
    """Names that change atomically: (folder, name, new inode). A rename changes two."""

    changes: tuple[tuple[Object, str, Object | None], ...]


@dataclass(frozen=True)
class Bytes:
    """The new content of a file."""

    file: Object
    content: bytes


@dataclass(frozen=True)
class Synced:
    inode: Object


@dataclass(frozen=True)
class Reported:
    """This step was reported as committed; `best` is a step that must be kept besides."""

    step: int
    best: int | None = None


Operation = Names | Bytes | Synced | Reported


@dataclass
class Recording:
    """The operations on a folder, and its state before them, which counts as synced."""

    names: dict[tuple[Object, str], Object] = field(default_factory=dict)
    content: dict[Object, bytes] = field(default_factory=dict)
    folders: set[Object] = field(default_factory=lambda: {ROOT})
    operations: list[Operation] = field(default_factory=list)

    def reported(self, cut: int) -> list[Reported]:
        return [operation for operation in self.operations[:cut] if isinstance(operation, Reported)]


class PowerlessError(OSError):
    """Nothing reaches the disk any more, because the process was killed."""


class Recorder:
    """Records the differences of the whole folder before and after every call that changes it.

    This also records what a library does in between through calls that are not patched, except its syncs.
    """

    CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "fsync", "fdatasync")

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.recording = root, Recording()
        self.calls, self._dies_at = 0, -1
        self._of_inode: dict[int, Object] = {root.stat().st_ino: ROOT}
        self._names: dict[tuple[Object, str], Object] = {}
        self._content: dict[Object, bytes] = {}
        self._record_changes()
        self.recording.names, self.recording.content = dict(self._names), dict(self._content)
        self.recording.operations.clear()
        for name in self.CALLS:
            patch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def report(self, step: int, best: int | None = None) -> None:
        self._record_changes()
        self.recording.operations.append(Reported(step, best))

    @contextmanager
    def killed_after(self, calls: int) -> Iterator[None]:
        """Let `calls` calls happen and refuse all later ones, like a killed process."""
        self._dies_at = self.calls + calls
        try:
            yield
        except PowerlessError:
            pass
        finally:
            self._dies_at = -1

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if 0 <= self._dies_at <= self.calls:
                raise PowerlessError(5, "killed")
            self.calls += 1
            self._record_changes()
            if name in (
                "fsync",
                "fdatasync",
            ):  # only recorded: the real disk does not lose power, so the sync can be skipped
                inode = self._of_inode.get(os.fstat(*args).st_ino)
                return None if inode is None else self.recording.operations.append(Synced(inode))
            result = original(*args, **options)
            self._record_changes()
            return result

        return call

    def _record_changes(self) -> None:
        """Record what has changed since the last call."""
        names, content, inodes = self._walk()
        operations = self.recording.operations
        operations += [Names(changes) for changes in _differences(self._names, names)]
        operations += [Bytes(file, now) for file, now in content.items() if self._content.get(file) != now]
        self._names, self._content, self._of_inode = names, content, inodes

    def _walk(self) -> tuple[dict[tuple[Object, str], Object], dict[Object, bytes], dict[int, Object]]:
        names: dict[tuple[Object, str], Object] = {}
        content: dict[Object, bytes] = {}
        inodes = {inode: known for inode, known in self._of_inode.items() if known == ROOT}
        todo = [(self.root, ROOT)]
        while todo:
            path, folder = todo.pop()
            for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                object_ = names[folder, entry.name] = self._object(entry)
                inodes[entry.inode()] = object_
                if entry.is_dir(follow_symlinks=False):
                    todo.append((Path(entry.path), object_))
                else:
                    content[object_] = Path(entry.path).read_bytes()
        return names, content, inodes

    def _object(self, entry: os.DirEntry[str]) -> Object:
        """Return the number of an inode; one that was free at the last call gets a new number."""
        known = self._of_inode.get(entry.inode())
        if known is None:
            known = self._of_inode[entry.inode()] = len(self.recording.folders) + len(self.recording.content)
            if entry.is_dir(follow_symlinks=False):
                self.recording.folders.add(known)
            else:
                self.recording.content[known] = b""
        return known


def _differences(
    before: dict[tuple[Object, str], Object], now: dict[tuple[Object, str], Object]
) -> list[tuple[tuple[Object, str, Object | None], ...]]:
    added = {place: inode for place, inode in now.items() if before.get(place) != inode}
    removed = {inode: place for place, inode in before.items() if now.get(place) != inode}
    changes: list[tuple[tuple[Object, str, Object | None], ...]] = []
    for place, inode in added.items():
        moved_from = removed.pop(inode, None)
        changes.append((((*moved_from, None),) if moved_from else ()) + ((*place, inode),))
    return changes + [((*place, None),) for place in removed.values() if place not in added]


# --- the disk after a power cut


def after_cut(recording: Recording, cut: int, rng: random.Random) -> Tree:
    """Draw a possible state of the disk after a power cut that follows the first `cut` operations."""
    done = recording.operations[:cut]
    synced = {operation.inode: index for index, operation in enumerate(done) if isinstance(operation, Synced)}
    survives = rng.choice(
        (0.0, 0.5, 1.0, rng.random())
    )  # 0 and 1 explicitly: independent coins would hardly ever lose or keep everything
    names = dict(recording.names)
    for index, operation in enumerate(done):
        if isinstance(operation, Names):
            durable = all(index < synced.get(folder, -1) for folder, _, _ in operation.changes)
            if durable or rng.random() < survives:
                for folder, name, inode in operation.changes:
                    names[folder, name] = inode  # type: ignore[assignment]
    children: dict[Object, list[tuple[str, Object]]] = {}
    for (folder, name), inode in names.items():
        if inode is not None:
            children.setdefault(folder, []).append((name, inode))
    contents = _contents(recording, done, synced, rng)
    tree: Tree = {}
    _grow(tree, "", ROOT, children, recording.folders, contents)
    return tree


def _grow(
    tree: Tree,
    above: str,
    folder: Object,
    children: dict[Object, list[tuple[str, Object]]],
    folders: set[Object],
    contents: dict[Object, bytes],
) -> None:
    for name, inode in sorted(children.get(folder, ())):
        tree[f"{above}{name}"] = None if inode in folders else contents[inode]
        if inode in folders:
            _grow(tree, f"{above}{name}/", inode, children, folders, contents)


def _contents(
    recording: Recording, done: list[Operation], synced: dict[Object, int], rng: random.Random
) -> dict[Object, bytes]:
    versions = {file: [content] for file, content in recording.content.items()}
    for index, operation in enumerate(done):
        if isinstance(operation, Bytes):
            if index < synced.get(operation.file, -1):
                versions[operation.file].clear()
            versions[operation.file].append(operation.content)
    return {file: _torn(contents, rng) for file, contents in versions.items()}


def _torn(versions: list[bytes], rng: random.Random) -> bytes:
    """Draw the content of a file: the first version is on disk, later versions fully, partly or not at all."""
    if len(versions) == 1:
        return versions[0]
    content = rng.choice(versions)
    place = rng.randrange(len(content) + 1)
    length, zeros = len(content), bytes(len(content) - place)
    return rng.choice(
        (content, content[:place], content[:place] + zeros, bytes(place) + content[place:], bytes(length))
    )


class Disk:
    """A folder that changes from one state to the next by writing only the differences."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reset()

    def reset(self) -> None:
        """Empty the folder. Call it after other code has changed the folder."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self._shown: Tree = {}

    def show(self, tree: Tree) -> None:
        for path in sorted(self._shown.keys() - tree.keys(), reverse=True):
            self._remove(path)
        for path, content in sorted(tree.items()):
            if path in self._shown and self._shown[path] != content:
                self._remove(path)
            if path not in self._shown:
                place = self.root / path
                place.mkdir() if content is None else place.write_bytes(content)
        self._shown = dict(tree)

    def _remove(self, path: str) -> None:
        place = self.root / path
        place.rmdir() if self._shown.pop(path) is None else place.unlink()
