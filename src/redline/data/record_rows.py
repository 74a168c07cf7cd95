"""A record as a row of tokens: each of its segments with its marks, padded to its length.

    question    the question, padding
    plan        <|plan|> the plan, padding
    execution   <|execution|> the steps <|answer|> the answer, padding     (named `solution` where there is no plan)

Learnt is all that a sampler must write: a segment's content, and the padding of the block in which the first of it
stands; that first one always exists, for it says where the content ends. What is too long is cut and counted. The
answer is never cut off: of the execution the end of its steps goes, and where not even the answer fits, the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from redline.data.record import Record
from redline.data.specials import WithSpecials
from redline.errors import UserError
from redline.plan.layout import Layout, Segment

QUESTION, PLAN, EXECUTION, SOLUTION = "question", "plan", "execution", "solution"
_LEAST = {QUESTION: 1, PLAN: 3, EXECUTION: 4, SOLUTION: 4}  # its marks, one token, and one of padding
_AT_ONCE = 4096  # records

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SegmentReport:
    name: str
    length: int
    median: int  # tokens of its content, before anything is cut
    most: int  # that 95 % of all do not exceed
    longest: int
    truncated: int


def key_of(layout: Layout, name: str) -> str:
    """The key of the recipe that makes a segment longer."""
    if any(segment.name == SOLUTION for segment in layout.segments):
        return "data.seq_len" if name == SOLUTION else f"block_diffusion.{name}"
    return f"hierarchical_diffusion.{name}"


def refuse_short(layout: Layout) -> None:
    names = [segment.name for segment in layout.segments]
    if names not in ([QUESTION, PLAN, EXECUTION], [QUESTION, SOLUTION]):
        raise ValueError(f"{names} are not the segments of a record")
    for segment in layout.segments:
        least = _LEAST[segment.name]
        if segment.length < least:
            what = f"a {segment.name} of {segment.length} tokens has no room for anything."
            fix = f"Raise {key_of(layout, segment.name)} so that it has at least {least}; 64 is a beginning."
            raise UserError(what, fix=fix)


class RecordRows:
    """Writes records into rows, and counts what did not fit."""

    def __init__(self, layout: Layout, tokenizer: WithSpecials) -> None:
        self.layout, self.tokenizer = layout, tokenizer
        self.dropped = self.unplanned = 0
        self._lengths: dict[str, list[int]] = {segment.name: [] for segment in layout.segments}
        self._truncated = dict.fromkeys(self._lengths, 0)
        self._least_answer = 0  # the shortest segment that would have saved a dropped record

    def write(self, records: Sequence[Record]) -> tuple[Int32s, Int32s, list[Record]]:
        """Tokens [R, n], up to where each segment is learnt [R, segments], and the records that fitted."""
        tokens_RN = np.full((len(records), self.layout.length), self.tokenizer.pad, dtype=np.int32)
        learnt_RS = np.zeros((len(records), len(self.layout.segments)), dtype=np.int32)
        kept: list[Record] = []
        for first in range(0, len(records), _AT_ONCE):
            some = records[first : first + _AT_ONCE]
            for record, segments in zip(some, self._coded(some), strict=True):
                if self._fill(segments, tokens_RN[len(kept)], learnt_RS[len(kept)]):
                    kept.append(record)
                    self.unplanned += not record.plan and PLAN in self._lengths
        return tokens_RN[: len(kept)], learnt_RS[: len(kept)], kept

    def _coded(self, records: Sequence[Record]) -> list[list[tuple[list[int], list[int]]]]:
        """Of each record, for each segment, what may be cut at its end and what must stay behind that."""
        of, marks = self.tokenizer.encode_batch, self.tokenizer
        parts = {QUESTION: [(q, list[int]()) for q in of([record.question for record in records])]}
        if PLAN in self._lengths:
            parts[PLAN] = [([marks.plan, *plan], []) for plan in of([record.plan for record in records])]
        steps, answers = of([record.execution for record in records]), of([record.answer for record in records])
        last = self.layout.segments[-1].name
        parts[last] = [([marks.execution, *s], [marks.answer, *a]) for s, a in zip(steps, answers, strict=True)]
        return [list(segments) for segments in zip(*parts.values(), strict=True)]

    def _fill(self, segments: list[tuple[list[int], list[int]]], row_N: Int32s, learnt_S: Int32s) -> bool:
        """Whether it fits."""
        filled = []
        for segment, (content, end) in zip(self.layout.segments, segments, strict=True):
            self._lengths[segment.name].append(len(content) + len(end))
            room = (segment.length if segment.given else segment.length - 1) - len(end)
            if room < (1 if end else 0):
                self.dropped += 1
                needed = len(end) + 2  # the mark before the steps, and the padding
                self._least_answer = min(self._least_answer or needed, needed)
                return False
            self._truncated[segment.name] += len(content) > room
            filled.append(content[:room] + end)
        for place, (segment, begin) in enumerate(zip(self.layout.segments, self.layout.starts, strict=True)):
            row_N[begin : begin + len(filled[place])] = filled[place]
            learnt_S[place] = _learnt(segment, len(filled[place]))
        return True

    def nothing_fits(self, source: str) -> UserError:
        last = self.layout.segments[-1]
        what = f"no record's answer fits into the {last.length} tokens of the {last.name}."
        more = self._least_answer - last.length
        fix = f"Raise {key_of(self.layout, last.name)} by at least {more}; the steps before the answer need room, too."
        return UserError(what, where=source, fix=fix)

    def reports(self) -> tuple[SegmentReport, ...]:
        return tuple(
            SegmentReport(one.name, one.length, *_quantiles(self._lengths[one.name]), self._truncated[one.name])
            for one in self.layout.segments
        )


def _learnt(segment: Segment, end: int) -> int:
    """Up to the end of the block in which the first padding stands."""
    return 0 if segment.given else (end // segment.block + 1) * segment.block


def _quantiles(lengths: list[int]) -> tuple[int, int, int]:
    median, most, longest = np.quantile(lengths, (0.5, 0.95, 1.0), method="higher").tolist()
    return median, most, longest
