"""The model: facts of its family, prompts, image features, attention over trees, log-probabilities of tokens.

It may import tree and the rooms below it.
"""
