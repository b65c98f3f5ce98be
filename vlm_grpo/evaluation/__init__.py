"""Answers to a split, their metrics with intervals, and the files of an evaluation.

It may import rollout, data and the rooms below them.
"""
