"""Which samples a step sees, and how they become prompts.

It may import model and the rooms below it.
"""
