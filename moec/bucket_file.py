"""`buckets.json` of an artefact for several ranks: what lies sharded where. Layers of one structure share a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from moec.artifact import BUCKETS, read_json
from moec.compiler.layout import BucketInstance, BucketLayout


def write_buckets(folder: Path, buckets: Mapping[str, BucketInstance]) -> None:
    """Write them, or take an older file away where there are none."""
    path = folder / BUCKETS
    if not buckets:
        path.unlink(missing_ok=True)
        return
    layouts = list(dict.fromkeys(bucket.layout for bucket in buckets.values()))
    content = {
        "layouts": [layout.to_json() for layout in layouts],
        "buckets": {name: [layouts.index(bucket.layout), bucket.prefix] for name, bucket in buckets.items()},
    }
    path.write_text(json.dumps(content) + "\n")


def read_buckets(folder: Path) -> dict[str, BucketInstance]:
    """The buckets of an artefact by name; none for one rank."""
    if not (folder / BUCKETS).is_file():
        return {}
    content = read_json(folder, BUCKETS)
    layouts = [BucketLayout.from_json(layout) for layout in content["layouts"]]
    return {name: BucketInstance(layouts[index], prefix) for name, (index, prefix) in content["buckets"].items()}
