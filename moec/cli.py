"""The command line.

TARGET is a preset (`moec presets`), `module:factory` with factory() -> nn.Module, or a Hugging Face config.json.
Exit codes: 0 success; 1 verification found a difference; 2 an error of use, printed with what, where, why and what
to do. Commands first check their arguments, and import what needs torch after that: `--help` and
typing errors are answered at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from moec.compiler.errors import MoecError

if TYPE_CHECKING:
    import torch

    from moec.compiler.plan import Plan
    from moec.runtime.ranks import Ranks

USE_ERROR, DIFFERENCE = 2, 1
_PIPE_WIDTH = 120
_ARGUMENTS = "moec.arguments"


class _Commands(TyperGroup):
    """Prints errors that moec raises on purpose, and paths that cannot be used, instead of a traceback.

    Keeps the arguments, for further ranks.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except MoecError as error:
            text = str(error)
            cause: Exception = error
        except (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            text = f"{error.strerror}: {error.filename}"
            cause = error
        Console(stderr=True).print(Text(f"{_rank_prefix()}error: {text}", style="red"), soft_wrap=True)
        raise typer.Exit(USE_ERROR) from cause


app = typer.Typer(
    cls=_Commands,
    help="moec compiles a sparse-MoE model into a training step that can be read, checked and run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TargetArgument = Annotated[str, typer.Argument(help="Preset, module:factory, or path of a Hugging Face config.json.")]
FolderArgument = Annotated[Path, typer.Argument(help="Folder that `moec compile --out` wrote.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder to write.")]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="YAML file with plan fields.")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="field=value of the plan, dots for nested fields; repeatable.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the initial weights and of the data.")]
OrderOption = Annotated[int, typer.Option("--seed", help="Seed of the order of documents.")]
DataOption = Annotated[list[Path], typer.Option("--data", help="Text file or folder; repeatable.")]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps of the whole run.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUT.")]
EveryOption = Annotated[int, typer.Option(help="Steps between checkpoints; 0 saves at the end only.")]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Hugging Face tokenizer.json; without it a token is a byte.")
]
PatternOption = Annotated[list[str], typer.Option(help="File names to read inside folders, as '*.py'; repeatable.")]
RanksOption = Annotated[
    int,
    typer.Option(help="Start this many ranks on this machine, and set mesh.fsdp unless the plan does."),
]
SilenceOption = Annotated[
    float, typer.Option("--rank-timeout", help="Seconds after which a silent rank counts as dead.")
]
BoardOption = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")]


@app.command()
def presets() -> None:
    """List the built-in model configurations."""
    from moec.preset_table import preset_table

    _show([preset_table()])


@app.command("compile")
def compile_command(
    target: TargetArgument,
    out: OutOption,
    weights: Annotated[Path | None, typer.Option(help="safetensors file or folder; stored with the artefact.")] = None,
    plan: PlanOption = None,
    settings: SetOption = [],  # noqa: B006
    device: DeviceOption = None,
) -> None:
    """Compile a training step and write it to a folder; needs no memory for weights unless they are given."""
    from moec.arguments import check_target, check_weights
    from moec.artifact_files import check_room
    from moec.settings import read_plan

    started = time.perf_counter()
    chosen, _ = read_plan(plan, settings)
    check_target(target)
    check_weights(weights)
    check_room(out)

    from moec.emit import emit
    from moec.overview import compile_report
    from moec.targets import build_target, fake_target

    place = _device(device)
    if weights is None:
        model = fake_target(target, dtype=_dtype(chosen), device=place)
    else:
        model = build_target(target, dtype=_dtype(chosen), device=place, weights=weights)
    log = emit(model, chosen, out, with_weights=weights is not None)
    _show(compile_report(log, out, time.perf_counter() - started))


@app.command()
def inspect(
    folder: FolderArgument,
    stage: Annotated[str | None, typer.Option(help="Print the graphs of a stage.")] = None,
    step_pass: Annotated[str | None, typer.Option("--pass", help="Print what one pass did where.")] = None,
    diff: Annotated[tuple[str, str] | None, typer.Option(help="Compare the graphs of two stages.")] = None,
) -> None:
    """Show what a compilation did; without an option, an overview."""
    from moec.artifact_files import FINGERPRINT, GRAPHS, LOG, check_holds

    graphs, log = stage is not None or diff is not None, step_pass is not None
    check_holds(
        folder, *([GRAPHS] if graphs else []), *([LOG] if log else []), *([] if graphs or log else [FINGERPRINT])
    )

    from moec.overview import difference, overview, pass_report
    from moec.step import pick_stage

    if stage is not None:
        typer.echo(str(pick_stage(folder, stage)))
    if diff is not None:
        _show(difference(*(pick_stage(folder, name) for name in diff)))
    if step_pass is not None:
        _show(pass_report(folder, step_pass))
    if stage is None and diff is None and step_pass is None:
        _show(overview(folder))


@app.command()
def verify(
    context: typer.Context,
    target: TargetArgument,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 3,
    dtype: Annotated[str | None, typer.Option(help="Same as --set dtype=...")] = None,
    seed: SeedOption = 0,
    weights: Annotated[Path | None, typer.Option(help="safetensors file or folder to start from.")] = None,
    plan: PlanOption = None,
    settings: SetOption = [],  # noqa: B006
    device: DeviceOption = None,
    lockstep: Annotated[int, typer.Option(help="Compare this many simulated ranks with one.")] = 1,
    ranks: Annotated[int, typer.Option(help="Start this many ranks here, and compare them with one.")] = 1,
) -> None:
    """Compare the compiled step with eager PyTorch: losses, every gradient, every parameter, every pass.

    With --lockstep or --ranks, compare the step of that many ranks (mesh.ep with --set) with the compiled step of one.
    """
    from moec.arguments import check_target, check_weights
    from moec.compiler.errors import PlanError
    from moec.runtime.launched import launched
    from moec.settings import TO_VERIFY, read_plan, with_packing

    if lockstep != 1 and ranks != 1:
        raise PlanError("--lockstep and --ranks exclude each other", hint="give one of them")
    world = lockstep if lockstep != 1 else (launched() or (0, ranks))[1]
    overrides = [*settings, *([f"dtype={dtype}"] if dtype else [])]
    defaults = TO_VERIFY if world == 1 else {**TO_VERIFY, "batch": 1, "mesh": {"fsdp": world}}
    chosen, given = read_plan(plan, overrides, defaults)
    check_target(target)
    check_weights(weights)
    _launch_others(context, ranks)

    from moec import verification as checks
    from moec.rank_checks import verify_lockstep, verify_ranks
    from moec.targets import build_target, fake_target

    place, own = _joined(_device(device), chosen) if lockstep == 1 else (_device(device), None)
    same: Any = {"dtype": _dtype(chosen), "device": place, "seed": seed}
    first = own is None or own.is_first
    whole = build_target(target, **same, weights=weights) if first else None
    console = _console()
    console.quiet = not first
    with console.status(f"verifying {target}") as status:

        def progress(doing: str) -> None:
            status.update(f"verifying {target}: {doing}")

        options: Any = {"steps": steps, "seed": seed, "progress": progress}
        if whole is not None and world == 1:
            report = checks.verify(whole, with_packing(chosen, given, whole), **options)
        elif whole is not None and own is None:
            report = verify_lockstep(whole, with_packing(chosen, given, whole), **options)
        else:
            assert own is not None
            model = fake_target(target, **same)
            chosen = with_packing(chosen, given, model)
            report = verify_ranks(model, chosen, own, whole, **options, weights=weights)
    if first:
        _show(report.renderables())
        if not report.equal:
            raise typer.Exit(DIFFERENCE)


@app.command()
def train(
    context: typer.Context,
    target: TargetArgument,
    data: DataOption,
    steps: StepsOption,
    out: OutOption,
    resume: ResumeOption = False,
    checkpoint_every: EveryOption = 100,
    tokenizer: TokenizerOption = None,
    pattern: PatternOption = [],  # noqa: B006
    tensorboard: BoardOption = False,
    weights: Annotated[Path | None, typer.Option(help="safetensors file or folder to start from.")] = None,
    seed: SeedOption = 0,
    plan: PlanOption = None,
    settings: SetOption = [],  # noqa: B006
    device: DeviceOption = None,
    ranks: RanksOption = 1,
    rank_timeout: SilenceOption = 30.0,
) -> None:
    """Train a model on text through its compiled step, on one rank or on several.

    Several: with --ranks on this machine, or started as `torchrun --nproc-per-node N -m moec train ...`. A resumed run
    keeps its plan, but for the fields given here and for the number of ranks, which changes the batch.
    """
    from moec.arguments import check_target, check_weights
    from moec.runtime.launched import launched
    from moec.runtime.sources import refuse_missing
    from moec.settings import earlier_plan, read_plan, with_packing

    world = (launched() or (0, ranks))[1]
    earlier = earlier_plan(out, world) if resume else {}
    chosen, given = read_plan(plan, settings, {"mesh": {"fsdp": world}, **earlier})
    check_target(target)
    check_weights(weights)
    refuse_missing(data)
    _launch_others(context, ranks)

    from moec.running import RunOptions, TextOptions
    from moec.targets import fake_target
    from moec.training import train_model

    place, own = _joined(_device(device), chosen)
    model = fake_target(target, dtype=_dtype(chosen), device=place, seed=seed)
    text = TextOptions(data, pattern, tokenizer, seed)
    options = RunOptions(steps, out, resume, checkpoint_every, tensorboard, rank_timeout)
    console = _console()
    console.quiet = not own.is_first
    _, summary = train_model(
        model, with_packing(chosen, given | set(earlier), model), text, options, console, ranks=own, weights=weights
    )
    _print_summary(console, summary, out)


@app.command()
def run(
    folder: FolderArgument,
    data: DataOption,
    steps: StepsOption,
    out: OutOption,
    weights: Annotated[Path | None, typer.Option(help="safetensors file; by default the artefact's own.")] = None,
    resume: ResumeOption = False,
    checkpoint_every: EveryOption = 100,
    tokenizer: TokenizerOption = None,
    pattern: PatternOption = [],  # noqa: B006
    tensorboard: BoardOption = False,
    seed: OrderOption = 0,
) -> None:
    """Train an emitted step; needs neither the model's source nor a compilation."""
    from moec.arguments import check_weights
    from moec.artifact_files import FINGERPRINT, check_holds
    from moec.runtime.sources import refuse_missing

    check_holds(folder, FINGERPRINT)
    check_weights(weights)
    refuse_missing(data)

    import moec
    from moec.running import RunOptions, TextOptions, open_text
    from moec.running import run as run_step

    step = moec.load(folder, weights=weights)
    batches = open_text(TextOptions(data, pattern, tokenizer, seed), step.plan, step.vocabulary)
    console = _console()
    summary = run_step(step, batches, RunOptions(steps, out, resume, checkpoint_every, tensorboard), console)
    _print_summary(console, summary, out)


def _console() -> Console:
    """As wide as the terminal; in a pipe or a log wide enough for the tables."""
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if told else _PIPE_WIDTH)


def _show(parts: Iterable[Any]) -> None:
    """Print tables to the width of the console, and lines whole."""
    console = _console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str | Text))


def _dtype(plan: Plan) -> torch.dtype | None:
    import torch

    return None if plan.dtype is None else getattr(torch, plan.dtype)


def _device(name: str | None) -> torch.device:
    import torch

    from moec.compiler.errors import PlanError

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PlanError(f"{name!r} is no device", why=str(error).splitlines()[0], hint="use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"there is no {name} here", hint="leave --device out to run on the CPU")
    return device


def _launch_others(context: typer.Context, ranks: int) -> None:
    """Where `ranks` are asked for and this process is none of them, start them and end as they do."""
    from moec.runtime.launched import launched

    if ranks == 1 or launched() is not None:
        return

    from moec.runtime.launch import launch

    raise typer.Exit(launch([sys.executable, "-m", "moec", *context.meta[_ARGUMENTS]], ranks))


def _joined(device: torch.device, plan: Plan) -> tuple[torch.device, Ranks]:
    """The device of this rank, and which one it is; the only one where no launcher has started this process."""
    from moec.runtime.groups import connect
    from moec.runtime.launch import join
    from moec.runtime.launched import launched

    if launched() is not None:
        device = join(device)
    return device, connect(plan.mesh, device)


def _rank_prefix() -> str:
    rank = os.environ.get("RANK")
    return f"rank {rank}: " if rank is not None and os.environ.get("WORLD_SIZE") != "1" else ""


def _print_summary(console: Console, summary: Any, out: Path) -> None:
    losses = summary.losses
    if losses:
        rate = summary.tokens / summary.seconds
        done = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {rate:,.0f} tokens/s"
    else:
        done = "nothing was left to do"
    console.print(
        f"steps {summary.first_step} -> {summary.last_step}, {done}; all in {out}", highlight=False, soft_wrap=True
    )


def main() -> None:
    """Entry point of the `moec` command."""
    app()
