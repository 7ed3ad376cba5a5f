"""`moec presets`: the built-in configurations as a table, without loading torch."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from moec.models.k3.config import K3Config
from moec.models.k3.counts import count_parameters
from moec.models.presets import preset, preset_names


def preset_table() -> Table:
    """Name, parameters and layers of every preset."""
    table = Table(pad_edge=False)
    for title in ("preset", "parameters", "active", "layers"):
        table.add_column(title, justify="left" if title == "preset" else "right")
    for name in preset_names():
        config = preset(name)
        counts = count_parameters(config)
        table.add_row(name, scaled(counts.total), scaled(counts.active), _layers(config))
    return table


def scaled(count: int) -> str:
    """A number with its unit: '2.78T'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def _layers(config: K3Config) -> str:
    kinds = Counter(config.mixer(index) for index in range(config.layers))
    return f"{config.layers} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
