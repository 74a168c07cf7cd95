"""The half of the job that needs torch: rows, the model, its loss, evaluation, samples and export."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from redline.data.corpus import RowIndex, row_index, row_mixture_key
from redline.data.sources import ReadStats, RowReport, UnusableRowError, parse_rows, source_rows, text_field
from redline.data.splits import key_of, split_rows
from redline.data.tokenizer import ByteTokenizer
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.jobs.base import export_problems
from redline.jobs.objective import Batch, DecoderObjective, JobRuntime, Sample, Sampling, TransformersModel
from redline.jobs.preview import SamplePreview, SampleView, TokenRun
from redline.kernels.matmul import DTYPES
from redline.models.decoder import Linear
from redline.models.families import shape_of, to_config, to_llama
from redline.recipe.resolve import DataFacts

BYTES = ByteTokenizer()
Row = tuple[str, int]  # text, number of its label
FIX = "Rows need the fields text and label; classifier.labels must list every label."


class ClassifierData(NamedTuple):
    facts: DataFacts  # what the plan needs to know; lock.json records it
    train: tuple[Row, ...] = ()
    held_out: tuple[Row, ...] = ()
    order: RowIndex | None = None  # number of a sample → row: a function of the seed, so a resumed run sees the same
    messages: tuple[str, ...] = ()  # what the user should know about the rows

    def row_keys(self, *, trained: bool) -> list[int]:
        return [key_of(text) for text, _ in (self.train if trained else self.held_out)]

    def held_out_sequences(self, seq_len: int) -> None: ...  # None: the data are rows, which `row_keys` counts


class Classifier(DecoderObjective):
    """The base class chooses precision, attention and compilation, and computes the loss: the cross-entropy of
    `batch["targets"]` at `batch["scored_positions"]`. Here they are the label and the last token of each row."""

    tokenizer = BYTES

    def __init__(self, resolved: Any, data: ClassifierData) -> None:
        super().__init__(resolved)
        self.data, self.labels = data, self.recipe.classifier.labels

    def build(self, device: torch.device) -> None:
        self.device = device
        self.model = self.decoder().to(device)
        self.model.head = Linear(self.model.shape.d_model, len(self.labels)).to(device)  # not over the vocabulary
        seed, options = torch.Generator().manual_seed(self.recipe.train.seed), self.recipe.model
        self.model.initialise(seed, options.init, options.embedding_std)

    def batch(self, samples: np.ndarray) -> Batch:
        """Return the rows of these samples. The result may depend on the seed and the sample numbers only."""
        return self._batch([self.data.train[number] for number in self.data.order.sequences(samples)])

    def worst_batch(self, micro: int) -> Batch:
        return self._batch([("x", 0)] * micro)  # every row is padded to data.seq_len, so all batches are equally large

    def _batch(self, rows: list[Row]) -> Batch:
        inputs = np.full((len(rows), self.seq_len), BYTES.eot, dtype=np.int64)
        last = np.arange(len(rows)) * self.seq_len
        for number, (text, _) in enumerate(rows):
            tokens = [BYTES.eot, *BYTES.encode(text)][: self.seq_len]  # longer texts are cut
            inputs[number, : len(tokens)] = tokens  # attention is causal: the last token does not see the padding
            last[number] += len(tokens) - 1
        arrays = {"inputs": inputs, "targets": np.array([label for _, label in rows]), "scored_positions": last}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @torch.no_grad()
    def logits(self, rows: list[Row]) -> torch.Tensor:
        batch = {name: tensor.to(self.device) for name, tensor in self._batch(rows).items()}
        self.model.eval()  # without dropout
        with self.uncompiled():
            hidden = self.model(batch["inputs"], self._bind(batch)).flatten(0, 1)
        self.model.train()
        return self.model.logits(hidden.index_select(0, batch["scored_positions"])).cpu()

    def evaluate(self, micro: int) -> dict[str, float | None]:
        rows = list(self.data.held_out[: self.recipe.eval.sequences])
        if not rows:
            return {"loss": None, "accuracy": None}
        logits = torch.cat([self.logits(rows[first : first + micro]) for first in range(0, len(rows), micro)])
        labels = torch.tensor([label for _, label in rows])
        found = {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}
        return {name: float(value) for name, value in found.items()}

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Answer with the most likely label and its probability. Nothing is drawn, so there is one sample."""
        probability, label = self.logits([(prompt, 0)])[0].softmax(0).max(0)
        return [Sample(f"{prompt} → ", f"{self.labels[int(label)]} ({float(probability):.0%})")]


class ClassifierRuntime(JobRuntime[ClassifierData]):
    def load_data(self, recipe: Any, *, for_evaluation: bool = False, progress: Any = None) -> ClassifierData:
        """Read all rows, and hold some out by a hash of their text; with `for_evaluation`, hold out all of them."""
        labels, data, seed = recipe.classifier.labels, recipe.data, recipe.train.seed

        def parse(place: str, row: Any) -> Row:
            label = str(row.get("label"))
            if label not in labels:
                raise UnusableRowError(f"the label {label} is not in classifier.labels")  # counted, and reported
            return text_field(row.get("text"), "text"), labels.index(label)

        sources, messages = [], []
        for part in data.parts:
            stats = ReadStats(part.source)
            rows = source_rows(part.source, stats, ("text", "label"), fix=FIX, instead="Use a JSONL file.")
            sources.append(list(parse_rows(rows, parse, stats, FIX)))
            messages.append(RowReport.of(stats).line())
        keys = [np.array([key_of(text) for text, _ in rows], dtype=np.uint64) for rows in sources]
        fraction = 0.0 if for_evaluation else data.val_fraction
        splits = split_rows([part.source for part in data.parts], keys, seed, fraction, dedup=data.dedup)
        train = tuple(rows[n] for rows, split in zip(sources, splits, strict=True) for n in split.train)
        held_out = tuple(rows[n] for rows, split in zip(sources, splits, strict=True) for n in split.val)
        order = row_index([len(split.train) for split in splits], data.parts, seed, shuffle=data.shuffle)
        options = [labels, data.seq_len, fraction, seed, data.shuffle, data.dedup, row_mixture_key(data.parts)]
        fingerprint = digest_of([sources, options])  # a resumed run must find the same
        sizes, tokenizer = [len(rows) * data.seq_len for rows in (order, held_out)], ("bytes", BYTES.fingerprint)
        facts = DataFacts(BYTES.vocab_size, *sizes, fingerprint, *tokenizer, val_rows=len(held_out))
        return ClassifierData(facts, train, train if for_evaluation else held_out, order, tuple(messages))

    def tokenizer_alone(self, facts: DataFacts, folder: Any = None, recipe: Any = None) -> ClassifierData:
        return ClassifierData(facts)  # for samples on a machine without the data

    random_data = tokenizer_alone  # for steps that are only timed

    def create(self, resolved: Any, data: ClassifierData) -> Classifier:
        return Classifier(resolved, data)

    def preview(self, recipe: Any, count: int, progress: Any, log: Any) -> SamplePreview:
        data, labels = self.load_data(recipe), recipe.classifier.labels
        rows = [[TokenRun(f"{text} → ", False, False), TokenRun(labels[n], True, False)] for text, n in data.train]
        return SamplePreview([SampleView(f"row {n + 1}", row) for n, row in enumerate(rows[:count])], data.messages)

    def export(self, recipe: Any, tensors: Any, *, eot: Any, vocab_size: int, dtype: str) -> TransformersModel:
        """Return a model of transformers that classifies: `score.weight` reads the last token before the padding."""
        if problems := export_problems(recipe.model):  # options that no class of transformers has
            raise UserError(" ".join(problem.line() for problem in problems))
        kind, labels = DTYPES[dtype], dict(enumerate(recipe.classifier.labels))
        config = to_config(recipe.model, seq_len=recipe.data.seq_len, eot=eot(), dtype=str(kind).removeprefix("torch."))
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
        config |= {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
        config["pad_token_id"] = eot()
        found = to_llama(tensors, shape_of(recipe.model)) | {"score.weight": tensors["head.weight"]}
        return TransformersModel(config, {}, {name: tensor.to(kind) for name, tensor in found.items()})
