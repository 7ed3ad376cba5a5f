"""What an artefact for several ranks says beside its program: `buckets.json` and `collectives.json`.

buckets: what lies sharded where; layers of one structure share a layout. collectives: those of one microbatch in
program order, which ranks compare before they start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from moec.artifact_files import BUCKETS, COLLECTIVES, read_json
from moec.compiler.layout import BucketInstance, BucketLayout
from moec.compiler.wire import Collective


def write_rank_files(folder: Path, buckets: Mapping[str, BucketInstance], collectives: Sequence[Collective]) -> None:
    """Write both, or take older files away where there is one rank."""
    if not buckets:
        for name in (BUCKETS, COLLECTIVES):
            (folder / name).unlink(missing_ok=True)
        return
    layouts = list(dict.fromkeys(bucket.layout for bucket in buckets.values()))
    content = {
        "layouts": [layout.to_json() for layout in layouts],
        "buckets": {name: [layouts.index(bucket.layout), bucket.prefix] for name, bucket in buckets.items()},
    }
    (folder / BUCKETS).write_text(json.dumps(content) + "\n")
    lines = ",\n".join(json.dumps(astuple(collective)) for collective in collectives)
    (folder / COLLECTIVES).write_text(f'{{"collectives": [\n{lines}\n]}}\n')


def read_buckets(folder: Path) -> dict[str, BucketInstance]:
    """The buckets of an artefact by name; none for one rank."""
    if not (folder / BUCKETS).is_file():
        return {}
    content = read_json(folder, BUCKETS)
    layouts = [BucketLayout.from_json(layout) for layout in content["layouts"]]
    return {name: BucketInstance(layouts[index], prefix) for name, (index, prefix) in content["buckets"].items()}


def read_collectives(folder: Path) -> list[Collective]:
    """The collectives of one microbatch of an artefact, in program order; none for one rank."""
    if not (folder / COLLECTIVES).is_file():
        return []
    return [Collective(*values) for values in read_json(folder, COLLECTIVES)["collectives"]]
