"""The model: its family's facts, prompts, image features, attention along the tree, log-probabilities.

It may import tree and the rooms below it.
"""
