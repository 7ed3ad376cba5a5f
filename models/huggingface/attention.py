"""Attention: transformers' pluggable attention function, expressed by the dialect's attention op.

1. A mask function registered as "moec" looks at the pattern that the model asks for. Causal and sliding-window
   patterns, packed or not, become a `CausalMask`, a label that costs nothing; any other pattern becomes the dense mask
   of the "eager" implementation.
2. The attention function registered as "moec" turns a label and the current document ids into `dialect.attention`.
3. What the op cannot express (another mask, a logit cap, a position bias, dropout) runs the model's own
   `eager_attention_forward`, with a note that says which module and why.
4. A model that decides something by the name of its attention implementation keeps its own.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from moec.compiler import dialect
from moec.compiler.errors import UnsupportedModelError
from moec.models.huggingface import documents
from moec.models.huggingface.swaps import Notes, replaced

NAME = "moec"


class CausalMask(str):
    """Stands for a causal mask (within the last `window` tokens, 0 for all) that is never built.

    A string, so that a layer called with it takes a plain constant. Reading it as a tensor raises.
    """

    window: int

    def __new__(cls, window: int = 0) -> CausalMask:
        mask = super().__new__(cls, f"causal, window {window}" if window else "causal")
        mask.window = window
        return mask

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _reads_mask(f"its {name}")

    def __getitem__(self, index: Any) -> Any:
        raise _reads_mask("a part of it")


@contextmanager
def exportable_attention(model: nn.Module, notes: Notes) -> Iterator[None]:
    """Every attention module runs `attention_forward`, unless the model has to keep its own implementation."""
    configs = _configs(model)
    before = {str(config._attn_implementation) for config in configs} - {NAME}
    reason = keeps_own_attention(model)
    if reason:
        notes.add(f"attention: kept as plain operators, {reason}")
        # Flash and flex kernels take no dense mask and do not trace.
        plain = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        replacements = [
            (vars(config), "_attn_implementation_internal", plain)
            for config in configs
            if config._attn_implementation not in ("sdpa", "eager")
        ]
        if replacements:
            notes.add(f"attention: {plain!r} instead of {', '.join(sorted(before))}, which does not trace")
    else:
        if before:
            notes.add(f"attention: one op with document ids instead of {', '.join(sorted(before))} and its masks")
        replacements = [(vars(config), "_attn_implementation_internal", NAME) for config in configs]
    with replaced(replacements), _noting(notes, model):
        yield


def keeps_own_attention(model: nn.Module) -> str:
    """Why the attention of this model must stay its own implementation, '' when it need not."""
    if not type(model)._can_set_attn_implementation():  # type: ignore[attr-defined]
        return f"{type(model).__name__} does not use transformers' attention interface"
    for kind in {type(module): None for module in model.modules()}:
        loads = Counter(name for code in _codes(kind) for name in _attributes(code))
        if loads["_attn_implementation"] > loads["get_interface"]:
            return f"{kind.__name__} decides by the name of its attention implementation"
    return ""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | CausalMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, Dk], key [B, G, T, Dk], value [B, G, T, Dv] -> ([B, T, H, Dv], None)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = _is_causal(module, options)
    # Without a mask a causal module is causal: so do transformers' sdpa and flash functions read it.
    mask = CausalMask() if attention_mask is None and causal else attention_mask
    reason = _inexpressible(mask, causal, dropout, options)
    if isinstance(mask, CausalMask) and not reason:
        output, _ = dialect.attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            documents.current_document_ids(),
            options.get("s_aux"),
            scale=scaling,
            window=mask.window,
        )
        return output, None
    _CONTEXT.note(module, reason)
    dense = mask
    if isinstance(mask, CausalMask):
        dense = documents.attention_mask(documents.current_document_ids(), query, mask.window)
    own = _own_attention(module)
    return own(module, query, key, value, dense, scaling=scaling, dropout=dropout, **options)


def attention_mask(mask_function: Callable[..., Any], **options: Any) -> Tensor | CausalMask:
    """The mask function that belongs to `attention_forward`: a label where the op can express the pattern."""
    window = _window(mask_function)
    if window is None or options.get("attention_mask") is not None or options["q_length"] != options["kv_length"]:
        return ALL_MASK_ATTENTION_FUNCTIONS["eager"](mask_function=mask_function, **options)
    return CausalMask(window)


def _configs(model: nn.Module) -> list[Any]:
    configs: dict[int, Any] = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of every function that the modeling file of a class defines in the class or its bases."""
    for base in kind.__mro__:
        if not base.__module__.startswith("transformers.modeling_") and ".modeling_" in base.__module__:
            functions = (inspect.unwrap(value) for value in vars(base).values() if inspect.isfunction(value))
            yield from (function.__code__ for function in functions)


def _attributes(code: CodeType) -> Iterator[str]:
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes(constant)


def _window(mask_function: Callable[..., Any]) -> int | None:
    """0 for a causal pattern, w for one within w tokens, None for anything else.

    transformers composes patterns from closures; each is known by its name. The packing closures only restate what
    the document ids say.
    """
    name = mask_function.__qualname__.partition(".")[0]
    cells = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    inner = dict(zip(mask_function.__code__.co_freevars, cells, strict=True))
    if name == "causal_mask_function":
        return 0
    if name == "sliding_window_overlay":
        return int(inner["sliding_window"])
    if name == "packed_sequence_mask_function":
        return 0
    if name == "remap_positions_for_packed_sequence":
        return _window(inner["mask_function"])
    if name == "and_masks":
        windows = [_window(part) for part in inner["mask_functions"]]
        if None in windows:
            return None
        return min((window for window in windows if window), default=0)
    return None


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _inexpressible(mask: Tensor | CausalMask | None, causal: bool, dropout: float, options: dict[str, Any]) -> str:
    if not causal:
        return "it is not causal"
    if not isinstance(mask, CausalMask):
        return "its mask is neither causal nor a sliding window"
    if dropout:
        return f"it drops attention weights with probability {dropout}"
    strange = sorted(name for name, given in options.items() if given is not None and name not in _UNDERSTOOD)
    return f"the attention op has no option {strange[0]!r}" if strange else ""


def _own_attention(module: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedModelError(
            f"the attention of {type(module).__name__} cannot be expressed and has no plain implementation",
            where=_CONTEXT.path(module),
            why=f"{type(module).__module__} defines no eager_attention_forward",
            hint="this model needs an adapter of its own",
        )
    return own  # type: ignore[no-any-return]


class _Context:
    """The model and notes of the `exportable_attention` under way, for functions that transformers calls."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.paths: dict[int, str] = {}

    def path(self, module: nn.Module) -> str:
        return self.paths.get(id(module), "")

    def note(self, module: nn.Module, reason: str) -> None:
        self.notes.add(f"attention: {self.path(module)} runs {type(module).__name__}'s own eager form: {reason}")


_CONTEXT = _Context()


@contextmanager
def _noting(notes: Notes, model: nn.Module) -> Iterator[None]:
    outer = _CONTEXT.notes, _CONTEXT.paths
    _CONTEXT.notes, _CONTEXT.paths = notes, {id(module): path for path, module in model.named_modules()}
    try:
        yield
    finally:
        _CONTEXT.notes, _CONTEXT.paths = outer


def _reads_mask(part: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a layer reads {part} of the attention mask, which is not built",
        why="outside its attention function the model uses the mask as a tensor",
        hint="this model needs an adapter of its own",
    )


# Options that do not change the result beyond what mask, scale and sinks say, whatever their value.
_UNDERSTOOD = frozenset(
    (
        "s_aux",
        "sliding_window",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    )
)

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
