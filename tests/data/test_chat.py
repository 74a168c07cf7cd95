"""Every known form of row gives its conversation; every other row is counted, with its place and the reason."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from redline.data.chat import Conversation, read_conversations
from redline.data.sources import ReadStats
from redline.errors import UserError

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"
GOOD = {"prompt": "Which?", "completion": "This."}


def read(source: Path | str) -> tuple[list[Conversation], ReadStats]:
    stats = ReadStats(str(source))
    return list(read_conversations(str(source), stats)), stats


def write(path: Path, rows: list[Any]) -> Path:
    content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def turns_of(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


PAIR = [("user", "Which?"), ("assistant", "This.")]
CHAT = [("system", ""), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " d\n")]


@pytest.mark.parametrize(
    ("row", "turns", "is_pair"),
    [
        (GOOD, PAIR, True),
        ({"question": "Which?", "answer": "This."}, PAIR, True),
        ({"instruction": "Which?", "output": "This."}, PAIR, True),
        ({"instruction": "Which?", "input": "", "output": "This."}, PAIR, True),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, [("user", "Add\n\n1, 2"), ("assistant", "3")], True),
        ({"prompt": "x", "completion": " y\n"}, [("user", "x"), ("assistant", " y\n")], True),  # nothing is stripped
        ({"messages": [{"role": r, "content": c} for r, c in CHAT]}, CHAT, False),
        ({"messages": [{"role": r, "content": c} for r, c in PAIR], "prompt": "Which?"}, PAIR, False),
        ({"conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "This."}]}, PAIR, False),
        (
            {"conversations": [{"from": "user", "value": "Which?"}, {"from": "assistant", "value": "This."}]},
            PAIR,
            False,
        ),
        ({"messages": None, "question": "Which?", "answer": "This.", "prompt": None}, PAIR, True),  # null: not there
    ],
)
def test_kinds_of_rows(tmp_path: Path, row: dict[str, Any], turns: list[Any], is_pair: bool) -> None:
    (conversation,), stats = read(write(tmp_path / "a.jsonl", [row]))
    assert (turns_of(conversation), conversation.is_pair, conversation.place) == (turns, is_pair, "a.jsonl:1")
    assert (stats.rows, stats.bad_rows.total()) == (1, 0)
    if "value" not in str(row) and "input" not in row:
        (same,), _ = read(write_parquet(tmp_path / "a.parquet", [{**row, "id": 7}]))
        assert turns_of(same) == turns


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


BAD = [
    ({"body": "x", "id": 3}, "none of the known fields (body, id)"),
    ({"prompt": "x"}, "none of the known fields (prompt)"),
    ({"prompt": "x", "completion": ""}, "empty 'completion'"),
    ({"prompt": "x", "completion": " \n"}, "empty 'completion'"),
    ({"prompt": "", "completion": "x"}, "empty 'prompt'"),
    ({"question": "x", "answer": 3}, "'answer' is not text"),
    ({"question": ["x"], "answer": "y"}, "'question' is not text"),
    ({"instruction": "x", "input": {}, "output": "y"}, "'input' is not text"),
    ({"prompt": "x\0", "completion": "y"}, "'prompt' is binary data, not text"),
    ({"prompt": "x", "completion": "\ud800"}, "'completion' is binary data, not text"),
    ({"messages": "hello"}, "'messages' is not a list of messages"),
    ({"messages": []}, "'messages' is not a list of messages"),
    ({"messages": ["a", "b"]}, "'messages' is not a list of messages"),
    (turns(("user", "a")), "no assistant turn"),
    (turns(("assistant", "a"), ("user", "b")), "begins with an assistant turn, which has nothing to answer"),
    (turns(("user", "a"), ("assistant", "")), "empty 'assistant turn'"),
    (turns(("user", "a"), ("assistant", None)), "'assistant turn' is not text"),
    (turns(("user", [{"type": "image"}]), ("assistant", "b")), "'user turn' is not text"),
    (turns(("user", "a"), ("narrator", "b")), "the role 'narrator' is unknown"),
    (turns(("user", "a"), (["x"], "b")), "the role ['x'] is unknown"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "a tool call, which is not text"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]}, "'assistant turn' is not text"),
    ("{broken", "not JSON"),
    ("[1]", "not a JSON object"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_what_cannot_be_used_is_counted(tmp_path: Path, row: Any, reason: str) -> None:
    conversations, stats = read(write(tmp_path / "a.jsonl", [GOOD, "", row, GOOD]))  # a blank line is no row
    assert [c.place for c in conversations] == ["a.jsonl:1", "a.jsonl:4"]
    assert dict(stats.bad_rows) == {reason: 1}
    assert stats.examples == [f"a.jsonl:3: {reason}"]
    assert stats.empty_rows == reason.startswith("empty")
    with pytest.raises(UserError, match=r"1 of 1 rows cannot be used; the first is b\.jsonl:1.*prompt and completion"):
        read(write(tmp_path / "b.jsonl", [row]))


def test_a_row_of_text_is_an_answer_without_a_question(tmp_path: Path) -> None:
    rows = [{"text": " x\n"}, {**GOOD, "text": "x"}, {"prompt": "half a pair", "text": "x"}, {"text": " "}, {"text": 3}]
    conversations, stats = read(write(tmp_path / "a.jsonl", [*rows, GOOD]))
    kinds = [(c.is_text, turns_of(c)) for c in conversations]
    text = [("assistant", "x")]
    assert kinds == [(True, [("assistant", " x\n")]), (False, PAIR), (True, text), (False, PAIR)]
    assert sum(stats.bad_rows.values()) == 2


def test_the_limit_is_half_of_the_rows(tmp_path: Path) -> None:
    conversations, stats = read(write(tmp_path / "a.jsonl", [GOOD, BAD[0][0]] * 7))
    assert (len(conversations), stats.bad_rows.total(), len(stats.examples)) == (7, 7, 5)  # a few examples, not all
    with pytest.raises(UserError, match=r"8 of 15 rows.*a\.jsonl:2: none of the known fields"):
        read(write(tmp_path / "a.jsonl", [GOOD, BAD[0][0]] * 7 + [BAD[2][0]]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst"])
def test_forms_of_files(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"naïve {n} 日本語", "completion": f"{n}\n🙂"} for n in range(50)]
    conversations, stats = read(write(tmp_path / name, rows))
    assert [turns_of(c) for c in conversations] == [
        [("user", r["prompt"]), ("assistant", r["completion"])] for r in rows
    ]
    assert stats.bytes == (tmp_path / name).stat().st_size


def test_a_folder_is_read_by_name_and_what_is_no_table_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "d/b.jsonl", [GOOD, {"prompt": "2", "completion": "2"}])
    write(tmp_path / "d/a/z.jsonl.gz", [{"prompt": "0", "completion": "0"}])
    write_parquet(tmp_path / "d/c.parquet", [{"question": "3", "answer": "3"}])
    (tmp_path / "d/LICENSE").write_text("MIT")
    conversations, stats = read(tmp_path / "d")
    assert [c.place for c in conversations] == ["a/z.jsonl.gz:1", "b.jsonl:1", "b.jsonl:2", "c.parquet:1"]
    assert stats.binary_files == 1


def test_sources_that_hold_no_rows(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match=r"list\.json: .*JSONL.*jq"):
        read(tmp_path / "list.json")
    with pytest.raises(UserError, match=r"folder.*JSONL"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"a\.jsonl: .*no rows"):
        read(write(tmp_path / "a.jsonl", ["", ""]))
    with pytest.raises(UserError, match="no such file or folder"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="embedded"):
        read("embedded")
    with pytest.raises(UserError, match=r"columns.*body, id\."):
        read(write_parquet(tmp_path / "a.parquet", [{"body": "x", "id": 1}]))


def test_a_dataset_of_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda *args, **words: [GOOD, {"prompt": "x", "completion": None}, GOOD]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    conversations, stats = read("owner/name:main@train")
    assert [c.place for c in conversations] == ["owner/name:main@train:1", "owner/name:main@train:3"]
    assert stats.rows == 3

    def broken(*args: Any, **words: Any) -> Any:
        yield GOOD
        raise ConnectionError("no route")

    module.load_dataset = broken  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"owner/name: .*cannot be reached"):
        read("owner/name")


def test_a_key_stands_for_what_is_said(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]}
    other = {"prompt": "Which?This", "completion": "."}
    conversations, _ = read(write(tmp_path / "a.jsonl", [GOOD, chat, {"answer": "This.", "question": "Which?"}, other]))
    keys = [conversation.key() for conversation in conversations]
    assert keys[0] == keys[1] == keys[2] != keys[3]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not on this machine")
def test_gsm8k_as_it_is_published() -> None:
    conversations, stats = read(GSM8K / "train.jsonl")
    assert (len(conversations), stats.bad_rows.total()) == (7473, 0)
    rows = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [turns_of(c) for c in conversations] == [[("user", r["question"]), ("assistant", r["answer"])] for r in rows]
