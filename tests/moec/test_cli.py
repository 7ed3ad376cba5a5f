"""The command line: what each command prints and writes, and how errors of use look."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moec.cli import app
from moec.runtime import StepState, export_weights
from moec.targets import build_target

ROOT = Path(__file__).parents[2]
FACTORY = "tests.moec.small_models:make"
SMALL_PLAN = ["--set", "batch=2", "--set", "length=32"]


def run(*arguments: str | Path) -> Result:
    """One command, in a wide terminal."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    """Everything printed, in one line."""
    return " ".join((result.stdout + result.stderr).split())


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`moec compile` of a small model, without weights."""
    folder = tmp_path_factory.mktemp("compiled") / "artifact"
    result = run("compile", FACTORY, "--out", folder, *SMALL_PLAN, "--set", "packing=true")
    assert result.exit_code == 0, result.output
    assert "passes" in result.stdout
    assert result.stdout.count("normalize") == 2  # its one row, and its estimate
    assert "compiled in" in result.stdout
    assert "peak memory" in result.stdout
    assert f"{folder}/step.py" in result.stdout
    return folder


def test_help_names_every_command_and_loads_no_torch() -> None:
    code = "import sys, moec.cli\ntry: moec.cli.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for command in ("presets", "compile", "inspect", "verify", "train", "run"):
        assert command in done.stdout


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from moec.cli import main; main()"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compile", "k3-tinny", "--out", "OUT"], "did you mean k3-tiny"),
        (["compile", "k3-tiny", "--out", "OUT", "--set", "lenght=3"], "unknown plan field lenght"),
        (["compile", "k3-tiny", "--out", "OUT", "--weights", "none"], "no weights at none"),
        (["compile", "k3-tiny", "--out", "BAD/config.json"], "is a file"),
        (["compile", "BAD", "--out", "OUT"], "config.json is not JSON"),
        (["compile", "none/config.json", "--out", "OUT"], "no config at none/config.json"),
        (["verify", "no_such_module:make"], "cannot import 'no_such_module'"),
        (["verify", "k3-tiny", "--plan", "none.yaml"], "no plan file at none.yaml"),
        (["verify", "k3-tiny", "--ranks", "2", "--set", "mesh.ep=3"], "ep must divide fsdp"),
        (["train", "k3-tiny", "--data", "none", "--steps", "1", "--out", "OUT"], "no file or folder none"),
        (["train", "k3-tinny", "--data", "BAD", "--steps", "1", "--out", "OUT", "--ranks", "2"], "unknown preset"),
        (["run", "none", "--data", "BAD", "--steps", "1", "--out", "OUT"], "none has no fingerprint.json"),
        (["inspect", "none", "--stage", "fused"], "none has no graphs"),
    ],
)
def test_mistakes_in_arguments_are_answered_before_torch_is_loaded(
    arguments: list[str], text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{")
    places = {"OUT": tmp_path / "out", "BAD": tmp_path, "BAD/config.json": tmp_path / "config.json"}
    command = [sys.executable, "-c", WITHOUT_TORCH, *(str(places.get(argument, argument)) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("error: ")) == (2, True), done.stderr
    assert text in done.stderr


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moec", "inspect", "no-such-folder"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no-such-folder has no fingerprint.json")
    assert "Traceback" not in done.stderr


def test_presets_are_listed_with_their_sizes() -> None:
    text = said(run("presets"))
    assert "k3 │ 2.78T │ 105" in text
    assert "k3-tiny │ 602.02K" in text
    assert "8 (6 kda, 2 mla)" in text


def test_presets_are_listed_without_loading_torch() -> None:
    code = "import sys; from moec.cli import presets; presets(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "602.02K" in done.stdout) == (0, True), done.stderr


def test_compile_writes_everything_but_weights(artifact: Path) -> None:
    names = {path.name for path in artifact.iterdir()}
    assert names >= {"step.py", "plan.yaml", "log.jsonl", "state_map.json", "fingerprint.json", "graphs"}
    assert "weights.safetensors" not in names
    assert "batch: 2" in (artifact / "plan.yaml").read_text()


def test_compile_again_replaces_an_artefact_but_nothing_else(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    result = run("compile", FACTORY, "--out", tmp_path, *SMALL_PLAN)
    assert result.exit_code == 2
    assert "holds other files" in said(result)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    again = tmp_path / "again"
    for length in (16, 24):
        assert run("compile", FACTORY, "--out", again, "--set", f"length={length}").exit_code == 0
    assert json.loads((again / "fingerprint.json").read_text())["plan"]["length"] == 24


def test_a_plan_file_is_read_and_settings_override_it(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("batch: 3\nlength: 16\noptimizer: {lr: 0.5}\n")
    out = tmp_path / "out"
    result = run(
        "compile",
        FACTORY,
        "--out",
        out,
        "--plan",
        tmp_path / "plan.yaml",
        "--set",
        "length=24",
        "--set",
        "optimizer.eps=1e-6",
    )
    assert result.exit_code == 0, result.output
    plan = json.loads((out / "fingerprint.json").read_text())["plan"]
    assert (plan["batch"], plan["length"]) == (3, 24)
    assert (plan["optimizer"]["lr"], plan["optimizer"]["eps"]) == (0.5, 1e-6)


def test_inspect_gives_an_overview(artifact: Path) -> None:
    text = said(run("inspect", artifact))
    assert text.count("normalize") > 2
    assert "1 x [2, 32] tokens on cpu" in text
    assert "stages: captured, fused, joint, placed, lowered" in text
    assert "kept for backward, and predicted times on one H200, per layer" in text
    assert f"{artifact}/step.py" in text


def test_inspect_shows_a_stage_a_difference_and_a_pass(artifact: Path) -> None:
    captured = run("inspect", artifact, "--stage", "captured").stdout
    assert "# captured: block" in captured
    assert "aten.silu" in captured
    difference = run("inspect", artifact, "--diff", "captured", "fused").stdout
    assert "--- captured/" in difference
    assert "+++ fused/" in difference
    assert run("inspect", artifact, "--diff", "fused", "fused").stdout == "the graphs are equal\n"
    text = run("inspect", artifact, "--pass", "chunk_loss").stdout
    assert "chunk_loss on model" in text
    assert "matched" in text


@pytest.mark.parametrize("columns", [None, 60])
def test_names_are_never_cut_off(artifact: Path, columns: int | None) -> None:
    """Neither in a pipe, which has no width, nor in a narrow terminal, where they are broken into lines."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": str(columns)}
    command = [sys.executable, "-m", "moec", "inspect", str(artifact)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    widest = max(len(line) for line in text.splitlines() if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL}"))
    assert widest <= (columns or 120)
    if columns is None:
        assert "linear_cross_entropy over 260 classes" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", "ARTIFACT", "--stage", "fussed"], "no stage 'fussed'"),
        (["inspect", "ARTIFACT", "--stage", "fussed"], "did you mean fused?"),
        (["inspect", "ARTIFACT", "--pass", "chunk_los"], "did you mean chunk_loss?"),
        (["inspect", "none"], "none has no fingerprint.json"),
        (["inspect", "none", "--stage", "fused"], "none has no graphs"),
        (["inspect", "none", "--pass", "fuse_kda"], "none has no log.jsonl"),
        (["compile", "k3-tinny", "--out", "OUT"], "did you mean k3-tiny"),
        (["compile", FACTORY, "--out", "OUT", "--set", "lenght=3"], "unknown plan field lenght"),
        (["compile", FACTORY, "--out", "OUT", "--set", "length"], "'length' is not field=value"),
        (["compile", FACTORY, "--out", "OUT", "--plan", "none.yaml"], "no plan file at none.yaml"),
        (["compile", FACTORY, "--out", "OUT", "--weights", "none"], "no weights at none"),
        (["compile", FACTORY, "--out", "OUT", "--device", "gpu"], "'gpu' is no device"),
        (["verify", FACTORY, "--dtype", "float8"], "plan field dtype is 'float8'"),
        (["verify", FACTORY, "--steps", "0"], "steps is 0"),
        (["train", FACTORY, "--data", "none", "--steps", "1", "--out", "OUT"], "no file or folder none"),
        (["train", FACTORY, "--data", "FILE", "--steps", "0", "--out", "OUT"], "steps is 0"),
        (["train", FACTORY, "--data", "FILE", "--steps", "1", "--out", "FILE"], "is a file"),
        (["train", FACTORY, "--data", "FILE", "--steps", "1", "--out", "FILE/x", *SMALL_PLAN], "Not a directory"),
        (
            ["train", FACTORY, "--data", "FILE", "--steps", "1", "--out", "OUT", "--checkpoint-every", "-1"],
            "checkpoint_every is -1",
        ),
        (["compile", "tests.moec.small_models:make_without_loss", "--out", "OUT"], "tensor of shape [1, 512, 260]"),
        (["compile", FACTORY, "--out", "OUT", "--plan", "FILE"], "FILE"),
        (["run", "none", "--data", "x", "--steps", "1", "--out", "OUT"], "none has no fingerprint.json"),
        (["run", "ARTIFACT", "--data", "FILE", "--steps", "1", "--out", "OUT"], "no weights at"),
    ],
)
def test_errors_of_use_are_explained(arguments: list[str], text: str, artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("some text [1")
    places = {"ARTIFACT": str(artifact), "OUT": str(tmp_path / "out"), "FILE": str(file), "FILE/x": str(file / "x")}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert places.get(text, text) in said(result)
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_error_that_moec_did_not_expect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.preset_table.preset_table", lambda: 1 / 0)
    assert isinstance(run("presets").exception, ZeroDivisionError)


def test_verify_of_equal_steps_succeeds() -> None:
    result = run("verify", FACTORY, *SMALL_PLAN, "--steps", "2", "--seed", "5")
    assert result.exit_code == 0, result.output
    assert "every pass on its own" in result.stdout
    assert result.stdout.splitlines()[-1].strip() == "equal"


def test_verify_shows_on_a_terminal_what_it_does_and_nothing_elsewhere() -> None:
    arguments = ["verify", FACTORY, *SMALL_PLAN, "--steps", "1"]
    assert f"verifying {FACTORY}: compiling" in CliRunner(env={"FORCE_COLOR": "1"}).invoke(app, arguments).stdout
    assert "verifying" not in run(*arguments).output


def test_verify_compares_simulated_ranks_with_one() -> None:
    result = run("verify", FACTORY, *SMALL_PLAN, "--steps", "2", "--lockstep", "3", "--set", "mesh.prefetch=2")
    assert result.exit_code == 0, result.output
    assert "3 ranks (ep 1) against one" in result.stdout
    assert result.stdout.splitlines()[-1].strip() == "equal"
    assert run("verify", FACTORY, "--lockstep", "2", "--ranks", "2").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("start", ["seed", "weights"])
def test_verify_compares_real_ranks_with_one(start: str, tmp_path: Path) -> None:
    """Ranks that hold no whole model start from the same weights as the one that does."""
    given: list[str | Path] = ["--seed", "3"]
    if start == "weights":
        path = export_weights(StepState.from_module(build_target(FACTORY, seed=7)), tmp_path / "w.safetensors")
        given = ["--weights", path]
    command = [sys.executable, "-m", "moec", "verify", FACTORY, *SMALL_PLAN, "--steps", "2", "--ranks", "2", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks (ep 1) against one" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "equal"


def test_verify_of_a_difference_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.optimizer.torch_adamw", lambda *_, **__: None)
    result = run("verify", FACTORY, *SMALL_PLAN, "--steps", "1")
    assert result.exit_code == 1
    assert "not equal" in result.stdout
    assert "parameter" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_of_k3_becomes_a_program_that_can_be_read_without_memory_for_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moec", "compile", "k3", "--out", str(tmp_path / "k3")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = re.search(r"peak memory ([\d,]+) MiB", done.stdout)
    assert peak, done.stdout
    assert int(peak[1].replace(",", "")) * 2**20 < 6e9
    assert len((tmp_path / "k3" / "step.py").read_text().splitlines()) < 10_000


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("k3-tiny", "float32"),
        pytest.param("k3-tiny", "bfloat16", marks=pytest.mark.slow),
        pytest.param("k3-dsa-tiny", "float32", marks=pytest.mark.slow),
        pytest.param("k3-dsa-tiny", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_tiny_presets_are_equal(preset: str, dtype: str) -> None:
    result = run("verify", preset, "--dtype", dtype)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa"])
def test_the_hugging_face_models_are_equal(kind: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from moec.models.huggingface.tiny import TINY

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **TINY[kind]}))
    result = run("verify", tmp_path / "config.json", "--dtype", dtype, "--set", "length=64")
    assert result.exit_code == 0, result.output
