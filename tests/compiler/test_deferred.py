"""Weights that are made later have the bits of those that are made at once, and few of them are there at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moec.compiler._torch_compat import FakeTensor
from moec.compiler.allocations import AllocationCount
from moec.compiler.deferred import deferred_init, make_buffers, recording_of
from moec.compiler.errors import UnsupportedModelError
from moec.models.build import build
from tests.moec.small_models import SmallModel

HUGGINGFACE = ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa")


class Initialisers(nn.Module):
    """What initialisations do: write twice, fork and seed generators, look at values, swap memory, convert."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 40)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.forked = nn.Parameter(torch.randn(5, 6))
        self.orthogonal = nn.Parameter(torch.zeros(6, 7))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(torch.empty(20, 9))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.drawn_again = nn.Parameter(torch.empty(20, 9))
        nn.init.trunc_normal_(self.drawn_again, std=1, a=-1.0, b=1.0)
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.empty(33).normal_(generator=own))
        self.after_own = nn.Parameter(torch.randn(4, generator=own).abs().log1p())
        torch.manual_seed(7)
        self.shuffled = nn.Parameter(torch.randperm(9).float())
        self.transposed = nn.Parameter(torch.rand(3, 5).t())
        self.embedding = nn.Embedding(11, 4, padding_idx=3)
        self.doubled = nn.Linear(30, 40, bias=False)
        self.doubled.weight.data = self.linear.weight.data * 2
        if torch.rand(()) > 0.0:
            self.looked = nn.Parameter(torch.full((3,), 2.0))
        self.tied = nn.Linear(4, 11, bias=False)
        self.tied.weight = self.embedding.weight
        self.to(torch.bfloat16)
        self.register_buffer("noise", torch.randn(5))
        self.register_buffer("table", torch.arange(6).float().pow(0.5))
        self.scale = torch.ones(2)
        self.sparse = nn.Parameter(torch.empty(8, 8))
        nn.init.sparse_(self.sparse, 0.5)


def hugging_face(kind: str) -> nn.Module:
    pytest.importorskip("transformers")
    from moec.models.huggingface.adapter import from_config
    from moec.models.huggingface.tiny import tiny_config

    return from_config(tiny_config(kind))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "k3": lambda: build("k3-tiny"),
    "k3-dsa in bfloat16": lambda: build("k3-dsa-tiny", dtype=torch.bfloat16),
    "small": SmallModel,
    "initialisers": Initialisers,
    **{kind: lambda kind=kind: hugging_face(kind) for kind in HUGGINGFACE},  # type: ignore[misc]
}


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    with deferred_init():
        model = make()
    return model


def made(model: nn.Module) -> dict[str, Tensor]:
    recording, values = recording_of(model), dict[str, Tensor]()
    assert recording is not None
    recording.run(dict(model.named_parameters()), lambda name, value: values.__setitem__(name, value.clone()))
    return values


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_bits_are_those_of_a_build(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    real, after = make(), torch.get_rng_state()
    torch.manual_seed(3)
    model = deferred(make)
    make_buffers(model)
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    values = made(model)
    assert values.keys() == dict(real.named_parameters()).keys()
    for name, parameter in real.named_parameters():
        assert values[name].dtype == parameter.dtype
        assert torch.equal(values[name], parameter), name
    for (name, buffer), (_, found) in zip(real.named_buffers(), model.named_buffers(), strict=True):
        assert not isinstance(found, FakeTensor), name
        assert torch.equal(buffer, found), name
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(value, values[name]) for name, value in made(model).items())


def test_a_generator_that_moved_on_is_left_alone() -> None:
    model = deferred(lambda: nn.Linear(3, 4))
    torch.manual_seed(8)
    before = torch.get_rng_state()
    made(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_weight_is_there_at_a_time() -> None:
    """Also of a model whose initialisation comes back to all weights after they were all made."""

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(6)))
        for layer in model:
            nn.init.normal_(layer.weight)  # type: ignore[arg-type]
        return model

    with AllocationCount() as whole:
        make()
    with AllocationCount() as memory:
        recording = recording_of(model := deferred(make))
        assert recording is not None
        memory.peak = memory.held = 0  # fakes have no memory
        recording.run(dict(model.named_parameters()), lambda name, value: None)
    assert whole.peak >= 6 * 40_000
    assert 40_000 <= memory.peak <= 41_000 + 3 * 5056


def test_what_cannot_be_made_later_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"aten.normal_.default writes values .* to a tensor that has its"):
        deferred(lambda: nn.ParameterList([torch.arange(5).float().normal_()]))
    with pytest.raises(UnsupportedModelError, match=r"the shape of what aten.nonzero.default returns depends on"):
        deferred(lambda: nn.ParameterList([torch.randn(5).gt(0).nonzero().float()]))


def test_a_model_with_weights_has_no_recording() -> None:
    assert recording_of(nn.Linear(2, 2)) is None
    assert recording_of(nn.Linear(2, 2, device="meta")) is None
