"""Groups operations for the picture of a partition.

Runs of units that only feed each other are drawn as one block, so that what is left is the shape of the model:
blocks, branches, joins. Every stage is a row whose horizontal axis is time, so a row is as long as its load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridpar.partition.graph import UnitGraph, Value


@dataclass
class Block:
    """A run of units drawn as one box.

    Attributes:
        stage: Row of the box.
        units: Indices of its units.
        left: Start on the time axis, in milliseconds.
        width: Time of its units.
        label: What it is.
    """

    stage: int
    units: list[int]
    left: float = 0.0
    width: float = 0.0
    label: str = ""

    @property
    def center(self) -> float:
        """Middle on the time axis."""
        return self.left + self.width / 2


@dataclass(frozen=True)
class Wire:
    """A value drawn from one block to another; `source` is None for an input of the model.

    Attributes:
        source: Index of the block that makes the value.
        target: Index of a block that uses it.
        bytes: Its size.
    """

    source: int | None
    target: int
    bytes: int


@dataclass
class Layout:
    """Blocks and wires of a picture. Wires between neighbours in a row are left out: the boxes touch.

    Attributes:
        blocks: By stage, and inside of it from left to right.
        inner: Values between blocks of one stage.
        cut: Values between stages.
    """

    blocks: list[Block] = field(default_factory=list)
    inner: list[Wire] = field(default_factory=list)
    cut: list[Wire] = field(default_factory=list)


def lay_out(graph: UnitGraph, stage_of: list[int]) -> Layout:
    """Place the units of a partitioned graph."""
    feeds: list[set[int]] = [set() for _ in graph.units]
    needs: list[set[int]] = [set() for _ in graph.units]
    for before, after in graph.edges():
        feeds[before].add(after)
        needs[after].add(before)
    layout = Layout()
    block_of: dict[int, int] = {}
    for stage in range(max(stage_of) + 1):
        place = 0.0
        row = [unit for unit in range(len(graph)) if stage_of[unit] == stage]
        for unit in row:
            (previous,) = needs[unit] if len(needs[unit]) == 1 else (-1,)
            joins = previous in block_of and len(feeds[previous]) == 1 and stage_of[previous] == stage
            last = layout.blocks[-1] if layout.blocks else None
            if not (joins and last is not None and last.units[-1] == previous):
                layout.blocks.append(Block(stage, [], place))
            block = layout.blocks[-1]
            block.units.append(unit)
            block.width += graph.units[unit].ms
            place += graph.units[unit].ms
            block_of[unit] = len(layout.blocks) - 1
    for block in layout.blocks:
        block.label = _label(graph, block)
    for value in graph.values:
        _add_wires(layout, value, block_of, stage_of)
    return layout


def _add_wires(layout: Layout, value: Value, block_of: dict[int, int], stage_of: list[int]) -> None:
    source = block_of.get(value.producer)
    home = stage_of[value.producer] if value.producer >= 0 else 0
    crossed: set[int] = set()
    for consumer in value.consumers:
        target = block_of[consumer]
        if stage_of[consumer] != home:
            # A tensor is sent once per stage, to the block that first needs it.
            if stage_of[consumer] not in crossed:
                crossed.add(stage_of[consumer])
                layout.cut.append(Wire(source, target, value.bytes))
        elif source is not None and target > source + 1:
            layout.inner.append(Wire(source, target, value.bytes))


def _label(graph: UnitGraph, block: Block) -> str:
    units = [graph.units[index] for index in block.units]
    paths = [unit.module for unit in units]
    if len(units) == 1:
        return f"{paths[0]} {units[0].operation}".strip() if not paths[0] else paths[0]
    shared = _common([path.split(".") for path in paths])
    first = paths[0].split(".") if paths[0] else [units[0].operation]
    return ".".join(shared) if len(shared) > 1 else ".".join(first[: len(shared) + 1]) + " ..."


def _common(paths: list[list[str]]) -> list[str]:
    """The parts that all paths begin with."""
    parts = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        parts.append(level[0])
    return parts


def readable_bytes(size: float) -> str:
    """A size in the unit that suits it, decimal: 1 MB is 10^6 bytes."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
