"""Reward functions for examples/reward-function.yaml, with the signature of TRL's GRPOTrainer."""

import re


def score(completions, numbers, **columns):
    """The share of the given numbers that a response uses, and 0 if it uses any other."""
    rewards = []
    for completion, given in zip(completions, numbers, strict=True):
        left = [str(number) for number in given]
        used = re.findall("[0-9]+", completion)
        for number in used:
            if number in left:
                left.remove(number)
        share = 1 - len(left) / len(given)
        rewards.append(share if len(used) == len(given) - len(left) else 0.0)
    return rewards


def brackets(completions, **columns):
    """1 for a response with brackets."""
    return [float("(" in completion and ")" in completion) for completion in completions]
