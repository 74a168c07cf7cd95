"""The latent_prefix objective: its loss terms, the teacher cache, no leaks, and gradients where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from latents import Latents, other_base, write_rows
from redline.jobs.latent_prefix.encoder import _MATMUL_POSITIONS, PAD, EncoderBlock, token_loss
from redline.jobs.latent_prefix.teacher import text_prompt
from redline.kernels.cross_entropy import IGNORE
from redline.models.decoder import rotary_table

pytest.importorskip("transformers", reason="bases are made by transformers")


@pytest.fixture(scope="module")
def second_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_base(tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture
def one(world: Any, tiny_base: Path, rows: Path, tmp_path: Path) -> Latents:
    return Latents(world, [tiny_base], rows, tmp_path)


@pytest.fixture
def two(world: Any, tiny_base: Path, second_base: Path, rows: Path, tmp_path: Path) -> Latents:
    return Latents(world, [tiny_base, second_base], rows, tmp_path)


def total(objective: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that a step would backpropagate."""
    weights = objective.weights(batch)
    terms = objective.loss(batch).values()
    return torch.stack([term.coefficient * term.sum / weights[term.weight] for term in terms]).sum()


def perturb(objective: Any) -> None:
    """Perturb the trained parameters: the prefix of an untrained adapter hardly changes a model's predictions."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


# --- the terms


def test_one_pass_gives_the_terms_of_separate_forward_passes(two: Latents) -> None:
    """The reference uses a forward pass per answer token and example, and a teacher that reads the text each time."""
    objective = two.objective()
    perturb(objective)
    samples = np.arange(8)
    batch = objective.batch(samples)
    options, found = objective.options, objective.loss(batch)
    pairs = objective.data.pairs
    numbers = pairs.index.sequences(samples).tolist()
    for name, llm in objective.frozen.items():
        decoder, reader = llm.decoder, llm.tokenizer
        sums = dict.fromkeys(("ce", "first", "k", "kd", "match"), 0.0)
        for row, number in enumerate(numbers):
            answer = pairs.train.answers[int(name)][number]
            z = objective.model.latents(batch["bytes"][row : row + 1])[name]
            prefix = objective.model.prefix(name, z)
            prompt = text_prompt(llm, pairs.train.pairs[number].text, 10**6)
            losses = []
            for t, token in enumerate(answer):
                said = torch.tensor([[*reader.anchor, *answer[:t]]])
                begin = decoder.embed(torch.tensor([reader.begin], dtype=torch.long))
                read = torch.cat((begin, prefix, decoder.embed(said)), 1)
                hidden = decoder(read, llm.decoder.attention.bind(read.shape[1]))[:, -1]
                logits = decoder.logits(hidden)
                losses.append(F.cross_entropy(logits, torch.tensor([token])).item())
                if t < options.first_tokens:
                    tokens = torch.tensor([[*prompt, *answer[:t]]])
                    taught = decoder(tokens, llm.decoder.attention.bind(tokens.shape[1]))[:, -1]
                    p, q = ((x / options.tau).softmax(-1) for x in (decoder.logits(taught), logits))
                    sums["kd"] += (options.tau**2 * (p * (p / q).log()).sum()).item()
                    sums["match"] += ((hidden - taught).square().sum() / taught.square().sum()).item()
            sums["ce"] += sum(losses)
            ratio = losses[0] / (sum(losses) / len(losses))
            sums["first"] += losses[0] * min(max(ratio, 1.0), options.first_clamp)
            sums["k"] += sum(losses[: options.first_tokens])
        for term, expected in sums.items():
            assert found[f"{term}_{name}"].sum.item() == pytest.approx(expected, rel=2e-4, abs=2e-4), (term, name)


def test_a_prefix_is_read_as_transformers_reads_embeddings(one: Latents) -> None:
    from transformers import AutoModelForCausalLM

    objective = one.objective(teach=False)
    perturb(objective)
    theirs = AutoModelForCausalLM.from_pretrained(one.bases[0], dtype=torch.float32).eval()
    llm, batch = objective.frozen["0"], objective.batch(np.arange(3))
    targets = batch["targets.0"]
    with torch.no_grad():
        prefix = objective.model.prefix("0", objective.model.latents(batch["bytes"])["0"])
        ours = llm.decoder.logits(llm.states(prefix, targets))
        embed = theirs.get_input_embeddings()
        anchor = embed(llm.anchor).expand(3, -1, -1)
        read = torch.cat((prefix, anchor, embed(targets[:, :-1].clamp_min(0))), 1)
        logits = theirs(inputs_embeds=read).logits[:, prefix.shape[1] + len(llm.anchor) - 1 :]
    there = targets != IGNORE
    torch.testing.assert_close(ours[there], logits[there], rtol=1e-4, atol=1e-4)


def test_each_weight_scales_its_term(one: Latents) -> None:
    """Changing a weight changes the loss by its term; the defaults are those of the specification."""
    objective = one.objective()
    options = type(objective.options)()
    assert (options.first_weight, options.k_weight, options.kd_weight, options.scale_weight) == (0.5, 0.5, 1.0, 0.05)
    assert (options.first_tokens, options.tau, options.first_clamp, options.bytes) == (4, 2.0, 8.0, 2048)
    batch = objective.batch(np.arange(4))
    perturb(objective)
    found = objective.loss(batch)
    weights = objective.weights(batch)
    for term in ("first", "k", "kd", "match", "words", "tokens", "scale"):
        other = one.objective(f"latent_prefix.{term}_weight=3")
        other.model.load_state_dict(objective.model.state_dict())
        key = term if term == "scale" else f"{term}_0"
        change = (3 - found[key].coefficient) * found[key].sum / weights[found[key].weight]
        moved = (total(other, batch) - total(objective, batch)).item()
        assert moved == pytest.approx(change.item(), rel=1e-3, abs=1e-5)


def test_the_token_term_rewards_a_prefix_that_is_the_text_s_own_tokens(two: Latents) -> None:
    """The reference sums over slots and tokens one by one. The embeddings of another text have a higher loss."""
    objective = two.objective(teach=False)
    perturb(objective)
    batch = objective.batch(np.arange(4))
    numbers = objective.data.pairs.index.sequences(np.arange(4)).tolist()
    found = objective.loss(batch)
    for name, llm in objective.frozen.items():
        embedding, expected = llm.decoder.embedding.weight, 0.0
        prefix = objective.model.prefix(name, objective.model.latents(batch["bytes"])[name])
        for row, number in enumerate(numbers):
            tokens = set(llm.tokenizer._ids(objective.data.pairs.train.pairs[number].text))
            assert set(batch[f"text.{name}"][row].tolist()) == {*tokens, -1}
            length = embedding.square().sum(1).mean() / llm.decoder.shape.d_model**0.5
            chances = [(slot @ embedding.T / length).softmax(-1) for slot in prefix[row]]
            each = [torch.stack([one[token] for one in chances]).mean().log().item() for token in tokens]
            expected -= sum(each) / len(each)
        assert found[f"tokens_{name}"].sum.item() == pytest.approx(expected, rel=1e-4)
        text, weight = batch[f"text.{name}"], llm.decoder.embedding.weight
        own = token_loss(llm.decoder.embed(text.clamp_min(0)), weight, text)
        others = token_loss(llm.decoder.embed(text.clamp_min(0)).roll(1, 0), weight, text)
        assert (own < others).all()


@pytest.mark.parametrize("positions", [80, _MATMUL_POSITIONS + 8])
def test_the_encoder_in_bf16_is_the_encoder_in_float32(positions: int) -> None:
    """Up to _MATMUL_POSITIONS it attends by matmuls on a CPU. Padding changes nothing in either form."""
    torch.manual_seed(0)
    block = EncoderBlock(64, 4, "none")
    for parameter in block.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    x, seen = torch.randn(3, positions, 64), torch.ones(3, 1, 1, positions, dtype=torch.bool)
    seen[1, ..., positions // 2 :] = False
    cos, sin = rotary_table(positions, 16, 10000.0, x.device)
    exact = block(x, cos, sin, seen)
    rough = block(x.bfloat16(), cos, sin, seen)
    real = seen[:, 0, 0]
    assert (rough.float() - exact)[real].norm() / exact[real].norm() < 0.01
    changed = x.clone()
    changed[1, positions // 2 :] += 5
    again = block(changed.bfloat16(), cos, sin, seen)
    assert torch.equal(again[real], rough[real])
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        block.zero_grad()
        (block(x.to(dtype), cos, sin, seen).float() * real[..., None]).square().sum().backward()
        gradients.append(block.qkv.weight.grad.clone())
    assert (gradients[1] - gradients[0]).norm() / gradients[0].norm() < 0.02


def test_auxiliary_terms_fade(one: Latents) -> None:
    objective = one.objective("latent_prefix.fade_steps=4", "train.steps=6")
    shares = []
    for step in (0, 1, 5):
        batch = objective.batch(np.arange(8 * step, 8 * step + 8))
        with_fade = objective.loss(batch)
        plain = objective.loss({key: value for key, value in batch.items() if key != "fade"})
        assert with_fade["ce_0"].sum == plain["ce_0"].sum
        shares.append(float(with_fade["kd_0"].sum / plain["kd_0"].sum))
    assert shares == pytest.approx([1.0, 0.75, 0.0])


# --- the teacher


def test_cached_states_equal_a_forward_pass_of_the_teacher(one: Latents) -> None:
    objective = one.objective()
    llm, pairs = objective.frozen["0"], objective.data.pairs
    rows = np.arange(len(pairs.train))
    cached = objective.teachers["0"].states(rows)
    for row in rows.tolist():
        answer = pairs.train.answers[0][row][:4]
        tokens = torch.tensor([[*text_prompt(llm, pairs.train.pairs[row].text, 10**6), *answer[:-1]]])
        with torch.no_grad():
            live = llm.decoder(tokens, llm.decoder.attention.bind(tokens.shape[1]))[0, -len(answer) :]
        torch.testing.assert_close(cached[row, : len(answer)], live, rtol=1e-4, atol=1e-5)
        assert not cached[row, len(answer) :].any()


def test_the_teacher_reads_each_text_once(one: Latents, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run uses the cache, and a short run lets the teacher read only the rows that it will see."""
    from redline.jobs.latent_prefix.frozen import FrozenModel

    read: list[int] = []
    real = FrozenModel.text_states

    def counted(self: Any, prompts: Any, answers: Any) -> Any:
        read.append(len(prompts))
        return real(self, prompts, answers)

    monkeypatch.setattr(FrozenModel, "text_states", counted)
    keys = ("latent_prefix.anchor='Colour: '", "train.global_batch=4")
    first = one.objective(*keys, "train.steps=1")
    assert sum(read) == 4
    again = one.objective(*keys, "train.steps=1")
    assert sum(read) == 4
    torch.testing.assert_close(first.batch(np.arange(4))["teacher.0"], again.batch(np.arange(4))["teacher.0"])
    one.objective(*keys, "train.steps=1000")
    assert sum(read) == len(first.data.pairs.train)


# --- what the latents depend on


def test_latents_depend_on_the_text_and_not_on_padding_or_batch(two: Latents) -> None:
    objective = two.objective("latent_prefix.patch=4", "latent_prefix.private_slots=2", teach=False)
    perturb(objective)
    latents = objective.model.latents
    bytes_ = objective.batch(np.arange(3))["bytes"]
    before = latents(bytes_)
    longer = latents(F.pad(bytes_, (0, 16), value=PAD))
    alone = latents(bytes_[1:2])
    changed = bytes_.clone()
    changed[1, 5] = (changed[1, 5] + 1) % 256
    after = latents(changed)
    for name, z in before.items():
        assert z.shape == (3, 4 + 2, 16)
        torch.testing.assert_close(longer[name], z)
        torch.testing.assert_close(alone[name], z[1:2])
        assert torch.equal(after[name][[0, 2]], z[[0, 2]])
        assert not torch.allclose(after[name][1], z[1], atol=1e-4)
    assert torch.equal(before["0"][:, :4], before["1"][:, :4]), "shared"
    assert not torch.allclose(before["0"][:, 4:], before["1"][:, 4:]), "private"


def test_the_answer_does_not_leak_into_the_prefix(one: Latents) -> None:
    """Neither its tokens nor its length: the first token's state is the same for all answers that begin with it."""
    objective = one.objective(teach=False)
    perturb(objective)
    batch = objective.batch(np.arange(4))
    llm, z = objective.frozen["0"], objective.model.latents(batch["bytes"])["0"]
    prefix = objective.model.prefix("0", z)
    short = batch["targets.0"]
    long = torch.cat((short[:, :1], torch.randint(0, 300, (4, 20))), 1)
    torch.testing.assert_close(llm.states(prefix, short)[:, 0], llm.states(prefix, long)[:, 0])


def test_answers_end_with_the_end_of_text_token(one: Latents) -> None:
    objective = one.objective(teach=False)
    reader, train = objective.data.tokenizers["0"], objective.data.pairs.train
    batch = objective.batch(np.arange(8))
    for targets in batch["targets.0"].tolist():
        said = [token for token in targets if token != IGNORE]
        assert said[-1] == reader.eos_ids[0]
        assert reader.decode(said[:-1]) in ("red", "blue", "green", "grey")
    assert reader.decode(reader.anchor) == "Answer:"
    assert all(reader._space == " " and row[0] for row in train.answers[0])


# --- what learns


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_gradients_reach_all_trained_parameters_and_no_frozen_ones(two: Latents, quant: str) -> None:
    objective = two.objective(f"model.quant={quant}", "latent_prefix.private_slots=1")
    perturb(objective)
    frozen = {
        (name, key): tensor.clone()
        for name, llm in objective.frozen.items()
        for key, tensor in llm.decoder.state_dict().items()
    }
    total(objective, objective.batch(np.arange(8))).backward()
    for name, parameter in objective.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    for llm in objective.frozen.values():
        assert not any(p.requires_grad or p.grad is not None for p in llm.decoder.parameters())
    grouped = {name for group in objective.param_groups() for name in group.parameters}
    assert grouped == {name for name, _ in objective.model.named_parameters()}
    for (name, key), tensor in frozen.items():
        assert torch.equal(tensor, objective.frozen[name].decoder.state_dict()[key])


def test_a_model_is_trained_the_same_with_and_without_the_other(two: Latents, one: Latents) -> None:
    """At equal weights, before the terms are averaged over the models."""
    both = two.objective("latent_prefix.private_slots=2")
    alone = one.objective("latent_prefix.private_slots=2")
    state = both.model.state_dict()
    mine = {name: state[name] for name in alone.model.state_dict()}
    assert all(torch.equal(mine[name], tensor) for name, tensor in alone.model.state_dict().items()), "as they begin"
    perturb(both)
    alone.model.load_state_dict({name: both.model.state_dict()[name] for name in mine})
    batch = both.batch(np.arange(8))
    found, expected = both.loss(batch), alone.loss(alone.batch(np.arange(8)))
    for term in ("ce_0", "first_0", "k_0", "kd_0", "match_0", "words_0", "tokens_0"):
        torch.testing.assert_close(found[term].sum, expected[term].sum)
        assert found[term].coefficient == expected[term].coefficient / 2
    found["ce_0"].sum.backward()
    expected["ce_0"].sum.backward()
    theirs = dict(both.model.named_parameters())
    for name, parameter in alone.model.named_parameters():
        if parameter.grad is not None and theirs[name].grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)
    untouched = [p for name, p in theirs.items() if name.startswith(("adapters.1", "private.1"))]
    assert untouched
    assert not any(p.grad is not None and p.grad.any() for p in untouched)
