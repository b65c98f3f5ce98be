"""What a rollout is and the tree rule: who sees whom, at which position, who predicts whom.

It may import common and task.
"""
