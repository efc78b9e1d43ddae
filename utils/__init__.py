"""The rooms of utils/, and the version of the program."""

__version__ = "0.9.0"
