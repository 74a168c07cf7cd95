"""A power cut, simulated: what was done to a folder is recorded, and what a cut may leave of it is drawn.

The disk is a pessimist's. Bytes that were not synced are there, or a part of them, or zeros in their place. Names that
were made, moved or taken away since their folder was last synced are so or not, each for itself. Syncing a file says
nothing about its name, syncing a folder nothing about what its files hold.
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

Object = int  # a file or folder itself, whatever its names are
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
    what: Object


@dataclass(frozen=True)
class Reported:
    """This step was reported as committed; `best` is a step that must be kept besides."""

    step: int
    best: int | None = None


Operation = Names | Bytes | Synced | Reported


@dataclass
class Recording:
    """What was done to a folder, and its state before, which counts as safely on disk."""

    names: dict[tuple[Object, str], Object] = field(default_factory=dict)
    content: dict[Object, bytes] = field(default_factory=dict)
    folders: set[Object] = field(default_factory=lambda: {ROOT})
    operations: list[Operation] = field(default_factory=list)

    def reported(self, cut: int) -> list[Reported]:
        return [operation for operation in self.operations[:cut] if isinstance(operation, Reported)]


class PowerlessError(OSError):
    """Nothing reaches the disk any more, because the process was killed."""


class Recorder:
    """Looks at the whole folder before and after every call that changes it.

    So what a library does in between, with calls of its own, is seen as well; only its syncs are not.
    """

    CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "fsync", "fdatasync")

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.recording = root, Recording()
        self.calls, self._dies_at = 0, -1
        self._of_inode: dict[int, Object] = {root.stat().st_ino: ROOT}
        self._names: dict[tuple[Object, str], Object] = {}
        self._content: dict[Object, bytes] = {}
        self._look()
        self.recording.names, self.recording.content = dict(self._names), dict(self._content)
        self.recording.operations.clear()
        for name in self.CALLS:
            patch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def report(self, step: int, best: int | None = None) -> None:
        self._look()
        self.recording.operations.append(Reported(step, best))

    @contextmanager
    def killed_after(self, calls: int) -> Iterator[None]:
        """Let so many calls happen and refuse all later ones, which leaves what a killed process leaves."""
        self._dies_at = self.calls + calls
        try:
            yield
        except PowerlessError:
            pass
        finally:
            self._dies_at = -1

    def _recorded(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if 0 <= self._dies_at <= self.calls:
                raise PowerlessError(5, "killed")
            self.calls += 1
            self._look()
            if name in ("fsync", "fdatasync"):  # only noted: this disk never loses its power
                what = self._of_inode.get(os.fstat(*args).st_ino)
                return None if what is None else self.recording.operations.append(Synced(what))
            result = plain(*args, **options)
            self._look()
            return result

        return call

    def _look(self) -> None:
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
                found = names[folder, entry.name] = self._object(entry)
                inodes[entry.inode()] = found
                if entry.is_dir(follow_symlinks=False):
                    todo.append((Path(entry.path), found))
                else:
                    content[found] = Path(entry.path).read_bytes()
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
    made = {place: what for place, what in now.items() if before.get(place) != what}
    gone = {what: place for place, what in before.items() if now.get(place) != what}
    changes: list[tuple[tuple[Object, str, Object | None], ...]] = []
    for place, what in made.items():
        moved_from = gone.pop(what, None)
        changes.append((((*moved_from, None),) if moved_from else ()) + ((*place, what),))
    return changes + [((*place, None),) for place in gone.values() if place not in made]


# --- the disk after a power cut


def after_cut(recording: Recording, cut: int, chance: random.Random) -> Tree:
    """Draw a possible state of the disk after a power cut that follows so many operations."""
    done = recording.operations[:cut]
    synced = {operation.what: place for place, operation in enumerate(done) if isinstance(operation, Synced)}
    survives = chance.choice((0.0, 0.5, 1.0, chance.random()))  # a coin alone would hardly ever lose or keep all
    names = dict(recording.names)
    for place, operation in enumerate(done):
        if isinstance(operation, Names):
            durable = all(place < synced.get(folder, -1) for folder, _, _ in operation.changes)
            if durable or chance.random() < survives:
                for folder, name, what in operation.changes:
                    names[folder, name] = what  # type: ignore[assignment]
    children: dict[Object, list[tuple[str, Object]]] = {}
    for (folder, name), found in names.items():
        if found is not None:
            children.setdefault(folder, []).append((name, found))
    contents = _contents(recording, done, synced, chance)
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
    for name, what in sorted(children.get(folder, ())):
        tree[f"{above}{name}"] = None if what in folders else contents[what]
        if what in folders:
            _grow(tree, f"{above}{name}/", what, children, folders, contents)


def _contents(
    recording: Recording, done: list[Operation], synced: dict[Object, int], chance: random.Random
) -> dict[Object, bytes]:
    versions = {file: [content] for file, content in recording.content.items()}
    for place, operation in enumerate(done):
        if isinstance(operation, Bytes):
            if place < synced.get(operation.file, -1):
                versions[operation.file].clear()
            versions[operation.file].append(operation.content)
    return {file: _torn(found, chance) for file, found in versions.items()}


def _torn(versions: list[bytes], chance: random.Random) -> bytes:
    """Draw a file content: the first one is on disk; later ones fully, partly or not at all."""
    if len(versions) == 1:
        return versions[0]
    content = chance.choice(versions)
    place = chance.randrange(len(content) + 1)
    whole, zeros = len(content), bytes(len(content) - place)
    return chance.choice(
        (content, content[:place], content[:place] + zeros, bytes(place) + content[place:], bytes(whole))
    )


class Disk:
    """A folder that is changed from one state to the next, writing only the differences."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reset()

    def reset(self) -> None:
        """Start with an empty folder, after something else has changed it."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self._shown: Tree = {}

    def show(self, tree: Tree) -> None:
        for path in sorted(self._shown.keys() - tree.keys(), reverse=True):
            self._forget(path)
        for path, content in sorted(tree.items()):
            if path in self._shown and self._shown[path] != content:
                self._forget(path)
            if path not in self._shown:
                place = self.root / path
                place.mkdir() if content is None else place.write_bytes(content)
        self._shown = dict(tree)

    def _forget(self, path: str) -> None:
        place = self.root / path
        place.rmdir() if self._shown.pop(path) is None else place.unlink()
