"""The table of what each layer is sent as, and what that saves."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from torch import nn

from hybridpar.compress import Policy, read_policy

#: Layers that the short table shows, the largest ones.
SHOWN = 10

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class LayerBytes:
    """What one parameter is sent as.

    Attributes:
        layer: Its name.
        kind: `conv`, `depthwise`, `linear`, `norm`, `bias`, `embedding` or `other`.
        size: Its number of elements.
        codec: What it is sent as, as text.
        bytes_before: What a worker sends of it in a step as it is.
        bytes_after: What it sends as the codec.
    """

    layer: str
    kind: str
    size: int
    codec: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class WireFormat:
    """What the gradients of a model are sent as.

    Attributes:
        policy: By which rules.
        layers: Each parameter; empty where gradients are added as they are.
    """

    policy: Policy
    layers: Sequence[LayerBytes]

    @property
    def applied(self) -> Policy:
        """The rules as far as they have an effect: those of `none` where no parameter is sent as a codec."""
        return self.policy if any(one.codec != "none" for one in self.layers) else read_policy("none")


def layer_bytes(model: nn.Module, known: Mapping[str, tuple[str, int, int]]) -> list[LayerBytes]:
    """A row for each parameter that is exchanged, in the model's order."""
    rows = []
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            if name in known:
                rows.append(LayerBytes(name, kind_of(module, own), parameter.numel(), *known[name]))
    return rows


def kind_of(module: nn.Module, name: str) -> str:
    """What a parameter of a module is, by the parameter's own name."""
    if isinstance(module, _NORMS):
        return "norm"
    if "bias" in name:
        return "bias"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "depthwise" if module.groups == module.in_channels > 1 else "conv"
    if isinstance(module, (nn.Linear, nn.Bilinear)) or "proj_weight" in name:
        return "linear"
    return "embedding" if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else "other"


def table_csv(rows: Sequence[LayerBytes]) -> bytes:
    """All rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(LayerBytes))
    writer.writerows(map(astuple, rows))
    return text.getvalue().encode()


def table_lines(rows: Sequence[LayerBytes], most: int = SHOWN) -> list[str]:
    """The table as lines of at most 79 characters, ASCII: the largest layers, the rest in one line, and the total."""
    if not rows:
        return []
    shown = sorted(rows, key=lambda row: row.bytes_before, reverse=True)[:most]
    if len(rows) == most + 1:  # a line for the rest would save nothing
        shown = list(rows)
    names = {row.layer for row in shown}
    rest = [row for row in rows if row.layer not in names]
    lines = [_line("layer", "kind", "size", "codec", "before", "after")]
    lines += [_row(row) for row in rows if row.layer in names]
    if rest:
        kinds = sorted({row.kind for row in rest})
        codecs = sorted({row.codec for row in rest})
        codec = _named(codecs[0], 12) if len(codecs) == 1 else f"{len(codecs)} codecs"
        lines.append(_sum_line(f"{len(rest)} smaller ones", kinds[0] if len(kinds) == 1 else "", codec, rest))
    before, after = _sums(rows)
    ratio = f"{before / after:.1f}x less" if after else ""
    return [*lines, _sum_line(f"all {len(rows)}", "", ratio, rows)]


def _row(row: LayerBytes) -> str:
    sizes = _size(row.bytes_before), _size(row.bytes_after)
    return _line(_short(row.layer, 26), row.kind, f"{row.size:,}", _named(row.codec, 12), *sizes)


def _sum_line(what: str, kind: str, codec: str, rows: Sequence[LayerBytes]) -> str:
    before, after = _sums(rows)
    return _line(what, kind, f"{sum(row.size for row in rows):,}", codec, _size(before), _size(after))


def _line(layer: str, kind: str, size: str, codec: str, before: str, after: str) -> str:
    return f"{layer:26} {kind:9} {size:>11}  {codec:12} {before:>7} {after:>7}"


def _sums(rows: Sequence[LayerBytes]) -> tuple[int, int]:
    return sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)


def _short(text: str, width: int) -> str:
    """A name without its beginning, where it is too long: its end tells layers apart."""
    return text if len(text) <= width else f"..{text[2 - width :]}"


def _named(codec: str, width: int) -> str:
    """A codec, without its options where they are too long."""
    return codec if len(codec) <= width else f"{codec.partition(':')[0]}:.."[:width]


def _size(count: int) -> str:
    """Bytes in at most seven characters."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:#.3g}".rstrip(".") + f" {unit}"
