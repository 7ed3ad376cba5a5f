"""What goes in: the Kimi K3 family as readable PyTorch, presets, and adapters for other models."""

from moec.models.adapters import training_view
from moec.models.build import build
from moec.models.presets import preset, preset_names

__all__ = ["build", "preset", "preset_names", "training_view"]
