"""From prompts to trees with rewards: sampling on one shared cache, and the reward worker.

It may import model and the rooms below it.
"""
