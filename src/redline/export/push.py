"""`redline export --push`: an exported folder as one commit of a repository on the Hugging Face hub.

The large files are uploaded first, and a commit names all of them at once, so readers never see half a model. A push
that broke off is repeated: what the hub has already is not sent again, and a commit that did arrive is not made twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.errors import UserError, install_hint
from redline.hub import REPOSITORY, causes, is_offline, silence_libraries

_ATTEMPTS, _PAUSE_S = 3, 2.0
# Errors that another attempt cannot change.
_FINAL = (
    "RepositoryNotFoundError",
    "GatedRepoError",
    "HFValidationError",
    "BadRequestError",
    "LocalTokenNotFoundError",
)
_REFUSED = (401, 403)


@dataclass(frozen=True)
class Pushed:
    repository: str
    url: str
    commit: str
    private: bool
    files: dict[str, int]  # name → bytes


def check_push(repository: str, *, dry_run: bool = False) -> None:
    """Raise a UserError for what a push lacks, before anything is exported. A dry run needs no hub."""
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"{repository!r} is not a repository.", where="--push", fix="Write OWNER/NAME.")
    if dry_run:
        return
    if is_offline():
        raise UserError("HF_HUB_OFFLINE is set.", where="--push", fix="Unset it to push.")
    try:
        from huggingface_hub import get_token
    except ImportError:
        what = "pushing needs the package huggingface_hub."
        raise UserError(what, where="--push", fix=f"Install it: {install_hint('hub')}.") from None
    if not get_token():
        fix = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
        raise UserError("the hub needs a token to accept files, and there is none.", where="--push", fix=fix)


def files_to_push(folder: Path) -> dict[str, int]:
    """Return the files of the folder and their sizes, in the order in which a listing shows them."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def push(
    folder: Path, repository: str, *, public: bool, message: str, log: Callable[[str], None] = lambda _: None
) -> Pushed:
    """Upload the folder as one commit; make the repository, private unless `public`, if it does not exist."""
    check_push(repository)
    from huggingface_hub import CommitOperationAdd, HfApi

    api, files = HfApi(), files_to_push(folder)

    def attempt() -> tuple[str, str, bool]:
        api.create_repo(repository, private=not public, exist_ok=True)
        # made anew for each attempt, because a failed one may have marked them as sent
        operations = [CommitOperationAdd(name, str(folder / name)) for name in files]
        done = api.create_commit(repository, operations, commit_message=message)
        return str(done.commit_url), str(done.oid), bool(api.repo_info(repository).private)

    url, commit, private = _repeated(attempt, repository, folder, log)
    if private is public:
        log(f"{repository} existed already and is {'private' if private else 'public'}: its settings were not changed")
    return Pushed(repository, url, commit, private, files)


def _repeated(
    attempt: Callable[[], tuple[str, str, bool]], repository: str, folder: Path, log: Callable[[str], None]
) -> tuple[str, str, bool]:
    for number in range(1, _ATTEMPTS + 1):
        try:
            with silence_libraries():  # their log lines may quote requests
                return attempt()
        except Exception as error:  # huggingface_hub and its network library raise many kinds of errors
            names, status = _names(error), _status(error)
            if status in _REFUSED:
                fix = "Use a token that may write to it (HF_TOKEN, or `hf auth login`), and a namespace of your own."
                what = f"the hub refuses to write to {repository} (HTTP {status})."
                raise UserError(what, where="--push", fix=fix) from None
            if number == _ATTEMPTS or names & {*_FINAL}:
                reason = f"HTTP {status}" if status else type(error).__name__
                what = f"the push to {repository} broke off ({reason}); {folder} is complete."
                fix = "Run the same command again: it continues with what the hub does not have yet."
                raise UserError(what, where="--push", fix=fix) from None
            log(f"the push to {repository} broke off ({f'HTTP {status}' if status else type(error).__name__}): again")
            time.sleep(_PAUSE_S)
    raise AssertionError


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for cause in causes(error) for kind in type(cause).__mro__}


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the reply that the error is about, if there was one."""
    for cause in causes(error):
        status: Any = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None
