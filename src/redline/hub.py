"""The Hugging Face hub: ids of the form `hf://owner/name[@revision]`, fetching repositories, and errors for people.

Everything goes through huggingface_hub, which reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE by itself. No
message quotes the text of one of its errors: that text may contain a token.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.errors import UserError, install_hint

SCHEME = "hf://"
MODEL, DATASET = "model", "dataset"
_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_URI = re.compile(rf"hf://((?P<kind>models|datasets)/)?(?P<name>{_NAME})(@(?P<revision>[\w./-]+))?")
REPOSITORY = re.compile(_NAME)
_DISK = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}
_UNKNOWN = {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}

_NO_ANSWER = {"ConnectError", "ConnectTimeout", "OfflineModeIsEnabled"}
_ATTEMPTS = 4


class UnreachableError(UserError):
    """The hub cannot provide a repository now."""


@dataclass(frozen=True)
class HubId:
    name: str  # owner/name
    revision: str | None = None  # a branch, a tag or a commit; None: the newest

    def at(self, commit: str) -> str:
        """Return the address of the same repository at a commit."""
        return f"{SCHEME}{self.name}@{commit}"


def parse_address(spec: str) -> HubId | None:
    """Return the repository that `hf://…` names; None for anything else."""
    match = _URI.fullmatch(spec)
    return HubId(match["name"], match["revision"]) if match else None


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off")


def fetch(spec: str, hub_id: HubId, kind: str, patterns: Sequence[str], *, hint: str = "") -> Path:
    """Return the folder of a repository in the hub's cache, after downloading what is missing of it.

    The folder's name is the commit. A download that breaks off is continued; a hub that cannot be reached is not asked
    again.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        what = "is not a folder, and fetching it from the hub needs the package huggingface_hub."
        fix = f"Install it: {install_hint('hub')}; or check the path.{hint}"
        raise UnreachableError(what, where=spec, fix=fix) from None
    options: dict[str, Any] = {"allow_patterns": list(patterns)}
    options |= {"repo_type": kind} if kind != MODEL else {}
    options |= {"revision": hub_id.revision} if hub_id.revision else {}
    for attempt in range(_ATTEMPTS):
        try:
            return Path(snapshot_download(hub_id.name, **options))
        except Exception as error:  # huggingface_hub and its network library raise many kinds of errors
            explained = hub_error(spec, error, kind, hint)
            answered = not is_offline() and not _kinds(error) & _NO_ANSWER
            if attempt + 1 == _ATTEMPTS or not answered or not isinstance(explained, UnreachableError):
                raise explained from None
    raise AssertionError


def hub_error(spec: str, error: BaseException, kind: str = MODEL, hint: str = "") -> UserError:
    """Return the error for the user. `hint` is added to the fix of a hub that cannot be reached."""
    kinds = _kinds(error)
    if "GatedRepoError" in kinds:
        fix = "Accept its terms on its page, then log in: `hf auth login`, or set HF_TOKEN."
        return UserError(f"is a gated {kind}: its owner asks users to accept terms first.", where=spec, fix=fix)
    if not is_offline() and kinds & _UNKNOWN:
        what = "the hub has no revision of that name." if "RevisionNotFoundError" in kinds else ""
        what = what or f"is not a folder, and the hub has no {kind} of that name."
        return UserError(what, where=spec, fix="Check the spelling (owner/name); a private one needs HF_TOKEN.")
    if isinstance(error, OSError) and error.errno in _DISK:
        fix = "Free space there, or set HF_HOME to another folder."
        return UserError(f"cannot be written to the hub's cache ({type(error).__name__}).", where=spec, fix=fix)
    fix = "Go online (and unset HF_HUB_OFFLINE) to fetch it once, or give a path to files on this machine."
    what = "is not a folder, is not in the hub's cache, and the hub cannot be reached."
    return UnreachableError(what, where=spec, fix=fix + hint)


def _kinds(error: BaseException) -> set[str]:
    return {own.__name__ for cause in causes(error) for own in type(cause).__mro__}


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


@contextlib.contextmanager
def silence_libraries() -> Iterator[None]:
    """Hide the progress bars and log lines of huggingface_hub and transformers. Failures still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
