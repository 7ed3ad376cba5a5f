"""C07: however far gathers run ahead of exchanges, a program uses nothing before it is made, waits for each collective
once, and has the same order on every rank; numbers stay bit for bit."""

from __future__ import annotations

import ast
from typing import Any, cast

import pytest
import torch

import moec
from moec.compiler.plan import MeshPlan, Plan
from moec.models.build import build
from moec.placing import UnconnectedStep
from moec.rank_checks import joined_batches
from moec.runtime.collective import record_collectives
from moec.simulated import split_rows
from tests.moec.small_models import SMALL_K3

MESHES: list[dict[str, Any]] = [
    {"prefetch": 0},
    {"prefetch": 1},
    {"prefetch": 2},
    {"prefetch": 99},
    {"prefetch": 99, "gather": "keep"},
]


def compiled(**mesh: Any) -> UnconnectedStep:
    torch.manual_seed(0)
    plan = Plan(batch=1, length=16, accumulation=2, mesh=MeshPlan(fsdp=4, ep=2, **mesh), check=True)
    return cast(UnconnectedStep, moec.compile(build(SMALL_K3).train(), plan))


def faults(source: str) -> list[str]:
    """What is wrong with the order of a program: names that are read before they are made, or after they are deleted,
    and collectives that are not waited for exactly once."""
    found = []
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or function.name not in ("forward", "backward"):
            continue
        made, waits = {argument.arg for argument in function.args.args}, dict[str, int]()
        local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for statement in function.body:
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)} & local
            found += [f"{name} is read before it is made" for name in read - made]
            for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == "c10d.wait_tensor" and isinstance(call.args[0], ast.Name):
                    waits[call.args[0].id] = waits.get(call.args[0].id, 0) + 1
            value = statement.value if isinstance(statement, ast.Assign) else None
            if (
                isinstance(value, ast.Call)
                and ast.unparse(value.func).startswith("c10d.")
                and "wait" not in ast.unparse(value.func)
            ):
                waits.setdefault(ast.unparse(cast(ast.Assign, statement).targets[0]), 0)
            made |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            made -= {node.id for node in names if isinstance(node.ctx, ast.Del)}
        found += [f"{name} is waited for {count} times" for name, count in waits.items() if count != 1]
    return found


@pytest.mark.slow
def test_c07_overlap_changes_neither_order_between_ranks_nor_numbers() -> None:
    losses, gradients = [], []
    for mesh in MESHES:
        step = compiled(**mesh)
        assert "c10d.wait_tensor" in step.source
        assert faults(step.source) == [], mesh
        many = step.simulate_ranks()
        batch = joined_batches(step.model, step.plan, 1, 0)[0]
        rows = split_rows(batch, step.plan)

        def called(rank: int, many: Any = many, rows: Any = rows) -> list[tuple[str, str]]:
            many.steps[rank].loss(rows[rank])
            with record_collectives() as calls:
                many.steps[rank].gradients(rows[rank])
            return [(call.op, call.role) for call in calls]

        orders = many.run(called)
        assert all(order == orders[0] for order in orders)
        assert {role for _, role in orders[0]} >= {"gather", "expert_gather", "exchange", "scatter", "expert_scatter"}
        losses.append(many.loss(batch)["lm_loss"])
        gradients.append(many.gradients(batch))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        assert all(torch.equal(value, gradients[0][name]) for name, value in other.items())


@pytest.mark.parametrize(
    ("change", "fault"),
    [("late", "is read before it is made"), ("never", "is waited for 0 times"), ("twice", "is waited for 2 times")],
)
def test_c07_a_wrong_order_is_seen(change: str, fault: str) -> None:
    """The first gather of a program starts after its wait, is not waited for, or is waited for twice."""
    lines = compiled(prefetch=1).source.splitlines()
    first = next(i for i, line in enumerate(lines) if "c10d.all_gather_into_tensor" in line)
    name = lines[first].split(" = ")[0].strip()
    wait = f"c10d.wait_tensor({name})"
    used = next(i for i, line in enumerate(lines) if i > first and wait in line)
    if change == "late":
        lines.insert(used + 1, lines.pop(first))
    elif change == "never":
        lines[used] = lines[used].replace(wait, name)
    else:
        lines.insert(first + 1, lines[first].split(name)[0] + wait)
    assert any(fault in found and found.startswith(name) for found in faults("\n".join(lines)))
