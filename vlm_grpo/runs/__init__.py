"""What a run leaves: checkpoints, metrics, rollouts, figures; and whether one may go on in a folder.

It may import algorithm, evaluation and the rooms below them.
"""
