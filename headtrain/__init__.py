"""headtrain trains draft heads for speculative decoding, measures them, and exports them to serving engines."""

__version__ = "0.1.0"
