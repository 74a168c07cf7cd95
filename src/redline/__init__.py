"""redline: train language models at the limit of the hardware, and know what that limit is."""

__version__ = "0.1.0"
