"""The main job: `python -m moec.demo --preset k3-tiny --out demo-out`.

0. Start two ranks on this machine, which share parameters and experts (fsdp 2, ep 2); all below happens on them.
1. Take text from the source of the Python standard library of this machine (demo_text.py).
2. Compile a training step for the preset, and train through it.
3. Measure the loss on text that was held out. It must end below the target, and well below what frequencies of byte
   pairs give: the feed-forward layers alone can learn those, so only working token mixers come below.
4. Train a second model of the same seed on the same rows in eager PyTorch, on one rank, and show both loss curves.
5. Say where everything is. The exit code is 1 when the loss or the curves miss their bounds, 2 after an error. A rank
   that dies ends the demo with an error that names it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moec.compiler.errors import ArtifactError, MoecError

if TYPE_CHECKING:
    from moec.demo_run import Outcome
    from moec.runtime.ranks import Ranks


def main(
    preset: Annotated[str, typer.Option(help="k3-tiny or k3-dsa-tiny.")] = "k3-tiny",
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier demo in it is replaced.")] = Path("demo-out"),
) -> None:
    """Train a tiny model on Python source through its compiled step on two ranks, and compare with eager PyTorch."""
    from moec.demo_run import PLAN
    from moec.runtime.launch import launch
    from moec.runtime.launched import launched

    if launched() is not None:
        with _errors_shown():
            _on_rank(preset, out)
        return
    started = time.perf_counter()
    with _errors_shown():
        _clear(out)
    ranks = f"{PLAN.mesh.world} ranks, processes of this machine that share its parameters and its experts"
    Console().print(f"{preset} on {ranks}", highlight=False, markup=False, soft_wrap=True)
    code = launch([sys.executable, "-m", "moec.demo", "--preset", preset, "--out", str(out)], PLAN.mesh.world)
    if not code:
        Console().print(f"{time.perf_counter() - started:.0f} s in all", highlight=False)
    raise typer.Exit(code)


def report(outcome: Outcome) -> list[Table | Text]:
    """The two curves side by side, and what they and the loss had to show."""
    table = Table(title="the same steps, compiled and eager", title_justify="left", pad_edge=False)
    for title in ("step", "compiled", "eager", "difference"):
        table.add_column(title, justify="right")
    last = len(outcome.eager)
    for number in [n for n in range(1, last + 1) if n <= 3 or n % 5 == 0 or n == last]:
        one, two = outcome.compiled[number - 1], outcome.eager[number - 1]
        table.add_row(str(number), f"{one:.6f}", f"{two:.6f}", f"{abs(one - two):.1e}")
    return [table, *(Text(str(check), "green" if check.passed else "red") for check in outcome.checks())]


def next_steps(preset: str, out: Path) -> dict[str, str]:
    """What there is to see after a demo, and the file or the command that shows it."""
    from moec.artifact_files import ARTIFACT, LOG
    from moec.demo_run import PLAN, STEPS, TEXT
    from moec.runtime.loop import CHECKPOINTS
    from moec.runtime.metrics import METRICS

    command = Path(sys.executable).with_name("moec")
    moec = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else "moec"
    artifact = out / ARTIFACT
    mesh = f"--set mesh.ep={PLAN.mesh.ep}"
    more = f"--data {out}/{TEXT} --steps {STEPS + 30} --out {out} --resume"
    return {
        "the program that ran": f"{artifact}/step.py",
        "what each pass did": f"{moec} inspect {artifact}",
        "the graphs after fusion": f"{moec} inspect {artifact} --stage fused",
        "what fusion changed": f"{moec} inspect {artifact} --diff captured fused",
        "its log": f"{artifact}/{LOG}",
        "loss, norm and speed by step": f"{out}/{METRICS}",
        "the checkpoint": f"{out}/{CHECKPOINTS}",
        "every gradient against eager": f"{moec} verify {preset}",
        "two ranks against one": f"{moec} verify {preset} --ranks {PLAN.mesh.world} {mesh}",
        "train on, on one rank": f"{moec} train {preset} {more}",
    }


def _on_rank(preset: str, out: Path) -> None:
    """What each of the ranks does; the first one prints."""
    import torch

    from moec.demo_run import PLAN
    from moec.runtime.groups import connect
    from moec.runtime.launch import join

    # The tensors of a tiny model are too small to share: two threads take as long as one on two free cores, and many
    # times as long when something else runs beside them.
    torch.set_num_threads(1)
    ranks = connect(PLAN.mesh, join(torch.device("cpu")))
    outcome = _run(preset, out, ranks)
    if not ranks.is_first:
        return
    console = Console()
    for part in report(outcome):
        console.print(part, soft_wrap=True)
    console.print("Where to look next:")
    for what, where in next_steps(preset, out).items():
        console.print(f"  {what:30}{where}", highlight=False, markup=False, soft_wrap=True)
    missed = [check for check in outcome.checks() if not check.passed]
    for check in missed:
        console.print(Text(str(check), "red"), soft_wrap=True)
    if missed:
        raise typer.Exit(1)


def _run(preset: str, out: Path, ranks: Ranks) -> Outcome:
    from moec.demo_run import run_demo
    from moec.targets import build_target, fake_target

    twin = build_target(preset) if ranks.is_first else None
    return run_demo(fake_target(preset), twin, out, Console(quiet=not ranks.is_first), ranks)


@contextmanager
def _errors_shown() -> Iterator[None]:
    """Errors that moec raises on purpose end the process with 2, and are printed without a traceback."""
    try:
        yield
    except MoecError as error:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        Console(stderr=True).print(Text(f"{rank}error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(2) from error


def _clear(out: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    from moec.demo_run import TEXT

    if out.exists() and any(out.iterdir()):
        if not (out / TEXT).is_dir():
            raise ArtifactError(f"{out} holds other files", hint="give the demo a folder of its own")
        shutil.rmtree(out)


if __name__ == "__main__":
    typer.run(main)
