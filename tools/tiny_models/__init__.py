"""Recipes of the tiny models that come with bapo: warm starts from random weights on two cores."""
