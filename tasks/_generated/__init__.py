"""Generated samples, for tasks without a data set and for the scripts that write them to files.

This package imports nothing of vlm_grpo, so that a data script needs only numpy and Pillow.
"""
