"""Texts as a data set: tokens, masks."""
