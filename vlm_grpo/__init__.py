"""GRPO-MA for vision-language models: thoughts and answers on one tree, every prefix computed once."""
