"""The training algorithm: advantages, losses, the optimiser step and the trainer.

It may import rollout, data and the rooms below them.
"""
