"""From rewards to better weights: advantages, losses, the optimiser step, the trainer.

It may import rollout, data and the rooms below them.
"""
