"""What FSDP and HSDP shard: the tensors of a block and of the rest of a model, and what a rank holds of them.

A rank holds rows of every tensor. Beside them it has, for a moment, the whole of the blocks that it computes and their
gradients. Tests compare these bytes with tensors counted on ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from redline.planning.memory import MemoryParts
from redline.planning.shapes import NF4_BLOCK, TARGETS, Adapter, DecoderShape, matrix_sides

# Blocks whose weights are whole at a time: the one that runs, and the next, which is gathered meanwhile.
GATHERED_BLOCKS = 2


@dataclass(frozen=True)
class Sharded:
    """A tensor that is sharded by rows, and the bytes of its values."""

    rows: int
    columns: int
    gathered: int = 4  # while its unit runs
    gradient: int = 4  # as the backward pass leaves it; 0 if it is frozen

    def padded(self, ranks: int) -> int:
        """Return its values with rows filled up to a multiple of the ranks."""
        return -(-self.rows // ranks) * ranks * self.columns


@dataclass(frozen=True)
class Units:
    """The tensors of a model by the unit in which they are gathered: each block, and the rest."""

    layers: int
    block: tuple[Sharded, ...]
    root: tuple[Sharded, ...]
    replicated: float = 0.0  # bytes of weights that every rank holds
    casts: float = 0.0  # bytes of copies in the compute precision that a model gathered in it does not make

    def gathered(self, ranks: int) -> tuple[float, float]:
        """Return the bytes of a block, and of the rest, as all ranks of a group together gather them."""
        block, root = (sum(t.padded(ranks) * t.gathered for t in unit) for unit in (self.block, self.root))
        return float(block), float(root)

    def scattered(self, ranks: int) -> tuple[float, float]:
        """Return the bytes of the gradients of a block, and of the rest, as they are reduced: in float32."""
        block, root = (sum(4 * t.padded(ranks) for t in unit if t.gradient) for unit in (self.block, self.root))
        return float(block), float(root)

    def gradients(self) -> tuple[float, float]:
        """Return the bytes of whole gradients of a block, and of the rest, as the backward pass leaves them."""
        block, root = (sum(t.rows * t.columns * t.gradient for t in unit) for unit in (self.block, self.root))
        return float(block), float(root)


def decoder_units(shape: DecoderShape, *, block_bytes: int = 4, root_bytes: int = 4, casts: float = 0.0) -> Units:
    """Return the units of a decoder that is trained whole; the bytes are those of a gathered value."""
    block = tuple(Sharded(rows, columns, block_bytes, block_bytes) for rows, columns in block_tensors(shape))
    root = tuple(Sharded(rows, columns, root_bytes, root_bytes) for rows, columns in root_tensors(shape))
    return Units(shape.layers, block, root, casts=casts)


def adapter_units(shape: DecoderShape, adapter: Adapter, bytes_per_value: int) -> Units:
    """Return the units of adapters on a frozen base. Everything is gathered as it is stored."""
    block: list[Sharded] = []
    sides = matrix_sides(shape)
    merged: dict[str, list[str]] = {}  # linear layer → the matrices that are stored in it
    for name in sides:
        merged.setdefault(TARGETS[name][0], []).append(name)
    for names in merged.values():
        inputs, outputs = sides[names[0]][0], [sides[name][1] for name in names]
        if adapter.quantised:  # each matrix by itself: two values to a byte of codes, and their scales
            scale = 1 if adapter.double else 4
            for values in (inputs * rows for rows in outputs):
                block += [Sharded((values + 1) // 2, 1, 1, 0), Sharded(-(-values // NF4_BLOCK) * scale, 1, 1, 0)]
        else:
            block.append(Sharded(sum(outputs), inputs, bytes_per_value, 0))
        adapted = [name for name in names if name in adapter.targets]
        block += [Sharded(len(adapted) * adapter.r, inputs)] if adapted else []
        block += [Sharded(sides[name][1], adapter.r) for name in adapted]
    norms = [(shape.d_model, 1)] * 2 + [(shape.head_dim, 1)] * (2 if shape.qk_norm else 0)
    block += [Sharded(rows, columns, 4, 0) for rows, columns in norms]
    root = [Sharded(rows, columns, bytes_per_value if columns > 1 else 4, 0) for rows, columns in root_tensors(shape)]
    return Units(shape.layers, tuple(block), tuple(root))


def block_tensors(shape: DecoderShape) -> list[tuple[int, int]]:
    """Return rows and columns of each parameter of a block."""
    d = shape.d_model
    matrices = [(shape.d_qkv, d), (d, shape.d_attention), (shape.d_up, d), (d, shape.d_ff)]
    norms = [(d, 1), (d, 1), *[(shape.head_dim, 1)] * (2 if shape.qk_norm else 0)]
    return [*matrices, *norms, *([(shape.d_qkv, 1)] if shape.qkv_bias else [])]


def root_tensors(shape: DecoderShape) -> list[tuple[int, int]]:
    """Return rows and columns of each parameter outside the blocks: embeddings, head, last norm, skip weights."""
    tables = [(shape.vocab, shape.d_model)] * (1 if shape.tied else 2)
    values = [(shape.vocab, shape.d_kv)] * shape.value_embeddings
    return [*tables, *values, (shape.d_model, 1), *([(shape.skip_count, 1)] if shape.skip_count else [])]


def sharded_memory(parts: MemoryParts, units: Units, ranks: int, *, whole: bool) -> MemoryParts:
    """Return the memory of a rank of a group of `ranks`; `parts` are those of the model on a single GPU.

    With `whole` gradients are summed whole until the last micro-batch of a step. Otherwise a rank holds its rows of the
    sums, and whole gradients only of the block in progress and of the rest of the model, whose gradients are complete
    when the backward pass ends: as they are computed, and as the message that is reduced.
    """
    block, root = units.gathered(ranks)
    of_block, of_root = units.gradients()
    message_of_block, message_of_root = units.scattered(ranks)
    rows = (units.layers * message_of_block + message_of_root) / ranks
    under_way = of_root + max(of_block + message_of_block, message_of_root)
    if whole:
        # The sums are in float32; the last backward pass replaces them by rows, block by block.
        gradients = 4.0 * _values(units) + max(of_block, message_of_block)
    else:
        gradients = rows + under_way
    return replace(
        parts,
        weights=(parts.weights - units.replicated) / ranks
        + units.replicated
        + min(GATHERED_BLOCKS, units.layers) * block
        + root,
        gradients=gradients,
        optimizer=parts.optimizer / ranks,
        workspace=parts.workspace - units.casts,
    )


def _values(units: Units) -> int:
    """Return the number of values that are trained."""
    each = (sum(t.rows * t.columns for t in unit if t.gradient) for unit in (units.block, units.root))
    block, root = each
    return units.layers * block + root
