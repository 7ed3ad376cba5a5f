"""moec: a compiler for sparse-MoE training steps."""
