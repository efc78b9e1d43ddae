"""Lockstep: what every layer stands on. No torch is imported here."""

__version__ = "0.9.0"
