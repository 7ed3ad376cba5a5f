"""What goes in: the Kimi K3 family as readable PyTorch, presets, and adapters for other models."""
