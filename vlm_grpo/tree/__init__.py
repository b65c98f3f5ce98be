"""The data of a rollout, and the tree rule: which tokens a token sees, at which position, and which token predicts it.

It may import common and task.
"""
