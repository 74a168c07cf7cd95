"""GSM8K scores as lm-evaluation-harness computes them: cases worked by hand, and the package itself where it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from redline.metrics import flexible_extract, gsm8k_exact_match, strict_match

SOLUTION = "She sold 48 + 24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("answer", "reference", "strict", "flexible", "ours"),
    [
        (SOLUTION, SOLUTION, 1, 1, 1),
        ("#### 1,234", "#### 1234", 1, 1, 1),
        ("#### 72.", "#### 72", 1, 1, 1),  # one final full stop is ignored
        ("#### 72.00", "#### 72", 0, 0, 1),  # texts are compared, not numbers
        ("#### $72", "#### 72", 0, 1, 1),  # strict expects the number right behind the mark
        ("####72", "#### 72", 0, 1, 1),
        ("#### 71 #### 72", "#### 72", 0, 1, 1),  # strict takes the first mark
        ("#### 72 so 5", "#### 72", 1, 0, 1),  # flexible takes the last number
        ("The answer is 72 clips.", "#### 72", 0, 1, 1),
        ("The answer is 72%, not 7.", "#### 72", 0, 0, 0),
        ("It is -5", "#### -5", 0, 1, 1),
        ("It is 3...", "#### 3", 0, 0, 1),  # `3...` is one piece of text
        ("It is 3. Or , .", "#### 3", 0, 1, 1),  # a single comma or full stop is no number
        ("no number", "#### 72", 0, 0, 0),
        ("72", "72", 0, 1, 1),  # a bare reference
        ("", "#### 72", 0, 0, 0),
    ],
)
def test_cases_worked_by_hand(answer: str, reference: str, strict: int, flexible: int, ours: int) -> None:
    assert strict_match([answer], [reference]) == strict
    assert flexible_extract([answer], [reference]) == flexible
    assert gsm8k_exact_match([answer], [reference]) == ours


def test_shares() -> None:
    answers, true = ["#### 1", "it is 2", "3"], ["#### 1", "#### 2", "#### 4"]
    assert (strict_match(answers, true), flexible_extract(answers, true)) == (1 / 3, 2 / 3)
    with pytest.raises(ValueError, match="1 predictions for 2 references"):
        strict_match(["1"], ["1", "2"])


def test_the_package_gives_the_same_scores() -> None:
    extraction = pytest.importorskip("lm_eval.filters.extraction", reason="lm-eval is not installed")
    metrics = pytest.importorskip("lm_eval.api.metrics", reason="lm-eval's own packages are not installed")
    task = Path(extraction.__file__).parents[1] / "tasks/gsm8k/gsm8k.yaml"
    config = yaml.safe_load(task.read_text())
    options = {key: config["metric_list"][0][key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    pieces = ["#### ", "####", "72", " -5", "$1,200.50", ".", ",", "\n", "so", "7.0", "-", "<<3+4=7>>7"]
    texts = ["".join(parts) for parts in itertools.product(pieces, repeat=3)]
    for one in config["filter_list"]:
        how = {key: value for key, value in one["filter"][0].items() if key != "function"}
        found = [row[0] for row in extraction.RegexFilter(**how).apply([[text] for text in texts], [{}] * len(texts))]
        ours = {"strict-match": strict_match, "flexible-extract": flexible_extract}[one["name"]]
        for reference in ("It is.\n#### 72", "#### 1,200.50", "-5", "#### 7"):
            scores = [
                metrics.exact_match_hf_evaluate(predictions=[piece], references=[reference], **options)["exact_match"]
                for piece in found
            ]
            assert [ours([text], [reference]) for text in texts] == [float(score) for score in scores]
