"""Lockstep: what every layer stands on; and the version of the program. No torch is imported here."""

__version__ = "0.13.0"
