"""recognize_experts: transformers' own grouped-matmul experts, in float32 and bfloat16, with and without biases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Report
from moec.passes.recognize_experts import RecognizeExperts
from moec.passes.recognize_mlp import RecognizeMlp

from .support import assert_golden, check, counts, graph_text, reasons, what

pytest.importorskip("transformers")
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

N, D, E, K = 7, 16, 4, 2
SIZES = {"hidden_size": D, "intermediate_size": 16, "num_local_experts": E, "num_experts_per_tok": K}


def _experts(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config, cls = (MixtralConfig, MixtralExperts) if kind == "mixtral" else (GptOssConfig, GptOssExperts)
    module = cls(config(**SIZES, experts_implementation="grouped_mm"))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.to(dtype)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(N)])  # one expert stays empty
    weights = torch.rand(N, K, generator=generator)
    return torch.randn(N, D, generator=generator).to(dtype), indices, weights


class Sequence(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return self.experts(x, indices, weights) * 2


def _run(kind: str, dtype: torch.dtype) -> tuple[Unit, Report]:
    module = Sequence(_experts(kind, dtype))
    bound = 1e-6 if dtype == torch.float32 else 3e-2
    return check(RecognizeExperts(), module, *_inputs(dtype), before=[RecognizeMlp()], bound=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_transformers_experts(kind: str, dtype: torch.dtype) -> None:
    unit, report = _run(kind, dtype)
    assert counts(unit) == {"permute": 1, "grouped_linear": 2, "gated_mlp_act": 1, "unpermute": 1}
    bias = " with bias" if kind == "gpt_oss" else ""
    expected = ["permute to 4 experts", f"grouped_linear{bias}", f"grouped_linear{bias}", "unpermute 2 rows per token"]
    assert what(report) == expected
    assert not report.near_misses
    left = [str(node.target) for node in unit.graph.nodes]
    assert not [name for name in left if any(word in name for word in ("sort", "histc", "index", "grouped_mm"))]


def test_golden_text() -> None:
    unit, _ = _run("mixtral", torch.float32)
    assert_golden("experts", graph_text(unit))


class Unsorted(nn.Module):
    """A grouped product whose row counts do not come from the experts of its rows."""

    def forward(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offsets)


def test_counts_of_another_origin_are_left_alone() -> None:
    args = (torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16(), torch.tensor([3, 8], dtype=torch.int32))
    unit, report = check(RecognizeExperts(), Unsorted(), *args, exact=True)
    assert not counts(unit)
    assert "its row counts do not come from a recognised sort of expert indices" in "\n".join(reasons(report))
    assert RecognizeExperts().expected(unit) == "1 grouped matrix products are in the graph, none was recognised"


class OtherTail(Sequence):
    """Rows are used as they come, without being put back."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        ids, slots = indices.reshape(-1).sort()
        counts = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(x[slots // K], self.experts.gate_up_proj.transpose(-2, -1), counts)
        return rows.sin()


class Downwards(Sequence):
    """Sorted from the last expert to the first: the counts then belong to other rows."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        ids, slots = indices.reshape(-1).sort(descending=True)
        counts = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(x[slots // K], self.experts.gate_up_proj.transpose(-2, -1), counts).sin()


def test_a_sort_downwards_is_no_permute() -> None:
    module = Downwards(_experts("mixtral", torch.bfloat16))
    unit, _ = check(RecognizeExperts(), module, *_inputs(torch.bfloat16), exact=True)
    assert not counts(unit)


def test_a_tail_of_another_kind_stays() -> None:
    module = OtherTail(_experts("mixtral", torch.bfloat16))
    unit, report = check(RecognizeExperts(), module, *_inputs(torch.bfloat16), bound=3e-2)
    assert counts(unit) == {"permute": 1, "grouped_linear": 1}
    assert what(report) == ["permute to 4 experts", "grouped_linear"]
