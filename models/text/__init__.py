"""Encoders for texts, from transformers."""
