"""The Kimi K3 family as readable PyTorch: KDA, gated MLA, gated DSA, Stable LatentMoE, attention residuals."""
