"""`moec train` and `moec run`: what a run leaves behind, and going on exactly where it stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import Result

from moec.compiler.plan import MeshPlan, Plan
from moec.settings import earlier_plan

from .test_cli import FACTORY, SMALL_PLAN, run, said

UNPACKABLE = "tests.moec.small_models:make_unpackable"
STEADY = ["--set", "optimizer.schedule=constant", "--set", "optimizer.lr=0.01"]
WORDS = ("the", "loss", "of", "a", "token", "is", "minus", "the", "logarithm", "of", "its", "probability")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short texts of different lengths."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(12):
        (folder / f"{index}.txt").write_text(" ".join(WORDS[(index * k) % len(WORDS)] for k in range(3 + 9 * index)))
    (folder / "notes.md").write_text("not for training " * 50)
    return folder


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a stop."""
    out = tmp_path_factory.mktemp("straight") / "run"
    result = train(text, out, 6)
    assert result.exit_code == 0, result.output
    assert "steps 0 -> 6" in said(result)
    return out


def train(text: Path, out: Path, steps: int, *more: str) -> Result:
    common = ["--data", text, "--pattern", "*.txt", "--out", out, *SMALL_PLAN, *STEADY]
    return run("train", FACTORY, "--steps", steps, *common, *more)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "weights.safetensors")


def same_bits(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) and losses(one) == losses(two)


def test_a_run_leaves_artefact_metrics_checkpoint_and_weights(straight: Path, text: Path) -> None:
    assert {path.name for path in straight.iterdir()} == {
        "artifact",
        "checkpoints",
        "metrics.jsonl",
        "weights.safetensors",
    }
    assert len(losses(straight)) == 6
    assert losses(straight)[-1] < losses(straight)[0]
    assert (straight / "checkpoints" / "LATEST").read_text().strip() == "step-00000006"
    plan = json.loads((straight / "artifact" / "fingerprint.json").read_text())["plan"]
    assert plan["packing"] is True


def test_a_model_that_cannot_pack_trains_without(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run("train", UNPACKABLE, "--data", text, "--steps", "1", "--out", out, *SMALL_PLAN)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "artifact" / "fingerprint.json").read_text())["plan"]["packing"] is False
    packed = ["--out", tmp_path / "packed", *SMALL_PLAN, "--set", "packing=true"]
    result = run("train", UNPACKABLE, "--data", text, "--steps", "1", *packed)
    assert result.exit_code == 2
    assert "cannot keep them apart" in said(result)


def test_packing_can_be_turned_off(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "run", 1, "--set", "packing=false").exit_code == 0
    plan = json.loads((tmp_path / "run" / "artifact" / "fingerprint.json").read_text())["plan"]
    assert plan["packing"] is False


def test_a_resumed_run_is_bit_equal(straight: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(text, out, 3).exit_code == 0
    assert not same_bits(out, straight)
    result = train(text, out, 6, "--resume")
    assert result.exit_code == 0, result.output
    assert "resuming from" in said(result)
    assert same_bits(out, straight)


def test_another_seed_gives_other_bits(straight: Path, text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "run", 6, "--seed", "1").exit_code == 0
    assert not same_bits(tmp_path / "run", straight)


def test_the_seed_orders_the_documents(straight: Path, text: Path, tmp_path: Path) -> None:
    """From the same weights, so that nothing but the data can tell two seeds apart."""
    start = ["--weights", str(straight / "weights.safetensors")]
    found = []
    for seed in (0, 1):
        assert train(text, tmp_path / str(seed), 2, "--seed", str(seed), *start).exit_code == 0
        found.append(losses(tmp_path / str(seed)))
    assert found[0] != found[1]
    artifact = ["--weights", straight / "weights.safetensors", "--data", text, "--pattern", "*.txt", "--steps", "2"]
    result = run("run", tmp_path / "0" / "artifact", *artifact, "--seed", "1", "--out", tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "again") == found[1]
    result = train(text, tmp_path / "1", 3, "--resume")
    assert result.exit_code == 2
    assert "seed was 1, now it is 0" in said(result)


def test_text_has_no_image_features(text: Path, tmp_path: Path) -> None:
    result = run(
        *("train", "k3-tiny", "--data", text, "--steps", "1", "--out", tmp_path / "run"), "--set", "image_tokens=2"
    )
    assert result.exit_code == 2
    assert "text files hold no image features" in said(result)


def test_a_run_starts_from_given_weights(straight: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(text, out, 1, "--weights", str(straight / "weights.safetensors")).exit_code == 0
    assert losses(out)[0] < losses(straight)[0]


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_compiled(
    straight: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.compile", None, raising=False)
    result = train(text, straight, 8)
    assert result.exit_code == 2
    assert "already holds a run" in said(result)


def test_resuming_with_another_plan_names_the_field(straight: Path, text: Path) -> None:
    before = (straight / "artifact" / "step.py").read_text()
    result = train(text, straight, 8, "--resume", "--set", "batch=4")
    assert result.exit_code == 2
    assert "a step of this run reads 2 rows, with this plan it would read 4" in said(result)
    assert "as batch=2" in said(result)
    result = train(text, straight, 8, "--resume", "--set", "length=8")
    assert result.exit_code == 2
    assert "is another one: plan.length differs" in said(result)
    assert "or train into another folder" in said(result)
    assert (straight / "artifact" / "step.py").read_text() == before


def test_a_resumed_run_may_share_its_rows_out_otherwise(stopped: Path, straight: Path, text: Path) -> None:
    """One microbatch of 2 rows, or two of 1: the same losses, to the order of summation."""
    result = train(text, stopped, 9, "--resume", "--set", "batch=1", "--set", "accumulation=2")
    assert result.exit_code == 0, result.output
    assert "plan.batch was 2, now it is 1" in said(result)
    again = Path(shutil.copytree(straight, stopped.with_name("again")))
    assert train(text, again, 9, "--resume").exit_code == 0
    assert losses(stopped)[6:] != losses(stopped)[:3]
    assert losses(stopped)[6:] == pytest.approx(losses(again)[6:], rel=1e-5)


@pytest.fixture
def stopped(straight: Path, tmp_path: Path) -> Path:
    """A copy of the run of six steps, to go on from."""
    return Path(shutil.copytree(straight, tmp_path / "stopped"))


def test_a_resumed_run_takes_another_learning_rate_and_says_so(
    stopped: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.compile", None, raising=False)
    result = train(text, stopped, 7, "--resume", "--set", "optimizer.lr=0.5")
    assert result.exit_code == 0, result.output
    assert "plan.optimizer.lr was 0.01, now it is 0.5" in said(result)
    assert "steps was 6, now it is 7" in said(result)
    assert json.loads((stopped / "metrics.jsonl").read_text().splitlines()[-1])["lr"] == 0.5
    changed = json.loads((stopped / "resumes.jsonl").read_text())["changed"]
    assert changed == {"plan.optimizer.lr": [0.01, 0.5], "steps": [6, 7]}


def test_what_the_program_was_written_for_is_compiled_again(stopped: Path, text: Path) -> None:
    result = train(text, stopped, 7, "--resume", "--set", "optimizer.clip_norm=0.5", "--set", "cache.policy=recompute")
    assert result.exit_code == 0, result.output
    assert "compiling again: plan.cache.policy differs" in said(result)
    assert "max_norm=0.5" in (stopped / "artifact" / "step.py").read_text()
    assert "plan.cache.policy was keep, now it is recompute" in said(result)
    assert len(losses(stopped)) == 7


@pytest.mark.parametrize(("ranks", "ep", "batch"), [(1, 1, 24), (2, 2, 12), (3, 1, 8), (6, 2, 4), (8, 4, 3)])
def test_the_plan_of_a_run_on_other_ranks(ranks: int, ep: int, batch: int, tmp_path: Path) -> None:
    plan = Plan(batch=6, length=8, mesh=MeshPlan(fsdp=4, ep=4, capacity=2.0))
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "plan.yaml").write_text(plan.to_yaml())
    mesh = MeshPlan(fsdp=ranks, ep=ep, capacity=2.0 if ep > 1 else 0.0)
    assert Plan.from_dict(earlier_plan(tmp_path, ranks)) == replace(plan, mesh=mesh, batch=batch)


def test_a_resumed_run_keeps_its_plan_where_nothing_is_said(stopped: Path, text: Path) -> None:
    common = ["--data", text, "--pattern", "*.txt", "--out", stopped, "--resume"]
    result = run("train", FACTORY, *common, "--steps", "7", "--set", "optimizer.lr=0.5")
    assert result.exit_code == 0, result.output
    result = run("train", FACTORY, *common, "--steps", "8")
    assert result.exit_code == 0, result.output
    changed = [json.loads(line)["changed"] for line in (stopped / "resumes.jsonl").read_text().splitlines()]
    assert changed == [{"plan.optimizer.lr": [0.01, 0.5], "steps": [6, 7]}, {"steps": [7, 8]}]
    result = run("train", FACTORY, *common, "--steps", "8")
    assert result.exit_code == 0, result.output
    assert "steps 8 -> 8, nothing was left to do" in said(result)


def test_an_edited_program_is_resumed_and_noted(stopped: Path, text: Path) -> None:
    program = stopped / "artifact" / "step.py"
    program.write_text(program.read_text() + "\n# read me\n")
    result = train(text, stopped, 7, "--resume")
    assert result.exit_code == 0, result.output
    assert "program was" in said(result)
    assert program.read_text().endswith("# read me\n")


def test_a_runs_folder_is_not_taken_for_its_artefact(straight: Path) -> None:
    for more in ([], ["--stage", "fused"], ["--pass", "normalize"]):
        result = run("inspect", straight, *more)
        assert result.exit_code == 2
        assert f"the artefact of this run is {straight}/artifact" in said(result)


def test_nothing_to_resume_is_an_error(text: Path, tmp_path: Path) -> None:
    result = train(text, tmp_path / "none", 1, "--resume")
    assert result.exit_code == 2
    assert "no run in" in said(result)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [("empty.txt", b"", "is empty"), ("binary.bin", b"\x00\xff\x00", "is not text"), (None, b"", "no file or folder")],
)
def test_data_that_is_no_text_is_refused(name: str | None, content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_bytes(content)
    result = run("train", FACTORY, "--data", path, "--steps", "1", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert reason in said(result)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(text: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"word{index}": index for index in range(400)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    result = run(
        *("train", "k3-tiny", "--data", text, "--steps", "1", "--out", tmp_path / "run"),
        *("--tokenizer", tmp_path / "tokenizer.json"),
    )
    assert result.exit_code == 2
    assert "has 400 tokens, the model has 320" in said(result)


def test_an_artefact_runs_without_the_source_of_models(text: Path, tmp_path: Path) -> None:
    """In a process where importing models, passes or the compiler's capture fails; with a resume, bit-equal."""
    initial = tmp_path / "initial"
    result = run("compile", FACTORY, "--out", initial, *SMALL_PLAN, *STEADY, "--set", "packing=true")
    assert result.exit_code == 0, result.output
    assert train(text, tmp_path / "one", 1).exit_code == 0
    start = tmp_path / "one" / "weights.safetensors"
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("moec.models", "moec.passes", "moec.compiler.capture", "tests")):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refuse())
from moec.cli import main
main()
"""
    out = tmp_path / "run"
    arguments = ["run", initial, "--weights", start, "--data", text, "--pattern", "*.txt", "--out", out]

    def run_there(steps: int, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, arguments), "--steps", str(steps), *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    first = run_there(2)
    assert first.returncode == 0, first.stderr
    second = run_there(4, "--resume")
    assert second.returncode == 0, second.stderr
    whole = tmp_path / "whole"
    assert run("run", initial, *arguments[2:-1], whole, "--steps", "4").exit_code == 0
    assert same_bits(out, whole)


def test_compiling_with_weights_makes_an_artefact_that_needs_nothing_else(
    straight: Path, text: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    given = ["--weights", straight / "weights.safetensors"]
    result = run("compile", FACTORY, "--out", artifact, *given, *SMALL_PLAN, *STEADY, "--set", "packing=true")
    assert result.exit_code == 0, result.output
    result = run("run", artifact, "--data", text, "--pattern", "*.txt", "--steps", "2", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "run")[0] < losses(straight)[0]


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 4, 5])
def test_a_kill_in_the_middle_of_a_save_loses_nothing(call: int, straight: Path, text: Path, tmp_path: Path) -> None:
    """SIGKILL before the n-th renaming inside the checkpoints: of the manifest, of the checkpoint, of LATEST, ..."""
    code = f"""
import os, signal, sys
from moec.runtime import durable
publish, calls = durable.publish, [0]
def killing(*arguments):
    if "checkpoints" in str(arguments[1]):
        calls[0] += 1
        if calls[0] == {call}:
            os.kill(os.getpid(), signal.SIGKILL)
    return publish(*arguments)
durable.publish = killing
from moec.cli import main
main()
"""
    out = tmp_path / "run"
    arguments = ["train", FACTORY, "--data", text, "--pattern", "*.txt", "--out", out, *SMALL_PLAN, *STEADY]
    command = [sys.executable, "-c", code, *map(str, arguments), "--steps", "6", "--checkpoint-every", "2"]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = train(text, out, 6, "--resume", "--checkpoint-every", "2")
    assert result.exit_code == 0, result.output
    assert same_bits(out, straight)
