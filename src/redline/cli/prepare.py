"""redline prepare"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.options import JsonOption
from redline.errors import EXIT_FAILED, UsageError
from redline.units import MOST_WORKERS, format_bytes, format_seconds

if TYPE_CHECKING:
    from redline.data.sources import Reading
    from redline.data.tokenizer import Tokenizer


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A text file, a folder, a JSONL or Parquet file, a dataset id OWNER/NAME, or embedded (a text that "
            "ships with redline).",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="A new folder for the tokens.")] = None,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="gpt2, bytes, train:N (train one with N entries) or a tokenizer.json file."),
    ] = "gpt2",
    val_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.999, metavar="F", help="Fraction of the text to hold out for validation.")
    ] = 0.05,
    text_key: Annotated[str, typer.Option(metavar="KEY", help="The key or column that holds the text.")] = "text",
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, metavar="N", help="Number of processes. Default: one per core."),
    ] = None,
    dedup: Annotated[bool, typer.Option("--dedup", help="Drop documents whose text occurred before.")] = False,
    preview: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show N documents with their tokens.")] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="With --preview: also show the ids of the first 40 tokens.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check all tokens of --out, or of a prepared SOURCE, against their digests."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Turn text into token files for training, at constant memory.

    Examples:
      redline prepare ./notes --out ./tokens --tokenizer train:16384
      redline prepare corpus.jsonl.zst --out ./tokens --text-key content --dedup
      redline prepare ./notes --preview 3
      redline prepare ./tokens --verify
    """
    if verify and out is None:
        if preview is not None:
            what = "--preview writes no tokens that --verify could check."
            raise UsageError(what, where="--verify", fix="Add --out DIR, or leave out --verify.")
        _verify(Path(source).expanduser(), tokenizer, json_)
        return
    if out is None and preview is None:
        raise UsageError("no folder is given for the tokens.", where="--out", fix="Add --out DIR, or --preview N.")
    from redline.cli.progress import PreparationBar
    from redline.data.prepare import (
        prepare_source,
        prepared_summary,
        refuse_content,
        require_text,
        tokenizer_for,
        verify_tokens,
    )
    from redline.data.sources import Reading

    require_text(source, fix=f"Train on it: data.source={source}.")
    if out is not None:
        refuse_content(out)
    reading = Reading(val_fraction, text_key, dedup)
    with _exit_on_preemption(), PreparationBar() as bar:
        encoder = tokenizer_for([source], tokenizer, reading, bar)
        summary: dict[str, Any] = {}
        if preview:
            summary["preview"] = _preview(source, encoder, reading, preview, ids=ids, quiet=json_)
        if out is not None:
            prepare_source(source, encoder, out, reading, workers=workers, progress=bar)
            if verify:
                verify_tokens(out)
    if out is not None:
        summary |= {"source": source, "out": str(out), **prepared_summary(out), "seconds": round(bar.seconds, 3)}
        text_bytes = summary["train"]["bytes"] + summary["val"]["bytes"]
        summary["mb_per_s"] = round(text_bytes / 1e6 / max(bar.seconds, 1e-9), 3)
    if json_:
        import json

        typer.echo(json.dumps(summary))
    elif out is not None:
        _show_summary(summary, dedup, val_fraction)


def _verify(folder: Path, tokenizer: str, json_: bool) -> None:
    from redline.data.prepare import verify_tokens

    counts = verify_tokens(folder, tokenizer)
    if json_:
        import json

        typer.echo(json.dumps({"source": str(folder), "verified": counts}))
    else:
        verified = f"{counts['tokens']:,} tokens in {counts['files']:,} files match their digests"
        typer.echo(f"{folder}\n  verified     {verified}")


@contextmanager
def _exit_on_preemption() -> Iterator[None]:
    """Turn preemption signals into SystemExit, so that a half-written folder is removed as after any failure."""
    from redline.training.control import preemption_signals

    previous = {
        number: signal.signal(number, lambda number, frame: sys.exit(EXIT_FAILED)) for number in preemption_signals()
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _preview(
    source: str, tokenizer: Tokenizer, reading: Reading, count: int, *, ids: bool, quiet: bool
) -> list[dict[str, Any]]:
    from redline.cli.preview import show_document
    from redline.data.prepare import preview

    rows = []
    for number, document in enumerate(preview(source, tokenizer, reading, count), start=1):
        if not quiet:
            show_document(document, number, ids=ids)
        rows.append(
            {
                "tokens": document.tokens,
                "more": document.more,
                "ids": document.ids,
                "texts": [span.text for span in document.spans],
            }
        )
    return rows


def _show_summary(summary: dict[str, Any], dedup: bool, val_fraction: float) -> None:
    counts = summary["counts"]
    rows = [("tokenizer", f"{summary['tokenizer']}, {summary['vocab_size']:,} entries")]
    for split in ("train", "val"):
        part = summary[split]
        size = format_bytes(part["bytes"])
        rows.append((split, f"{part['tokens']:,} tokens · {size} of text · {part['documents']:,} documents"))
    if counts["bad_rows"]:
        skipped = f"{counts['bad_rows']:,} of {counts['rows']:,} skipped; the first is {counts['first_bad_row']}"
        rows.append(("bad rows", skipped))
    if odd := counts["not_utf8_files"]:
        hint = "`iconv -t UTF-8` converts them"
        rows.append(("not UTF-8", f"{odd:,} left out; the first is {counts['first_not_utf8_file']}. {hint}"))
    if binary := counts["binary_files"] - odd:
        rows.append(("binary files", f"{binary:,} left out; the first is {counts['first_binary_file']}"))
    if not summary["val"]["tokens"] and val_fraction:
        rows.append(
            ("held out", "nothing, so there will be no validation loss. Use more text, or a larger --val-fraction")
        )
    kept = "dropped" if dedup else "counted and kept"
    rows.append(("duplicates", f"{counts['duplicates']:,} {kept}" if counts["duplicates"] else "none"))
    rows.append(("fingerprint", summary["fingerprint"]))
    rows.append(("took", f"{format_seconds(summary['seconds'])}, {summary['mb_per_s']:.1f} MB of text per second"))
    typer.echo(summary["out"])
    for name, value in rows:
        typer.echo(f"  {name:12s} {value}")
